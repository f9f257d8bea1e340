"""What attention is on any target, and what happens to its q, k and v before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

GROUP = 16  # tokens loaded together; a group never crosses a block of the pool


class PoolLayer(Protocol):
    """What the arrays of a layer's K/V pool follow from."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...


@dataclass(frozen=True)
class AttentionJob:
    """One attention layer over a paged pool.

    `window` is how many tokens a row sees, itself included (None: all); `softcap` bounds a score s
    to softcap * tanh(s / softcap). The context is cut in segments of `segment_tokens`: inside one,
    softmax has one maximum; segments are merged in ascending order.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    kv_dtype: str = "float16"
    block_tokens: int = 16
    segment_tokens: int = 128

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, f"{self.heads} heads over {self.kv_heads}"
        assert self.segment_tokens % GROUP == 0, f"segments of {self.segment_tokens} tokens"
        assert self.scale > 0

    @property
    def group(self) -> int:
        """Query heads that share one head of the pool."""
        return self.heads // self.kv_heads

    @property
    def name(self) -> str:
        """The part of a kernel's name that tells this layer from others."""
        words = [f"{self.heads}_{self.kv_heads}_{self.head_dim}", self.kv_dtype]
        words += [f"w{self.window}"] if self.window else []
        words += ["cap"] if self.softcap else []
        return "_".join(words)


@dataclass(frozen=True)
class QkPrepJob:
    """What happens to q, k and v between their projection and attention, and where they go.

    `pairing` is "norm" (dimensions 2i and 2i + 1 turn together) or "neox" (i and i + n_rot / 2);
    `eps` is that of the q and k norm, None where the model has none; q, k and v are columns of one
    tensor if `joined`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    n_rot: int
    pairing: str
    eps: float | None = None
    kv_dtype: str = "float16"
    block_tokens: int = 16
    joined: bool = True

    def __post_init__(self) -> None:
        assert self.pairing in ("norm", "neox"), self.pairing
        assert self.n_rot % 2 == 0, f"{self.n_rot} dimensions cannot be paired"
        assert self.n_rot <= self.head_dim

    @property
    def name(self) -> str:
        """The part of a kernel's name that tells this layer from others."""
        words = [f"{self.heads}_{self.kv_heads}_{self.head_dim}_{self.n_rot}", self.pairing]
        words += ["qknorm"] if self.eps is not None else []
        return "_".join([*words, self.kv_dtype])
