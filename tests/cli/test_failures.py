"""How commands fail: two lines for what the user can mend, one for a bug, never a traceback."""

import errno
import os
import subprocess
import sys

import pytest
from cli_runs import invoke, write_manifest

from xpuc.artifact import FORMAT_VERSION
from xpuc.errors import XpucError

USAGE, BUG, INTERRUPTED = 2, 1, 130
NAMES = "bench, compile, doctor, explain, inspect, opt, run, score, tokenize, tune"

# arguments, the message, the hint
MISTAKES = [
    ("rum", "unknown command: 'rum'", f"did you mean 'run'? known: {NAMES}"),
    ("xyzzy", "unknown command: 'xyzzy'", f"known: {NAMES}"),
    ("--verzion", "unknown option: --verzion", "did you mean --version? see xpuc --help"),
    ("run", "ARTIFACT|MODEL is missing", "type xpuc run [OPTIONS] ARTIFACT|MODEL"),
    ("run m --tmep 1", "unknown option: --tmep",
     "did you mean --temp, --stop, --help? see xpuc run --help"),
    ("run m --xyzzy", "unknown option: --xyzzy", "see xpuc run --help"),
    ("run m hello", "unexpected argument: hello", "type xpuc run [OPTIONS] ARTIFACT|MODEL"),
    ("run m --temp", "option '--temp' requires an argument", "see xpuc run --help"),
    ("run m --temp hot", "--temperature: 'hot' is not a valid float", "see xpuc run --help"),
    ("run m --threads 0", "--threads: 0 is not in the range 1<=x<=1024", "see xpuc run --help"),
    ("run m -p x --top-p 1.5", "--top-p is 1.5", "give a number from 0 to 1"),
    ("run m -p x --temp nan", "--temperature is nan", "give a number"),
    ("run m -p x --typical 2", "--typical is 2.0", "give a number from 0 to 1"),
    ("run m -p x --repeat-last-n -2", "--repeat-last-n is -2", "give a whole number from -1 up"),
    ("run m -p x -n 0", "--n-predict is 0", "give a whole number from 1 up"),
    ("run m -p x -s -2", "--seed is -2", f"give a whole number from 0 to {2**128 - 1}"),
    ("run m -p x --stop=", "--stop: ''", "give texts of at least one character"),
    ("run m -p x --dry-sequence-breaker=", "--dry-sequence-breaker: ''",
     "give texts of at least one character"),
    ("run m -p x -l 5+nan", "--logit-bias: token 5 has bias nan",
     "give a number up to 1e6; -inf keeps the token from being chosen"),
    ("run m -p x --samplers top_k;top_k", "--samplers: 'top_k' stands twice",
     "name each sampler once"),
    ("run m -p x --regex a --grammar -", "--regex and --grammar exclude each other",
     "give one of them"),
    ("run m -p x -l 12", "--logit-bias 12: not understood",
     "write a token id and a bias: 15043+1 or 15043-inf"),
    ("run m -p x --store-bytes 1G", "--store-bytes needs --store",
     "add --store DIR, or leave --store-bytes out"),
    ("run m -p x --store-bytes 9999999T", "--store-bytes: 9999999T is more than a file can hold",
     "see xpuc run --help"),
    ("run m -p x --chunk-budget-ms nan", "--chunk-budget-ms: 'nan' is not a number",
     "see xpuc run --help"),
    ("run m -p x --step-log .", ".: cannot be written (Is a directory)",
     "name a file in a folder that can be written"),
    ("run m -p x --step-log /dev/null/x", "/dev/null/x: cannot be written (Not a directory)",
     "name a file in a folder that can be written"),
    ("run m -p x --store=", "--store: an empty text is no path", "see xpuc run --help"),
    ("tune m --minutes nan", "--minutes: 'nan' is not a number", "see xpuc tune --help"),
    ("tune m --key k", "--key needs --tracker", "add --tracker HOST:PORT, or leave --key out"),
    ("tune . --export /dev/null/x", "/dev/null/x: cannot be written (Not a directory)",
     "name a file in a folder that can be written"),
    ("run m -p x --store-bytes 20X", "--store-bytes: '20X' is no size such as 512M or 20G",
     "see xpuc run --help"),
    ("run m -p x --policy fifo",
     "--policy: 'fifo' is not one of 'fcfs', 'priority', 'lpm', 'vllm'", "see xpuc run --help"),
    ("run m -p x --draft-max -1", "--draft-max: -1 is not in the range x>=0",
     "see xpuc run --help"),
    ("run m -p x --completions 0", "--completions: 0 is not in the range x>=1",
     "see xpuc run --help"),
    ("run m -p x -n -2", "--n-predict: -2 is not in the range x>=-1", "see xpuc run --help"),
    ("run m -p x -f y", "both -p and -f are given", "give the text one way"),
    ("run m -f nope.txt", "nope.txt: not found", "give the path of a text file"),
    ("run m.gguf -p x", "m.gguf: not found", "give the path of a MODEL or ARTIFACT"),
    ("tokenize m.gguf -p x", "m.gguf: not found", "give the path of a MODEL or ARTIFACT"),
    ("inspect m.gguf", "m.gguf: not found", "give the path of a GGUF checkpoint or ARTIFACT"),
    ("inspect .", ".: not an xpuc artifact (no manifest.json)",
     "give the folder that xpuc compile wrote"),
    ("score m", "give the text one way, with --ids or with -f", "see xpuc score --help"),
    ("score m -f - --top -1", "--top: -1 is not in the range 0<=x<=1000", "see xpuc score --help"),
    ("score m -f - --windows 2", "--windows needs --window",
     "add --window N, or leave --windows out"),
    ("score m -f - --window 8 --top 2", "--top: not with --window", "leave one of the two out"),
    ("compile m.gguf", "m.gguf: not found", "give the path of a GGUF checkpoint"),
    ("compile .", ".: is a directory", "give the path of a GGUF file"),
    ("compile m.gguf --kv q8", "--kv: 'q8' is not one of 'f16', 'f32', 'q8_0'",
     "see xpuc compile --help"),
    ("bench . -p 0 -n 0", "-p 0 and -n 0 leave nothing to measure", "give one of them a length"),
    ("bench . -p many", "--n-prompt: 'many' is not a number or several with commas between",
     "see xpuc bench --help"),
    ("bench . -b 1,0", "--batch: 0 is out of range: choose 1 to 256", "see xpuc bench --help"),
    ("bench . --model m.gguf", "--model needs --vs",
     "add --vs llama.cpp, or leave --model out"),
    ("bench . --vs llama.cpp", "--vs llama.cpp: needs the checkpoint",
     "name it with --model FILE.gguf"),
    ("opt x.py --pass fuse_qkv", "x.py: not found", "give the path of a dumped graph"),
    ("opt x.py", "--pass is missing", "type xpuc opt [OPTIONS] FILE"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XPUC_DEBUG", raising=False)


@pytest.mark.parametrize(("line", "message", "hint"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_takes_two_lines(line, message, hint):
    done = invoke(*line.split(), stdin="text")
    assert done.err == f"error: {message}\nhint: {hint}\n"
    assert done.out == ""
    assert done.code == USAGE


def test_text_that_is_not_utf8_names_the_byte(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"caf\xe9")
    done = invoke("run", "m", "-f", "t.txt")
    assert done.err.splitlines()[0] == "error: t.txt: byte 3 is not UTF-8"
    assert done.code == USAGE


def test_a_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "m.gguf").write_text("hello, this is text")
    for command in ("inspect", "run", "tokenize"):
        done = invoke(command, "m.gguf", stdin="text")
        assert done.err.splitlines()[0].startswith("error: m.gguf: "), command
        assert len(done.err.splitlines()) == 2
        assert done.code == USAGE


def test_an_artifact_of_another_version_says_how_to_make_it_anew(tmp_path):
    write_manifest(tmp_path / "m.xpuc", format_version=99)
    done = invoke("inspect", "m.xpuc")
    assert f"artifact format 99, this xpuc reads format {FORMAT_VERSION}" in done.err
    assert "hint: compile the model again: xpuc compile MODEL -o m.xpuc" in done.err
    assert done.code == USAGE


def _failing(monkeypatch, error):
    def fail(path, what=""):
        raise error

    monkeypatch.setattr("xpuc.cli.sources.require", fail)
    return invoke("inspect", "m.gguf")


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (XpucError("m: bad", "mend it"), "m: bad", "mend it"),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), "/out: permission denied",
         "check the path, its permissions and the space left"),
        (OSError(errno.ENOSPC, "No space left on device", "/out"), "/out: no space left on device",
         "check the path, its permissions and the space left"),
        (OSError(errno.ENOSPC, "No space left on device"),
         "reading or writing a file: no space left on device",
         "check the path, its permissions and the space left"),
        (ModuleNotFoundError("No module named 'tvm'", name="tvm"),
         "the compiler needs apache-tvm, which is not installed", "pip install 'xpuc[compile]'"),
        (MemoryError(), "not enough memory", "ask for a smaller context (--ctx), or free some"),
    ],
    ids=["xpuc", "permission", "space", "nameless", "package", "memory"],
)  # fmt: skip
def test_what_the_user_can_mend_takes_two_lines(monkeypatch, error, message, hint):
    done = _failing(monkeypatch, error)
    assert done.err == f"error: {message}\nhint: {hint}\n"
    assert done.code == USAGE


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("blk.0"), "bug: KeyError: 'blk.0' (XPUC_DEBUG=1 shows where)"),
        (ValueError("two\nlines"), "bug: ValueError: two lines (XPUC_DEBUG=1 shows where)"),
        (AssertionError(), "bug: AssertionError: no message (XPUC_DEBUG=1 shows where)"),
        (OSError(errno.EBADF, "Bad file descriptor"),
         "bug: OSError: [Errno 9] Bad file descriptor (XPUC_DEBUG=1 shows where)"),
        (ModuleNotFoundError("No module named 'x'", name="x"),
         "bug: ModuleNotFoundError: No module named 'x' (XPUC_DEBUG=1 shows where)"),
    ],
    ids=["key", "value", "assertion", "descriptor", "module"],
)  # fmt: skip
def test_a_bug_takes_one_line(monkeypatch, error, line):
    assert _failing(monkeypatch, error) == (BUG, "", f"{line}\n")


