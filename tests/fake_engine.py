"""Carries out plans without a model: what a kernel would read back from the pool is checked.

Each place of a block holds a digest of the text that ends there, as K/V hangs on all that came
before. A wrong block, a missed copy, a prefix that is not what its hash says, a block that a row of
a group's window sees and is not there is an assertion here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

from xpuc.runtime.blocks import BlockPool
from xpuc.runtime.kv_blocks import KvBlocks
from xpuc.runtime.plan import Plan, Span
from xpuc.runtime.prefix import Link
from xpuc.runtime.scheduler import Scheduler
from xpuc.runtime.sequence import Request, Sequence, State

BLOCK_TOKENS, N_BLOCKS, MAX_BATCH, MAX_CHUNK, MAX_CONTEXT, QUEUE = 4, 10, 3, 8, 32, 5

_Digests = list[int | None]


class FakeEngine:
    """With `has_store`, evicted blocks are kept and come back from there, but for `torn` ones."""

    def __init__(self, scheduler: Scheduler, *, has_store: bool = False) -> None:
        self.kv = scheduler.kv
        self.size = self.kv.block_tokens
        groups = self.kv.groups
        self.stored: list[dict[bytes, _Digests]] = [{} for _ in groups]
        self.torn: set[tuple[int, bytes]] = set()
        if has_store:
            self.kv.store = self
            for g, group in enumerate(groups):
                group.pool.on_evict = partial(self._save, g)
        self.pools: list[list[_Digests]] = [
            [[None] * self.size for _ in range(group.pool.n_blocks)] for group in groups
        ]
        self._texts: dict[Sequence, _Digests] = {}

    def run(self, plan: Plan) -> None:
        """Copies, then writes, then reads, as a step of the model does."""
        for copy in plan.copies:
            pool = self.pools[copy.group]
            pool[copy.destination] = list(pool[copy.source])
        spans = [span for span in plan.spans if span.sequence.state is State.RUNNING]
        for span in spans:
            self._write(span)
        for span in spans:
            self._read(span)

    def n_leading(self, group: int, links: Many[Link]) -> int:
        """The scheduler's PrefixSource, as is `fill`."""
        for n, link in enumerate(links):
            if link.digest not in self.stored[group]:
                return n
        return len(links)

    def fill(self, group: int, blocks: Many[int], links: Many[Link]) -> int:
        assert len(blocks) == len(links)
        for n, block in enumerate(blocks):
            digest = links[n].digest
            held = self.stored[group].get(digest)
            if (group, digest) in self.torn:
                self.torn.remove((group, digest))
                del self.stored[group][digest]
                return n
            if held is None:
                return n
            self.pools[group][block] = list(held)
        return len(blocks)

    def _save(self, group: int, block: int, digest: bytes) -> None:
        self.torn.discard((group, digest))
        self.stored[group][digest] = list(self.pools[group][block])

    def text(self, sequence: Sequence) -> _Digests:
        """Of each token of a sequence, a digest of it and all before; tokens are only appended."""
        text = self._texts.setdefault(sequence, [])
        for token in sequence.tokens[len(text) :]:
            text.append(hash((text[-1] if text else None, token)))
        return text

    def _write(self, span: Span) -> None:
        text = self.text(span.sequence)[: span.start + span.count]
        for draft in span.drafts:
            text.append(hash((text[-1], draft)))
        for pool, blocks in zip(self.pools, span.sequence.blocks, strict=True):
            for position in range(span.start, len(text)):
                block = blocks[position // self.size]
                assert block >= 0, "a row has no block to write to"
                pool[block][position % self.size] = text[position]

    def _read(self, span: Span) -> None:
        text, n = self.text(span.sequence), span.start + span.count
        for g, group in enumerate(self.kv.groups):
            seen = max(0, span.start - group.window + 1) if group.window else 0
            for position in range(seen, n):
                block = span.sequence.blocks[g][position // self.size]
                assert block >= 0, "a block that a row sees was given back"
                held = self.pools[g][block][position % self.size]
                assert held == text[position], "a block holds another text"


def kv_of(
    n_blocks: int | Many[int] = N_BLOCKS, windows: Many[int] = (0,), **other: Any
) -> KvBlocks:
    counts = [n_blocks] if isinstance(n_blocks, int) else n_blocks
    return KvBlocks([BlockPool(n, BLOCK_TOKENS) for n in counts], windows, **other)


def scheduler_of(
    n_blocks: int | Many[int] = N_BLOCKS,
    windows: Many[int] = (0,),
    *,
    reuse: bool = True,
    max_chunk: int = MAX_CHUNK,
    **other: Any,
) -> Scheduler:
    sizes = {"max_batch": MAX_BATCH, "max_context": MAX_CONTEXT, "queue_bound": QUEUE}
    kv = kv_of(n_blocks, windows, max_chunk=max_chunk, reuse=reuse)
    return Scheduler(kv, max_chunk=max_chunk, **(sizes | other))


def sequence_of(id_: int, n_prompt: int, *, first: int | None = None) -> Sequence:
    """A prompt like no other's, or one that begins like others with the same `first`."""
    start = 1000 * id_ if first is None else first
    return Sequence(Request(id_, tuple(range(start, start + n_prompt))))


def carry_out(scheduler: Scheduler, plan: Plan, next_token: Callable[[], int] = lambda: 0) -> None:
    """What the engine does with a plan, with tokens that never end a sequence."""
    scheduler.complete(plan)
    for span in [span for span in plan.spans if span.is_last]:
        sequence, drafts = span.sequence, iter(span.drafts)
        while sequence.state is State.RUNNING:
            sequence.tokens.append(next_token())
            if len(sequence.tokens) >= scheduler.max_tokens:
                scheduler.finish(sequence, "length")
            elif next(drafts, None) == sequence.tokens[-1]:
                scheduler.accept(plan, span)
            else:
                break
    scheduler.end_step(plan)
