"""A block store after writes that were cut, bytes that flipped and processes that were killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
from stored_blocks import (
    BLOCK_BYTES,
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

from xpuc.runtime.extents import place_bytes
from xpuc.runtime.store_index import Index

HEADER_BYTES = 64
USED_BYTES = HEADER_BYTES + BLOCK_BYTES
PLACE_BYTES = place_bytes(BLOCK_BYTES)


def states_around(path: Path, n_places: int, number: int, copies: Path) -> dict[str, Path]:
    """Copies of a store as it is before and after a put, by what the index then knows."""
    with open_store(path, n_places) as store:
        before = as_killed(path, copies / "before")
        put(store, number)
        after = as_killed(path, copies / "after")
    anew = as_killed(after, copies / "made anew")
    return {"before": before, "after": after, "made anew": anew}


@contextmanager
def with_extents(state: Path, extents: bytes, scratch: Path) -> Iterator[Path]:
    """The store of a state, but with these bytes for its extents."""
    copy = as_killed(state, scratch / "store")
    file_of(copy, "extents").write_bytes(extents)
    if state.name == "made anew":
        lose_power(copy)
    yield copy
    shutil.rmtree(copy)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["before", "after", "made anew"])
def test_the_end_of_the_file_cut_at_every_byte(tmp_path, state):
    with open_store(tmp_path / "own", 8) as store:
        put(store, 0, 1)
    path = states_around(tmp_path / "own", 8, 2, tmp_path)[state]
    whole = file_of(tmp_path / "after", "extents").read_bytes()
    known = 2 if state == "before" else 3
    starts = [PLACE_BYTES, 2 * PLACE_BYTES]
    cuts = [start + n for start in starts for n in (*range(USED_BYTES + 2), PLACE_BYTES - 1)]
    for cut in (*cuts, len(whole)):
        with (
            with_extents(path, whole[:cut], tmp_path / "scratch") as copy,
            open_store(copy, 8) as store,
        ):
            expected = [n for n in range(known) if n * PLACE_BYTES + USED_BYTES <= cut]
            assert present(store, 4) == expected, cut
            assert [n for n in range(4) if served(store, n)] == expected, cut
            put(store, 2, 3)
            assert served(store, 2)
            assert served(store, 3)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["before", "after", "made anew"])
def test_a_reused_place_written_up_to_every_byte(tmp_path, state):
    with open_store(tmp_path / "own", 2) as store:
        put(store, 0, 1)
    path = states_around(tmp_path / "own", 2, 2, tmp_path)[state]
    old = file_of(tmp_path / "before", "extents").read_bytes()
    new = file_of(tmp_path / "after", "extents").read_bytes()
    for cut in range(USED_BYTES + 1):
        mixed = new[:cut] + old[cut:]
        with (
            with_extents(path, mixed, tmp_path / "scratch") as copy,
            open_store(copy, 2) as store,
        ):
            whole = {0: mixed[:USED_BYTES] == old[:USED_BYTES], 1: True}
            whole[2] = mixed[:USED_BYTES] == new[:USED_BYTES]
            known = {"before": {0, 1}, "after": {1, 2}, "made anew": {0, 1, 2}}[state]
            expected = [n for n in range(3) if n in known and whole[n]]
            assert [n for n in range(3) if served(store, n)] == expected, cut
            put(store, 0, 2)
            assert served(store, 0)
            assert served(store, 2)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_is_a_miss_wherever_it_is(tmp_path, flip):
    with open_store(tmp_path, 3) as store:
        put(store, 0, 1, 2)
        extents = file_of(tmp_path, "extents")
        for at in range(USED_BYTES):
            raw = bytearray(extents.read_bytes())
            start = raw.index(payload_of(1)) - HEADER_BYTES
            with extents.open("r+b") as file:
                file.seek(start + at)
                file.write(bytes([raw[start + at] ^ flip]))
            assert [served(store, n) for n in range(3)] == [True, False, True], at
            assert not store.contains(key_of(1))
            put(store, 1)
            assert served(store, 1)
        assert store.stats().corrupt == USED_BYTES


@pytest.mark.slow
def test_a_flipped_byte_is_a_miss_to_an_index_made_anew(tmp_path):
    with open_store(tmp_path / "own", 3) as store:
        put(store, 0, 1, 2)
    raw = file_of(tmp_path / "own", "extents").read_bytes()
    lost = tmp_path / "made anew"
    (tmp_path / "own").rename(lost)
    for at in range(PLACE_BYTES, PLACE_BYTES + USED_BYTES):
        flipped = raw[:at] + bytes([raw[at] ^ 0x04]) + raw[at + 1 :]
        with (
            with_extents(lost, flipped, tmp_path / "scratch") as copy,
            open_store(copy, 3) as store,
        ):
            assert [served(store, n) for n in range(3)] == [True, False, True], at


def overwrite_the_start(path: Path) -> None:
    path.write_bytes(bytes(8192) + path.read_bytes()[8192:])


@pytest.mark.parametrize("damage", [overwrite_the_start, Path.unlink])
def test_a_damaged_index_is_made_anew(tmp_path, damage: Callable[[Path], None]):
    with open_store(tmp_path, 4) as store:
        put(store, *range(6))
    damage(file_of(tmp_path, "index.mdb"))
    with open_store(tmp_path, 4) as store:
        assert present(store, 6) == [2, 3, 4, 5]
        assert all(served(store, n) for n in (2, 3, 4, 5))
        put(store, 6)
        assert present(store, 7) == [3, 4, 5, 6]


def test_an_index_cut_at_any_page_is_made_anew(tmp_path):
    with open_store(tmp_path / "own", 4) as store:
        put(store, *range(6))
    n_pages = file_of(tmp_path / "own", "index.mdb").stat().st_size // 4096
    assert n_pages > 4
    for n_left in range(n_pages):
        copy = as_killed(tmp_path / "own", tmp_path / str(n_left))
        os.truncate(file_of(copy, "index.mdb"), n_left * 4096)
        with open_store(copy, 4) as store:
            assert all(served(store, n) for n in (2, 3, 4, 5)), n_left


def test_an_index_made_anew_lists_a_block_once_where_it_was_written_last(tmp_path):
    with open_store(tmp_path, 3) as store:
        put(store, 0, 1)
        first = file_of(tmp_path, "extents").read_bytes()
        with file_of(tmp_path, "extents").open("r+b") as file:
            file.write(bytes(USED_BYTES))
        assert not served(store, 0)
        put(store, 2, 0)  # 2 where 0 was
    with file_of(tmp_path, "extents").open("r+b") as file:
        file.write(first[:USED_BYTES])
    lose_power(tmp_path)
    with open_store(tmp_path, 3) as store:
        assert present(store, 3) == [0, 1]
        assert store.stats().entries == 2
        put(store, 3, 4)
        assert present(store, 5) == [0, 3, 4]


@pytest.mark.parametrize("n_before", range(4))
def test_killed_while_the_store_is_made_smaller(tmp_path, monkeypatch, n_before):
    """After `n_before` of the moves: what was kept is there, at the latest after a next try."""

    def killed(*_):
        raise KeyboardInterrupt

    def move(index: Index, key: bytes, place: int) -> None:
        moved.append(key)
        (killed if len(moved) > n_before else original)(index, key, place)

    moved: list[bytes] = []
    original = Index.move
    with open_store(tmp_path, 8) as store:
        put(store, *range(8))
    with monkeypatch.context() as patch:
        patch.setattr(Index, "move", move)
        with pytest.raises(KeyboardInterrupt):
            open_store(tmp_path, 4)
    with open_store(tmp_path, 4) as store:
        assert present(store, 8) == [4, 5, 6, 7]
        assert all(served(store, n) for n in (4, 5, 6, 7))


N_ROUNDS, N_PLACES, LARGE_BYTES = 200, 12, 200_000


# When a writer is killed, in turns: as it starts or writes, once it has written, and by itself
# between a put and its acknowledgment.
MOMENTS = ("any", "any", "writing", "writing", "unacknowledged")


def write_until_killed(path: Path, start: int, acknowledge: int, moment: str) -> None:
    """Puts from `start` on, and now and then a use of an older block; each told when done."""
    store = open_store(path, N_PLACES, block_bytes=LARGE_BYTES)
    into = bytearray(LARGE_BYTES)
    for number in range(start, start + 10_000):
        store.put(key_of(number), payload_of(number, LARGE_BYTES))
        if moment == "unacknowledged" and number == start + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(acknowledge, number.to_bytes(4, "little"))
        if number % 3 == 0 and number >= start + 4:
            assert store.get(key_of(number - 4), into)
            os.write(acknowledge, (number - 4).to_bytes(4, "little"))


def acknowledged_before_the_kill(path: Path, start: int, moment: str, seconds: float) -> list[int]:
    """What a process that opens the store and writes says until it is killed at that moment."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # of threads, which the child does not use
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            write_until_killed(path, start, writing, moment)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read(4) if moment == "writing" else b""
        if moment != "unacknowledged":
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        said += pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return [int.from_bytes(said[at : at + 4], "little") for at in range(0, len(said), 4)]


