import dataclasses
import json

import pytest

from xpuc import tune_db
from xpuc.tune_db import Key, Measurement, Record, TuneDb
from xpuc.tune_db.records import from_line, to_line

KEY = Key("linear", "Q4_1:576x576", 1, "llvm", "znver1")
RECORD = Record(
    key=KEY, schedule="linear_x8", knobs={"prefetch_bytes": 512}, kernel="c0ffee", tvm="0.27.0",
    features=("avx2", "fma"), threads=2, error=1e-7, date="2026-11-30",
    measured=(Measurement(1, 9.0, 0.02, 10.0, "memory", 0.8),),
)  # fmt: skip


def variant(knob: int = 512, **key: object) -> Record:
    changed = dataclasses.replace(KEY, **key)
    return dataclasses.replace(RECORD, key=changed, knobs={"prefetch_bytes": knob})


def line(**changes: object) -> str:
    return json.dumps(json.loads(to_line(RECORD)) | changes)


def test_a_line_holds_the_whole_record():
    assert from_line(to_line(RECORD)) == RECORD
    assert "\n" not in to_line(RECORD)


def test_a_record_is_found_by_its_key_and_schedule_only():
    db = TuneDb()
    db.read([to_line(RECORD)])
    assert db.lookup(KEY, "linear_x8") == RECORD
    assert db.lookup(KEY, "other") is None
    assert db.lookup(dataclasses.replace(KEY, rows=2), "linear_x8") is None


def test_a_later_record_wins():
    db = TuneDb()
    db.read([to_line(RECORD), to_line(variant(2048))])
    assert db.lookup(KEY, "linear_x8").knobs == {"prefetch_bytes": 2048}


@pytest.mark.parametrize(
    "broken",
    [
        "{", "[]", "7", '{"version": 1}', line(key={"op": "linear"}), line(unknown=1),
        line(knobs={"prefetch_bytes": "512"}), line(knobs={"prefetch_bytes": True}), line(tvm=None),
        line(measured=[{"rows": 1}]), line(measured=7), line(card=7),
        line(measured=[vars(dataclasses.replace(RECORD.measured[0], us=0.0))]), "[" * 100_000,
    ],
)  # fmt: skip
def test_a_broken_line_is_counted_and_stops_nothing(broken):
    db = TuneDb()
    db.read([broken, "", to_line(RECORD)])
    assert sum(db.ignored.values()) == 1
    assert db.lookup(KEY, "linear_x8") == RECORD


def test_a_record_of_another_format_is_named():
    db = TuneDb()
    db.read([line(version=9), line(version=9)])
    assert db.ignored == {"record format 9, this xpuc reads 1": 2}


def folders(tmp_path, monkeypatch, shipped, user):
    monkeypatch.setattr(tune_db, "SHIPPED", tmp_path / "shipped")
    for name, records in (("shipped", shipped), ("user", user)):
        tune_db.save(tmp_path / name, "llvm", records)
    return tmp_path / "user"


def test_the_users_records_win_over_the_shipped_ones(tmp_path, monkeypatch):
    user = folders(tmp_path, monkeypatch, [RECORD, variant(rows=2)], [variant(64)])
    db = tune_db.load("llvm", "znver1", user)
    assert db.lookup(KEY, "linear_x8").knobs == {"prefetch_bytes": 64}
    assert db.lookup(dataclasses.replace(KEY, rows=2), "linear_x8") is not None
    assert tune_db.load("cuda", "znver1", user).records == {}


def test_records_of_another_cpu_are_left_out_and_counted(tmp_path, monkeypatch):
    user = folders(tmp_path, monkeypatch, [RECORD, variant(cpu="znver4")], [variant(cpu="znver4")])
    db = tune_db.load("llvm", "znver1", user)
    assert list(db.records) == [(KEY, "linear_x8")]
    assert db.ignored == {"measured on znver4": 1}


def test_code_for_several_architectures_takes_the_record_of_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_db, "SHIPPED", tmp_path / "none")
    made = [variant(knob, kind="cuda", cpu=cpu) for knob, cpu in ((1, "sm_80"), (2, "sm_90a"))]
    tune_db.save(tmp_path, "cuda", made)
    for archs, knob in (("sm_80,sm_89,sm_90a", 2), ("sm_80,sm_89", 1), ("sm_90a", 2)):
        db = tune_db.load("cuda", archs, tmp_path)
        found = db.lookup(dataclasses.replace(KEY, kind="cuda", cpu=archs), "linear_x8")
        assert found.knobs == {"prefetch_bytes": knob}
    assert tune_db.load("cuda", "sm_89", tmp_path).ignored == {
        "measured on sm_80": 1, "measured on sm_90a": 1
    }  # fmt: skip


def test_card_and_driver_are_of_gpus_only():
    of_gpu = dataclasses.replace(RECORD, card="NVIDIA H200", driver="580.65.06")
    assert from_line(to_line(of_gpu)) == of_gpu
    assert "card" not in json.loads(to_line(RECORD))


def test_saving_merges_sorts_and_keeps_what_it_cannot_read(tmp_path):
    path = tune_db.save(tmp_path, "llvm", [variant(rows=2), variant(rows=8)])
    path.write_text(path.read_text() + line(version=9) + "\n")
    tune_db.save(tmp_path, "llvm", [RECORD, variant(64, rows=2)])
    lines = path.read_text().splitlines()
    assert [from_line(each).key.rows for each in lines[:-1]] == [1, 2, 8]
    assert from_line(lines[1]).knobs == {"prefetch_bytes": 64}
    assert lines[-1] == line(version=9)
    assert [p.name for p in tmp_path.iterdir()] == ["llvm.jsonl"]


def test_the_gain_is_the_least_one():
    two = dataclasses.replace(RECORD.measured[0], rows=8, us=50.0, default_us=51.0)
    both = dataclasses.replace(RECORD, measured=(*RECORD.measured, two))
    assert both.gain == pytest.approx(1.02)


def test_the_shipped_records_are_whole_and_sorted():
    for path in tune_db.SHIPPED.glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [from_line(each) for each in lines]
        assert lines == [to_line(r) for r in sorted(records, key=lambda r: (r.key, r.schedule))]