def test_debug_shows_the_traceback_and_then_the_lines(monkeypatch):
    monkeypatch.setenv("XPUC_DEBUG", "1")
    done = _failing(monkeypatch, XpucError("m: bad", "mend it"))
    assert done.err.startswith("Traceback (most recent call last):")
    assert done.err.endswith("error: m: bad\nhint: mend it\n")
    assert done.code == USAGE


def test_a_path_with_a_line_break_takes_two_lines_too():
    done = invoke("inspect", "a\nb\x1b[1m.gguf")
    assert done.err == (
        "error: a\\nb\\x1b[1m.gguf: not found\n"
        "hint: give the path of a GGUF checkpoint or ARTIFACT\n"
    )


def test_what_the_terminal_s_encoding_lacks_is_replaced(tmp_path):
    path = write_manifest(tmp_path / "m\N{SNOWMAN}.xpuc")
    code = "import sys; from xpuc.__main__ import main; sys.argv[0] = 'xpuc'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", path], capture_output=True, check=False,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"m?.xpuc" in done.stdout


def test_ctrl_c_takes_one_line(monkeypatch):
    assert _failing(monkeypatch, KeyboardInterrupt()) == (INTERRUPTED, "", "interrupted\n")


def test_a_reader_that_closes_the_pipe_is_no_error():
    code = "from xpuc.cli import main; main(['run', '--help'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()
