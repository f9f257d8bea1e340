"""Call the kernels of a bundle with their recorded inputs, and compare what they write.

    python vectors.py KERNELS ARTIFACT

Prints JSON: every kernel, how far it is from what was recorded (the largest difference, in terms
of the largest value; of whole numbers the largest difference) and whether that is too far. The
recorded results were within as little of numpy's when they were recorded (recorder.py). The TVM
runtime is that of the artifact.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from xpuc.artifact import read_manifest
from xpuc.runtime.model import open_runtime
from xpuc.runtime.places import place_of


def main() -> int:
    folder, artifact = Path(sys.argv[1]), Path(sys.argv[2])
    manifest = read_manifest(artifact)
    open_runtime(artifact)
    place = place_of(manifest, artifact)
    rows = []
    for library in sorted(folder.glob("*.so")):
        module = tvm_ffi.load_module(str(library.resolve()))
        cases = json.loads(library.with_suffix(".json").read_text())
        arrays = np.load(library.with_suffix(".npz"))
        rows += [compared(module, case, arrays, place) for case in cases]
    wrong = [row["kernel"] for row in rows if row["wrong"]]
    same = sum(row["same_bits"] for row in rows)
    facts = {"kernels": len(rows), "same_bits": same, "wrong": wrong, "rows": rows}
    sys.stdout.write(json.dumps(facts) + "\n")
    return int(bool(wrong) or not rows)


def compared(module: Any, case: dict[str, Any], arrays: Any, place: Any) -> dict[str, Any]:
    """One call of a kernel against what was recorded."""
    row = {"kernel": case["kernel"], "test": case["test"], "tolerance": case["tolerance"]}
    try:
        results = called(module[case["function"]], case, arrays, place)
    except Exception as error:
        said = (str(error).splitlines() or [repr(error)])[-1]
        return row | {"wrong": True, "same_bits": False, "error": said}
    wanted = [arrays[key] for key in case["results"]]
    off = [difference(got, want) for got, want in zip(results, wanted, strict=True)]
    limits = [limit(case, want) for want in wanted]
    return row | {
        "differences": off,
        "same_bits": all(o == 0 for o in off),
        "wrong": any(not o <= limit for o, limit in zip(off, limits, strict=True)),
    }


def limit(case: dict[str, Any], want: np.ndarray) -> float:
    """How far a result may be off: a quantised number one step, an id not at all."""
    return float(case["tolerance"] if want.dtype.kind == "f" else want.dtype == np.int8)


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


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """See above; infinite where only one of the two is a number."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    there = ~np.isnan(b)
    if not np.array_equal(np.isnan(a), ~there):
        return float("inf")
    if not there.any():
        return 0.0
    with np.errstate(invalid="ignore"):
        off = float(np.nan_to_num(np.abs(a - b)[there], nan=0.0, posinf=np.inf).max())
    largest = float(np.abs(b[there & np.isfinite(b)]).max(initial=0.0))
    return off if want.dtype.kind != "f" or not largest else off / largest


if __name__ == "__main__":
    sys.exit(main())
