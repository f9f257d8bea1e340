"""What is measured: reading a prompt (pp) or generating (tg), at a depth of context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_SEED = 1


@dataclass(frozen=True)
class Case:
    """`n_tokens` a sequence, of `batch` sequences that already hold `depth` tokens each."""

    kind: str  # pp | tg
    n_tokens: int
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        """As llama-bench writes it: `pp512`, `tg128 @ d1024`; a batch is named behind it (`b8`)."""
        batch = f" b{self.batch}" if self.batch > 1 else ""
        return f"{self.kind}{self.n_tokens}{batch}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def n_context(self) -> int:
        """Tokens a sequence has at the end."""
        return self.depth + self.n_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens that count for the rate."""
        return self.n_tokens * self.batch


def cases(
    prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Case]:
    """Every combination, prompts first (one at a time); a length of 0 leaves its kind out."""
    pp = [Case("pp", n, depth) for depth in depths for n in prompts if n]
    tg = [Case("tg", n, depth, b) for depth in depths for b in batches for n in generated if n]
    return pp + tg


def random_ids(n_vocab: int, n: int, row: int) -> list[int]:
    """`n` valid token ids, the same for the same arguments: the speed does not depend on which."""
    draw = random.Random(f"{_SEED}:{row}")
    return [draw.randrange(n_vocab) for _ in range(n)]
