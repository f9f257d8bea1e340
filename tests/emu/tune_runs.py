"""`xpuc tune` on the emulated GPU: what its tests run, and how they break a bundle."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_runs import invoke
from emu import compiler
from emu.device import Emulator

from xpuc.codegen.cuda import device_code
from xpuc.schedules import RoofLoop, cuda
from xpuc.schedules.cuda import read
from xpuc.tuning import device_programs
from xpuc.tuning.bundle import MANIFEST
from xpuc.tuning.trials import TrialLog

KERNEL = ("--kernel", "linear Q4_0:64x* rows=1")  # the output of attention, and of the feed-forward


def small_roofs(facts: Any) -> list[RoofLoop]:
    n_bytes = 1 << 16
    kernel = read.memory_read(n_bytes)
    return [RoofLoop(read.NAME, kernel, n_bytes // 4, (read.sums(n_bytes),), {"bytes": n_bytes})]


@contextmanager
def on_the_emulated_gpu() -> Iterator[None]:
    """Compilers make code for it, processes started here find it."""
    folder = compiler.driver_folder()
    libraries = [str(folder / name) for name in ("libcuda.so.1", "libcudart.so.13")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_code, "find_compiler", Emulator)
        patch.setattr(device_programs, "find_compiler", Emulator)
        patch.setattr(cuda, "roof_loops", small_roofs)
        patch.setenv("LD_PRELOAD", ":".join(libraries))
        yield


def replay(bundle: Path, results: Path, *more: object) -> Any:
    done = invoke("tune", "--replay", bundle, "--results", results, "--json", *more)
    assert done.code == 0, done.err
    return done.json


def outcomes(results: Path) -> list[str]:
    return [t.outcome for t in TrialLog(results).read()]


def changed(bundle: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The bundle with its manifest changed."""
    with zipfile.ZipFile(bundle) as source, zipfile.ZipFile(to, "w") as file:
        for name in source.namelist():
            data = source.read(name)
            if name == MANIFEST:
                facts = json.loads(data)
                change(facts)
                data = json.dumps(facts).encode()
            file.writestr(name, data)
    return to


def refused(*args: object) -> tuple[str, str]:
    done = invoke("tune", *args)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    return error, hint
