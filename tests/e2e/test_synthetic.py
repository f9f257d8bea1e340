"""An artifact without its weights, from a file of shapes: it runs, and says what it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bench import shapes
from cli_runs import invoke
from stepping import row_by_row

from xpuc.artifact import WEIGHTS, read_manifest
from xpuc.codegen import synthetic
from xpuc.runtime.model import load_model
from xpuc.schedules import target_of
from xpuc.schedules.packed import FORMATS

pytestmark = pytest.mark.slow
SIZES = {"ctx": 64, "max_batch": 1, "max_chunk": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("shapes") / "tiny.gguf"
    shapes.write(shapes.SHAPES["tiny"], "Tiny", path)
    return path


@pytest.fixture(scope="module")
def artifact(compiled, checkpoint):
    return compiled(checkpoint, plainly=True, synthetic=7, **SIZES)


def test_it_carries_no_weights_and_its_model_answers_from_the_seed(artifact):
    assert not (artifact / WEIGHTS).exists()
    ids = [5 + (i * 37) % 250 for i in range(20)]
    first, again = (row_by_row(load_model(artifact), ids) for _ in range(2))
    assert np.isfinite(first).all()
    assert 0.1 < first.std() < 100
    np.testing.assert_array_equal(first, again)


def test_it_never_pretends_to_be_the_model(artifact):
    manifest = read_manifest(artifact)
    assert manifest.name == "Tiny, synthetic weights (seed 7)"
    assert manifest.memory["weights"] > sum(p.size for p in manifest.planes)
    assert "synthetic (seed 7), made up at load" in invoke("inspect", artifact).out
    assert json.loads(invoke("inspect", artifact, "--json").out)["manifest"]["synthetic"]
    done = invoke("run", artifact, "-p", "a", "--raw", "-n", 2, "--json")
    assert "has synthetic weights (seed 7): what it answers means nothing" in done.err
    assert done.code == 0


@pytest.mark.parametrize("format", FORMATS)
def test_made_up_weights_of_a_format_keep_sums_small(format):
    columns = 1024
    ranges = synthetic.matrix_ranges("cuda", format, columns)
    planes = target_of("cuda").planes(format, 4, columns)
    assert len(ranges) == len(planes)
    for plane, span in zip(planes, ranges, strict=True):
        if span is not None and plane.name in ("d", "m", "w") and plane.dtype != "uint16":
            assert -0.5 < span[0] < 0 < span[1] < 0.5
