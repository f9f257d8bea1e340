"""A tuned record, and the line of JSON that holds it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import Any

VERSION = 1


class Unusable(Exception):
    """Why a line is no record for this version."""


@dataclass(frozen=True, order=True)
class Key:
    """What a record is for: operation, shape, rows (0: any number), target, its CPU or GPU.

    `cpu` is an architecture of GPUs (sm_90a); that of an operation compiled for several names them
    all, oldest first, with commas.
    """

    op: str
    shape: str
    rows: int
    kind: str
    cpu: str


@dataclass(frozen=True)
class Measurement:
    """Medians of one number of rows: this record's knobs and the defaults, in turns.

    `spread` is the distance of the quartiles over the median; `of_roof` the share of what `roof`
    (memory or int8, as measured in the same session) allows.
    """

    rows: int
    us: float
    spread: float
    default_us: float
    roof: str
    of_roof: float

    @property
    def beside(self) -> Measurement:
        """That of what it was timed beside."""
        of_roof = self.of_roof * self.us / self.default_us
        return replace(self, us=self.default_us, of_roof=of_roof)


@dataclass(frozen=True)
class Record:
    """The knobs a schedule was measured fastest with.

    `kernel` is the digest of the very kernel that was measured, `tvm` the version that compiled
    it for CPU `features`; `error` is its largest difference from the reference, in terms of the
    largest value. Of a GPU, `card` and `driver` say which one, by NVIDIA's names.
    """

    key: Key
    schedule: str
    knobs: dict[str, int]
    kernel: str
    tvm: str
    features: tuple[str, ...]
    threads: int
    measured: tuple[Measurement, ...]
    error: float
    date: str
    card: str = ""
    driver: str = ""

    @property
    def gain(self) -> float:
        """How many times as fast as the defaults it was, where it gained least."""
        return min((m.default_us / m.us for m in self.measured), default=1.0)


def to_line(record: Record) -> str:
    """The record as a line, without its end."""
    facts = dataclasses.asdict(record)
    for name in ("card", "driver"):
        if not facts[name]:
            del facts[name]
    return json.dumps({"version": VERSION, **facts}, ensure_ascii=False)


def from_line(line: str) -> Record:
    """The record of a line; Unusable says why there is none."""
    try:
        raw = json.loads(line)
        version = raw.pop("version", None)
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise Unusable("malformed line") from None
    if version != VERSION:
        raise Unusable(f"record format {version}, this xpuc reads {VERSION}")
    try:
        return _record(raw)
    except (KeyError, TypeError, ValueError):
        raise Unusable("malformed line") from None


def _record(raw: dict[str, Any]) -> Record:
    key = Key(**raw["key"])
    knobs = {str(name): _int(value) for name, value in raw["knobs"].items()}
    measured = tuple(Measurement(**m) for m in raw["measured"])
    for m in measured:
        if not (_number(m.us) > 0 and _number(m.default_us) > 0):
            raise ValueError("times are positive")
    texts = (key.op, key.shape, key.kind, key.cpu, raw["schedule"], raw["kernel"], raw["tvm"],
             raw.get("card", ""), raw.get("driver", ""))  # fmt: skip
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("names are text")
    return Record(
        **raw
        | {
            "key": dataclasses.replace(key, rows=_int(key.rows)),
            "knobs": knobs,
            "features": tuple(raw["features"]),
            "measured": measured,
        }
    )


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is no number")
    return float(value)
