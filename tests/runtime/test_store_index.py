"""The index of a block store by itself: what it says, what it refuses, what it leaves behind."""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_blocks import key_of

from xpuc.runtime import store_index
from xpuc.runtime.store_index import Entry, Index

N_ENTRIES = 64
Trees = tuple[dict[bytes, bytes], dict[bytes, bytes]]  # places, recency


def index_of(path: Path, n: int = N_ENTRIES) -> Index:
    return Index(path / "index.mdb", n)


def trees_of(path: Path, change: Callable[[Trees], object] = lambda trees: None) -> Trees:
    """Both trees as LMDB has them, after a change from outside."""
    with lmdb.open(str(path / "index.mdb"), subdir=False, max_dbs=2, lock=False) as env:
        names = [env.open_db(name) for name in (b"places", b"recency")]
        with env.begin(write=True) as txn:
            trees = tuple(dict(txn.cursor(name)) for name in names)
            before = [dict(tree) for tree in trees]
            change(trees)  # type: ignore[arg-type]
            for name, old, new in zip(names, before, trees, strict=True):
                for key in old:
                    txn.delete(key, db=name)
                for key, value in new.items():
                    txn.put(key, value, db=name)
    return trees[0], trees[1]


def n_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def by_use(index: Index) -> list[bytes]:
    """Its keys, coldest first."""
    found = sorted(index.entries(), key=lambda each: each[1].stamp)
    return [key for key, _ in found]


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "move", "remove"]), st.integers(0, 5))))
@settings(max_examples=40, deadline=None)
def test_it_is_a_dictionary_that_knows_its_coldest(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("index")
    places: dict[bytes, int] = {}  # coldest first
    index = index_of(path)
    for n, (call, number) in enumerate(calls):
        key, stamp = key_of(number), index.next_stamp
        if call == "touch":
            assert index.touch(key) == (key in places)
            if key in places:
                assert index.find(key) == Entry(places[key], stamp)
                places[key] = places.pop(key)
        elif call == "add" and key not in places:
            index.add(key, n)
            assert index.find(key) == Entry(n, stamp)
            places[key] = n
        elif call == "move" and key in places:
            index.move(key, n)
            places[key] = n
        elif call == "remove" and key in places:
            assert index.remove(key) == places.pop(key)
        is_use = (call == "touch" and key in places) or (call == "add" and places.get(key) == n)
        assert index.next_stamp == stamp + is_use
        assert {key: entry.place for key, entry in index.entries()} == places
        assert by_use(index) == list(places)
        assert index.coldest() == next(iter(places), None)
        assert len(index) == len(places)
    assert index.find(key_of(9)) is None
    last = max((entry.stamp for _, entry in index.entries()), default=0)
    entries = index.entries()
    index.close()
    again = index_of(path)
    assert again.entries() == entries
    assert again.next_stamp == last + 1
    again.close()


def test_uses_stay_in_order_beyond_a_byte_of_them(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    for number in range(3):
        index.add(key_of(number), number)
    for _ in range(150):
        index.touch(key_of(0))
        index.touch(key_of(2))
    assert index.coldest() == key_of(1)
    index.remove(key_of(1))
    assert index.coldest() == key_of(0)
    index.close()


def test_the_leading_ones_of_a_chain(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    for number in (0, 1, 3):
        index.add(key_of(number), number)
    for numbers, n in [((), 0), ((0, 1), 2), ((0, 1, 2, 3), 2), ((2, 0), 0), ((3,), 1)]:
        assert index.leading([key_of(number) for number in numbers]) == n
    index.close()


def test_filled_from_entries_in_any_order(tmp_path: Path) -> None:
    """Of two for a key the last used counts, and stamps that two blocks have are told apart."""
    index = index_of(tmp_path)
    given_ = [(2, 30, 9), (1, 20, 8), (0, 10, 7), (1, 21, 4), (3, 40, 7)]  # number, place, stamp
    index.fill((key_of(number), Entry(place, stamp)) for number, place, stamp in given_)
    found = dict(index.entries())
    assert {key: entry.place for key, entry in found.items()} == {
        key_of(0): 10, key_of(1): 20, key_of(2): 30, key_of(3): 40
    }  # fmt: skip
    assert by_use(index) == [key_of(0), key_of(3), key_of(1), key_of(2)]
    assert [found[key].stamp for key in by_use(index)] == [7, 8, 9, 10]
    assert index.next_stamp == 11
    index.close()
    index_of(tmp_path).close()  # its trees agree


def test_stamps_with_gaps_are_kept(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    index.fill([(key_of(0), Entry(0, 5)), (key_of(1), Entry(1, 50))])
    assert [entry.stamp for _, entry in sorted(index.entries(), key=lambda e: e[1])] == [5, 50]
    assert index.next_stamp == 51
    index.close()


def test_as_many_as_were_announced_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [(key_of(number), Entry(number, number + 1)) for number in range(2000)]
    index = Index(tmp_path / "not announced", 0)
    index.fill(entries)
    assert len(index) == len(entries), "there is no room beyond"
    index.close()
    monkeypatch.setattr(store_index, "_MAP_BYTES", 1 << 16)
    index = index_of(tmp_path, len(entries))
    index.fill(entries)
    index.close()
    small = Index(tmp_path / "small", 0)
    with pytest.raises(OSError, match="MDB_MAP_FULL") as raised:
        small.fill(entries)
    assert raised.value.errno == errno.EIO
    assert raised.value.filename == str(tmp_path / "small")
    assert len(small) == 0, "something was changed"
    small.close()


def drop_a_place(trees: Trees) -> None:
    del trees[0][key_of(1)]


def drop_a_use(trees: Trees) -> None:
    del trees[1][min(trees[1])]


def add_a_use(trees: Trees) -> None:
    trees[1][struct.pack(">Q", 99)] = key_of(1)


def swap_two_uses(trees: Trees) -> None:
    first, second, *_ = trees[1]
    trees[1][first], trees[1][second] = trees[1][second], trees[1][first]


def give_two_one_stamp(trees: Trees) -> None:
    trees[1].pop(struct.pack(">Q", struct.unpack("<QQ", trees[0][key_of(0)])[1]))
    trees[0][key_of(0)] = trees[0][key_of(1)]


def cut_an_entry(trees: Trees) -> None:
    trees[0][key_of(1)] = trees[0][key_of(1)][:-1]


def cut_a_stamp(trees: Trees) -> None:
    stamp = min(trees[1])
    trees[1][stamp[:-1]] = trees[1].pop(stamp)


@pytest.mark.parametrize(
    "change",
    [
        drop_a_place, drop_a_use, add_a_use, swap_two_uses, give_two_one_stamp, cut_an_entry,
        cut_a_stamp,
    ],
)  # fmt: skip
def test_an_index_whose_trees_disagree_is_refused(
    tmp_path: Path, change: Callable[[Trees], object]
) -> None:
    index = index_of(tmp_path)
    for number in range(3):
        index.add(key_of(number), number)
    index.close()
    trees_of(tmp_path, change)
    n_open = n_open_files()
    with pytest.raises(OSError, match=re.escape(str(tmp_path))) as raised:
        index_of(tmp_path)
    assert raised.value.errno == errno.EIO
    assert raised.value.filename == str(tmp_path / "index.mdb")
    assert n_open_files() == n_open, "it was left open"


def test_both_trees_forget_what_is_removed(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    index.add(key_of(0), 7)
    index.add(key_of(1), 8)
    index.touch(key_of(0))
    index.move(key_of(0), 9)
    index.remove(key_of(1))
    index.close()
    places, recency = trees_of(tmp_path)
    assert places == {key_of(0): struct.pack("<QQ", 9, 3)}
    assert recency == {struct.pack(">Q", 3): key_of(0)}


def test_it_is_one_file_and_let_go_of_when_closed(tmp_path: Path) -> None:
    n_open = n_open_files()
    index = index_of(tmp_path)
    index.add(key_of(0), 0)
    index.sync()
    assert [each.name for each in tmp_path.iterdir()] == ["index.mdb"]
    index.close()
    assert n_open_files() == n_open


class Watched:
    """An LMDB environment, and whether it was told to write to the medium whatever its flags."""

    def __init__(self, env: lmdb.Environment) -> None:
        self.env = env
        self.forced: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def sync(self, force: bool = False) -> None:
        self.forced.append(force)
        self.env.sync(force)


def test_sync_is_forced_as_transactions_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, made = lmdb.open, []

    def watched(*given_: Any, **options: Any) -> Watched:
        made.append(Watched(opened(*given_, **options)))
        return made[-1]

    monkeypatch.setattr(lmdb, "open", watched)
    index = index_of(tmp_path)
    index.add(key_of(0), 0)
    assert made[0].forced == []
    index.sync()
    assert made[0].forced == [True]
    index.close()


def test_the_file_as_long_as_its_pages_is_taken_and_a_byte_less_is_not(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    for number in range(200):
        index.add(key_of(number), number)
    pages, page_bytes = index._env.info()["last_pgno"] + 1, index._env.stat()["psize"]
    index.close()
    os.truncate(tmp_path / "index.mdb", pages * page_bytes)
    index = index_of(tmp_path)
    assert len(index) == 200
    index.close()
    os.truncate(tmp_path / "index.mdb", pages * page_bytes - 1)
    with pytest.raises(OSError, match=f"shorter than its {pages} pages"):
        index_of(tmp_path)
