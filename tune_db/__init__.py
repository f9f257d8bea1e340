"""What was measured: tuned records by operation, shape and target, one JSON object a line.

records.py   a record, and its line
TuneDb       the records of one target, looked up by a compilation, merged by a tuning session
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from xpuc.files import write_whole
from xpuc.tune_db.records import Key, Measurement, Record, Unusable, from_line, to_line

__all__ = ["SHIPPED", "Key", "Measurement", "Record", "TuneDb", "load", "save", "user_folder"]

SHIPPED = Path(__file__).parent


@dataclass
class TuneDb:
    """Records by key and schedule; `ignored` counts those that could not be used, by reason."""

    records: dict[tuple[Key, str], Record] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)

    def lookup(self, key: Key, schedule: str) -> Record | None:
        """The record of this key, measured for this schedule.

        Code for several GPU architectures has one kernel for all: of the records there are, that of
        the newest.
        """
        for cpu in reversed(key.cpu.split(",")):
            record = self.records.get((replace(key, cpu=cpu), schedule))
            if record is not None:
                return record
        return None

    def add(self, record: Record) -> None:
        """Take in a record, in place of one of the same key and schedule."""
        self.records[record.key, record.schedule] = record

    def read(self, lines: Iterable[str]) -> None:
        """Take in the lines of a file; later records win. A broken line is counted, not raised."""
        for line in lines:
            if not line.strip():
                continue
            try:
                self.add(from_line(line))
            except Unusable as reason:
                self.ignored[str(reason)] += 1

    def lines(self) -> list[str]:
        """Every record, sorted, one a line: what a file holds."""
        return [to_line(self.records[at]) for at in sorted(self.records)]


def load(kind: str, cpu: str, *folders: Path) -> TuneDb:
    """The records for a CPU or GPUs, shipped ones first, then those of `folders`, which win.

    Records of others are left out and counted.
    """
    return _read([SHIPPED / f"{kind}.jsonl", *(f / f"{kind}.jsonl" for f in folders)], cpu)


def _read(paths: Iterable[Path], cpu: str) -> TuneDb:
    everything = TuneDb()
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            everything.read(path.read_text(encoding="utf-8", errors="replace").splitlines())
    db = TuneDb(ignored=everything.ignored)
    for record in everything.records.values():
        if record.key.cpu in cpu.split(","):
            db.add(record)
        else:
            db.ignored[f"measured on {record.key.cpu}"] += 1
    return db


def save(folder: Path, kind: str, records: Iterable[Record]) -> Path:
    """Merge records into the folder's file, which is replaced whole: a reader never sees half.

    Lines of the file that this version cannot read are kept as they are.
    """
    path = folder / f"{kind}.jsonl"
    db, unread = TuneDb(), []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            db.add(from_line(line))
        except Unusable:
            unread.append(line)
    for record in records:
        db.add(record)
    write_whole(path, "".join(f"{line}\n" for line in (*db.lines(), *filter(str.strip, unread))))
    return path


def user_folder() -> Path:
    """Where a tuning session keeps the user's own records: they win over the shipped ones."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "xpuc" / "tune_db"
