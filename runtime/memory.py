"""The memory statement: what a loaded model takes, term by term, and the K/V blocks that fit."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xpuc.artifact import Manifest
from xpuc.errors import ArtifactError
from xpuc.runtime.kv_blocks import ring_blocks

RESERVE_BYTES = 256 << 20  # left to the rest of the machine
RUNTIME_BYTES = 72 << 20  # Python and the libraries
TOKEN_BYTES = 448  # of a token in the tokenizer's tables
GPU_ELEMENTS = 1 << 31  # of an array: kernels of a GPU count them in 32 bits
_CGROUPS = {  # mount, limit, use, and what of the use can be had back at once
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PoolMemory:
    """K/V of the layers that see `window` tokens (0: all), `n_bytes` for `n_blocks` blocks."""

    window: int
    n_blocks: int
    n_bytes: int


@dataclass(frozen=True)
class PrefillWeights:
    """What prompts are multiplied with: `copies` bytes of int8 copies beside the packed weights.

    `reason` says why there are any, or why none.
    """

    copies: int
    reason: str


@dataclass(frozen=True)
class MemoryStatement:
    """Bytes by term."""

    free: int
    weights: int
    prefill: PrefillWeights
    activations: int
    logits: int
    pools: tuple[PoolMemory, ...]
    runtime: int

    @property
    def kv_pool(self) -> int:
        """Of all pools."""
        return sum(pool.n_bytes for pool in self.pools)

    @property
    def total(self) -> int:
        fixed = self.weights + self.prefill.copies + self.activations + self.logits + self.runtime
        return fixed + self.kv_pool

    def lines(self) -> list[str]:
        """One line a term, in MiB, and one on the weights of prompts if they were asked about."""
        terms = (
            ("free memory", self.free),
            ("weights (mapped file)", self.weights),
            *([("int8 copies for prompts", self.prefill.copies)] if self.prefill.copies else []),
            ("activations (planned)", self.activations),
            ("logits", self.logits),
            *(_pool_term(pool) for pool in self.pools),
            ("runtime and tokenizer", self.runtime),
            ("total", self.total),
        )
        lines = [f"{name:<28}{value / 2**20:>10.1f} MiB" for name, value in terms]
        if self.prefill != PACKED:
            lines.append(f"prefill weights: {self.prefill.reason}")
        return lines


PACKED = PrefillWeights(0, "packed, as compiled")


def _pool_term(pool: PoolMemory) -> tuple[str, int]:
    window = f" of {pool.window}" if pool.window else ""
    return f"K/V pool{window} ({pool.n_blocks} blocks)", pool.n_bytes


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had without swapping, on the machine and in the process's container."""
    info = root / "proc" / "meminfo"
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min([int(line.split()[1]) * 1024, *_left_by_cgroups(root)])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """What each memory limit above the process leaves."""
    own = root / "proc" / "self" / "cgroup"
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & _CGROUPS.keys():
            mount, limit, use, reclaimable = _CGROUPS[controller]
            # A container sees its own group at the mount, under the host's name or none.
            group = root / mount / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root / mount) and (folder / limit).is_file():
                    yield from _left(folder / limit, folder / use, reclaimable)


def _left(limit: Path, use: Path, reclaimable: str) -> Iterator[int]:
    most = limit.read_text().strip()
    if most == "max":
        return
    stat = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
    yield max(0, int(most) - int(use.read_text()) + int(stat.get(reclaimable, 0)))


def plan(
    manifest: Manifest,
    n_sequences: int,
    context: int,
    *,
    rings: bool = True,
    free: int | None = None,
) -> MemoryStatement:
    """Blocks for `n_sequences` sequences of `context` tokens, or as many as memory affords.

    With `rings` layers with a window have as many as a sequence holds at a time. `free` bytes of
    memory can be had; default: this machine's. On a GPU no array has more than GPU_ELEMENTS.
    """
    bare = MemoryStatement(
        free=free_bytes() if free is None else free,
        weights=manifest.memory["weights"],
        prefill=PACKED,
        activations=manifest.memory["activations"],
        # What a step returns is no part of what the compiler planned.
        logits=manifest.max_out_rows * manifest.n_vocab * 4,
        pools=(),
        runtime=RUNTIME_BYTES + manifest.n_vocab * TOKEN_BYTES,
    )
    of_one = sequence_pools(manifest, context, rings=rings)
    n_bytes = sum(pool.n_bytes for pool in of_one)
    spare = bare.free - bare.total - RESERVE_BYTES - n_sequences * n_bytes
    bare = dataclasses.replace(bare, prefill=_prefill_weights(manifest, spare))
    left = max(0, bare.free - bare.total - RESERVE_BYTES)
    if n_bytes > left:
        raise ArtifactError(
            f"{manifest.name}: K/V for one sequence of {context} tokens takes"
            f" {n_bytes >> 20} MiB, {left >> 20} MiB are free beside the model",
            "ask for a smaller context (--ctx), or free some memory",
        )
    pools = []
    for pool in of_one:
        most = _countable_blocks(manifest, pool.window)
        if pool.n_blocks > most:
            raise ArtifactError(
                f"{manifest.name}: K/V for one sequence of {context} tokens has more elements than"
                " kernels of a GPU count",
                f"ask for a context of at most {most * manifest.kv.block_tokens} tokens (--ctx)",
            )
        n_blocks = min(n_sequences * pool.n_blocks, pool.n_blocks * left // n_bytes, most)
        pools.append(PoolMemory(pool.window, n_blocks, n_blocks * pool.n_bytes // pool.n_blocks))
    return dataclasses.replace(bare, pools=tuple(pools))


def _countable_blocks(manifest: Manifest, window: int) -> int:
    """The most that a pool may have for kernels to find every element of its arrays."""
    if manifest.target["kind"] != "cuda":
        return sys.maxsize
    kv = manifest.kv
    return GPU_ELEMENTS // max(
        math.prod(array.shape)
        for layer, (*_, seen) in enumerate(kv.layers)
        if seen == window
        for array in kv.arrays(layer)
    )


def _prefill_weights(manifest: Manifest, spare: int) -> PrefillWeights:
    """What prompts are multiplied with, where `spare` bytes are free beside all K/V wanted."""
    copies = manifest.copy_bytes
    size = f"int8 copies of {copies / 2**20:,.1f} MiB"
    match manifest.prefill_weights:
        case "packed":
            return PACKED
        case "int8":
            return PrefillWeights(copies, f"{size}, as compiled")
    if not copies:
        return PrefillWeights(0, "packed (auto: int8 copies pay for no matrix of the model)")
    free = f"{max(0, spare) / 2**20:,.1f} MiB are free beside weights and K/V"
    if copies > spare:
        return PrefillWeights(0, f"packed (auto: {size} are too much, {free})")
    return PrefillWeights(copies, f"{size} (auto: {free})")


def sequence_pools(
    manifest: Manifest, context: int, *, rings: bool = True
) -> tuple[PoolMemory, ...]:
    """What one sequence of `context` tokens takes of each pool."""
    kv, found = manifest.kv, []
    for window in kv.windows:
        n_blocks = -(-context // kv.block_tokens)
        if window and rings:
            ring = ring_blocks(window, manifest.max_chunk, kv.block_tokens)
            n_blocks = min(n_blocks, ring)
        found.append(PoolMemory(window, n_blocks, n_blocks * kv.block_bytes(window)))
    return tuple(found)
