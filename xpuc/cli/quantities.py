"""Numbers for people, and rows of them in columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def size(n_bytes: float) -> str:
    """`63.3 MiB`; powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024 or unit == "GiB":
            break
        n_bytes /= 1024
    return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:,.1f} {unit}"


def n_bytes(text: str) -> int:
    """Of `63.3M`, `63.3MiB` or `66400000`; K, M, G and T are powers of 1024. ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMGT])(?:iB)?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size")
    number, unit = match.groups()
    return int(float(number) * 1024 ** (" KMGT".index(unit.upper()) if unit else 0))


def count(n: int, noun: str) -> str:
    """`1 token`, `4,096 tokens`."""
    return f"{n:,} {noun}" + "s" * (n != 1)


def duration(seconds: float) -> str:
    """`840 ms`, `12.3 s`, `3 min 5 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def rate(per_second: float) -> str:
    """`76.1 tok/s`."""
    return f"{per_second:,.1f} tok/s"


def ratio(part: float, whole: float) -> str:
    """How much larger than `whole` a part that should equal it is: `+1.3 %`."""
    return f"{100 * (part / whole - 1):+.1f} %" if whole else "-"


def columns(
    rows: Iterable[Sequence[object]], right: Iterable[int] = (), indent: int = 0
) -> list[str]:
    """The rows as lines of aligned columns; those numbered in `right` end flush."""
    cells = [[str(cell) for cell in row] for row in rows]
    flush = set(right)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        placed = [
            cell.rjust(width) if i in flush else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * indent + "  ".join(placed)).rstrip())
    return lines
