"""How many byte products a second this machine computes: the roof over steps of many rows.

The loop is in the artifact, in the instructions of its target: a machine that only runs artifacts
may lack a compiler. The manifest says how many operations a call is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from xpuc.artifact import Manifest

DECISION = "int8_peak"  # its facts in the manifest: {"operations": of a call}


class Int8Peak:
    """The loop, to be run again and again."""

    def __init__(self, run: Callable[[], object], operations: int) -> None:
        self._run, self._operations = run, operations

    def measure(self) -> float:
        """Operations a second of all threads together; a multiply-add is two."""
        self._run()  # wakes the threads
        start = time.perf_counter()
        self._run()
        return self._operations / (time.perf_counter() - start)


def int8_peak(model: object, manifest: Manifest) -> Int8Peak | None:
    """That of a loaded artifact, if its target has byte products."""
    facts = manifest.decisions.get(DECISION)
    if facts is None:
        return None
    run = cast("Any", model).loop(DECISION, int(facts["elements"]))
    return Int8Peak(run, int(facts["operations"]))
