"""What the machine allows: from the artifact's own loops, and as a limit of work."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from cli_runs import manifest

from xpuc.bench.roofs import RoofLoops, Roofs, combined

READ = {"memory_read": {"elements": 32, "bytes": 128}}
PRODUCT = {"int8_peak": {"elements": 8, "operations": 1000}}


class Loops:
    """A model whose loops take 5 ms."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def loop(self, name: str, elements: int) -> Callable[[], float]:
        def run() -> float:
            self.calls.append((name, elements))
            return 0.005

        return run


def test_the_slower_of_reading_and_computing_is_the_limit() -> None:
    roofs = Roofs(bytes_s=10.0, operations_s=100.0)
    assert roofs.limit(50, 100) == (5.0, "memory")
    assert roofs.limit(50, 1000) == (10.0, "int8")
    assert Roofs(10.0).limit(50, 1000) == (5.0, "memory")
    assert roofs.limit(0, 0) == (0.0, None)


def test_several_measurements_as_one() -> None:
    assert combined([Roofs(2.0, 5.0), Roofs(3.0, 4.0)], max) == Roofs(3.0, 5.0)
    assert combined([Roofs(2.0), Roofs(1.0), Roofs(9.0)], statistics.median) == Roofs(2.0)


def test_roofs_are_measured_by_the_artifacts_own_loops() -> None:
    model = Loops()
    roofs = RoofLoops(model, manifest(decisions=READ | PRODUCT)).measure(3)
    assert (
        model.calls == [("int8_peak", 8)] * 4 + [("memory_read", 32)] * 4
    )  # one wakes the threads
    assert roofs.bytes_s == 128 / 0.005
    assert roofs.operations_s == 1000 / 0.005


def test_a_target_without_byte_products_has_one_roof() -> None:
    assert RoofLoops(Loops(), manifest(decisions=READ)).measure().operations_s is None


def test_as_text_and_as_json() -> None:
    assert str(Roofs(21.34e9, 188e9)) == "memory is read at 21.3 GB/s, int8 peak 188 Gop/s"
    assert str(Roofs(21.34e9)) == "memory is read at 21.3 GB/s"
    assert Roofs(21.34e9).as_json() == {"read_gb_s": 21.3, "int8_gop_s": None}
