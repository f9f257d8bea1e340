"""What the tests of sampling share: logits, and a draw with every sampler off but those named."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from xpuc.runtime.candidates import Candidates
from xpuc.runtime.sampler import SAMPLERS, Draw
from xpuc.runtime.sampling_params import SamplingParams

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
NAMED = {each.name: each for each in SAMPLERS}


def tenths(seed: int, n: int) -> Any:
    """Logits a tenth apart at least: a sum that decides is then not decided by rounding."""
    return (np.random.default_rng(seed).integers(-200, 200, n) / 10).astype(np.float32)


def candidates_of(logits: Any) -> Candidates:
    candidates = Candidates()
    candidates.begin(np.asarray(logits, np.float32))
    return candidates


def top_ids(logits: Any, k: int) -> list[int]:
    """The `k` likeliest, as a chain finds them."""
    candidates = candidates_of(logits)
    candidates.keep_top(k)
    ids: list[int] = candidates.ids.tolist()
    return ids


some_logits = st.builds(tenths, st.integers(0, 2**32), st.integers(1, 300))


def draw_of(tokens: list[int] | None = None, *, seed: int = 0, **options: Any) -> Draw:
    random = np.random.Generator(np.random.PCG64(seed))
    return Draw(SamplingParams(**(OFF | options)), tokens or [], random, {})
