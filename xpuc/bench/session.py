"""A benchmark: rounds in which each case runs here, at the peer, and beside a read of memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from xpuc.bench.cases import Case
from xpuc.bench.ours import Ours
from xpuc.bench.peer import Peer
from xpuc.bench.profile import Profile, Profiler
from xpuc.bench.roofs import RoofLoops, Roofs, combined

# TVM's workers spin for 0.1 s after a launch, llama.cpp's a little: not in the other's time.
_PAUSE_S = 0.3
_CALLS = 3  # of the loop of each roof, in each round


@dataclass(frozen=True)
class Row:
    """One test. Rates are medians over the rounds; a spread is (largest - smallest) / median.

    ratio is the median of the rounds' ratios, with flash attention as it is faster for the peer.
    pct_int8_peak is of steps of more than one row; a multiply-add is two operations.
    """

    test: str
    tok_s: float
    spread: float
    bytes_per_token: float
    gb_s: float
    bandwidth_gb_s: float
    pct_bandwidth: float
    rounds: int
    threads: int
    load_average: float  # of the machine's other work, at the start
    peer: str | None = None
    peer_tok_s: float | None = None
    peer_spread: float | None = None
    peer_flash_attention: bool | None = None
    ratio: float | None = None
    ratio_spread: float | None = None
    int8_gop_s: float | None = None
    int8_peak_gop_s: float | None = None
    pct_int8_peak: float | None = None
    profile: Profile | None = None


@dataclass
class _Times:
    """Seconds of each round."""

    ours: list[float] = field(default_factory=list)
    peer: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})


class Session:
    """The parties and what they have measured so far."""

    def __init__(
        self, cases: Sequence[Case], ours: Ours, threads: int, peer: Peer | None = None
    ) -> None:
        self.cases, self.ours, self.peer, self.threads = list(cases), ours, peer, threads
        self.loops = RoofLoops(ours.model, ours.manifest)
        self.load_average = os.getloadavg()[0]
        self._roofs: list[Roofs] = []
        self._profiles: dict[Case, Profile] = {}
        self._times = {case: _Times() for case in self.cases}

    def run(
        self, rounds: int, progress: Callable[[int, str], None], *, by_kernel: bool = False
    ) -> list[Row]:
        """Measure; `progress(round, test)` is called before each test of each round.

        by_kernel: then measure a step of each test kernel by kernel, in as many rounds.
        """
        self.ours.warm_up()
        for number in range(rounds):
            for case in self.cases:
                progress(number, case.name)
                self._round(number, case)
        if by_kernel:
            for case in self.cases:
                self._profiles[case] = self._profile(case, rounds, progress)
        return [self._row(case) for case in self.cases]

    def _profile(self, case: Case, rounds: int, progress: Callable[[int, str], None]) -> Profile:
        profiler = Profiler(self.ours.model, self.ours.manifest, self.ours.step(case))
        for number in range(rounds):
            progress(number, f"{case.name}, by kernel")
            profiler.round()
            self._roofs.append(self.loops.measure(_CALLS))
        return profiler.profile(combined(self._roofs[-rounds:], max))

    def _round(self, number: int, case: Case) -> None:
        """The parties take turns in going first."""
        times = self._times[case]
        turns: list[Callable[[], None]] = [
            lambda: times.ours.append(self.ours.run(case)),
            *(self._peer_turn(case, flash) for flash in (True, False) if self.peer),
        ]
        for turn in turns[number % len(turns) :] + turns[: number % len(turns)]:
            turn()
            time.sleep(_PAUSE_S)
        self._roofs.append(self.loops.measure(_CALLS))

    def _peer_turn(self, case: Case, flash: bool) -> Callable[[], None]:
        def turn() -> None:
            assert self.peer is not None
            self._times[case].peer[flash].append(self.peer.run(case, flash=flash))

        return turn

    def _row(self, case: Case) -> Row:
        times = self._times[case]
        rates = [case.total_tokens / seconds for seconds in times.ours]
        rate = statistics.median(rates)
        roofs = combined(self._roofs, statistics.median)
        bandwidth = roofs.bytes_s / 1e9
        per_token = self.ours.bytes_per_token(case)
        return Row(
            test=case.name, tok_s=rate, spread=spread(rates), bytes_per_token=per_token,
            gb_s=per_token * rate / 1e9, bandwidth_gb_s=bandwidth,
            pct_bandwidth=100 * per_token * rate / 1e9 / bandwidth,
            rounds=len(rates), threads=self.threads,
            load_average=self.load_average, profile=self._profiles.get(case),
            **dict(self._compared(case, rates)),
            **dict(self._computed(case, rate, roofs.operations_s)),
        )  # fmt: skip

    def _computed(self, case: Case, rate: float, peak: float | None) -> Iterator[tuple[str, Any]]:
        if peak is None:
            return
        yield "int8_peak_gop_s", peak / 1e9
        if case.kind == "pp" or case.batch > 1:
            speed = rate * self.ours.operations_per_token(case)
            yield "int8_gop_s", speed / 1e9
            yield "pct_int8_peak", 100 * speed / peak

    def _compared(self, case: Case, rates: list[float]) -> Iterator[tuple[str, Any]]:
        if self.peer is None:
            return
        by_flash = {
            flash: [case.total_tokens / seconds for seconds in taken]
            for flash, taken in self._times[case].peer.items()
        }
        flash = max(by_flash, key=lambda each: statistics.median(by_flash[each]))
        theirs = by_flash[flash]
        ratios = [ours / other for ours, other in zip(rates, theirs, strict=True)]
        yield "peer", self.peer.description
        yield "peer_tok_s", statistics.median(theirs)
        yield "peer_spread", spread(theirs)
        yield "peer_flash_attention", flash
        yield "ratio", statistics.median(ratios)
        yield "ratio_spread", spread(ratios)


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)
