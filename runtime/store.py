"""The block store: K/V blocks that were evicted from memory, kept on disk across restarts.

    with BlockStore.open(folder, identity=..., block_bytes=n, max_bytes=20 << 30) as store:
        store.put(key, [k_of_layer_0, v_of_layer_0, ...])
        store.get(key, [k_of_layer_0, v_of_layer_0, ...])

`key` is the chained hash of a block's tokens and all before them, 16 bytes. `identity` is every
byte that decides what a block's bytes mean: model digest, K/V dtype, layout, rope parameters.

FOLDER/<digest of identity and block_bytes>/
  extents    the blocks (`runtime.extents`)
  index.mdb  where each is, and the order of their last uses (`runtime.store_index`)
  state      whether the index may be believed
  lock       held by the process that has the store open; its number

- Another identity is another folder, never mixed: the checksums are seeded with it as well.
- `max_bytes` bounds the extents of one identity; the index comes on top, 100 to 300 bytes a block.
  When the bound is reached a new block takes the place of the one unused for longest.
- When `put` returns, the block outlives the process, however that ends. To outlive a power failure
  or a crash of the operating system it needs a `sync` after it; without one it is there or it is a
  miss. After such an end the index is made anew from the extents, where a use that was no `put`
  left no trace: such blocks may be evicted in the order they were written.
- What the disk does not take is not kept: `put` returns all the same, and `stats().failed` rises.
  What does not read back with the right checksum is a miss and is forgotten.
- One process at a time: a second is refused by name. One thread at a time.
- There is no cache in this process: the operating system's page cache keeps what was used lately.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import xxhash

from xpuc.errors import FileError, XpucError
from xpuc.runtime.extents import KEY_BYTES, ExtentFile, byte_views, place_bytes

if TYPE_CHECKING:
    from xpuc.runtime.extents import Buffers
    from xpuc.runtime.store_index import Entry, Index

log = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What `state` may say, beside the boot of the machine since which the store was open.
_CLOSED, _IN_DOUBT, _STATE_BYTES = b"closed", b"in doubt", 40
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class StoreStats:
    """Since the store was opened, but for the first two."""

    entries: int
    bytes: int  # of the extent file, taken by the entries
    hits: int
    misses: int  # `corrupt` included
    corrupt: int  # entries whose extent was not whole
    evicted: int
    failed: int  # writes the disk or the index did not take
    written_bytes: int


@dataclass
class _Counts:
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    evicted: int = 0
    failed: int = 0
    written_bytes: int = 0


class BlockStore:
    """Blocks of `block_bytes` by key; see the module for what is promised."""

    def __init__(
        self, folder: Path, extents: ExtentFile, index: Index, n_places: int, block_bytes: int
    ) -> None:
        """Of what `open` opened; brings what is there within `n_places`."""
        self._folder = folder
        self._extents = extents
        self._index = index
        self._n_places = n_places
        self._block_bytes = block_bytes
        self._counts = _Counts()
        self._resources = ExitStack()
        self._is_open = True
        self._fit()

    @classmethod
    def open(cls, path: Path, *, identity: bytes, block_bytes: int, max_bytes: int) -> BlockStore:
        """The store of `identity` in the folder `path`, both made if they are not there."""
        n_places = max_bytes // place_bytes(block_bytes)
        if n_places < 1:
            raise XpucError(
                f"{path}: a block store of {max_bytes} bytes cannot hold one block"
                f" ({place_bytes(block_bytes)} bytes)",
                "allow it more bytes, or run without a store",
            )
        _require_lmdb()
        name = xxhash.xxh3_128(block_bytes.to_bytes(8, "little") + identity)
        folder = path / name.hexdigest()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as resources:
                resources.callback(os.close, _lock(path, folder / "lock"))
                seed = name.intdigest() & (1 << 64) - 1
                extents = ExtentFile(folder / "extents", block_bytes, seed)
                resources.callback(extents.close)
                believed = _read_state(folder) in (_CLOSED, _boot())
                _write_state(folder, _IN_DOUBT)
                index = _open_index(folder / "index.mdb", extents, n_places, believed=believed)
                resources.callback(index.close)
                store = cls(folder, extents, index, n_places, block_bytes)
                _write_state(folder, _boot() or _IN_DOUBT)
                store._resources = resources.pop_all()
                return store
        except OSError as error:
            raise FileError(
                f"{path}: the block store cannot be opened ({error.strerror})",
                "name a folder on a local disk that can be written",
            ) from None

    def get(self, key: bytes, into: Buffers) -> bool:
        """Whether `into` (in all `block_bytes`) now holds the block; if not, it holds anything."""
        views = self._views(key, into)
        entry = self._find(key)
        if entry is not None and not self._extents.read(entry.place, key, views):
            self._counts.corrupt += 1
            with suppress(OSError):
                self._free.append(self._index.remove(key))
            entry = None
        if entry is None:
            self._counts.misses += 1
            return False
        self._counts.hits += 1
        with suppress(OSError):  # it is here, if not the last to be used
            self._index.touch(key)
        return True

    def put(self, key: bytes, payload: Buffers) -> None:
        """Keep a block of in all `block_bytes`; of one that is there, only the use is noted."""
        views = self._views(key, payload)
        try:
            if not self._index.touch(key):
                self._write(key, views)
        except OSError as error:
            if not self._counts.failed:
                log.warning("%s: a block could not be stored (%s)", self._folder, error.strerror)
            self._counts.failed += 1

    def contains(self, key: bytes) -> bool:
        """Whether a `get` would look for it on disk. No use of the block."""
        return self._find(key) is not None

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, `contains` has. No use of the blocks."""
        try:
            return self._index.leading(keys)
        except OSError:
            return 0

    def sync(self) -> None:
        """Returns when every block put before outlives a power failure."""
        try:
            self._extents.sync()
        except OSError as error:
            raise FileError(
                f"{self._folder}: the block store could not be written ({error.strerror})",
                "see what is wrong with the disk",
            ) from None

    def stats(self) -> StoreStats:
        n = self._n_entries
        return StoreStats(n, n * place_bytes(self._block_bytes), **dataclasses.asdict(self._counts))

    def close(self) -> None:
        """Does not wait for the blocks to be on the medium: that is `sync`."""
        resources, self._resources = self._resources, ExitStack()
        with resources:
            if self._is_open:
                self._is_open = False
                with suppress(OSError):  # the next to open it then makes the index anew
                    self._index.sync()
                    _write_state(self._folder, _CLOSED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _n_entries(self) -> int:
        return self._n_grown - len(self._free)

    def _views(self, key: bytes, buffers: Buffers) -> list[memoryview]:
        views = byte_views(buffers)
        n_bytes = sum(view.nbytes for view in views)
        assert len(key) == KEY_BYTES, key
        assert n_bytes == self._block_bytes, (n_bytes, self._block_bytes)
        return views

    def _find(self, key: bytes) -> Entry | None:
        try:
            return self._index.find(key)
        except OSError:
            return None

    def _write(self, key: bytes, payload: list[memoryview]) -> None:
        try:
            self._write_at(self._take_place(), key, payload)
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._n_entries:
                raise
            # The disk is full before the store is: what is on it already can be written over.
            self._write_at(self._evict(), key, payload)

    def _write_at(self, place: int, key: bytes, payload: list[memoryview]) -> None:
        """No key leads to `place` while it is written, and one does only when it is whole."""
        try:
            self._extents.write(place, key, self._index.next_stamp, payload)
            self._index.add(key, place)
        except OSError:
            self._free.append(place)
            raise
        self._counts.written_bytes += self._block_bytes

    def _take_place(self) -> int:
        if self._free:
            return self._free.pop()
        if self._n_grown == self._n_places:
            return self._evict()
        self._n_grown += 1
        return self._n_grown - 1

    def _evict(self) -> int:
        """The place of the block that went unused for longest."""
        key = self._index.coldest()
        assert key is not None
        place = self._index.remove(key)
        self._counts.evicted += 1
        return place

    def _fit(self) -> None:
        """Forget what the file lost, evict what is over the bound, move the rest within it."""
        n_whole = self._extents.n_whole
        places = {key: entry.place for key, entry in self._index.entries()}
        for key in [key for key, place in places.items() if place >= n_whole]:
            self._index.remove(key)
            del places[key]
        for _ in range(len(places) - self._n_places):
            self._evict()
        entries = self._index.entries()
        taken = {entry.place for _, entry in entries}
        self._n_grown = min(n_whole, self._n_places)
        self._free = [place for place in range(self._n_grown) if place not in taken]
        outside = [(key, entry) for key, entry in entries if entry.place >= self._n_places]
        for key, entry in outside:
            self._move(key, entry)
        if outside:
            self._extents.sync()  # the copies, before the originals are cut off
        self._extents.truncate(self._n_places)

    def _move(self, key: bytes, entry: Entry) -> None:
        """To a free place; forgotten if it is not whole."""
        payload = [memoryview(bytearray(self._block_bytes))]
        if self._extents.read(entry.place, key, payload):
            place = self._free.pop()
            self._extents.write(place, key, entry.stamp, payload)
            self._index.move(key, place)
        else:
            self._index.remove(key)


def _require_lmdb() -> None:
    try:
        import lmdb  # noqa: F401
    except ImportError:
        raise XpucError(
            "the block store needs the package lmdb", "pip install 'xpuc[store]'"
        ) from None


def _open_index(path: Path, extents: ExtentFile, n_places: int, *, believed: bool) -> Index:
    """The index as it is if it may be believed and is sound, else made anew."""
    from xpuc.runtime.store_index import Entry, Index  # imports lmdb

    if (
        believed and path.is_file() and path.stat().st_size
    ):  # LMDB takes an empty file for a new one
        try:
            return Index(path, n_places)
        except OSError as error:
            log.warning("%s: the index of the block store is made anew (%s)", path, error.strerror)
    path.unlink(missing_ok=True)
    index = Index(path, n_places)
    try:
        index.fill((header.key, Entry(place, header.stamp)) for place, header in extents.headers())
    except BaseException:
        index.close()
        raise
    return index


def _lock(store: Path, path: Path) -> int:
    """The lock's file descriptor; the system frees it when the process ends, however it does."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(file, 20, 0).decode(errors="replace")
        os.close(file)
        raise XpucError(
            f"{store}: the block store is in use by process {holder}",
            "stop that process, or give this one a folder of its own",
        ) from None
    except BaseException:
        os.close(file)
        raise
    return file


def _boot() -> bytes | None:
    """The boot of this machine: within one, what a process wrote outlives it."""
    try:
        return _BOOT.read_bytes().strip()
    except OSError:  # not Linux: after any end but `close` the index is made anew
        return None


def _read_state(folder: Path) -> bytes:
    path = folder / "state"
    return path.read_bytes().strip() if path.is_file() else b""


def _write_state(folder: Path, state: bytes) -> None:
    """In place and at once on the medium; of one length, so that a full disk takes it."""
    file = os.open(folder / "state", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(file, state.ljust(_STATE_BYTES), 0)
        os.fsync(file)
    finally:
        os.close(file)
