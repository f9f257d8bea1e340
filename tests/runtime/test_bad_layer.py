"""Of logits that are no numbers the layer is found in which the first of them is."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xpuc.artifact import WEIGHTS
from xpuc.runtime.engine import load

pytestmark = pytest.mark.slow
PROMPT = list(range(5, 30))


def damaged(artifact: Path, tensor: str, to: Path) -> Path:
    """A copy of an artifact with a NaN in a tensor of float32."""
    copy = shutil.copytree(artifact, to)
    with (copy / WEIGHTS).open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        start, _ = json.loads(file.read(length))[tensor]["data_offsets"]
        file.seek(8 + length + start)
        file.write(np.float32(math.nan).tobytes())
    return copy


@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        ("blk.0.attn_norm.weight", "layer 0"),
        ("blk.1.attn_norm.weight", "layer 1"),
        ("blk.1.ffn_norm.weight", "layer 1"),
        ("output_norm.weight", "the output head"),
    ],
)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1}], ids=["greedy", "sampled"])
def test_it_is_named_when_asked(
    artifacts: dict[str, Path], tensor: str, where: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("llama", "gemma3_pattern"):  # without and with a window
        path = damaged(artifacts[name], tensor, tmp_path / name)
        with load(path, find_bad_layer=True) as engine:
            results = engine.generate([PROMPT, PROMPT[:7]], max_tokens=2, **options)
            for result in results:
                assert result.error is not None
                assert f"the first bad numbers are those of {where} (" in result.error
            assert engine.kv.n_used == 0
        with load(path) as engine:
            error = engine.generate(PROMPT, max_tokens=2, **options).error
            assert error is not None
            assert "the first bad numbers" not in error


def test_what_gives_numbers_again_is_told_as_that(artifact: Path) -> None:
    from xpuc.runtime.bad_layer import first_bad_layer

    with load(artifact, find_bad_layer=True) as engine:
        engine.add_request(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        engine.step()
        (sequence,) = engine.scheduler.running
        said = first_bad_layer(engine.model, sequence)  # type: ignore[arg-type]
        assert said == "computed again, every layer gives numbers"


def test_k_v_that_was_given_back_is_not_read(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """A window of 8 from the last token of the first block: that block is free by then."""
    path = damaged(artifacts["gemma3_pattern"], "output_norm.weight", tmp_path / "it")
    with load(path, find_bad_layer=True) as engine:
        error = engine.generate(PROMPT[:23], max_tokens=2).error
        assert error is not None
        assert error.endswith("K/V that its window begins with is gone")
