"""Record the kernels that the tests of tests/emu run, with their inputs and results.

    pytest -q -m 'not hardware' -p device.recorder --record FOLDER tests/emu/test_products.py ...

Each test compares what it ran with numpy, so what a passed test ran is a test vector. At the end
the kernels are compiled for real GPUs. FOLDER gets a library, a .json and a .npz (vectors.py).
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ARCHS = ("sm_90a",)
_ON_TENSOR_CORES = ("matmul", "gated_matmul", "attention_prefill")


@dataclass
class Recording:
    """Calls of kernels: PrimFuncs by their names in the library, and what vectors.py reads."""

    kernels: dict[str, Any] = field(default_factory=dict)
    cases: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, test: str, kernel: Any, arguments: tuple[Any, ...], results: list[Any]) -> None:
        """A call, its arguments as those of emu.device.run."""
        from emu.device import InOut, Out

        name = str(kernel.attrs["global_symbol"])
        function = f"{name}_{len(self.cases)}"
        self.kernels[function] = kernel.with_attr("global_symbol", function)
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
        rounded = name.startswith(_ON_TENSOR_CORES)
        self.cases.append({
            "kernel": name, "function": function, "test": test, "arguments": described,
            "results": [self._keep(each) for each in results],
            "tolerance": 2e-3 if rounded else 1e-5, "steps": 1 if rounded else 0,
        })  # fmt: skip

    def _keep(self, array: np.ndarray) -> str:
        key = f"a{len(self.arrays)}"
        self.arrays[key] = np.array(array)
        return key

    def write(self, path: Path, compiler: Any = None, archs: tuple[str, ...] = ARCHS) -> None:
        """The library at `path`, and the rest beside it."""
        import tvm
        from emu.device import MACHINE

        from xpuc.codegen import cuda
        from xpuc.codegen.linker import link, require_linker

        path.parent.mkdir(parents=True, exist_ok=True)
        with MACHINE.tvm, cuda.compiling(archs, compiler):
            module = tvm.IRModule(self.kernels)
            built = tvm.compile(module, target=MACHINE.tvm, tir_pipeline=cuda.PIPELINE)
        built.export_library(
            str(path),
            fcompile=lambda output, objects, **_: link(require_linker(), output, objects),
        )
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
    parser.addoption("--record", type=Path, metavar="LIBRARY.so", help="write test vectors there")


def pytest_collection_finish(session: pytest.Session) -> None:
    path = session.config.getoption("--record")
    if path is not None:
        session.config.pluginmanager.register(Recorder(path))
