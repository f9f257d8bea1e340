"""llama.cpp as the peer: found among the installed packages, run in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from xpuc.bench import peer_worker
from xpuc.bench.cases import Case
from xpuc.errors import FileError, RequestError, UnsupportedError

_SEARCH = (
    "from importlib.util import find_spec;"
    "print(next((n for n in ('llama_cpp', 'xllamacpp') if find_spec(n)), ''))"
)


class Peer:
    """A process with the model loaded, once for each setting of flash attention."""

    def __init__(
        self, model: Path, threads: int, cases: Sequence[Case], python: str | None = None
    ) -> None:
        self._model = model
        interpreter = python or sys.executable
        package = find_package(interpreter)
        settings = {
            "package": package,
            "model": str(model),
            "threads": threads,
            "n_context": max(case.n_context for case in cases),
            "n_sequences": max(case.batch for case in cases),
        }
        self._process = subprocess.Popen(
            [interpreter, peer_worker.__file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.description: str = self._answer()["description"]

    def run(self, case: Case, *, flash: bool) -> float:
        """Seconds the case takes there, with flash attention or without."""
        request = {
            "kind": case.kind, "n_tokens": case.n_tokens, "depth": case.depth,
            "batch": case.batch, "flash": flash,
        }  # fmt: skip
        pipe = cast("IO[str]", self._process.stdin)
        try:
            print(json.dumps(request), file=pipe, flush=True)
        except BrokenPipeError:
            raise self._died() from None
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and did not read the last case
            cast("IO[str]", self._process.stdin).close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        cast("IO[str]", self._process.stdout).close()

    def _answer(self) -> dict[str, Any]:
        line = cast("IO[str]", self._process.stdout).readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.close()
            raise UnsupportedError(f"llama.cpp: {answer['error']}", "leave --vs out, or this test")
        return answer

    def _died(self) -> FileError:
        code = self._process.wait()
        return FileError(
            f"llama.cpp ended (exit code {code}) with {self._model}",
            "it may not read this file: try another --model",
        )


def find_package(python: str) -> str:
    """`llama_cpp` (it is built for the CPU) or `xllamacpp`, whichever that interpreter has."""
    try:
        found = subprocess.run(
            [python, "-c", _SEARCH], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise RequestError(
            f"--peer-python {python}: does not run", "give a Python interpreter"
        ) from None
    if not found:
        raise RequestError(
            "--vs llama.cpp: no package of it is installed",
            "pip install 'xpuc[peer]', or llama-cpp-python, which is built for this CPU",
        )
    return found
