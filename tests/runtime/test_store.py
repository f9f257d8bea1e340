"""Evicted blocks on disk: the bound, the order of eviction, a second process, a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from file_limits import largest_file
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stored_blocks import (
    BLOCK_BYTES,
    IDENTITY,
    as_killed,
    file_of,
    key_of,
    lose_power,
    open_store,
    payload_of,
    present,
    put,
    served,
)

from xpuc.errors import FileError, XpucError
from xpuc.runtime.extents import place_bytes
from xpuc.runtime.store import BlockStore

N_NUMBERS = 10
numbers = st.integers(0, N_NUMBERS - 1)
sizes = st.integers(1, 6)


class Storing(RuleBasedStateMachine):
    """A store beside a model of it: the numbers it holds, coldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.n_copies = 0
        self.path = Path(self.folder.name, "0")
        self.n_places = 4
        self.store = open_store(self.path, self.n_places)
        self.held: list[int] = []

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def use(self, number: int) -> None:
        self.held.remove(number)
        self.held.append(number)

    @rule(number=numbers)
    def put(self, number: int) -> None:
        put(self.store, number)
        if number in self.held:
            self.use(number)
        else:
            self.held = [*self.held, number][-self.n_places :]

    @rule(number=numbers)
    def get(self, number: int) -> None:
        assert served(self.store, number) == (number in self.held)
        if number in self.held:
            self.use(number)

    @rule(asked=st.lists(numbers))
    def look_for_the_longest_prefix(self, asked: list[int]) -> None:
        missing = [i for i, number in enumerate(asked) if number not in self.held]
        expected = min(missing, default=len(asked))
        assert self.store.longest([key_of(number) for number in asked]) == expected

    @rule(n_places=sizes)
    def reopen(self, n_places: int) -> None:
        self.store.close()
        self.n_places = n_places
        self.store = open_store(self.path, n_places)
        self.held = self.held[-n_places:]

    def die(self) -> None:
        self.n_copies += 1
        copy = as_killed(self.path, Path(self.folder.name, str(self.n_copies)))
        self.store.close()
        self.path = copy

    @rule()
    def kill(self) -> None:
        self.die()
        self.store = open_store(self.path, self.n_places)

    @rule()
    def lose_power(self) -> None:
        """The order of uses is lost and made anew; every block is there."""
        self.die()
        lose_power(self.path)
        self.store = open_store(self.path, self.n_places)
        assert all(served(self.store, number) for number in self.held)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), at=st.integers(0, 63))
    def damage_a_header(self, data: st.DataObject, at: int) -> None:
        number = data.draw(st.sampled_from(self.held))
        with file_of(self.path, "extents").open("r+b") as file:
            start = file.read().index(payload_of(number))
            file.seek(start - 64 + at)
            (byte,) = file.read(1)
            file.seek(start - 64 + at)
            file.write(bytes([byte ^ 0x10]))
            file.flush()
            assert not served(self.store, number)
            file.seek(start)
            file.write(bytes(BLOCK_BYTES))  # found by it no more
        self.held.remove(number)

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        assert present(self.store, N_NUMBERS) == sorted(self.held)

    @invariant()
    def the_bound_holds(self) -> None:
        bound = self.n_places * place_bytes(BLOCK_BYTES)
        stats = self.store.stats()
        assert stats.entries == len(self.held)
        assert stats.bytes <= file_of(self.path, "extents").stat().st_size <= bound


TestStoring = pytest.mark.slow(Storing.TestCase)
TestStoring.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_block_unused_for_longest_goes_first(tmp_path):
    with open_store(tmp_path, 3) as store:
        put(store, 0, 1, 2)
        assert served(store, 0)
        put(store, 1)  # a use, like the get
        put(store, 3)
        assert present(store, 4) == [0, 1, 3]
        put(store, 4)
        assert present(store, 5) == [1, 3, 4]
        assert store.stats().evicted == 2


def test_the_order_of_uses_survives_a_restart(tmp_path):
    with open_store(tmp_path, 3) as store:
        put(store, 0, 1, 2)
        assert served(store, 0)
    with open_store(tmp_path, 3) as store:
        put(store, 3)
        assert present(store, 4) == [0, 2, 3]


def test_arrays_go_out_and_come_back_in_place(tmp_path):
    pools = [np.arange(24, dtype=np.float16).reshape(2, 3, 4) + i for i in range(2)]
    expected = [pool[1].copy() for pool in pools]
    with open_store(tmp_path, 2, block_bytes=48) as store:
        store.put(key_of(0), [pool[1] for pool in pools])
        for pool in pools:
            pool[:] = 0
        assert store.get(key_of(0), [pool[1] for pool in pools])
    for pool, block in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(pool[1], block)
        assert not pool[0].any()


def test_a_block_of_another_size_is_a_mistake_of_the_caller(tmp_path):
    with open_store(tmp_path, 2) as store:
        with pytest.raises(AssertionError):
            store.put(key_of(0), bytes(BLOCK_BYTES + 1))
        with pytest.raises(AssertionError):
            store.get(key_of(0), bytearray(BLOCK_BYTES - 1))


def test_identities_share_a_folder_and_nothing_else(tmp_path):
    with open_store(tmp_path, 2) as one, open_store(tmp_path, 2, identity=b"another") as other:
        put(one, 0)
        assert not other.contains(key_of(0))
        assert not served(other, 0)
        put(other, 1, 2)
        assert present(one, 3) == [0]
        assert served(one, 0)


