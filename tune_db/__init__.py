"""What was measured: tuned records by kernel, shape and target, one JSON object a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent


@dataclass(frozen=True, order=True)
class Key:
    """What a record is for: operation, shape, rows (0: any number), target, its CPU or GPU."""

    op: str
    shape: str
    rows: int
    kind: str
    cpu: str


@dataclass(frozen=True)
class Record:
    """The knobs a schedule was measured fastest with."""

    key: Key
    schedule: str
    knobs: dict[str, Any]


@dataclass
class TuneDb:
    """Records by key and schedule; `ignored` counts the lines that could not be used, by reason."""

    records: dict[tuple[Key, str], Record] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)

    def lookup(self, key: Key, schedule: str) -> Record | None:
        """The record of exactly this key, measured for this schedule."""
        return self.records.get((key, schedule))

    def read(self, lines: Iterable[str]) -> None:
        """Take in the lines of a file; later records win. A broken line is counted, not raised."""
        for line in lines:
            if not line.strip():
                continue
            try:
                raw = json.loads(line)
                record = Record(Key(**raw["key"]), str(raw["schedule"]), dict(raw["knobs"]))
            except (ValueError, KeyError, TypeError):
                self.ignored["malformed line"] += 1
                continue
            self.records[record.key, record.schedule] = record


def load(kind: str, *folders: Path) -> TuneDb:
    """The records of a target kind, from the shipped folder and then the user's, which win."""
    db = TuneDb()
    for folder in (SHIPPED, *folders):
        path = folder / f"{kind}.jsonl"
        if path.is_file():
            db.read(path.read_text(encoding="utf-8").splitlines())
    return db
