"""What running a model allocates: nothing for each token, and for a prompt whatever its depth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import allocations
import pytest

from xpuc.artifact import read_manifest

TESTS = Path(allocations.__file__).parent
# What grows with an answer: its tokens and its text, and every full block's link to be found by.
# (`<string>` is the dataclass of a link; the codec makes the text.)
ANSWER = {"generation.py", "candidates.py", "tokenizer.py", "<frozen codecs>"}
BLOCKS = {"blocks.py", "kv_blocks.py", "prefix.py", "<string>"}
# Bytes: an int (32), a piece of text (49 and some characters), two entries of lists that grow by
# eighths.
GROWTH_PER_TOKEN = 112
GROWTH_PER_BLOCK = 640
NOISE = 512  # bytes in all other files: a counter becomes a larger int
# Where a sequence stands becomes one too: in itself and in two spans that are kept.
NOISE_PER_SEQUENCE = 3 * 32


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return allocations.build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def tiny(compiled: Callable[..., Path], tiny_model: Callable[..., Path]) -> Path:
    gguf = tiny_model("llama", weights="Q8_0")
    return compiled(gguf, plainly=True, ctx=512, max_batch=8, max_chunk=32)


def decoded(shim: Path, artifact: Path, n: int, how: str) -> dict[str, Any]:
    script = TESTS / "steady_decode.py"
    found: dict[str, Any] = json.loads(allocations.preloaded(shim, script, artifact, n, how))
    return found


def check_growth(found: dict[str, Any], n_sequences: int) -> None:
    growth, n = found["growth"], found["tokens"]
    assert sum(growth.get(file, 0) for file in ANSWER) <= GROWTH_PER_TOKEN * n, growth
    assert sum(growth.get(file, 0) for file in BLOCKS) <= GROWTH_PER_BLOCK * n // 16 + 512, growth
    rest = {file: size for file, size in growth.items() if file not in ANSWER | BLOCKS}
    noise = NOISE + NOISE_PER_SEQUENCE * n_sequences
    assert sum(max(0, size) for size in rest.values()) <= noise, rest


@pytest.mark.slow
@pytest.mark.parametrize(("n", "how"), [(1, "greedy"), (8, "greedy"), (8, "sampled")])
def test_decoding_allocates_nothing(n: int, how: str, shim: Path, tiny: Path) -> None:
    found = decoded(shim, tiny, n, how)
    assert found["system"] == []
    assert found["arrays"] == {}
    check_growth(found, n)


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_decodes_without_allocating(
    shim: Path, compiled: Callable[..., Path], smollm2_gguf: Path
) -> None:
    found = decoded(shim, compiled(smollm2_gguf), 1, "greedy")
    assert found["system"] == []
    assert found["arrays"] == {}
    check_growth(found, 1)


@pytest.mark.slow
def test_depth_costs_a_prompt_no_memory(
    shim: Path, compiled: Callable[..., Path], tiny_model: Callable[..., Path]
) -> None:
    """What is planned for 2 layers is what is planned for 24, and asked of the system."""
    planned, asked = {}, {}
    for layers in (2, 24):
        gguf = tiny_model("llama", weights="Q8_0", layers=layers)
        path = compiled(gguf, plainly=True, ctx=512, max_batch=1, max_chunk=64)
        planned[layers] = read_manifest(path).memory["activations"]
        printed = allocations.preloaded(shim, TESTS / "first_prefill.py", path)
        asked[layers] = json.loads(printed)
    assert planned[2] == planned[24]
    assert asked[2] == asked[24]
    # The pool asks for whole pages, one or more for each of a few dozen storages.
    assert planned[24] <= asked[24] <= planned[24] + 24 * 4096


def test_the_counters_count(shim: Path) -> None:
    """Each of them sees what it is there for, and says where it was."""
    found = json.loads(allocations.preloaded(shim, TESTS / "allocations_made.py"))
    assert found["system"] == [["malloc", 300], ["calloc", 512], ["realloc", 4000], ["mmap", 8192]]
    assert [(line.partition(":")[0], n) for line, n in found["arrays"].items()] == [
        ("allocations_made.py", 2),
        ("allocations_made.py", 1),
    ]
