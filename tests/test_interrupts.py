"""Ctrl-C and requests to end: who is told, what waits, what stays as it was."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from xpuc import interrupts


@pytest.fixture(autouse=True)
def _left_as_it_was():
    """Requests to end have Python's handlers, whoever started the tests (nohup)."""
    ends = (signal.SIGTERM, signal.SIGHUP)
    theirs = {number: signal.signal(number, signal.SIG_DFL) for number in ends}
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    for number, handler in theirs.items():
        assert signal.signal(number, handler) is signal.SIG_DFL


def test_the_second_time_does_not_wait():
    pressed = threading.Event()
    with interrupts.noted(pressed):
        signal.raise_signal(signal.SIGINT)
        assert pressed.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_interrupts_once(number):
    told = []
    with interrupts.heeding(told.append):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)  # while what is begun is cleared away
    assert told == [number]


def test_those_who_are_told_of_ctrl_c_are_told_of_a_request_to_end_as_well():
    ended_by, told = [], []
    with interrupts.heeding(ended_by.append), interrupts.told(lambda: told.append(1)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (ended_by, told) == ([signal.SIGTERM], [1, 1])


def test_what_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with interrupts.heeding(lambda number: pytest.fail("was told")):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_may_not_be_cut_in_two_is_not():
    def work():
        with interrupts.put_off():
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    done = []
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]


def test_other_threads_are_not_concerned():
    def work():
        with interrupts.put_off(), interrupts.heeding(lambda number: None):
            done.append(1)

    done = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]


def test_ctrl_c_before_the_command_is_there_shows_no_traceback():
    code = (
        "import os, signal, sys\n"
        "from xpuc.__main__ import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'click':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_command_that_is_asked_to_end_clears_up_and_says_so():
    code = (
        "import click, os, signal, tempfile\n"
        "from xpuc import cli\n"
        "@click.command()\n"
        "def command():\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        click.echo(folder)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "cli.main.get_command = lambda ctx, name: command\n"
        "cli.main(['doctor'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "interrupted\n")
    assert done.stdout.startswith("/")
    assert not Path(done.stdout.strip()).exists()