def test_the_extents_of_another_identity_never_read(tmp_path):
    for name, identity in (("one", IDENTITY), ("other", b"another")):
        with open_store(tmp_path / name, 2, identity=identity) as store:
            put(store, 0)
    foreign = file_of(tmp_path / "other", "extents").read_bytes()
    file_of(tmp_path / "one", "extents").write_bytes(foreign)
    with open_store(tmp_path / "one", 2) as store:
        assert not served(store, 0)
        assert store.stats().corrupt == 1
    lose_power(tmp_path / "one")
    with open_store(tmp_path / "one", 2) as store:
        assert store.stats().entries == 0


@pytest.mark.parametrize("n_left", [1, 3, 5])
def test_a_smaller_bound_keeps_the_last_used_and_moves_them_together(tmp_path, n_left):
    with open_store(tmp_path, 8) as store:
        put(store, *range(8))
        for number in (3, 0, 6):
            assert served(store, number)
    last_used = [1, 2, 4, 5, 7, 3, 0, 6][-n_left:]
    with open_store(tmp_path, n_left) as store:
        assert file_of(tmp_path, "extents").stat().st_size == n_left * place_bytes(BLOCK_BYTES)
        assert present(store, 8) == sorted(last_used)
        assert all(served(store, number) for number in last_used)
    with open_store(tmp_path, 8) as store:
        put(store, *range(10, 18 - n_left))
        assert all(served(store, number) for number in last_used)


def test_a_place_is_used_again(tmp_path):
    with open_store(tmp_path, 3) as store:
        put(store, *range(50))
        assert file_of(tmp_path, "extents").stat().st_size == 3 * place_bytes(BLOCK_BYTES)
        assert [served(store, number) for number in range(50)] == [False] * 47 + [True] * 3


def test_counts(tmp_path):
    with open_store(tmp_path, 2) as store:
        put(store, 0, 1, 2, 2)
        assert [served(store, number) for number in range(3)] == [False, True, True]
        stats = store.stats()
    assert (stats.entries, stats.bytes) == (2, 2 * place_bytes(BLOCK_BYTES))
    assert (stats.hits, stats.misses, stats.corrupt) == (2, 1, 0)
    assert (stats.evicted, stats.failed, stats.written_bytes) == (1, 0, 3 * BLOCK_BYTES)


def test_a_second_process_is_refused_by_name_until_the_first_ends(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path; from stored_blocks import open_store, put\n"
        f"store = open_store(Path({str(tmp_path)!r}), 2); put(store, 0)\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"open\n"
        with pytest.raises(XpucError) as refused:
            open_store(tmp_path, 2)
        first.kill()
    expected = f"{tmp_path}: the block store is in use by process {first.pid}"
    assert refused.value.message == expected
    assert refused.value.hint == "stop that process, or give this one a folder of its own"
    with open_store(tmp_path, 2) as store:
        assert served(store, 0)


def test_a_closed_store_is_free_for_the_next(tmp_path):
    store = open_store(tmp_path, 2)
    with pytest.raises(XpucError, match="in use by process"):
        open_store(tmp_path, 2)
    store.close()
    store.close()
    open_store(tmp_path, 2).close()


def test_a_bound_under_one_block(tmp_path):
    with pytest.raises(XpucError) as raised:
        BlockStore.open(tmp_path, identity=b"", block_bytes=5000, max_bytes=8191)
    expected = f"{tmp_path}: a block store of 8191 bytes cannot hold one block (8192 bytes)"
    assert raised.value.message == expected
    assert raised.value.hint == "allow it more bytes, or run without a store"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError) as raised:
        open_store(tmp_path / "file", 2)
    expected = f"{tmp_path}/file: the block store cannot be opened (Not a directory)"
    assert raised.value.message == expected
    assert raised.value.hint == "name a folder on a local disk that can be written"


def test_without_lmdb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(XpucError) as raised:
        open_store(tmp_path, 2)
    assert raised.value.message == "the block store needs the package lmdb"
    assert raised.value.hint == "pip install 'xpuc[store]'"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("places_on_disk", [4, 4.5])
def test_a_disk_full_before_the_store_is_keeps_the_newest(tmp_path, places_on_disk):
    n = 40_000

    def keep(store, *numbers):
        for number in numbers:
            store.put(key_of(number), payload_of(number, n))

    with open_store(tmp_path, 8, block_bytes=n) as store:
        with largest_file(int(places_on_disk * place_bytes(n))):
            keep(store, *range(6))
            assert present(store, 6) == [2, 3, 4, 5]
            assert all(served(store, number, n) for number in range(2, 6))
        keep(store, *range(6, 10))  # there is room again
        assert present(store, 10) == list(range(2, 10))
        assert all(served(store, number, n) for number in range(2, 10))
        assert store.stats().failed == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_fails_the_put_and_no_more(tmp_path, monkeypatch, caplog, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    with open_store(tmp_path, 2) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            put(store, 0, 1)
        assert store.stats().failed == 2
        assert store.stats().entries == 0
        (line,) = caplog.messages
        assert f"a block could not be stored ({os.strerror(code)})" in line
        put(store, 0, 1, 2)
        assert present(store, 3) == [1, 2]
    with open_store(tmp_path, 2) as store:
        assert served(store, 1)
        assert served(store, 2)


def test_an_index_that_cannot_be_written_fails_the_put_and_no_more(tmp_path):
    with open_store(tmp_path, 4) as store:
        put(store, 0)
        with largest_file(4096):
            put(store, 1)
            assert served(store, 0)
        assert store.stats().failed == 1
        put(store, 2)
        assert store.longest([key_of(0), key_of(2), key_of(1)]) == 2
        assert served(store, 2)


def test_a_medium_that_cannot_be_read_is_a_miss(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(tmp_path, 4) as store:
        put(store, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            assert not served(store, 0)
        assert present(store, 2) == [1]
        assert served(store, 1)


def test_sync_says_what_is_wrong(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(tmp_path, 2) as store:
        store.sync()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(FileError, match="could not be written \\(Input/output error\\)"):
                store.sync()
