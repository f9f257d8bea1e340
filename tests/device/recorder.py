"""Record the kernels that the tests of tests/emu run: their inputs, and what numpy expects.

    pytest -m 'not hardware' -p device.recorder --record FOLDER/rows.ir tests/emu/test_rows.py

What a test that passed ran and held to something (expectations.py) is a test vector. Beside the
module of the kernels, which libraries.py compiles, are a .json and a .npz (vectors.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device.difference import digest

GPU_TOLERANCE = 1e-5  # of floats at least: exp2 and rsqrt of a GPU are not the host's


@dataclass(frozen=True)
class Call:
    """A kernel that ran, its arguments as those of emu.device.run, and what it wrote."""

    kernel: Any
    arguments: tuple[Any, ...]
    results: list[np.ndarray]
    expected: list[dict[str, Any]] = field(default_factory=list)  # `array` is not yet a key


@dataclass
class Recording:
    """Calls of kernels: PrimFuncs by their names in the library, and what vectors.py reads."""

    kernels: dict[str, Any] = field(default_factory=dict)
    cases: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    _functions: dict[str, str] = field(default_factory=dict)
    _calls: list[Call] = field(default_factory=list)  # of the test that runs

    def ran(self, kernel: Any, arguments: tuple[Any, ...], results: list[np.ndarray]) -> None:
        """Observes emu.device.run."""
        self._calls.append(Call(kernel, copy.deepcopy(arguments), results))

    def held(self, got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
        """Observes expectations.close."""
        for call in self._calls:
            for i, result in enumerate(call.results):
                offset = _address(got) - _address(result)
                if 0 <= offset < result.nbytes:
                    is_float = got.dtype.kind == "f"
                    call.expected.append({
                        "result": i, "dtype": got.dtype.name, "shape": got.shape,
                        "offset": offset, "strides": got.strides,
                        "array": want.astype(np.float32 if is_float else got.dtype),
                        "tolerance": max(tolerance, GPU_TOLERANCE) if is_float else tolerance,
                    })  # fmt: skip

    def end(self, test: str, *, passed: bool) -> None:
        """Keep what the test ran, or forget it."""
        for call in self._calls if passed else ():
            self._add(test, call)
        self._calls.clear()

    def _add(self, test: str, call: Call) -> None:
        from tvm_ffi import structural_hash

        name = str(call.kernel.attrs["global_symbol"])
        key = f"{name}_{structural_hash(call.kernel) & 0xFFFFFFFF:08x}"
        function = self._functions.setdefault(key, f"{name}_{len(self.cases)}")
        self.kernels.setdefault(function, call.kernel.with_attr("global_symbol", function))
        self.cases.append({
            "kernel": name, "function": function, "test": test,
            "arguments": [self._described(each) for each in call.arguments],
            "expected": [e | {"array": self._keep(e["array"])} for e in call.expected],
            "emulated": [digest(each) for each in call.results],
        })  # fmt: skip

    def _described(self, argument: Any) -> dict[str, Any]:
        from emu.device import InOut, Out

        if isinstance(argument, Out):
            shape = [int(d) for d in argument.shape]
            return {"shape": shape, "dtype": argument.dtype, "is_written": True}
        if isinstance(argument, InOut):
            return {"array": self._keep(argument.array), "is_written": True}
        if isinstance(argument, np.ndarray):
            return {"array": self._keep(argument), "is_written": False}
        return {"value": argument}

    def _keep(self, array: np.ndarray) -> str:
        array = np.ascontiguousarray(array)
        content = sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        key = content.hexdigest()[:16]
        self.arrays[key] = array
        return key

    def write(self, path: Path) -> None:
        """The module of the kernels at `path`, for libraries.py, and the rest beside it."""
        import tvm

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tvm.ir.save_json(tvm.IRModule(self.kernels)))
        path.with_suffix(".json").write_text(json.dumps(self.cases))
        np.savez_compressed(path.with_suffix(".npz"), **self.arrays)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@contextmanager
def recording(made: Recording) -> Iterator[Recording]:
    """It observes what is run and held to something inside."""
    import expectations
    from emu import device

    device.observers.append(made.ran)
    expectations.observers.append(made.held)
    try:
        yield made
    finally:
        device.observers.remove(made.ran)
        expectations.observers.remove(made.held)


class Recorder:
    """The plugin: keeps what a test ran once it has passed."""

    def __init__(self, path: Path) -> None:
        self._path, self._recording = path, Recording()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        with recording(self._recording):
            result = yield
        if self._recording.cases:
            self._recording.write(self._path)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._recording.end(report.nodeid, passed=report.passed)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="MODULE.ir", help="write test vectors there")


def pytest_collection_finish(session: pytest.Session) -> None:
    path = session.config.getoption("--record")
    if path is not None:
        session.config.pluginmanager.register(Recorder(path))
