"""A TVM RPC tracker and servers on loopback, each a process with those it starts."""

from __future__ import annotations

import socket
import time
from types import TracebackType

import pytest
from tvm import rpc
from tvm.rpc import tracker

from xpuc.errors import XpucError
from xpuc.tuning.boards import Tracker

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Lab:
    """What `python -m tvm.exec.rpc_tracker` starts, and `python -m tvm.exec.rpc_server`."""

    def __init__(self) -> None:
        port = free_port()
        self._tracker = tracker.Tracker(HOST, port, port + 1, silent=True)
        self.address = f"{HOST}:{port}"
        self.servers: list[rpc.Server] = []

    def server(self, key: str, **environment: str) -> rpc.Server:
        """Another one, which the tracker knows soon."""
        port = free_port()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ({"TVM_NUM_THREADS": "1"} | environment).items():
                patch.setenv(name, value)
            made = rpc.Server(HOST, port, port + 1, key=key, silent=True,
                              tracker_addr=(HOST, self._tracker.port))  # fmt: skip
        self.servers.append(made)
        return made

    def tracker(self, key: str, count: int) -> Tracker:
        """Once it knows so many servers."""
        deadline = time.monotonic() + 60
        while True:
            try:
                found = Tracker(self.address, key)
            except XpucError:
                assert time.monotonic() < deadline
            else:
                if found.count == count:
                    return found
                found.close()
            time.sleep(0.05)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for server in self.servers:
            server.terminate()
        self._tracker.terminate()
