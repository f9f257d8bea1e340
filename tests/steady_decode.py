"""Decodes with everything counted that is allocated: `steady_decode.py ARTIFACT N greedy|sampled`.

Prints JSON, each of 200 steps after some to warm up: `system`, what native code asks of the system
(its largest pieces are what TVM's pooled allocator does, so no call means constant pooled bytes);
`arrays` made by line; `growth`, bytes that Python's objects have grown by file; `tokens` made.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import allocations
from allocations import of_arrays, of_the_system

import xpuc
from xpuc.runtime.engine import Engine

# The growth is that from 264 tokens on: whole numbers up to 256 take no memory of their own.
WARM, STEPS, LEAST = 60, 200, 256
SAMPLED = {"temperature": 0.8, "seed": 1}
PENALTIES = {"repeat_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
# What the requests ask for, in turn.
OPTIONS: dict[str, list[dict[str, float]]] = {
    "greedy": [{"temperature": 0}],
    "sampled": [SAMPLED, SAMPLED | PENALTIES, SAMPLED | PENALTIES | {"penalty_last_n": -1}],
}


def main(path: str, n: int, how: str) -> dict[str, object]:
    engine = xpuc.load(path, threads=2, n_sequences=n, ctx=512, warm_rows=8)
    engine.tokenizer.eog_ids = frozenset()  # so that none ends before its time
    for i in range(n):
        options = OPTIONS[how][i % len(OPTIONS[how])]
        engine.add_request([5 + i, 6, 7, 8], max_tokens=WARM + 2 * STEPS + 8, **options)
    run(engine, WARM)
    with of_arrays() as arrays, of_the_system(LEAST) as system:
        run(engine, STEPS)
    growth = grown(engine)
    assert len(engine.scheduler.running) == n, "a sequence has ended"
    return {
        "system": [dataclasses.asdict(each) for each in system if not each.is_python],
        "arrays": arrays,
        "growth": growth,
        "tokens": n * STEPS,
    }


def run(engine: Engine, n_steps: int) -> None:
    for _ in range(n_steps):
        engine.step()


def grown(engine: Engine) -> Counter[str]:
    """Bytes by file over 200 steps."""
    gc.collect()
    before = tracemalloc.take_snapshot()
    run(engine, STEPS)
    gc.collect()
    after = tracemalloc.take_snapshot()
    growth: Counter[str] = Counter()
    for each in after.compare_to(before, "filename"):
        file = each.traceback[0].filename
        if file not in (tracemalloc.__file__, allocations.__file__, __file__):
            growth[Path(file).name] += each.size_diff
    return Counter({file: size for file, size in growth.items() if size})


if __name__ == "__main__":
    assert tracemalloc.is_tracing(), (
        "run it with PYTHONTRACEMALLOC=1: all that lives is to be known"
    )
    artifact, n_sequences, how = sys.argv[1:]
    sys.stdout.write(f"{json.dumps(main(artifact, int(n_sequences), how))}\n")
