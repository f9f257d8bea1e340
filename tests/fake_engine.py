"""Carries out plans without a model: what a kernel would read back from the pool is checked.

Each place of a block holds a digest of the text that ends there, as K/V hangs on all that came
before. A wrong block, a missed copy, a prefix that is not what its hash says is an assertion here.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from xpuc.runtime.blocks import BlockPool
from xpuc.runtime.plan import Plan, Span
from xpuc.runtime.prefix import Link
from xpuc.runtime.scheduler import Scheduler
from xpuc.runtime.sequence import Request, Sequence, State

BLOCK_TOKENS, N_BLOCKS, MAX_BATCH, MAX_CHUNK, MAX_CONTEXT, QUEUE = 4, 10, 3, 8, 32, 5

_Digests = list[int | None]


class FakeEngine:
    """With `has_store`, evicted blocks are kept and come back from there."""

    def __init__(self, scheduler: Scheduler, *, has_store: bool = False) -> None:
        self.size = scheduler.block_tokens
        n_blocks = scheduler.pool.n_blocks
        self.stored: dict[bytes, _Digests] = {}
        if has_store:
            scheduler.store = self
            scheduler.pool.on_evict = self._save
        self._pool: list[_Digests] = [[None] * self.size for _ in range(n_blocks)]
        self._texts: dict[Sequence, _Digests] = {}

    def run(self, plan: Plan) -> None:
        """Copies, then writes, then reads, as a step of the model does."""
        for source, destination in plan.copies:
            self._pool[destination] = list(self._pool[source])
        spans = [span for span in plan.spans if span.sequence.state is State.RUNNING]
        for span in spans:
            self._write(span)
        for span in spans:
            self._read(span)

    def fill(self, blocks: Many[int], links: Many[Link]) -> int:
        """The scheduler's PrefixSource."""
        assert len(blocks) <= len(links)
        for n, block in enumerate(blocks):
            held = self.stored.get(links[n].digest)
            if held is None:
                return n
            self._pool[block] = list(held)
        return len(blocks)

    def _save(self, block: int, digest: bytes) -> None:
        self.stored[digest] = list(self._pool[block])

    def _text(self, sequence: Sequence) -> _Digests:
        """Of each token of a sequence, a digest of it and all before; tokens are only appended."""
        text = self._texts.setdefault(sequence, [])
        for token in sequence.tokens[len(text) :]:
            text.append(hash((text[-1] if text else None, token)))
        return text

    def _write(self, span: Span) -> None:
        text, blocks = self._text(span.sequence), span.sequence.blocks
        for position in range(span.start, span.start + span.count):
            self._pool[blocks[position // self.size]][position % self.size] = text[position]

    def _read(self, span: Span) -> None:
        text, n = self._text(span.sequence), span.start + span.count
        for place, start in enumerate(range(0, n, self.size)):
            part = text[start : min(start + self.size, n)]
            held = self._pool[span.sequence.blocks[place]]
            assert held[: len(part)] == part, "a block holds another text"


def scheduler_of(n_blocks: int = N_BLOCKS, **other: Any) -> Scheduler:
    sizes = {"max_batch": MAX_BATCH, "max_chunk": MAX_CHUNK, "max_context": MAX_CONTEXT}
    return Scheduler(BlockPool(n_blocks, BLOCK_TOKENS), **(sizes | {"queue_bound": QUEUE} | other))


def sequence_of(id_: int, n_prompt: int, *, first: int | None = None) -> Sequence:
    """A prompt like no other's, or one that begins like others with the same `first`."""
    start = 1000 * id_ if first is None else first
    return Sequence(Request(id_, tuple(range(start, start + n_prompt))))


def carry_out(scheduler: Scheduler, plan: Plan) -> None:
    """What the engine does with a plan, with tokens that never end a sequence."""
    scheduler.complete(plan)
    for span in plan.spans:
        if span.is_last and span.sequence.state is State.RUNNING:
            span.sequence.tokens.append(0)
            if len(span.sequence.tokens) >= scheduler.max_tokens:
                scheduler.finish(span.sequence, "length")
    scheduler.end_step(plan)
