"""The fake driver goes in before tvm: this folder needs a pytest process of its own.

`pytest tests/emu` runs it; a plain `pytest` does not collect it (norecursedirs).
"""

from __future__ import annotations

import pytest
from emu import fake_driver

fake_driver.load()


@pytest.fixture(params=fake_driver.ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs in each order of threads and blocks."""
    monkeypatch.setenv("XPUC_EMU_ORDER", request.param)
    return str(request.param)
