"""Call the kernels of a bundle with their recorded inputs, and compare what they write.

    python vectors.py KERNELS ARTIFACT SECONDS [SECONDS OF A CALL]

Prints JSON: every call of a kernel, how far its results are from numpy's (difference.py) and
whether that is too far, and whether they have the bits they had on the emulated GPU. A call that
recorder.py knows no numbers of numpy for is listed as unchecked. The TVM runtime is that of the
artifact.

A process of its own makes the calls: a launch that fails takes the GPU from its process, and one
that does not end is never over. That is said of its kernel, and another process makes the calls
after it. What is left after SECONDS is counted as not made.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from difference import difference, digest

from xpuc.artifact import read_manifest
from xpuc.runtime.model import open_runtime
from xpuc.runtime.places import place_of

_START_S = 30.0  # a process may take for all before its first call
_CALL_S = 10.0


def main() -> int:
    folder, artifact = Path(sys.argv[1]), Path(sys.argv[2])
    end = time.monotonic() + float(sys.argv[3])
    patience = float(sys.argv[4]) if len(sys.argv) > 4 else _CALL_S
    cases = [case for _, of_library in libraries(folder) for case in of_library]
    rows: list[dict[str, Any]] = []
    while len(rows) < len(cases) and time.monotonic() < end:
        made = list(called_apart(folder, artifact, cases[len(rows) :], end, patience))
        if not made:
            break
        rows += made
    facts = {
        "calls": len(rows),
        "not_made": len(cases) - len(rows),
        "same_bits": sum(row["same_bits"] for row in rows),
        "wrong": [row["kernel"] for row in rows if row["wrong"]],
        "unchecked": [row["kernel"] for row in rows if not row["tolerances"]],
        "rows": rows,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    return int(bool(facts["wrong"]) or not rows or len(rows) < len(cases))


def libraries(folder: Path) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Each library of kernels with the calls that were recorded of them."""
    for library in sorted(folder.rglob("*.so")):
        yield library, json.loads(library.with_suffix(".json").read_text())


def called_apart(
    folder: Path, artifact: Path, cases: list[dict[str, Any]], end: float, patience: float
) -> Iterator[dict[str, Any]]:
    """The rows of the last so many cases, in order, from one process: up to a call that goes wrong;
    none if it cannot make calls, of which it says why."""
    spawn = multiprocessing.get_context("spawn")
    receiving, sending = spawn.Pipe(duplex=False)
    process = spawn.Process(target=call_last, args=(sending, folder, artifact, len(cases)))
    process.start()
    sending.close()
    try:
        if not has_started(receiving, until(end, _START_S)):
            return
        for case in cases:
            if not receiving.poll(until(end, patience)):
                if time.monotonic() < end:
                    yield failed(case, f"not done after {patience:g} s")
                return
            try:
                row = receiving.recv()
            except EOFError:
                process.join()
                row = failed(case, f"its process ended with {process.exitcode}")
            yield row
            if "error" in row:
                return
    finally:
        process.kill()
        process.join()


def until(end: float, patience: float) -> float:
    """Seconds to wait: as long as patience lasts, but not past the end."""
    return min(patience, max(0.0, end - time.monotonic()))


def has_started(receiving: Connection, patience: float) -> bool:
    """Whether the process can make calls, so that it says so in time."""
    try:
        return receiving.poll(patience) and receiving.recv() is None
    except EOFError:
        return False


def call_last(rows: Connection, folder: Path, artifact: Path, count: int) -> None:
    """Make the last `count` calls; send None, then the row of each."""
    manifest = read_manifest(artifact)
    open_runtime(artifact)
    place = place_of(manifest, artifact)
    rows.send(None)
    left = sum(len(cases) for _, cases in libraries(folder)) - count
    for library, cases in libraries(folder):
        skipped = min(left, len(cases))
        left -= skipped
        if skipped == len(cases):
            continue
        module = tvm_ffi.load_module(str(library.resolve()))
        arrays = np.load(library.with_suffix(".npz"))
        for case in cases[skipped:]:
            rows.send(compared(module, case, arrays, place))


def failed(case: dict[str, Any], error: str) -> dict[str, Any]:
    """The row of a call that gave nothing."""
    tolerances = [each["tolerance"] for each in case["expected"]]
    return {
        "kernel": case["kernel"], "test": case["test"], "tolerances": tolerances,
        "wrong": True, "same_bits": False, "error": error,
    }  # fmt: skip


def compared(module: Any, case: dict[str, Any], arrays: Any, place: Any) -> dict[str, Any]:
    """One call of a kernel against what was recorded."""
    tolerances = [each["tolerance"] for each in case["expected"]]
    try:
        results = called(module[case["function"]], case, arrays, place)
    except Exception as error:
        return failed(case, (str(error).splitlines() or [repr(error)])[-1])
    off = [difference(part(results, each), arrays[each["array"]]) for each in case["expected"]]
    return {
        "kernel": case["kernel"], "test": case["test"], "tolerances": tolerances,
        "differences": off,
        "same_bits": [digest(each) for each in results] == case["emulated"],
        "wrong": any(not o <= limit for o, limit in zip(off, tolerances, strict=True)),
    }  # fmt: skip


def part(results: list[np.ndarray], expected: dict[str, Any]) -> np.ndarray:
    """The view of a result that a test held to something."""
    return np.ndarray(
        expected["shape"], expected["dtype"], results[expected["result"]].data,
        expected["offset"], expected["strides"],
    )  # fmt: skip


def called(function: Any, case: dict[str, Any], arrays: Any, place: Any) -> list[np.ndarray]:
    """What one call writes into its outputs, which hold poison before."""
    given, written = [], []
    for argument in case["arguments"]:
        if "value" in argument:
            given.append(argument["value"])
            continue
        array = poison(argument) if "shape" in argument else arrays[argument["array"]]
        given.append(place.tensor(np.ascontiguousarray(array)))
        if argument["is_written"]:
            written.append((given[-1], np.empty_like(array)))
    function(*given)
    read = tvm_ffi.get_global_func("runtime.TVMTensorCopyToBytes")
    for tensor, array in written:
        read(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
    return [array for _, array in written]


def poison(argument: dict[str, Any]) -> np.ndarray:
    """What the recording's outputs held before: all bits set, NaN or -1."""
    array = np.empty(argument["shape"], argument["dtype"])
    array.view(np.uint8)[...] = 0xFF
    return array


if __name__ == "__main__":
    sys.exit(main())
