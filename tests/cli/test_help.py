"""Help: in the docs, and at once."""

import resource
import subprocess
import sys

import cli_docs
from cli_runs import invoke

from xpuc.cli import COMMANDS

HEAVY = ("tvm", "tvm_ffi", "numpy", "tokenizers", "jinja2", "rich", "xxhash", "ctypes")


def test_the_docs_are_what_help_prints():
    assert cli_docs.PATH.read_text() == cli_docs.text(), "run python tests/cli_docs.py"


def test_no_command_is_the_same_as_help():
    bare, asked = invoke(), invoke("--help")
    assert bare == asked
    assert bare.code == 0
    assert not bare.err


def test_every_command_has_a_line_that_fits():
    listed = invoke("--help").out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_help_imports_nothing_heavy_and_takes_little_time():
    code = (
        "import sys; sys.argv = ['xpuc', '--help']\n"
        "from xpuc.cli import main\n"
        "try: main()\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )

    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.stderr.strip() == "[]"
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Processor time: how long it takes by the clock hangs on what else the machine does.
    assert any(seconds() < 0.3 for _ in range(5))
