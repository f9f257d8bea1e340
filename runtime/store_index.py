"""The index of a block store: two B+ trees of one LMDB file.

`places` leads from a block's key to its place among the extents, `recency` from a stamp that rises
with every use to the key, so that its first entry is the block that went unused for longest.
A transaction is committed to the operating system and not to the medium (see `runtime.store`).
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import lmdb

_ENTRY = struct.Struct("<QQ")  # place, stamp
_STAMP = struct.Struct(">Q")  # big-endian: byte order is number order
_MAP_BYTES = 16 << 20  # of address space, and for each entry
_MAP_BYTES_PER_ENTRY = 1 << 10


class Entry(NamedTuple):
    """Where a block is, and the stamp of its last use."""

    place: int
    stamp: int


class Index:
    """Entries by key. Whatever LMDB cannot do leaves as an OSError, with nothing changed."""

    def __init__(self, path: Path, n_entries: int) -> None:
        """Opens or creates it; OSError if the file is no sound index of its own."""
        self._path = path
        with self._faults():
            # The store's lock keeps others out, and no transaction outlives a call: no lock file.
            self._env = lmdb.open(
                str(path),
                map_size=_MAP_BYTES + n_entries * _MAP_BYTES_PER_ENTRY,
                subdir=False,
                max_dbs=2,
                lock=False,
                sync=False,
                metasync=False,
                readahead=False,
            )
        try:
            self._check_length()
            with self._faults():
                self._places = self._env.open_db(b"places")
                self._recency = self._env.open_db(b"recency")
            self.next_stamp = self._check_trees() + 1
        except BaseException:
            self._env.close()
            raise

    def __len__(self) -> int:
        with self._transaction() as txn:
            return int(txn.stat(self._places)["entries"])

    def find(self, key: bytes) -> Entry | None:
        with self._transaction() as txn:
            return self._entry(txn, key)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are there."""
        with self._transaction() as txn:
            for n, key in enumerate(keys):
                if txn.get(key, db=self._places) is None:
                    return n
        return len(keys)

    def coldest(self) -> bytes | None:
        """The key that went unused for longest."""
        with self._transaction() as txn, txn.cursor(self._recency) as cursor:
            return bytes(cursor.value()) if cursor.first() else None

    def entries(self) -> list[tuple[bytes, Entry]]:
        with self._transaction() as txn, txn.cursor(self._places) as cursor:
            return [(bytes(key), Entry(*_ENTRY.unpack(value))) for key, value in cursor]

    def add(self, key: bytes, place: int) -> None:
        """A new key, the last to be used."""
        with self._transaction(write=True) as txn:
            self._put(txn, key, Entry(place, self.next_stamp))
        self.next_stamp += 1

    def touch(self, key: bytes) -> bool:
        """Make a key the last to be used, if it is there."""
        with self._transaction(write=True) as txn:
            if (old := self._entry(txn, key)) is None:
                return False
            txn.delete(_STAMP.pack(old.stamp), db=self._recency)
            self._put(txn, key, Entry(old.place, self.next_stamp))
        self.next_stamp += 1
        return True

    def move(self, key: bytes, place: int) -> None:
        """A key that is there has a new place, and its old recency."""
        with self._transaction(write=True) as txn:
            old = self._entry(txn, key)
            assert old is not None, key.hex()
            self._put(txn, key, Entry(place, old.stamp))

    def remove(self, key: bytes) -> int:
        """Forget a key that is there; its place."""
        with self._transaction(write=True) as txn:
            old = self._entry(txn, key)
            assert old is not None, key.hex()
            txn.delete(key, db=self._places)
            txn.delete(_STAMP.pack(old.stamp), db=self._recency)
        return old.place

    def fill(self, entries: Iterable[tuple[bytes, Entry]]) -> None:
        """Make an empty index that of `entries`; of two for one key the last used counts."""
        newest = dict(sorted(entries, key=lambda each: each[1].stamp))
        with self._transaction(write=True) as txn:
            for key, entry in sorted(newest.items(), key=lambda each: each[1].stamp):
                stamp = max(entry.stamp, self.next_stamp)
                self._put(txn, key, Entry(entry.place, stamp))
                self.next_stamp = stamp + 1

    def sync(self) -> None:
        """Wait until everything committed is on the medium."""
        with self._faults():
            self._env.sync(True)

    def close(self) -> None:
        self._env.close()

    def _entry(self, txn: lmdb.Transaction, key: bytes) -> Entry | None:
        value = txn.get(key, db=self._places)
        return None if value is None else Entry(*_ENTRY.unpack(value))

    def _put(self, txn: lmdb.Transaction, key: bytes, entry: Entry) -> None:
        txn.put(key, _ENTRY.pack(*entry), db=self._places)
        txn.put(_STAMP.pack(entry.stamp), key, db=self._recency)

    def _check_length(self) -> None:
        """A map that reaches over the end of its file would end the process, not a call."""
        with self._faults():
            pages = self._env.info()["last_pgno"] + 1
            needed = pages * self._env.stat()["psize"]
        if self._path.stat().st_size < needed:
            raise OSError(errno.EIO, f"shorter than its {pages} pages", str(self._path))

    def _check_trees(self) -> int:
        """Each entry is in both trees and nowhere else; the highest stamp, or 0."""
        by_stamp = {entry.stamp: key for key, entry in self.entries()}
        with self._transaction() as txn, txn.cursor(self._recency) as cursor:
            recency = {_STAMP.unpack(stamp)[0]: bytes(key) for stamp, key in cursor}
        if recency != by_stamp or len(by_stamp) != len(self):
            raise OSError(errno.EIO, "its trees disagree", str(self._path))
        return max(by_stamp, default=0)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (lmdb.Error, struct.error) as error:
            raise OSError(errno.EIO, str(error), str(self._path)) from error

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[lmdb.Transaction]:
        with self._faults(), self._env.begin(write=write) as txn:
            yield txn
