"""Record the kernels that the tests of tests/emu run, with their inputs and results.

    pytest -m 'not hardware' -p device.recorder --record FOLDER/rows.ir tests/emu/test_rows.py

Each test compares what it ran with numpy, so what a passed test ran is a test vector. Beside the
module of the kernels, which libraries.py compiles, are a .json and a .npz (vectors.py).
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_ON_TENSOR_CORES = ("matmul", "gated_matmul", "hopper_", "attention_prefill")


@dataclass
class Recording:
    """Calls of kernels: PrimFuncs by their names in the library, and what vectors.py reads."""

    kernels: dict[str, Any] = field(default_factory=dict)
    cases: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    _functions: dict[str, str] = field(default_factory=dict)

    def add(self, test: str, kernel: Any, arguments: tuple[Any, ...], results: list[Any]) -> None:
        """A call, its arguments as those of emu.device.run."""
        from emu.device import InOut, Out
        from tvm_ffi import structural_hash

        name = str(kernel.attrs["global_symbol"])
        same = f"{name}_{structural_hash(kernel) & 0xFFFFFFFF:08x}"
        function = self._functions.setdefault(same, f"{name}_{len(self.cases)}")
        self.kernels.setdefault(function, kernel.with_attr("global_symbol", function))
        described: list[dict[str, Any]] = []
        for each in arguments:
            if isinstance(each, Out):
                shape = {"shape": [int(d) for d in each.shape], "dtype": each.dtype}
                described.append(shape | {"is_written": True})
            elif isinstance(each, np.ndarray | InOut):
                array = each.array if isinstance(each, InOut) else each
                is_written = isinstance(each, InOut)
                described.append({"array": self._keep(array), "is_written": is_written})
            else:
                described.append({"value": each})
        # A GPU's exp2 and rsqrt may move what is quantised after them by a step.
        is_quantised = any(each.dtype == np.int8 for each in results)
        tolerance = 2e-3 if name.startswith(_ON_TENSOR_CORES) else 1e-5
        self.cases.append({
            "kernel": name, "function": function, "test": test, "arguments": described,
            "results": [self._keep(each) for each in results],
            "tolerance": 1e-2 if is_quantised else tolerance,
        })  # fmt: skip

    def _keep(self, array: np.ndarray) -> str:
        key = f"a{len(self.arrays)}"
        self.arrays[key] = np.array(array)
        return key

    def write(self, path: Path) -> None:
        """The module of the kernels at `path`, for libraries.py, and the rest beside it."""
        import tvm

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tvm.ir.save_json(tvm.IRModule(self.kernels)))
        path.with_suffix(".json").write_text(json.dumps(self.cases))
        np.savez_compressed(path.with_suffix(".npz"), **self.arrays)


class Recorder:
    """Listens to emu.device.run; keeps what a test ran once it has passed."""

    def __init__(self, path: Path) -> None:
        from emu import device

        self.path, self.recording = path, Recording()
        self._ran: list[tuple[Any, tuple[Any, ...], list[Any]]] = []
        device.observers.append(self._observe)

    def _observe(self, kernel: Any, arguments: tuple[Any, ...], results: list[Any]) -> None:
        self._ran.append((kernel, copy.deepcopy(arguments), results))  # tests change their arrays

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for call in self._ran if report.passed else ():
            self.recording.add(report.nodeid, *call)
        self._ran.clear()

    def pytest_sessionfinish(self) -> None:
        if self.recording.cases:
            self.recording.write(self.path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="MODULE.ir", help="write test vectors there")


def pytest_collection_finish(session: pytest.Session) -> None:
    path = session.config.getoption("--record")
    if path is not None:
        session.config.pluginmanager.register(Recorder(path))
