"""What an artifact's manifest says of each operation: how it runs on the target, and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from xpuc.schedules import Choice, Site


@dataclass
class Operation:
    """An operation of the model; those that are alike in all but their weights' values are one.

    `facts` make its site again (schedules.site_of); no `choice` leaves it to the target-free
    kernel; `arch` is the GPU architecture it is for, if not for all. `kernels` are the functions it
    launches, in order; `uses` counts it in each entry point.
    """

    name: str
    facts: dict[str, Any]
    choice: Choice | None
    arch: str = ""
    kernels: list[str] = field(default_factory=list)
    uses: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def at(site: Site, choice: Choice | None, arch: str = "") -> Operation:
        """The operation of a site."""
        key = site.key
        copies, on = " int8" if site.copies else "", f" {arch}" if arch else ""
        name = f"{key.op} {key.shape} rows={key.rows or 'any'}{copies}{on}"
        return Operation(name, site.facts(), choice, arch)

    def as_manifest(self) -> dict[str, Any]:
        """As JSON holds it; an origin is `tuned`, `default` or `portable`."""
        choice, record = self.choice, self.choice.record if self.choice else None
        how: dict[str, Any] = {
            "schedule": choice.schedule.name if choice else f"portable_{self.facts['op']}",
            "origin": choice.origin if choice else "portable",
            "reason": choice.reason if choice else "no schedule of the target takes it",
            "knobs": dataclasses.asdict(choice.knobs) if choice else {},
            "measured": [dataclasses.asdict(m) for m in record.measured] if record else [],
        }
        return (
            {"name": self.name} | self.facts | ({"arch": self.arch} if self.arch else {}) | how
            | {"kernels": self.kernels, "uses": dict(self.uses)}
        )  # fmt: skip
