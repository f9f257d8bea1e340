"""Boards: kernels over RPC, boards that go away, and trackers that are not there."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import sites
from fake_machine import small_roofs
from rpc_lab import Lab, free_port

from xpuc import tune_db
from xpuc.codegen import target
from xpuc.codegen.linker import find_linker, link
from xpuc.errors import XpucError
from xpuc.schedules import Schedule, Site, llvm
from xpuc.tuning import boards, programs, reference, timing
from xpuc.tuning.boards import RpcBoard, ThisMachine, Tracker
from xpuc.tuning.candidates import Candidate
from xpuc.tuning.cases import make
from xpuc.tuning.kernels import Arguments, Board, BoardLost, Call, Direct, Kernel, lost
from xpuc.tuning.programs import Builder
from xpuc.tuning.remote import card_of
from xpuc.tuning.session import Budget, Session, Status
from xpuc.tuning.tasks import Subject, Task
from xpuc.tuning.trials import TrialLog

CRASHES = (
    "#include <stdlib.h>\nint __tvm_ffi_die(void *s, const void *a, int n, void *r) { abort(); }"
)


def task(site: Site, *rows: int) -> Task:
    """Of this machine."""
    schedule = next(s for s in llvm.SCHEDULES if s.op == site.op and s.accepts(site))
    return Task(site.facts(), target.resolve("llvm", None).facts, schedule, {"decode": 1}, rows)


# --- trackers ---


@pytest.mark.parametrize(
    "address", ["board", ":9190", "board:", "board:x", "board:0", "board:99999"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(XpucError) as caught:
        Tracker(address, "cpu")
    assert caught.value.message == f"--tracker {address}: not an address"
    assert "HOST:PORT" in caught.value.hint


def test_where_nothing_listens_there_is_no_tracker() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(XpucError, match="no TVM RPC tracker answers") as caught:
        Tracker(address, "cpu")
    assert address in caught.value.message
    assert "tvm.exec.rpc_tracker" in caught.value.hint


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """The address of something that answers so, or keeps silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # the server was shut down
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(64)
                        if answer is None:
                            connection.recv(64)  # until the other side has had enough
                        connection.sendall(answer or b"")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("answer", [None, b"", b"SSH", b"HTTP/1.1 400 Bad Request\r\n"])
def test_what_else_listens_is_no_tracker(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "_ANSWER_S", 0.1)
    refused = pytest.raises(XpucError, match="no TVM RPC tracker answers")
    with listening(answer) as address, refused:
        Tracker(address, "cpu")


@pytest.mark.parametrize(
    "error", [OSError("reset"), RuntimeError("code=kShutdown"), AttributeError("no such function")]
)
def test_whatever_breaks_on_a_board_loses_it(error: Exception) -> None:
    def step() -> None:
        raise error

    with pytest.raises(BoardLost, match=str(error)):
        lost(step)


# --- this machine ---


@pytest.fixture(scope="module")
def machine() -> Iterator[ThisMachine]:
    here = ThisMachine(threads=1)
    yield here
    here.close()


def built(of: Task, folder: Path, **knobs: int) -> Candidate:
    facts = (dict(of.facts), of.schedule.name, of.target.kind, of.target.cpu)
    candidate = programs._build(facts, knobs, folder / f"{of.key.op}.so")
    assert not candidate.refused
    return candidate


def kernel_on(board: Board, candidate: Candidate, arguments: Arguments) -> Kernel:
    assert candidate.library is not None
    assert candidate.program is not None
    return Kernel(board, board.load(candidate.library), candidate.program, arguments)


@pytest.mark.slow
def test_kernels_over_rpc_compute_what_they_compute_here(
    machine: ThisMachine, tmp_path: Path
) -> None:
    from tvm import rpc

    there, here = machine.connect(), RpcBoard(rpc.LocalSession())
    of_all = [
        (task(sites.linear("n", [("Q8_0", 24, 64)])), 5),
        (task(sites.gate_up(2, [("Q4_0", 32, 64), ("Q4_1", 32, 64)])), 2),
        (task(sites.attention(3)), 3),  # two kernels, tensors between them
    ]
    for each, rows in of_all:
        case, candidate = make(each.site, rows), built(each, tmp_path)
        kernels = [kernel_on(b, candidate, Arguments(b, case)) for b in (there, here)]
        remote, local = (kernel.results() for kernel in kernels)
        for a, b in zip(remote, local, strict=True):
            np.testing.assert_array_equal(a, b)
        assert reference.error(each.site, case, remote) <= each.schedule.tolerance
        seconds = kernels[0].seconds(3)
        assert len(seconds) == 3
        assert min(seconds) > 0


def processes(machine: ThisMachine) -> list[psutil.Process]:
    """The server's, and those it has started."""
    assert machine._server is not None
    server = psutil.Process(machine._server.pid)
    return [server, *server.children(recursive=True)]


