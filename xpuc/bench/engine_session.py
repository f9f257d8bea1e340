"""`xpuc bench --engine`: what requests notice of an engine, measured in rounds."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from xpuc.bench import overhead
from xpuc.bench.load import arrivals_of
from xpuc.bench.overhead import Overhead
from xpuc.bench.reuse import Reuse, reuse
from xpuc.bench.saving import Served, serve
from xpuc.bench.stall import Stall, stall
from xpuc.bench.subject import Subject
from xpuc.bench.workload import LONGEST
from xpuc.errors import RequestError, XpucError
from xpuc.runtime.chunks import BUDGET_MS

_NO_STORE = "the block store needs the package lmdb"
PARTS = ("overhead", "load", "stall", "reuse")
_SCHEDULER_STEPS, _ENGINE_STEPS = 1000, 64
Watch = Callable[[str, int, int], None]  # what is measured, done, total


@dataclass(frozen=True)
class Sizes:
    """Which parts are measured; requests of the load, how many come a second, and whether it also
    runs with a block store; tokens of the prompt that comes into a stream, and of the prefix that
    prompts share."""

    parts: tuple[str, ...] = PARTS
    n_requests: int = 100
    rate: float = 4.0
    seed: int = 1
    with_store: bool = False
    stall_prompt: int = 4096
    prefix: int = 1024
    budget_ms: float = BUDGET_MS


@dataclass
class Report:
    """What was measured, one entry a round, and what was not, or not as asked (`notes`).

    loads, stored_loads    without a block store, and with one
    stalls, free_stalls    with the chunk budget, and without any
    stopped                Ctrl-C came before all rounds were done
    """

    overheads: list[list[Overhead]] = field(default_factory=list)
    loads: list[Served] = field(default_factory=list)
    stored_loads: list[Served] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    free_stalls: list[Stall] = field(default_factory=list)
    reuses: list[Reuse] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: bool = False


class EngineSession:
    """Each round measures everything once; what is compared takes turns in going first."""

    def __init__(self, subject: Subject, sizes: Sizes, watch: Watch) -> None:
        self._subject = subject
        self._sizes = sizes
        self._watch = watch
        self._has_store = find_spec("lmdb") is not None
        if sizes.with_store and not self._has_store:
            raise RequestError(_NO_STORE, "pip install 'xpuc[store]'")
        self.report = Report()

    def run(self, rounds: int) -> Report:
        """What is done when Ctrl-C comes is kept."""
        parts = {
            "overhead": self._overhead,
            "load": self._load,
            "stall": self._stall,
            "reuse": self._reuse,
        }
        wanted = {name: parts[name] for name in PARTS if name in self._sizes.parts}
        try:
            for number in range(rounds):
                for name, measure in wanted.items():
                    try:
                        measure(number)
                    except XpucError as error:
                        self._note(f"{name}: not measured: {error.message}; {error.hint}")
        except KeyboardInterrupt:
            self.report.stopped = True
        return self.report

    def _note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)

    def _progress(self, what: str, number: int) -> Callable[[int, int], None]:
        name = what if number == 0 else f"{what}, round {number + 1}"
        self._watch(name, 0, 0)
        return lambda done, total: self._watch(name, done, total)

    def _overhead(self, number: int) -> None:
        found = overhead.of_scheduler(
            _SCHEDULER_STEPS, self._progress("scheduler overhead", number)
        )
        found += overhead.of_engine(
            self._subject, _ENGINE_STEPS, self._progress("engine overhead", number)
        )
        self.report.overheads.append(found)

    def _load(self, number: int) -> None:
        sizes, context = self._sizes, self._subject.context
        if context < LONGEST:
            self._note(
                f"load: requests of up to {context} tokens, not {LONGEST}: the context has no more"
            )
        arrivals = arrivals_of(self._subject, sizes.n_requests, sizes.rate, sizes.seed)

        def without() -> None:
            progress = self._progress("load", number)
            served = serve(self._subject, arrivals, sizes.budget_ms, None, progress)
            self.report.loads.append(served)

        def stored() -> None:
            progress = self._progress("load with a store", number)
            with _folder() as store:
                served = serve(self._subject, arrivals, sizes.budget_ms, store, progress)
            self.report.stored_loads.append(served)

        _in_turns([without, stored] if sizes.with_store else [without], number)

    def _stall(self, number: int) -> None:
        subject, sizes = self._subject, self._sizes
        if subject.max_batch < 2:
            raise RequestError(
                "the artifact runs one sequence at a time", "compile it with --max-batch 2 or more"
            )
        n_prompt = self._scaled("stall", "the prompt", sizes.stall_prompt)

        def with_budget() -> None:
            progress = self._progress("stall", number)
            self.report.stalls.append(stall(subject, n_prompt, sizes.budget_ms, progress))

        def without() -> None:
            progress = self._progress("stall without a budget", number)
            self.report.free_stalls.append(stall(subject, n_prompt, math.inf, progress))

        _in_turns([with_budget, without], number)

    def _reuse(self, number: int) -> None:
        n_prefix = self._scaled("reuse", "the prefix", self._sizes.prefix)
        progress = self._progress("prefix reuse", number)
        if not self._has_store:
            self._note(f"reuse: nothing from a store: {_NO_STORE}")
        with _folder() as store:
            found = reuse(
                self._subject, n_prefix, store if self._has_store else None, number, progress
            )
        self.report.reuses.append(found)

    def _scaled(self, part: str, what: str, n_tokens: int) -> int:
        """At most half of the context."""
        context = self._subject.context
        if n_tokens <= context // 2:
            return n_tokens
        self._note(
            f"{part}: {what} has {context // 2} tokens, not {n_tokens}: the context holds {context}"
        )
        return context // 2


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="xpuc-bench-") as name:
        yield Path(name)


def _in_turns(measures: list[Callable[[], None]], number: int) -> None:
    first = number % len(measures)
    for measure in measures[first:] + measures[:first]:
        measure()
