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
    kernel. `kernels` are the functions it launches, in order; `uses` counts it in each entry point.
    """

    name: str
    facts: dict[str, Any]
    choice: Choice | None
    kernels: list[str] = field(default_factory=list)
    uses: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def at(site: Site, choice: Choice | None) -> Operation:
        """The operation of a site."""
        key = site.key
        copies = " int8" if site.copies else ""
        name = f"{key.op} {key.shape} rows={key.rows or 'any'}{copies}"
        return Operation(name, site.facts(), choice)

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
            {"name": self.name} | self.facts | how
            | {"kernels": self.kernels, "uses": dict(self.uses)}
        )  # fmt: skip
