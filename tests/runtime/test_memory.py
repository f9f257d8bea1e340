"""The memory statement: its terms, the K/V blocks that free memory affords, what counts as free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import manifest

from xpuc.artifact import Copy
from xpuc.errors import ArtifactError
from xpuc.runtime import memory

MODEL = manifest()
# Two layers alike but that the second sees 8 tokens, and steps are of 16: its ring is 7 blocks.
BLOCK, RING = 4 * 2 * 2 * 16 * 2, 7
LOGITS = MODEL.max_out_rows * MODEL.n_vocab * 4
RUNTIME = memory.RUNTIME_BYTES + MODEL.n_vocab * memory.TOKEN_BYTES
FIXED = MODEL.memory["weights"] + MODEL.memory["activations"] + LOGITS + RUNTIME
FREE = FIXED + memory.RESERVE_BYTES + 40 * BLOCK + BLOCK // 2


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: FREE)


@pytest.mark.usefixtures("free")
def test_the_pools_hold_the_sequences_asked_for_or_what_fits() -> None:
    assert n_blocks(2, 40) == (20, 14)
    assert n_blocks(2, 41) == (22, 14)
    assert n_blocks(2, 20) == (10, 10), "a context shorter than the ring"
    assert n_blocks(4, 40) == (40 * 10 // 17, 40 * 7 // 17), "40 blocks shared out as one wants 17"
    assert n_blocks(2, 40, rings=False) == (20, 20)


def n_blocks(n_sequences: int, context: int, *, rings: bool = True) -> tuple[int, ...]:
    statement = memory.plan(MODEL, n_sequences, context, rings=rings)
    assert [pool.window for pool in statement.pools] == [0, 8]
    assert all(pool.n_bytes == pool.n_blocks * BLOCK for pool in statement.pools)
    return tuple(pool.n_blocks for pool in statement.pools)


@pytest.mark.usefixtures("free")
def test_the_terms_add_up_and_each_has_a_line() -> None:
    statement = memory.plan(MODEL, 2, 40)
    terms = (4200, 1 << 20, LOGITS, 20 * BLOCK, 2 * RING * BLOCK, RUNTIME)
    assert statement.total == sum(terms)
    lines = statement.lines()
    shown = [float(line.split()[-2]) for line in lines]
    assert shown == [round(term / 2**20, 1) for term in (FREE, *terms, sum(terms))]
    assert lines[4].startswith("K/V pool (20 blocks)")
    assert lines[5].startswith("K/V pool of 8 (14 blocks)")


@pytest.mark.usefixtures("free")
def test_one_sequence_must_fit() -> None:
    assert n_blocks(1, 132) == (33, RING)
    with pytest.raises(ArtifactError, match=r"Tiny: K/V for one sequence of 133 tokens") as caught:
        memory.plan(MODEL, 1, 133)
    assert "--ctx" in caught.value.hint


def test_kernels_of_a_gpu_can_count_what_a_pool_holds() -> None:
    gpu = replace(MODEL, target=MODEL.target | {"kind": "cuda"})
    elements = BLOCK // 2 // 2  # of keys, as of values, in float16
    most = memory.GPU_ELEMENTS // elements
    tokens = most * MODEL.kv.block_tokens
    assert [p.n_blocks for p in memory.plan(gpu, 3, tokens, free=1 << 50).pools] == [most, 3 * RING]
    assert memory.plan(MODEL, 3, tokens + 1, free=1 << 50).pools[0].n_blocks > 2 * most
    with pytest.raises(ArtifactError, match="more elements than kernels of a GPU count") as caught:
        memory.plan(gpu, 1, tokens + 1, free=1 << 50)
    assert f"at most {tokens} tokens" in caught.value.hint


def test_less_than_the_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: FIXED)
    with pytest.raises(ArtifactError, match="0 MiB are free beside the model"):
        memory.plan(MODEL, 1, 4)


COPIES = (Copy("a.weight", "copy_q4_k", 3 << 20, ("a.weight.qs",)),)
SPARE = FREE - FIXED - memory.RESERVE_BYTES - 2 * (10 + RING) * BLOCK  # beside two sequences


@pytest.mark.parametrize(
    ("policy", "copies", "spare", "taken", "said"),
    [
        ("int8", COPIES, 3 << 20, 3 << 20, "int8 copies of 3.0 MiB, as compiled"),
        ("auto", COPIES, 3 << 20, 3 << 20, "int8 copies of 3.0 MiB (auto: 3.0 MiB are free"),
        ("auto", COPIES, (3 << 20) - 1, 0, "packed (auto: int8 copies of 3.0 MiB are too much"),
        ("auto", (), 3 << 20, 0, "pay for no matrix"),
    ],
)
def test_copies_for_prompts(
    policy: str, copies: tuple[Copy, ...], spare: int, taken: int, said: str
) -> None:
    model = manifest(prefill_weights=policy, copies=copies)
    statement = memory.plan(model, 2, 40, free=FREE - SPARE + spare)
    assert statement.prefill.copies == taken
    assert statement.total == FIXED + taken + 2 * (10 + RING) * BLOCK
    assert said in statement.lines()[-1]
    assert any("int8 copies for prompts" in line for line in statement.lines()) == bool(taken)


def test_copies_that_are_asked_for_go_before_sequences() -> None:
    model = manifest(prefill_weights="int8", copies=COPIES)
    free = FREE - SPARE + COPIES[0].size
    assert memory.plan(model, 2, 40, free=free).pools[0].n_blocks == 20
    assert memory.plan(model, 2, 40, free=free - BLOCK).pools[0].n_blocks < 20


def machine(root: Path, cgroup: str, **files: str) -> Path:
    """What Linux says of a machine with 8 MiB to be had; `files` is a cgroup's, by path."""
    given = {
        "proc/meminfo": "MemTotal: 16384 kB\nMemFree: 1024 kB\nMemAvailable: 8192 kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }
    for name, text in given.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: str, use: int, cache: int) -> dict[str, str]:
    """A cgroup of version 2."""
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{use}\n",
        f"{folder}/memory.stat": f"anon 17\ninactive_file {cache}\nactive_file 5\n",
    }


