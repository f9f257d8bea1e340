"""A model without weights: its next token hangs on the whole context, read back from a paged pool.

Every index of the batch is used the way a kernel uses it, so a wrong slot, block, tile, segment or
position gives other tokens, and what a real model could not survive is an assertion here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from draws import draw, options_of

from xpuc.artifact import Tail
from xpuc.runtime.batch import Batch, Ticket
from xpuc.runtime.calls import replayer
from xpuc.runtime.engine import Engine, Result
from xpuc.runtime.modes import Mode, Modes

_ON = Mode("pipelined", True, "a fake")
# How a fake is decoded unless a test says otherwise.
MODES = Modes(
    Mode("batched", True, "a fake"),
    Mode("pipelined", False, "a fake"),
    Mode("replayed", False, "a fake"),
)
PIPELINED = replace(MODES, pipelined=_ON)
_STRANGER = -12345  # what a slot holds that nobody has written


class FakeModel:
    def __init__(self, **sizes: Any) -> None:
        self.n_vocab: int = sizes.pop("n_vocab", 97)
        self.block_tokens: int = sizes.pop("block_tokens", 4)
        self.windows: tuple[int, ...] = sizes.pop("windows", (0,))
        n_blocks = sizes.pop("n_blocks", 64)
        self.n_blocks: tuple[int, ...] = (
            (n_blocks,) * len(self.windows) if isinstance(n_blocks, int) else n_blocks
        )
        self.max_context: int = sizes.pop("max_context", 96)
        self.max_chunk: int = sizes.pop("max_chunk", 16)
        self.max_batch: int = sizes.pop("max_batch", 4)
        self.max_out_rows: int = sizes.pop("max_out_rows", 8)
        self.buckets: tuple[int, ...] = sizes.pop("buckets", (1, 2, 4))
        self.tile_rows: int = sizes.pop("tile_rows", 4)
        self.segment_tokens: int = sizes.pop("segment_tokens", 8)
        self.modes: Modes = sizes.pop("modes", MODES)
        self.tails: tuple[Tail, ...] = sizes.pop("tails", ("logits", "greedy"))
        self.is_replayed: bool = sizes.pop("is_replayed", False)
        assert not sizes, sizes
        self.kv = tuple(FakeKv(n, self.block_tokens, self.settle) for n in self.n_blocks)
        self._queue: deque[Queued] = deque()
        self.n_queued = 0  # most steps that were queued at a time
        # The same for every size, so that engines of different sizes run the same model.
        weights = np.random.default_rng(7).integers(1, 2**62, (2, 4096), dtype=np.int64)
        self._weights = weights.astype(np.uint64)
        self.calls: list[tuple[str, int, Tail]] = []  # kind, rows, tail
        self.fails_at: set[int] = set()  # numbers of calls that raise
        self.nan_tokens: set[int] = set()  # tokens after which the logits are no numbers

    def submit(self, batch: Batch, *, tail: Tail, follows: Ticket | None = None) -> Ticket:
        """Nothing is computed until somebody waits, as a device may do it."""
        assert tail in self.tails
        step = Queued(batch, tail, follows, Ticket())
        self._check(step)
        self._queue.append(step)
        self.n_queued = max(self.n_queued, len(self._queue))
        return step.ticket

    def collect(self, ticket: Ticket) -> npt.NDArray[Any]:
        while ticket.rows is None:
            self._compute_next()
        return ticket.rows

    def run(self, batch: Batch, *, tail: Tail) -> npt.NDArray[Any]:
        return self.collect(self.submit(batch, tail=tail))

    def settle(self) -> None:
        """All that is queued is computed."""
        while self._queue:
            self._compute_next()

    def _compute_next(self) -> None:
        step = self._queue.popleft()
        if step.follows is not None:
            ids = step.follows.rows
            if ids is None:  # it failed
                return
            step.tokens[: len(ids)] = ids
        step.ticket.rows = self._compute(step, step.tail)

    def _compute(self, batch: Queued, tail: Tail) -> npt.NDArray[Any]:
        self.calls.append((batch.kind, batch.n_rows, tail))
        for kv, slots in zip(self.kv, batch.slots, strict=True):
            written = slots >= 0
            kv.token[slots[written]] = batch.tokens[written]
            kv.position[slots[written]] = batch.positions[written]
        if len(self.calls) - 1 in self.fails_at:
            raise RuntimeError("kernel launch failed")
        digests = self._read_context(batch)
        logits = np.stack([self._logits(digests[row]) for row in batch.out_rows.tolist()])
        for place, row in enumerate(batch.out_rows.tolist()):
            if int(batch.tokens[row]) in self.nan_tokens:
                logits[place] = np.nan
        if tail == "logits":
            return logits
        if tail == "sampled":
            pairs = zip(logits, batch.sampling, strict=False)  # without padded rows
            return np.array([draw(row, options_of(how))[0] for row, how in pairs], np.int32)
        ids: npt.NDArray[np.int32] = logits.argmax(axis=1).astype(np.int32)
        ids[np.isnan(logits).any(axis=1)] = -1
        return ids

    def loop(self, name: str, elements: int) -> Callable[[], float]:
        return lambda: 0.0001

    def replayer(self, works: Any) -> Callable[[], dict[str, float]]:
        return replayer(works)

    def copy_block(self, group: int, source: int, destination: int) -> None:
        assert source != destination
        self.settle()
        first = int(self.kv[group].position[source * self.block_tokens])
        assert first != _STRANGER, "a block that holds nothing is copied"
        assert first % self.block_tokens == 0, "a block does not begin with its first place"
        old, new = (self.kv[group].buffers(block) for block in (source, destination))
        for before, after in zip(old, new, strict=True):
            after[:] = before

    def _read_context(self, batch: Queued) -> dict[int, int]:
        digests: dict[int, int] = {}
        for row_start, n_rows, first_work, n_work in batch.tiles.tolist():
            items = batch.work[first_work : first_work + n_work].tolist()
            assert all(item[:2] == [row_start, n_rows] for item in items)
            for row in range(row_start, row_start + n_rows):
                assert row not in digests, f"row {row} is in two tiles"
                position = int(batch.positions[row])
                digests[row] = sum(
                    (g + 1) * self._digest(batch, g, position, items)
                    for g in range(len(self.windows))
                ) % (2**64)
        return digests

    def _digest(self, batch: Queued, g: int, position: int, items: list[list[int]]) -> int:
        """Of what a row sees in a group's layers."""
        total, kv, window = 0, self.kv[g], self.windows[g]
        for _, _, seq, segment in items:
            start = segment * self.segment_tokens
            first = max(start, position - window + 1) if window else start
            places = np.arange(first, min(start + self.segment_tokens, position + 1))
            if not len(places):
                continue  # a segment that only other rows of the tile see
            blocks = batch.block_tables[g][seq, places // self.block_tokens]
            assert (blocks >= 0).all(), "a row sees a block that was given back"
            slots = blocks * self.block_tokens + places % self.block_tokens
            tokens, positions = kv.token[slots], kv.position[slots]
            assert (positions == places).all(), "a slot holds another position's K/V"
            total += int(((tokens + 1).astype(np.uint64) * self._weights[0, positions]).sum())
            total ^= int(self._weights[1, len(places)]) * (segment + 1)
        return total % 2**64

    def _logits(self, digest: int) -> npt.NDArray[np.float32]:
        random = np.random.Generator(np.random.PCG64(digest))
        return (3 * random.standard_normal(self.n_vocab)).astype(np.float32)

    def _check(self, batch: Queued) -> None:
        for array in batch.views:
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        n = batch.n_rows
        assert len(batch.positions) == n
        assert 1 <= len(batch.out_rows) <= self.max_out_rows
        assert len(batch.slots) == len(batch.block_tables) == len(self.windows)
        in_tiles = sum(batch.tiles[:, 1].tolist())
        for slots, table in zip(batch.slots, batch.block_tables, strict=True):
            assert len(slots) == n
            assert len(table) <= self.max_batch
            written = slots[slots >= 0].tolist()
            assert len(set(written)) == len(written) == in_tiles, "two rows write to one slot"
        if batch.kind == "prefill":
            assert n == in_tiles <= self.max_chunk
            assert (batch.tiles[:, 1] <= self.tile_rows).all()
        else:
            assert n in self.buckets
            assert (batch.kind == "decode") == (n == 1)
            assert (batch.tiles[:, 1] == 1).all()
            assert all((slots[in_tiles:] == -1).all() for slots in batch.slots)
            assert not batch.tokens[in_tiles:].any()
            assert not batch.positions[in_tiles:].any()


class Queued:
    """A step as it was when it was queued."""

    def __init__(self, batch: Batch, tail: Tail, follows: Ticket | None, ticket: Ticket) -> None:
        self.tail, self.follows, self.ticket = tail, follows, ticket
        self.kind, self.n_rows = batch.kind, batch.n_rows
        self.tokens, self.positions = batch.tokens.copy(), batch.positions.copy()
        self.slots = tuple(each.copy() for each in batch.slots)
        self.tiles, self.work = batch.tiles.copy(), batch.work.copy()
        self.block_tables = tuple(each.copy() for each in batch.block_tables)
        self.out_rows = batch.out_rows.copy()
        self.views = batch.views
        sampling, n = batch.sampling
        self.sampling = sampling[n].copy()


class FakeKv:
    """The memory of a group's blocks, as KvPool gives it out: a token and its position a slot."""

    def __init__(self, n_blocks: int, block_tokens: int, settle: Callable[[], None]) -> None:
        self._settle = settle
        self.token, self.position = np.full((2, n_blocks * block_tokens), _STRANGER, np.int64)
        arrays = (self.token, self.position)
        self._bytes = [each.reshape(n_blocks, -1).view(np.uint8) for each in arrays]
        self.block_bytes = sum(each.shape[1] for each in self._bytes)

    def fetch(self, block: int) -> list[npt.NDArray[np.uint8]]:
        self._settle()
        return self.buffers(block)

    def send(self, block: int) -> None:
        pass

    def buffers(self, block: int) -> list[npt.NDArray[np.uint8]]:
        return [each[block] for each in self._bytes]


class FakeCodec:
    """Token 0 ends a text; the others are one to three characters, some only part of one."""

    bos_id: int | None = None
    eos_id: int | None = 0
    eog_ids: frozenset[int] = frozenset({0})

    def __init__(self, n_vocab: int = 97) -> None:
        self.n_vocab = n_vocab
        letters = "abcdefghijklmnopqrstuvwxyz ."
        self._pieces = [b""]
        for id_ in range(1, n_vocab):
            one, two = letters[id_ % len(letters)], letters[id_ * 7 % len(letters)]
            self._pieces.append((one + two * (id_ // len(letters) % 3)).encode())
        euro = "€".encode()
        self._pieces[n_vocab - 2 :] = [euro[:2], euro[2:]]

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [1 + "abcdefghijklmnopqrstuvwxyz .".index(c) for c in text]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self._pieces[id_].decode(errors="replace") for id_ in ids]

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_control(self, token_id: int) -> bool:
        return not self._pieces[token_id]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._pieces[id_] for id_ in ids).decode(errors="replace")

    def stream(self, *, skip_special: bool = False, continued: bool = False) -> FakeStream:
        return FakeStream(self._pieces)


class FakeStream:
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._held = b""

    def push(self, token_id: int, /) -> str:
        self._held += self._pieces[token_id]
        if self._held.endswith("€".encode()[:2]):
            return ""
        return self.finish()

    def finish(self) -> str:
        text, self._held = self._held.decode(errors="replace"), b""
        return text


def engine_of(codec: FakeCodec | None = None, **sizes: Any) -> Engine:
    return Engine(FakeModel(**sizes), codec)


def alone(prompt: list[int], windows: tuple[int, ...] = (0,), **options: Any) -> Result:
    """A request by itself in an engine of its own, its prompt in one call."""
    return engine_of(max_chunk=96, n_blocks=24, windows=windows).generate(prompt, **options)
