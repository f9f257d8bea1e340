"""What an option or an argument may be: a path, a number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click


class _Path(click.Path):
    """A path; an empty text, as of a shell's variable that is not set, is none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("an empty text is no path", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)
FILE = _Path(path_type=Path, dir_okay=False)
FOLDER = _Path(path_type=Path, file_okay=False)


class Number(click.FloatRange):
    """A number of a range; `nan` is none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number
