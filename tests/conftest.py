"""What all tests share: the real models, the tiny ones, golden files, and that skips are few."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
from hypothesis import settings

# Before anything imports tvm or numpy: the tests share two cores, and a thread of OpenBLAS that
# waits for a core keeps the others from theirs.
os.environ.setdefault("TVM_NUM_THREADS", "2")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile("xpuc", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "xpuc")

GOLDEN = Path(__file__).parent / "golden"
# What a test may be skipped for: no such device here, or a peer that is not installed.
MAY_SKIP = ("hardware", "peer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden with what is found"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what goes on in the background without Ctrl-C, and so all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "peer: compares with an optional package (skipped without it)"
    )


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    long = report.longrepr
    return str(long[2]) if isinstance(long, tuple) else str(long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip that is neither `hardware` nor `peer` fails: it hides a test that should run."""
    report = yield
    expected = hasattr(report, "wasxfail") or any(map(item.get_closest_marker, MAY_SKIP))
    if report.skipped and not expected:
        report.outcome = "failed"
        report.longrepr = f"skipped, but not marked {' or '.join(MAY_SKIP)}: {skip_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole file may not skip itself: it has no mark to say why."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a test file skipped itself: {skip_reason(report)}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every skip, with its reason: a run that skipped says so."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("skipped")
    for report in skipped:
        terminalreporter.write_line(f"{report.nodeid}: {skip_reason(report)}")


def real_model(name: str) -> Path:
    """A missing model fails: the tests that need it are the ones that show the product works."""
    try:
        return models.model_path(name)
    except models.ModelError as error:
        pytest.fail(f"no {name}: {error}")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Models run on one thread where nobody asks for more: two that share their cores with another
    process wait for each other at every kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xpuc.runtime.model.default_threads", lambda: 1)
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf."""
    return real_model("smollm2")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """gemma-3-270m-q4_k_m.gguf."""
    return real_model("gemma3")


def tokenizer_spec(path: Path) -> Any:
    from xpuc.frontend.gguf import open_gguf
    from xpuc.frontend.tokenizer import convert_tokenizer

    return convert_tokenizer(open_gguf(path).metadata, path=str(path))


@pytest.fixture(scope="session")
def smollm2_spec(smollm2_gguf: Path) -> Any:
    """What is made of SmolLM2's tokenizer, a frontend.tokenizer.TokenizerSpec."""
    return tokenizer_spec(smollm2_gguf)


@pytest.fixture(scope="session")
def gemma3_spec(gemma3_gguf: Path) -> Any:
    """The same of Gemma 3's, which takes seconds."""
    return tokenizer_spec(gemma3_gguf)


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> Any:
    """The oracle of SmolLM2, a reference.Reference; its widened weights (0.5 GB) live as long."""
    from reference import Reference  # imports gguf

    return Reference(smollm2_gguf)


@pytest.fixture(scope="session")
def gemma3_reference(gemma3_gguf: Path) -> Any:
    """The oracle of Gemma 3; its widened weights take 1.1 GB, its file seconds to read."""
    from reference import Reference  # imports gguf

    return Reference(gemma3_gguf)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(name, **changes): the GGUF of a row of tiny_models.TINY, written once."""
    from tiny_models import write_tiny  # imports gguf

    folder = tmp_path_factory.mktemp("tiny")
    written: dict[str, Path] = {}

    def path_of(name: str, **changes: Any) -> Path:
        key = repr((name, sorted(changes.items())))
        if key not in written:
            written[key] = write_tiny(name, folder / f"{name}-{len(written)}.gguf", **changes)
        return written[key]

    return path_of


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """golden(name): a file of tests/golden, parsed if it is JSON."""

    def load(name: str) -> Any:
        text = (GOLDEN / name).read_text(encoding="utf-8")
        return json.loads(text) if name.endswith(".json") else text

    return load


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """check_golden(name, text): text equals the golden file; --update-golden writes it instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"no {path}: write it with pytest --update-golden"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs: see --update-golden"

    return check
