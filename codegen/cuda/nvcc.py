"""nvcc of an installed CUDA toolkit."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xpuc.codegen.cuda import ptxas
from xpuc.codegen.cuda.compiler import FLAGS, PTXAS_FLAGS, Fatbin, source_error
from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.codegen.cuda.room import without_spills
from xpuc.errors import XpucError

MAJOR = 13  # the release TVM's CUDA library is linked with


@dataclass(frozen=True)
class Nvcc:
    """The compiler of a toolkit; it needs a C++ compiler of the host as well."""

    path: Path
    version: str

    @property
    def name(self) -> str:
        return f"nvcc {self.version}"

    def compile(self, source: str, archs: Sequence[str]) -> Fatbin:
        """CUDA source to one fatbin with a cubin for each architecture."""
        with tempfile.TemporaryDirectory(prefix="xpuc-") as folder:
            text, fatbin = Path(folder) / "xpuc.cu", Path(folder) / "xpuc.fatbin"

            def once(source: str) -> tuple[bytes, Sequence[KernelUsage]]:
                text.write_text(source, encoding="utf-8")
                said = self._run(["--fatbin", *self._options(archs), "-o", str(fatbin), str(text)])
                if said.returncode:
                    raise source_error(self.name, ", ".join(archs), said.stderr + said.stdout)
                return fatbin.read_bytes(), ptxas.parse(said.stderr + said.stdout)

            code, usage = without_spills(once, source)
            return Fatbin(code, tuple(usage), source)

    def _options(self, archs: Sequence[str]) -> list[str]:
        numbers = [arch.removeprefix("sm_") for arch in archs]
        codes = [f"--generate-code=arch=compute_{n},code=sm_{n}" for n in numbers]
        return ["-Xptxas", ",".join(PTXAS_FLAGS), *FLAGS, *codes]

    def _run(self, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
        command = [str(self.path), *options]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise _cannot_start(self.path, error) from None


def nvcc_at(path: Path) -> Nvcc:
    """The compiler at a path, of a release that fits; XpucError says what does not."""
    try:
        said = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise _cannot_start(path, error) from None
    found = re.search(r"release (\d+)\.\d+, V(\S+)", said.stdout)
    if found is None:
        raise XpucError(f"{path}: does not say its release", "set CUDACXX to another nvcc")
    if int(found[1]) != MAJOR:
        raise XpucError(
            f"{path}: CUDA {found[2]}, xpuc needs CUDA {MAJOR}",
            "pip install 'xpuc[cuda]', which brings a compiler that fits, and unset CUDACXX",
        )
    return Nvcc(path, found[2])


def _cannot_start(path: Path, error: OSError) -> XpucError:
    return XpucError(f"{path}: cannot be started ({error.strerror})", "set CUDACXX to an nvcc")