@pytest.mark.slow
def test_what_was_acknowledged_outlives_kill_9(tmp_path):
    """200 times at random moments; each tenth time the machine goes down with the process."""
    random_ = random.Random(9)
    held: list[int] = []  # coldest first
    start, n_unacknowledged = 0, 0
    for round_, moment in zip(range(N_ROUNDS), cycle(MOMENTS)):
        seconds = random_.uniform(0.001, 0.02)
        said = acknowledged_before_the_kill(tmp_path, start, moment, seconds)
        for number in said:
            held = [each for each in held if each != number] + [number]
        held = held[-N_PLACES:]
        if round_ % 10 == 9 and list(tmp_path.glob("*/state")):
            lose_power(tmp_path)
        with open_store(tmp_path, N_PLACES, block_bytes=LARGE_BYTES) as store:
            # The put that was not acknowledged may have evicted the coldest block.
            found = [number for number in held if served(store, number, LARGE_BYTES)]
            assert found in (held, held[1:] if len(held) == N_PLACES else held), round_
            next_ = max([start - 1, *said]) + 1
            if served(store, next_, LARGE_BYTES):
                n_unacknowledged += 1
                found.append(next_)
            assert store.stats().corrupt == 0 or round_ % 10 == 9
        held, start = found, next_ + 1
    assert start >= N_ROUNDS  # of those that are killed after a write, and by themselves, alone
    assert n_unacknowledged >= N_ROUNDS // len(MOMENTS)
