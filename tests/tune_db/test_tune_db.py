import json

from xpuc import tune_db
from xpuc.tune_db import Key, TuneDb

KEY = Key("linear", "Q4_1:576x576", 1, "llvm", "znver1")


def line(**changes):
    record = {"key": vars(KEY) | changes, "schedule": "linear_x8", "knobs": {"prefetch_bytes": 512}}
    return json.dumps(record)


def test_a_record_is_found_by_its_key_and_schedule_only():
    db = TuneDb()
    db.read([line()])
    assert db.lookup(KEY, "linear_x8").knobs == {"prefetch_bytes": 512}
    assert db.lookup(KEY, "other") is None
    assert db.lookup(Key("linear", "Q4_1:576x576", 2, "llvm", "znver1"), "linear_x8") is None


def test_a_later_record_wins():
    db = TuneDb()
    db.read([line(), line().replace("512", "2048")])
    assert db.lookup(KEY, "linear_x8").knobs == {"prefetch_bytes": 2048}


def test_a_broken_line_is_counted_and_stops_nothing():
    db = TuneDb()
    db.read(["{", "[]", '{"key": {}}', "", line(unknown=1), line()])
    assert db.ignored["malformed line"] == 4
    assert db.lookup(KEY, "linear_x8") is not None


def test_the_users_records_win_over_the_shipped_ones(tmp_path, monkeypatch):
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    for folder, text in ((shipped, line()), (user, line().replace("512", "64"))):
        folder.mkdir()
        (folder / "llvm.jsonl").write_text(text + "\n")
    monkeypatch.setattr(tune_db, "SHIPPED", shipped)
    assert tune_db.load("llvm", user).lookup(KEY, "linear_x8").knobs == {"prefetch_bytes": 64}
    assert tune_db.load("cuda", user).records == {}
