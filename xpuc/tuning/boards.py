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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xpuc.errors import RequestError, XpucError
from xpuc.tuning.box import DRIVER_VERSION, Card
from xpuc.tuning.kernels import Board, BoardLost, Call, Timer, lost

_FLUSH = "cache_flush_cpu_non_first_arg"  # weights come from memory, as in a step of the model
# Patience with a server that starts, with a tracker that answers, with one that looks for a board.
_START_S, _ANSWER_S, _REQUEST_S = 60.0, 5.0, 20.0


class Boards(Protocol):
    """A place to get boards from. Each thread that measures has one of its own."""

    name: str
    count: int  # boards that can be had at once

    def connect(self) -> Board:
        """A board for this thread alone; BoardLost if there is none."""

    def close(self) -> None:
        """End what was started."""


class RpcBoard:
    """A connection to an RPC server: a kernels.Board, the CPU there."""

    def __init__(self, remote: Any) -> None:
        self._remote, self.device = remote, remote.cpu()
        self._modules: dict[Path, Any] = {}

    def close(self) -> None:
        """End the connection, so that the server is free for another."""
        with contextlib.suppress(BoardLost):
            lost(lambda: self._remote.get_function("CloseRPCConnection")())

    def load(self, library: Path) -> Any:
        """See kernels.Board. It is sent once: a file that is mapped must not be written again."""

        def load() -> Any:
            self._remote.upload(bytearray(library.read_bytes()), library.name)
            return self._remote.load_module(library.name)

        if library not in self._modules:
            self._modules[library] = lost(load)
        return self._modules[library]

    def tensor(self, array: NDArray[Any]) -> Any:
        """See kernels.Board."""
        import tvm

        return lost(lambda: tvm.runtime.tensor(array, device=self.device))

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """See kernels.Board. Nothing is sent, which TVM's RPC does byte by byte: 40 MB a second."""
        import tvm

        def written() -> Any:
            made, other = (tvm.runtime.empty(shape, dtype, self.device) for _ in range(2))
            return made.copyfrom(other)  # or all of it would be the one page of zeros

        return lost(written)

    def array(self, tensor: Any) -> NDArray[Any]:
        """See kernels.Board."""
        found: NDArray[Any] = lost(tensor.numpy)
        return found

    def timer(self, module: Any, calls: Sequence[Call]) -> Timer:
        """See kernels.Board."""
        timers: dict[int, list[Any]] = {}

        def seconds(repeat: int) -> list[float]:
            if repeat not in timers:
                timers[repeat] = [
                    module.time_evaluator(
                        call.function, self.device, number=1, repeat=repeat, **self._cold()
                    )
                    for call in calls
                ]
            totals = np.zeros(repeat)
            for timer, call in zip(timers[repeat], calls, strict=True):
                totals += timer(*call.args).results
            return [float(s) for s in totals]

        def timed(repeat: int) -> list[float]:
            taken: list[float] = lost(lambda: seconds(repeat))
            return taken

        return timed

    def _cold(self) -> dict[str, Any]:
        """What makes a time evaluator empty the caches before each run."""
        return {"f_preproc": _FLUSH}


class GpuBoard(RpcBoard):
    """A connection to an RPC server: the first GPU there."""

    def __init__(self, remote: Any) -> None:
        super().__init__(remote)
        self.device = remote.cuda()

    def card(self) -> Card | None:
        """The GPU; None if TVM finds none there."""

        def card() -> Card | None:
            gpu = self.device
            if not gpu.exist:
                return None
            return Card(str(gpu.device_name), self._driver(), str(gpu.compute_version))

        found: Card | None = lost(card)
        return found

    def _driver(self) -> str:
        try:  # a path from the root is one on the server, not in the folder of the session
            text: bytes = self._remote.download(str(DRIVER_VERSION))
        except RuntimeError:
            return "unknown"
        return bytes(text).decode("ascii", "replace").strip("\0\n")

    def _cold(self) -> dict[str, Any]:
        # So much is written, and as much read.
        return {"cache_flush_bytes": 2 * self.device.l2_cache_size_bytes}


class ThisMachine:
    """An RPC server on this machine, started anew when a kernel crashed it."""

    name, count = "this machine", 1

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._server: subprocess.Popen[bytes] | None = None

    def connect(self) -> RpcBoard:
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
                return RpcBoard(_connect("127.0.0.1", port))
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
        self.start_one = (
            f"start one on each board: python -m tvm.exec.rpc_server --tracker {address}"
            f" --key {key}"
        )
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
            raise XpucError(f"--tracker {address}: knows no server of key {key}", self.start_one)
        self.count = len(names)

    def connect(self) -> RpcBoard:
        return RpcBoard(self.request())

    def request(self) -> Any:
        """A session with a board that has no other; BoardLost if there is none."""
        return lost(lambda: self._connected().request(self._key, max_retry=1))

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
