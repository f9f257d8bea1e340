"""Where candidates are measured: TVM RPC servers, one started here or those of a tracker.

A kernel that crashes takes its session's process along, not the tuning session's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xpuc.errors import RequestError, XpucError
from xpuc.tuning.inputs import Case
from xpuc.tuning.programs import Program

_FLUSH = "cache_flush_cpu_non_first_arg"  # weights come from memory, as in a step of the model
# Patience with a server that starts, with a tracker that answers, with one that looks for a board.
_START_S, _ANSWER_S, _REQUEST_S = 60.0, 5.0, 20.0


class BoardLost(Exception):
    """The connection to a board broke: the board went away, or a kernel crashed it."""


class Boards(Protocol):
    """A place to get boards from. Each thread that measures has one of its own."""

    name: str
    count: int  # boards that can be had at once

    def connect(self) -> Board:
        """A board for this thread alone; BoardLost if there is none."""

    def close(self) -> None:
        """End what was started."""


@dataclass
class Board:
    """A connection to an RPC server."""

    remote: Any

    @property
    def device(self) -> Any:
        return self.remote.cpu()

    def load(self, library: Path) -> Any:
        """Upload a library and open it there."""

        def load() -> Any:
            self.remote.upload(bytearray(library.read_bytes()), library.name)
            return self.remote.load_module(library.name)

        return lost(load)

    def tensor(self, array: NDArray[Any]) -> Any:
        """A copy of an array there."""
        import tvm

        return lost(lambda: tvm.runtime.tensor(array, device=self.device))


@dataclass(frozen=True)
class Call:
    """A function of a library on a board, and its tensors there."""

    function: str
    args: tuple[Any, ...]


class Direct:
    """Calls of a library's functions, one after the other."""

    def __init__(self, board: Board, module: Any, *calls: Call) -> None:
        self._board, self._module, self._calls = board, module, calls
        self._timers: dict[int, list[Any]] = {}

    def run(self) -> None:
        """Make the calls once."""

        def run() -> None:
            for call in self._calls:
                self._module[call.function](*call.args)

        lost(run)

    def seconds(self, repeat: int) -> list[float]:
        """Seconds of `repeat` runs, each from cold caches."""

        def measure() -> list[float]:
            totals = np.zeros(repeat)
            for timer, call in zip(self._timers_of(repeat), self._calls, strict=True):
                totals += timer(*call.args).results
            return [float(s) for s in totals]

        taken: list[float] = lost(measure)
        return taken

    def _timers_of(self, repeat: int) -> list[Any]:
        if repeat not in self._timers:
            self._timers[repeat] = [
                self._module.time_evaluator(
                    call.function, self._board.device, number=1, repeat=repeat, f_preproc=_FLUSH
                )
                for call in self._calls
            ]
        return self._timers[repeat]


class Kernel(Direct):
    """A candidate's program with its arguments in place; `own` are the tensors of its task."""

    def __init__(self, board: Board, module: Any, program: Program, own: Arguments) -> None:
        tensors = [
            own.tensor(t.role, t.index) or board.tensor(own.empty(t.shape, t.dtype))
            for t in program.tensors
        ]
        calls = (Call(c.function, tuple(tensors[i] for i in c.args)) for c in program.calls)
        super().__init__(board, module, *calls)
        self._results = [tensors[i] for i in program.results]

    def results(self) -> list[NDArray[Any]]:
        """The result tensors, computed once."""
        self.run()
        found: list[NDArray[Any]] = lost(lambda: [t.numpy() for t in self._results])
        return found


class Arguments:
    """A case's arrays on a board, shared by all candidates of the task."""

    def __init__(self, board: Board, case: Case) -> None:
        self._symbols = case.symbols
        planes = [plane for weight in case.planes for plane in weight]
        self._tensors = {
            "operand": [board.tensor(a) for a in case.operands],
            "plane": [board.tensor(a) for a in planes],
        }

    def tensor(self, role: str, index: int) -> Any | None:
        return self._tensors[role][index] if role in self._tensors else None

    def empty(self, shape: Sequence[int | str], dtype: str) -> NDArray[Any]:
        """Room for a new tensor."""
        sizes = [d if isinstance(d, int) else self._symbols[d] for d in shape]
        return np.zeros(sizes, dtype)


class ThisMachine:
    """An RPC server on this machine, started anew when a kernel crashed it."""

    name, count = "this machine", 1

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._server: subprocess.Popen[bytes] | None = None

    def connect(self) -> Board:
        self.close()
        port = _free_port()
        self._server = _start(
            ["tvm.exec.rpc_server", "--host", "127.0.0.1", "--port", str(port),
             "--port-end", str(port + 1)],
            {"TVM_NUM_THREADS": str(self._threads)},
        )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while True:
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise XpucError(
                    "TVM's RPC server does not start",
                    "pip install 'xpuc[tune]'; python -m tvm.exec.rpc_server says what is wrong",
                )
            with contextlib.suppress(OSError, RuntimeError):
                return Board(_connect("127.0.0.1", port))
            time.sleep(0.2)

    def close(self) -> None:
        if self._server is not None:
            stop(self._server)
            self._server = None


class Tracker:
    """The servers that a TVM RPC tracker knows by a key."""

    def __init__(self, address: str, key: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise RequestError(f"--tracker {address}: not an address", "give it as HOST:PORT")
        self._address, self._key = (host, int(port)), key
        self.name = f"{key} at {address}"
        try:
            self._session = self._connected()
            names = [s["addr"] for s in self._session.summary()["server_info"]
                     if s["key"] == f"server:{key}"]  # fmt: skip
        except (OSError, RuntimeError) as error:
            raise XpucError(
                f"--tracker {address}: no TVM RPC tracker answers ({error})",
                "start one: python -m tvm.exec.rpc_tracker --host HOST --port PORT",
            ) from None
        if not names:
            raise XpucError(
                f"--tracker {address}: knows no server of key {key}",
                f"start one on each board: python -m tvm.exec.rpc_server --tracker {address} "
                f"--key {key}",
            )
        self.count = len(names)

    def connect(self) -> Board:
        def request() -> Board:
            return Board(self._connected().request(self._key, max_retry=1))

        board: Board = lost(request)
        return board

    def close(self) -> None:
        self._session.close()

    def _connected(self) -> Any:
        """A connection to the tracker that does not wait for ever, for it or for a board."""
        from tvm import rpc
        from tvm.rpc import base

        # TVM would try for a minute where nothing listens, and for ever where nothing answers.
        with socket.create_connection(self._address, _ANSWER_S) as probe:
            probe.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            base.recvall(probe, 4)
        session = rpc.connect_tracker(*self._address)
        session._sock.settimeout(_REQUEST_S)
        return session


def lost(step: Callable[[], Any]) -> Any:
    """Run a step on a board; BoardLost if the connection breaks in it."""
    try:
        return step()
    except (OSError, RuntimeError, AttributeError, AssertionError) as error:
        raise BoardLost(str(error).splitlines()[-1] if str(error) else repr(error)) from None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process with all it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _start(module: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A Python module as a process group of its own: Ctrl-C is for the session alone."""
    return subprocess.Popen(
        [sys.executable, "-m", *module],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _connect(host: str, port: int) -> Any:
    from tvm import rpc

    with socket.create_connection((host, port), timeout=1):
        pass
    return rpc.connect(host, port)
