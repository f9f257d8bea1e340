"""The memory statement: what a loaded model takes, term by term, and the K/V blocks that fit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xpuc.artifact import Manifest
from xpuc.errors import ArtifactError

RESERVE_BYTES = 256 << 20  # left to the rest of the machine
RUNTIME_BYTES = 72 << 20  # Python and the libraries
TOKEN_BYTES = 448  # of a token in the tokenizer's tables
_CGROUPS = {  # mount, limit, use, and what of the use can be had back at once
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class MemoryStatement:
    """Bytes by term. `kv_pool` is for `n_blocks` blocks."""

    free: int
    weights: int
    activations: int
    logits: int
    n_blocks: int
    kv_pool: int
    runtime: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.logits + self.kv_pool + self.runtime

    def lines(self) -> list[str]:
        """One line a term, in MiB."""
        terms = (
            ("free memory", self.free),
            ("weights (mapped file)", self.weights),
            ("activations (planned)", self.activations),
            ("logits", self.logits),
            (f"K/V pool ({self.n_blocks} blocks)", self.kv_pool),
            ("runtime and tokenizer", self.runtime),
            ("total", self.total),
        )
        return [f"{name:<28}{value / 2**20:>10.1f} MiB" for name, value in terms]


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


def plan(manifest: Manifest, n_sequences: int, context: int) -> MemoryStatement:
    """Blocks for `n_sequences` sequences of `context` tokens, or as many as memory affords."""
    block = manifest.kv.bytes_per_token * manifest.kv.block_tokens
    per_sequence = -(-context // manifest.kv.block_tokens)
    bare = MemoryStatement(
        free=free_bytes(),
        weights=manifest.memory["weights"],
        activations=manifest.memory["activations"],
        # What a step returns is no part of what the compiler planned.
        logits=manifest.max_out_rows * manifest.n_vocab * 4,
        n_blocks=0,
        kv_pool=0,
        runtime=RUNTIME_BYTES + manifest.n_vocab * TOKEN_BYTES,
    )
    left = max(0, bare.free - bare.total - RESERVE_BYTES)
    n_blocks = min(n_sequences * per_sequence, left // block)
    if n_blocks < per_sequence:
        raise ArtifactError(
            f"{manifest.name}: K/V for one sequence of {context} tokens takes"
            f" {per_sequence * block >> 20} MiB, {left >> 20} MiB are free beside the model",
            "ask for a smaller context (--ctx), or free some memory",
        )
    return dataclasses.replace(bare, n_blocks=n_blocks, kv_pool=n_blocks * block)