def test_a_machine_without_limits(tmp_path: Path) -> None:
    assert memory.free_bytes(machine(tmp_path, "0::/\n")) == 8 << 20


def test_a_limit_of_the_process_s_own_group(tmp_path: Path) -> None:
    files = group("sys/fs/cgroup/a/b", "5000", 3000, 700)
    assert memory.free_bytes(machine(tmp_path, "0::/a/b\n", **files)) == 2700


def test_the_tightest_limit_above_it(tmp_path: Path) -> None:
    files = group("sys/fs/cgroup/a/b", "max", 100, 0) | group("sys/fs/cgroup/a", "900", 400, 0)
    assert memory.free_bytes(machine(tmp_path, "0::/a/b\n", **files)) == 500


def test_a_container_that_knows_its_group_by_the_host_s_name(tmp_path: Path) -> None:
    files = group("sys/fs/cgroup", "900", 400, 0)
    assert memory.free_bytes(machine(tmp_path, "0::/docker/1f2e\n", **files)) == 500


def test_a_limit_above_what_the_machine_has(tmp_path: Path) -> None:
    files = group("sys/fs/cgroup", str(1 << 40), 400, 0)
    assert memory.free_bytes(machine(tmp_path, "0::/\n", **files)) == 8 << 20


def test_a_group_that_uses_more_than_its_limit(tmp_path: Path) -> None:
    files = group("sys/fs/cgroup", "900", 1000, 0)
    assert memory.free_bytes(machine(tmp_path, "0::/\n", **files)) == 0


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/a"
    files = {
        f"{folder}/memory.limit_in_bytes": "5000\n",
        f"{folder}/memory.usage_in_bytes": "3000\n",
        f"{folder}/memory.stat": "inactive_file 1\ntotal_inactive_file 600\n",
    }
    own = "5:cpu,cpuacct:/x\n4:hugetlb,memory:/a\n1:name=systemd:/y\n"
    assert memory.free_bytes(machine(tmp_path, own, **files)) == 2600


def test_this_machine_has_some() -> None:
    assert memory.free_bytes() > 64 << 20
