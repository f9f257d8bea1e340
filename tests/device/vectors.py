"""Call the kernels of a bundle with their recorded inputs, and compare what they write.

    python vectors.py KERNELS ARTIFACT

Prints JSON: every call of a kernel, how far its results are from numpy's (difference.py) and
whether that is too far, and whether they have the bits they had on the emulated GPU. A call that
recorder.py knows no numbers of numpy for is listed as unchecked. The TVM runtime is that of the
artifact.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from difference import difference, digest

from xpuc.artifact import read_manifest
from xpuc.runtime.model import open_runtime
from xpuc.runtime.places import place_of


def main() -> int:
    folder, artifact = Path(sys.argv[1]), Path(sys.argv[2])
    manifest = read_manifest(artifact)
    open_runtime(artifact)
    place = place_of(manifest, artifact)
    rows = []
    for library in sorted(folder.rglob("*.so")):
        module = tvm_ffi.load_module(str(library.resolve()))
        cases = json.loads(library.with_suffix(".json").read_text())
        arrays = np.load(library.with_suffix(".npz"))
        rows += [compared(module, case, arrays, place) for case in cases]
    facts = {
        "calls": len(rows),
        "same_bits": sum(row["same_bits"] for row in rows),
        "wrong": [row["kernel"] for row in rows if row["wrong"]],
        "unchecked": [row["kernel"] for row in rows if not row["tolerances"]],
        "rows": rows,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    return int(bool(facts["wrong"]) or not rows)


def compared(module: Any, case: dict[str, Any], arrays: Any, place: Any) -> dict[str, Any]:
    """One call of a kernel against what was recorded."""
    row = {"kernel": case["kernel"], "test": case["test"]}
    row["tolerances"] = tolerances = [each["tolerance"] for each in case["expected"]]
    try:
        results = called(module[case["function"]], case, arrays, place)
    except Exception as error:
        said = (str(error).splitlines() or [repr(error)])[-1]
        return row | {"wrong": True, "same_bits": False, "error": said}
    off = [difference(part(results, each), arrays[each["array"]]) for each in case["expected"]]
    return row | {
        "differences": off,
        "same_bits": [digest(each) for each in results] == case["emulated"],
        "wrong": any(not o <= limit for o, limit in zip(off, tolerances, strict=True)),
    }


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
