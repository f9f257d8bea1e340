"""An artifact running the cases: the model alone, as llama-bench runs one, with token ids given."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from pathlib import Path
from typing import cast

from xpuc.artifact import Manifest, Plane
from xpuc.bench.cases import Case, random_ids
from xpuc.bench.launches import Transparent, launches
from xpuc.errors import RequestError
from xpuc.runtime.batch import Batch, StepModel
from xpuc.runtime.scheduler import Span
from xpuc.runtime.sequence import Request, Sequence

_EMBEDDING, _HEAD = "token_embd.weight.", "output.weight."


class Ours:
    """The model, and for each row of a batch a sequence whose K/V is kept from case to case.

    All cases read the same ids at the same positions, so the K/V that one has written is right for
    the next, and a depth is filled once.
    """

    def __init__(self, model: StepModel, manifest: Manifest, cases: Many[Case]) -> None:
        self.model, self.manifest = model, manifest
        n_rows = max(case.batch for case in cases)
        if n_rows > model.max_batch:
            raise RequestError(
                f"-b {n_rows}: the artifact was compiled for batches of up to {model.max_batch}",
                f"compile it again with --max-batch {n_rows}",
            )
        n = max(case.n_context for case in cases)
        self._ids = [random_ids(model.n_vocab, n, row) for row in range(n_rows)]
        self._batch = Batch(model)
        per_row = -(-n // model.block_tokens)
        assert per_row * n_rows <= min(model.n_blocks), "the pool was sized for the cases"
        self._sequences = []
        for row in range(n_rows):
            sequence = Sequence(Request(row, ()))
            blocks = list(range(row * per_row, (row + 1) * per_row))
            sequence.blocks = [blocks for _ in model.n_blocks]
            self._sequences.append(sequence)
        self._filled = [0] * n_rows  # tokens whose K/V is in the pool
        self._reads_prompts = any(case.kind == "pp" or case.depth for case in cases)

    @classmethod
    def load(cls, artifact: Path, threads: int, cases: Many[Case], **modes: bool) -> Ours:
        """Load the artifact with room for the cases; its errors say what does not fit.

        modes: `pipeline` and `graphs`, see runtime.engine.load.
        """
        from xpuc.runtime.model import load_model  # tvm_ffi

        n = max(case.n_context for case in cases)
        n_sequences = max(case.batch for case in cases)
        model = load_model(
            artifact, threads=threads, ctx=n, n_sequences=n_sequences, rings=False, **modes
        )
        return cls(model, model.manifest, cases)

    def warm_up(self) -> None:
        """One chunk of the largest size if a case has any, and a decode step."""
        n = min(self.model.max_chunk, len(self._ids[0]) - 1) if self._reads_prompts else 0
        if n > 0:
            self._prefill(0, 0, n)
        self._decode(1, n)

    def run(self, case: Case) -> float:
        """Seconds that the case takes; its depth is filled before."""
        for row in range(case.batch):
            if self._filled[row] < case.depth:
                self._prefill(row, self._filled[row], case.depth)
        self._decode(case.batch, case.depth)  # wakes the threads; the first token of the case
        start = time.perf_counter()
        if case.kind == "pp":
            self._prefill(0, case.depth, case.n_context)
        else:
            self._generate(case)
        return time.perf_counter() - start

    def step(self, case: Case) -> Batch:
        """One step of the case in a batch of its own: the first chunk, or the token halfway.

        The K/V before it is there.
        """
        batch = Batch(self.model)
        n = min(self.model.max_chunk, case.n_tokens) if case.kind == "pp" else 1
        start = case.depth + (case.n_tokens // 2 if case.kind == "tg" else 0)
        spans = []
        for row in range(case.batch):
            if self._filled[row] < start:
                self._prefill(row, self._filled[row], start)
            sequence = self._sequences[row]
            sequence.tokens[:] = self._ids[row][: start + n]
            spans.append(Span(sequence, start, n))
        batch.fill(spans)
        return batch

    def _prefill(self, row: int, start: int, end: int) -> None:
        sequence = self._sequences[row]
        sequence.tokens[:] = self._ids[row][:end]
        for first in range(start, end, self.model.max_chunk):
            count = min(self.model.max_chunk, end - first)
            self._batch.fill([Span(sequence, first, count)])
            self.model.run(self._batch, tail="greedy")
        self._filled[row] = max(self._filled[row], end)

    def _generate(self, case: Case) -> None:
        """Its steps, each queued before the one before it is read where an engine does that."""
        before = None
        for position in range(case.depth, case.n_context):
            if not self.model.modes.pipelined.is_on:
                self._decode(case.batch, position)
                continue
            self._describe(case.batch, position)
            ticket = self.model.submit(self._batch, tail="greedy")
            if before is not None:
                self.model.collect(before)
            before = ticket
        if before is not None:
            self.model.collect(before)

    def _decode(self, n_rows: int, position: int) -> None:
        self._describe(n_rows, position)
        self.model.run(self._batch, tail="greedy")

    def _describe(self, n_rows: int, position: int) -> None:
        """A step of the tokens at a position."""
        spans = []
        for sequence, ids in zip(self._sequences[:n_rows], self._ids, strict=False):
            if len(sequence.tokens) != position:
                sequence.tokens[:] = ids[:position]
            sequence.tokens.append(ids[position])
            spans.append(Span(sequence, position, 1))
        self._batch.fill(spans)

    def operations_per_token(self, case: Case) -> float:
        """On int8, two for each weight a token is multiplied with: those of a step, shared out."""
        batch = self.step(case)
        found = launches(cast("Transparent", self.model), self.manifest, batch)
        return sum(launch.operations for launch in found) / int(batch.tiles[:, 1].sum())

    def bytes_per_token(self, case: Case) -> float:
        """What a token of the case reads: its share of the weights, and K and V of the context."""
        manifest = self.manifest
        per_step = self.model.max_chunk if case.kind == "pp" else case.batch
        n_steps = -(-case.total_tokens // min(per_step, case.total_tokens))
        weights = n_steps * streamed_weights(manifest.planes)
        # A step reads K/V once for each of its rows of a batch, once for all rows of a chunk.
        reads = n_steps if case.kind == "pp" else case.total_tokens
        context = case.depth + (case.n_tokens + 1) / 2
        return (weights + reads * kv_bytes(manifest, context)) / case.total_tokens


def streamed_weights(planes: Many[Plane]) -> int:
    """Bytes of weights a step reads: all but an embedding table that is not the output head too."""
    has_head = any(plane.name.startswith(_HEAD) for plane in planes)
    return sum(
        plane.size * _item_bytes(plane.dtype)
        for plane in planes
        if not (has_head and plane.name.startswith(_EMBEDDING))
    )


def kv_bytes(manifest: Manifest, context: float) -> float:
    """Bytes of K and V that attention over `context` tokens reads, windows taken into account."""
    kv = manifest.kv
    return sum(
        kv.token_bytes(layer) * (min(window, context) if window else context)
        for layer, (*_, window) in enumerate(kv.layers)
    )


def _item_bytes(dtype: str) -> int:
    return int("".join(c for c in dtype if c.isdigit())) // 8
