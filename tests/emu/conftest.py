"""The fake driver goes in before tvm: this folder needs a pytest process of its own.

`pytest tests/emu` runs it; a plain `pytest` does not collect it (norecursedirs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emu import fake_driver

fake_driver.load()

SIZES = {"ctx": 128, "max_batch": 2, "max_chunk": 32}  # of the tiny models


@pytest.fixture(params=fake_driver.ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs in each order of threads and blocks."""
    monkeypatch.setenv("XPUC_EMU_ORDER", request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def emulated_compiler() -> Iterator[None]:
    """What compiles for cuda makes code for the emulated GPU."""
    from emu.device import Emulator  # imports tvm

    from xpuc.codegen.cuda import device_code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_code, "find_compiler", Emulator)
        yield


@pytest.fixture(scope="session")
def on_gpu(
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    emulated_compiler: None,
) -> Callable[[str], Path]:
    """on_gpu(name): the artifact of a tiny model for the emulated GPU, compiled once."""
    from xpuc.codegen.compile import Options, compile_model
    from xpuc.schedules import RoofLoop, cuda
    from xpuc.schedules.cuda import read

    def roof_loops(_facts: Any) -> list[RoofLoop]:
        """Of a memory that is read in a moment."""
        n = 1 << 16
        return [RoofLoop(read.NAME, read.memory_read(n), n // 4, (read.sums(n),), {"bytes": n})]

    made: dict[str, Path] = {}

    def artifact(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("gpu")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cuda, "roof_loops", roof_loops)
                made[name] = compile_model(
                    tiny_model(name, weights="Q4_0"), "cuda -arch=sm_90a", folder / f"{name}.xpuc",
                    options=Options(**SIZES),
                ).path  # fmt: skip
        return made[name]

    return artifact


@pytest.fixture(scope="module")
def tuned_on_gpu() -> Iterator[None]:
    """`xpuc tune` for the emulated GPU."""
    from emu.tune_runs import on_the_emulated_gpu

    with on_the_emulated_gpu():
        yield


@pytest.fixture(scope="session")
def bundle(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Candidates of two operations of a tiny model, three each, of which one is in use."""
    from cli_runs import invoke
    from emu.tune_runs import KERNEL, on_the_emulated_gpu

    path = tmp_path_factory.mktemp("bundle") / "tiny.zip"
    checkpoint = tiny_model("llama", weights="Q4_0")
    with on_the_emulated_gpu():
        done = invoke(
            "tune", checkpoint, "--target", "cuda -arch=sm_90a", *KERNEL, "--candidates", 2,
            "--export", path, "--db", path.parent / "none", "--json",
        )  # fmt: skip
    assert done.code == 0, done.err
    assert done.json["arch"] == "sm_90a"
    assert [len(task["kept"]) for task in done.json["tasks"]] == [3, 3]
    assert all(task["tried"] > 6 for task in done.json["tasks"])
    return path
