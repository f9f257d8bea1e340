"""The memory statement: what a loaded model takes, term by term, and the K/V blocks that fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from xpuc.artifact import Manifest
from xpuc.errors import ArtifactError

RESERVE_BYTES = 256 << 20  # left to the rest of the machine
RUNTIME_BYTES = 64 << 20  # Python, the libraries, the tokenizer's tables


@dataclass(frozen=True)
class MemoryStatement:
    """Bytes by term. `kv_pool` is for `n_blocks` blocks."""

    free: int
    weights: int
    activations: int
    logits: int
    n_blocks: int
    kv_pool: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.logits + self.kv_pool + RUNTIME_BYTES

    def lines(self) -> list[str]:
        """One line a term, in MiB."""
        terms = (
            ("free memory", self.free),
            ("weights (mapped file)", self.weights),
            ("activations (planned)", self.activations),
            ("logits", self.logits),
            (f"K/V pool ({self.n_blocks} blocks)", self.kv_pool),
            ("runtime", RUNTIME_BYTES),
            ("total", self.total),
        )
        return [f"{name:<28}{value / 2**20:>10.1f} MiB" for name, value in terms]


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan(manifest: Manifest, n_sequences: int, context: int) -> MemoryStatement:
    """Blocks for `n_sequences` sequences of `context` tokens, or as many as memory affords."""
    free = free_bytes()
    block = manifest.kv.bytes_per_token * manifest.kv.block_tokens
    # What a step returns is no part of what the compiler planned.
    logits = manifest.max_out_rows * manifest.n_vocab * 4
    fixed = manifest.memory["activations"] + logits + RUNTIME_BYTES + RESERVE_BYTES
    affordable = max(0, free - fixed) // block
    wanted = n_sequences * -(-context // manifest.kv.block_tokens)
    n_blocks = min(wanted, affordable)
    if n_blocks < -(-context // manifest.kv.block_tokens):
        raise ArtifactError(
            f"K/V for one sequence of {context} tokens takes"
            f" {context * manifest.kv.bytes_per_token} bytes, {max(0, free - fixed)} are free",
            "ask for a smaller context (--ctx)",
        )
    return MemoryStatement(
        free=free, weights=manifest.memory["weights"],
        activations=manifest.memory["activations"], logits=logits,
        n_blocks=n_blocks, kv_pool=n_blocks * block,
    )  # fmt: skip
