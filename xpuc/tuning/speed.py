"""Tokens a second before and after a session: measured where it can be, else predicted."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from xpuc.artifact import read_manifest
from xpuc.errors import XpucError
from xpuc.tune_db import TuneDb
from xpuc.tuning.results import Speed, TaskResult

_GENERATED, _PROMPT = 64, 512
_ENTRIES = {"tg": "decode_greedy", "pp": "prefill_greedy"}  # whose kernels a test runs


def measured(before: Path, after: Path, threads: int, rounds: int = 4) -> list[Speed]:
    """Both artifacts, in turns, each run in a process of its own."""
    rates: dict[Path, dict[str, list[float]]] = {before: {}, after: {}}
    for turn in range(rounds):
        for path in (before, after) if turn % 2 == 0 else (after, before):
            for test, rate in bench(path, threads).items():
                rates[path].setdefault(test, []).append(rate)
    return [
        Speed(test, statistics.median(found), statistics.median(rates[after][test]), measured=True)
        for test, found in rates[before].items()
    ]


def bench(artifact: Path, threads: int, rounds: int = 1) -> dict[str, float]:
    """Tokens a second by test, as `xpuc bench` says."""
    context = read_manifest(artifact).context
    prompt, generated = min(_PROMPT, context), min(_GENERATED, context)
    command = ["-p", str(prompt), "-n", str(generated), "-r", str(rounds), "-t", str(threads)]
    done = subprocess.run(
        [sys.executable, "-m", "xpuc", "bench", str(artifact), *command, "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise XpucError(f"{artifact}: cannot be measured ({said[0]})", "say --no-verify")
    return {row["test"]: float(row["tok_s"]) for row in json.loads(done.stdout)}


def predicted(before: Mapping[str, float], results: Iterable[TaskResult]) -> list[Speed]:
    """What the records should make of measured rates: their kernels' time saved in each step."""
    found = list(results)
    return [
        Speed(test, rate, _predicted(test, rate, found), measured=False)
        for test, rate in before.items()
    ]


def n_of_other_records(results: Iterable[TaskResult], records: TuneDb) -> int:
    """How many operations of an artifact have other knobs than a compilation with these records
    gives them."""
    tasks = [result.task for result in results]
    return sum(dataclasses.asdict(t.in_use(records).knobs) != t.facts["knobs"] for t in tasks)


def _predicted(test: str, rate: float, results: Sequence[TaskResult]) -> float:
    kind = test[:2]
    tokens = int(test[2:]) if kind == "pp" else 1
    step = tokens / rate
    saved = sum(result.task.uses.get(_ENTRIES[kind], 0) * _saved(result) for result in results)
    return tokens / max(step - saved, step / 10)


def _saved(result: TaskResult) -> float:
    """Seconds of a call that the record saves, with the most rows it was measured with."""
    if result.kept is None or not result.baseline:
        return 0.0
    last = result.kept.measured[-1]
    return max(0.0, result.baseline[-1].us * (1 - last.us / last.default_us)) / 1e6
