"""A loaded model read step by step, in steps of any shape, with the logits of every row kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpuc.artifact import Tail
from xpuc.runtime.batch import Batch
from xpuc.runtime.blocks import BlockPool
from xpuc.runtime.kv_blocks import KvBlocks
from xpuc.runtime.scheduler import Span
from xpuc.runtime.sequence import Request
from xpuc.runtime.sequence import Sequence as Running

F32 = NDArray[np.float32]
Ids = Sequence[int]


class Stepper:
    """Texts read side by side.

    `logits[i]` has a row for each token of text i, NaN until it is read; with tail "greedy" it is
    the likeliest id instead, -1 until then.
    """

    def __init__(self, model: Any, texts: Sequence[Ids], *, tail: Tail = "logits") -> None:
        self.model, self.texts, self.tail = model, texts, tail
        self.batch = Batch(model)
        self.sequences = [Running(Request(i, tuple(text))) for i, text in enumerate(texts)]
        self.done = [0] * len(texts)
        self.logits: list[NDArray[Any]] = [
            np.full(len(text), -1, np.int32)
            if tail == "greedy"
            else np.full((len(text), model.n_vocab), np.nan, np.float32)
            for text in texts
        ]
        pools = [_mixed(BlockPool(n, model.block_tokens)) for n in model.n_blocks]
        self.kv = KvBlocks(pools, model.windows, max_chunk=model.max_chunk)
        for sequence in self.sequences:
            assert self.kv.borrow(sequence, sequence.n_prompt), "the pools are too small"

    def step(self, counts: Mapping[int, int], *, every_row: bool = True) -> str:
        """One call that reads the next `counts[i]` tokens of each text i; what kind it was.

        Without `every_row` only the last row of each is asked for.
        """
        spans = []
        for i, count in counts.items():
            start = self.done[i]
            assert start + count <= len(self.texts[i]), "the text is not that long"
            self.sequences[i].tokens = list(self.texts[i][: start + count])
            spans.append(Span(self.sequences[i], start, count))
        self.batch.fill(spans, every_row=every_row)
        rows = self.model.run(self.batch, tail=self.tail)
        wanted = counts if every_row else dict.fromkeys(counts, 1)
        assert len(rows) == sum(wanted.values())
        first = 0
        for i, count in counts.items():
            self.done[i] += count
            n = wanted[i]
            self.logits[i][self.done[i] - n : self.done[i]] = rows[first : first + n]
            first += n
            self.kv.slide(self.sequences[i], self.done[i])
            assert self.kv.grow(self.sequences[i], len(self.texts[i]), [])
        return self.batch.kind

    def left(self) -> Iterator[int]:
        """The texts that are not read to their end."""
        return (i for i, text in enumerate(self.texts) if self.done[i] < len(text))


def _mixed(pool: BlockPool) -> BlockPool:
    """Its free blocks in an order in which no sequence gets some in a row."""
    blocks = pool.allocate(pool.n_blocks)
    for block in np.random.default_rng(0).permutation(blocks).tolist():
        pool.free([block])
    return pool


def row_by_row(model: Any, ids: Ids, *, tail: Tail = "logits") -> NDArray[Any]:
    """Logits (n, vocab) of decode calls of one row."""
    stepper = Stepper(model, [ids], tail=tail)
    kinds = {stepper.step({0: 1}) for _ in ids}
    assert kinds == {"decode"}
    return stepper.logits[0]


def in_chunks(model: Any, ids: Ids, sizes: Sequence[int], *, tail: Tail = "logits") -> NDArray[Any]:
    """Logits (n, vocab) of calls of these sizes, over and over until all is read."""
    stepper = Stepper(model, [ids], tail=tail)
    for size in itertools.cycle(sizes):
        left = len(ids) - stepper.done[0]
        if not left:
            break
        stepper.step({0: min(size, left)})
    return stepper.logits[0]
