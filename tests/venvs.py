"""Virtual environments that have xpuc's wheel as a user would install it, and what runs in them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13")  # of CPython, that xpuc runs on


def build_wheel(folder: Path) -> Path:
    """xpuc's wheel, built as pip builds it: in an environment of its own."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*pip, str(REPO)], check=True)
    (wheel,) = folder.glob("xpuc-*.whl")
    return wheel


def interpreters() -> dict[str, Path]:
    """Those of VERSIONS that this machine has, this process's first: on PATH, or pyenv's."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {own: Path(sys.executable)}
    for version in VERSIONS:
        for python in _candidates(version):
            if version not in found and _version(python) == version:
                found[version] = python
    return found


def _candidates(version: str) -> list[Path]:
    on_path = [Path(each) / f"python{version}" for each in os.get_exec_path()]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return [*on_path, *sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)]


def _version(python: Path) -> str | None:
    """What an interpreter says it is; None if it does not start, as a shim of pyenv may not."""
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(frozen=True)
class Venv:
    """A virtual environment, and the folder its programs are started from."""

    folder: Path
    cwd: Path

    def __call__(self, program: str, *args: object, **environment: str) -> str:
        """What a program prints that must succeed."""
        done = self.start(program, *args, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(
        self, program: str, *args: object, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A program of the venv, without what pytest adds to the environment."""
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TVM"))}
        return subprocess.run(
            [self.folder / "bin" / program, *map(str, args)],
            cwd=self.cwd, env=outer | environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def importable(self, names: Sequence[str]) -> list[str]:
        """Those of the packages that are there."""
        code = (
            "import importlib.util, sys;"
            "print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))"
        )
        return self("python", "-c", code, *names).split()

    def installed_bytes(self) -> int:
        """Bytes of what xpuc brought."""
        files = [f for f in self.packages.rglob("*") if f.is_file() and f.suffix != ".pyc"]
        return sum(f.stat().st_size for f in files)


def make_venv(folder: Path, requirement: str, python: Path | str = sys.executable) -> Venv:
    """A new venv of an interpreter in `folder`, with this installed and nothing else."""
    made = Venv(folder / "venv", folder / "else where")
    made.cwd.mkdir(parents=True)
    subprocess.run([python, "-m", "venv", "--without-pip", made.folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(made.folder / "bin" / "python")]
    quietly = ["--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *quietly, requirement], check=True)
    return made