def library_that_crashes(folder: Path) -> Path:
    source, path = folder / "die.c", folder / "die.so"
    source.write_text(CRASHES)
    linker = find_linker()
    assert linker is not None
    link(linker, str(path), [str(source)])
    return path


@pytest.mark.slow
def test_a_board_that_a_kernel_crashed_is_ended_and_another_is_had(
    machine: ThisMachine, tmp_path: Path
) -> None:
    board = machine.connect()
    assert board.tensor(np.arange(4)).numpy().tolist() == [0, 1, 2, 3]
    family = processes(machine)
    crashes = Direct(board, board.load(library_that_crashes(tmp_path)), Call("die", ()))
    with pytest.raises(BoardLost):
        crashes.run()
    with pytest.raises(BoardLost):
        board.tensor(np.arange(4))
    again = machine.connect()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert again.tensor(np.arange(4)).numpy().tolist() == [0, 1, 2, 3]
    assert machine._server is not None
    os.killpg(machine._server.pid, signal.SIGKILL)
    with pytest.raises(BoardLost):
        again.tensor(np.arange(4))


@pytest.mark.slow
def test_a_server_that_does_not_start_is_a_mistake_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    here = ThisMachine(threads=1)
    with pytest.raises(XpucError, match="does not start") as caught:
        here.connect()
    assert "xpuc[tune]" in caught.value.hint
    here.close()


# --- boards of a tracker ---


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as started:
        yield started


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that measure in a hurry."""
    monkeypatch.setattr(timing, "_BLOCK_S", 0.0005)
    monkeypatch.setattr(llvm, "roof_loops", small_roofs)
    monkeypatch.setattr(boards, "_REQUEST_S", 3.0)


def small_space(of: Task) -> Task:
    """The task with few knobs to try."""
    s = of.schedule
    schedule = Schedule(
        s.name, s.op, s.accepts, s.emit, s.knobs, lambda _: {"prefetch_bytes": (0, 256, 512)}
    )
    return Task(of.facts, of.target, schedule, of.uses, of.rows)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly")
def test_a_session_survives_one_of_two_boards(lab: Lab, tmp_path: Path) -> None:
    servers = [lab.server("lab"), lab.server("lab")]
    tracker = lab.tracker("lab", 2)
    assert tracker.name == f"lab at {lab.address}"
    with pytest.raises(XpucError, match="knows no server of key nobody") as caught:
        Tracker(lab.address, "nobody")
    assert f"--tracker {lab.address} --key nobody" in caught.value.hint

    tasks = [small_space(task(sites.linear(1, [("Q8_0", size, 64)]), 1)) for size in (64, 96, 128)]
    log = TrialLog(tmp_path / "trials.jsonl")
    builder = Builder(tmp_path, 2)
    killed = threading.Event()

    def watch(status: Status) -> None:
        if status.doing == "tuning" and status.trials >= 2 and not killed.is_set():
            killed.set()
            servers[0].terminate()

    session = Session(
        Subject(Path("tiny.gguf"), target.resolve("llvm", None), tuple(tasks), {}),
        tracker, builder, tune_db.TuneDb(), tmp_path, log, Budget(), 2, watch,
    )  # fmt: skip
    try:
        findings = session.run()
    finally:
        builder.close()
        tracker.close()
    assert killed.is_set()
    assert all(any(t.concludes for t in result.trials) for result in findings.results)
    trials = Counter((t.task, t.kernel) for t in log.read() if not t.concludes)
    assert set(trials.values()) == {1}
    assert len({t.board for t in log.read()}) <= 2
    assert findings.roofs.bytes_s > 0
    kept = {t.task for t in log.read() if t.outcome == "kept"}
    assert kept == {r.task.name for r in findings.results if r.record}


@pytest.mark.slow
@pytest.mark.usefixtures("quickly")
def test_a_tracker_without_a_free_board_is_not_waited_for(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = lab.server("lab", CUDA_VISIBLE_DEVICES="")
    tracker = lab.tracker("lab", 1)
    with pytest.raises(XpucError, match=f"lab at {lab.address}: TVM finds no GPU there") as caught:
        card_of(tracker)
    assert "libcudart" in caught.value.hint
    held = tracker.connect()
    with monkeypatch.context() as hurry:
        hurry.setattr(boards, "_REQUEST_S", 1.0)
        with pytest.raises(BoardLost, match="timed out"):
            tracker.connect()
    del held
    assert tracker.connect().tensor(np.arange(2)).numpy().tolist() == [0, 1]
    server.terminate()
    monkeypatch.setattr(boards, "_REQUEST_S", 1.0)
    with pytest.raises(BoardLost):
        tracker.connect()
    tracker.close()
