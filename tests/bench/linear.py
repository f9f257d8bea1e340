"""How fast the CPU linear kernels are: GB/s against a plain read for one row, Gop/s for many.

    python tests/bench/linear.py --formats Q4_1,Q8_0 --shapes 4096x4096 --rows 1

One JSON line a result. Weights are walked cold: copies of 96 MB together, one after the other;
`--hot` takes one copy. Kernels take turns and the fastest call counts; a ratio compares numbers of
one run only. With TVM_NUM_THREADS=1 the time is that of the thread, which others disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", str(os.cpu_count()))
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import tvm
from activations import q8a

from xpuc.schedules.llvm.isa import isa_for
from xpuc.schedules.llvm.layouts import layout_of, pack
from xpuc.schedules.llvm.linear import linear
from xpuc.schedules.llvm.products import LinearKnobs, Weight
from xpuc.schedules.llvm.read import LANES, memory_read
from xpuc.schedules.packed import FORMATS

COLD_BYTES = 96 << 20
How = tuple[tvm.target.Target, frozenset[str], LinearKnobs]
Timed = tuple[list[Callable[[], None]], int, int]  # calls, the bytes and operations of each


def main() -> None:
    """Measure and print."""
    options = _options()
    target = tvm.target.Target({"kind": "llvm", "mcpu": options.mcpu})
    features = frozenset(options.features.split(","))
    knobs = LinearKnobs(options.prefetch, options.m_tile, options.unroll, options.groups)
    timed: dict[str, Timed] = {"read": _read(target)}
    for shape in options.shapes.split(","):
        rows, k = (int(v) for v in shape.split("x"))
        for format in options.formats.split(","):
            weight = Weight(format, rows)
            name = f"{format} {shape} n={options.rows}"
            timed[name] = _linear(weight, k, options, (target, features, knobs))
    times = _times(timed, options.seconds)
    read = timed["read"][1] / times["read"] / 1e9
    for name, (_, size, operations) in timed.items():
        rate = size / times[name] / 1e9
        result = {"what": name, "us": round(times[name] * 1e6, 1), "GB/s": round(rate, 2)}
        if operations:
            result |= {
                "read %": round(100 * rate / read),
                "Gop/s": operations / times[name] // 1e8 / 10,
            }
        sys.stdout.write(json.dumps(result) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(f for f in FORMATS if f[0] in "QI"))
    parser.add_argument("--shapes", default="4096x4096")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--hot", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each kernel")
    parser.add_argument("--mcpu", default="znver1")
    parser.add_argument("--features", default="avx2,fma")
    parser.add_argument("--prefetch", type=int, default=LinearKnobs.prefetch_bytes)
    parser.add_argument("--m-tile", type=int, default=LinearKnobs.m_tile)
    parser.add_argument("--unroll", type=int, default=LinearKnobs.unroll)
    parser.add_argument("--groups", type=int, default=LinearKnobs.groups)
    return parser.parse_args()


def _linear(weight: Weight, k: int, options: argparse.Namespace, how: How) -> Timed:
    target, features, knobs = how
    n = options.rows
    layout = layout_of(weight.format)
    activation = "q8" if layout.is_quantised else "f32"
    kernel = linear(
        (weight,), k, n if n <= 4 else None,
        activation=activation, bias=(False,), isa=isa_for(features), knobs=knobs,
    )  # fmt: skip
    run = tvm.compile(kernel, target=target)[kernel.attrs["global_symbol"]]
    size = weight.rows * k // layout.columns * layout.nbytes
    # Few distinct values: time does not depend on them, but denormal scales would cost.
    raw = np.full((weight.rows, k // layout.columns * layout.nbytes), 0x33, np.uint8)
    planes = pack(weight.format, raw)
    copies = 1 if options.hot else max(1, COLD_BYTES // size)
    weights = [[_tensor(p.copy()) for p in planes.values()] for _ in range(copies)]
    x = [_tensor(a) for a in _activations(activation, n, k)]
    y = _tensor(np.zeros((n, weight.rows), np.float32))

    repeat = 50 if options.hot else 1  # a call in the cache is too short to time

    def call(w: list[tvm.runtime.Tensor]) -> None:
        for _ in range(repeat):
            run(*x, *w, y)

    size = repeat * sum(p.nbytes for p in planes.values())
    return [partial(call, w) for w in weights], size, 2 * repeat * n * weight.rows * k


def _activations(activation: str, n: int, k: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    if activation == "f32":
        return [rng.standard_normal((n, k)).astype(np.float32)]
    return q8a(rng.standard_normal((n, k)).astype(np.float32))


def _read(target: tvm.target.Target) -> Timed:
    """A sum over 12 MB of memory: what the machine can read."""
    size = COLD_BYTES // 8
    run = tvm.compile(memory_read(size, 256), target=target)["memory_read"]
    weights = [_tensor(np.ones(size // 4, np.int32)) for _ in range(8)]
    y = _tensor(np.zeros(256 * LANES, np.int32))
    return [partial(run, w, y) for w in weights], size, 0


def _tensor(array: np.ndarray) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(array)


def _times(timed: dict[str, Timed], seconds: float) -> dict[str, float]:
    """Seconds of the fastest call, kernels taking turns: others can only slow one down."""
    clock = time.thread_time if os.environ["TVM_NUM_THREADS"] == "1" else time.perf_counter
    best = {name: float("inf") for name in timed}
    end = time.perf_counter() + seconds * len(timed)
    while time.perf_counter() < end:
        for name, (calls, _, _) in timed.items():
            for call in calls:
                start = clock()
                call()
                best[name] = min(best[name], clock() - start)
    return best


if __name__ == "__main__":
    main()
