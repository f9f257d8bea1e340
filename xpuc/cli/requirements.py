"""The packages xpuc declares, with the versions it accepts, against those that are installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

_LINE = re.compile(
    r"(?P<name>[\w.-]+)\s*(?P<pins>[^;]*?)\s*(;\s*extra\s*==\s*['\"](?P<extra>[\w-]+)['\"])?\s*$"
)
_PIN = re.compile(r"(==|>=|<=|<|>|!=)\s*([\w.]+)")


@dataclass(frozen=True)
class Requirement:
    """A declared package. `extra` is "" for one that xpuc always needs."""

    name: str
    pins: str
    extra: str
    installed: str | None

    @property
    def is_met(self) -> bool:
        return self.installed is not None and accepts(self.pins, self.installed)


def declared() -> Iterator[Requirement]:
    """Every package of xpuc's own metadata, once: one of several extras under the first."""
    seen: set[str] = set()
    for line in requires("xpuc") or ():
        match = _LINE.match(line)
        if match is not None and match["name"] not in seen:
            name = match["name"]
            seen.add(name)
            yield Requirement(
                name, match["pins"].strip("() "), match["extra"] or "", installed(name)
            )


def accepts(pins: str, found: str) -> bool:
    """Whether a version meets pins such as `>=0.1.14.post0,<0.1.15`."""
    have = _order(found)
    for sign, wanted in _PIN.findall(pins):
        want = _order(wanted)
        met = {
            "==": have == want, "!=": have != want, ">=": have >= want,
            "<=": have <= want, ">": have > want, "<": have < want,
        }  # fmt: skip
        if not met[sign]:
            return False
    return True


def _order(text: str) -> tuple[tuple[int, ...], int]:
    """(release, post release) of a version: enough for the pins xpuc writes."""
    release, _, post = text.partition(".post")
    numbers = [int(n) for n in re.findall(r"\d+", release.partition("+")[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), int(post) if post.isdigit() else -1


def installed(name: str) -> str | None:
    """The installed version, if there is one."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
