"""What a compilation is asked for, and what of it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xpuc.codegen import copies
from xpuc.errors import RequestError, UnsupportedError, nearest
from xpuc.passes import FUSIONS

KV_DTYPES = {"f16": "float16", "f32": "float32", "q8_0": "q8_0"}
OUT_ROWS = 64  # rows a prefill call gives logits of, or one a sequence if those are more


@dataclass(frozen=True)
class Options:
    """What changes the compiled code.

    `ctx`, `max_chunk` and `block_tokens` in tokens; a `ctx` of 0 is the checkpoint's own, at most
    8192. `max_batch` in sequences.
    """

    target: str = "llvm"
    cpu: str | None = None
    ctx: int = 0
    max_batch: int = 8
    max_chunk: int = 512
    activations: str = "int8"  # int8 | f32
    kv: str = "f16"  # f16 | f32 | q8_0
    prefill_weights: str = "packed"  # packed | int8 | auto
    block_tokens: int = 16
    no_fuse: tuple[str, ...] = ()
    deterministic: bool = False
    tokenizer_pre: str | None = None
    db: Path | None = None  # folder of tuned records, in place of the user's
    untuned: bool = False  # use no records
    synthetic: int | None = None  # leave the weights out: a load makes them up from this seed

    @property
    def max_out_rows(self) -> int:
        """Rows a prefill call may give logits of: in a mixed step every sequence wants one."""
        return max(OUT_ROWS, self.max_batch)

    def check(self) -> None:
        """Refuse what cannot be compiled before any work starts."""
        for name, value, allowed in (
            ("activations", self.activations, ("int8", "f32")),
            ("kv", self.kv, tuple(KV_DTYPES)),
            ("prefill-weights", self.prefill_weights, copies.POLICIES),
        ):
            if value not in allowed:
                raise RequestError(
                    f"--{name} {value}: not known", f"choose one of {', '.join(allowed)}"
                )
        for name, size, low, high in (
            ("ctx", self.ctx, 0, 1 << 20),
            ("max-batch", self.max_batch, 1, 256),
            ("max-chunk", self.max_chunk, 16, 4096),
            ("synthetic", self.synthetic or 0, 0, (1 << 63) - 1),
        ):
            if not low <= size <= high:
                raise RequestError(f"--{name} {size}: out of range", f"choose {low} to {high}")
        if self.block_tokens not in (16, 32, 64, 128):
            raise RequestError(
                f"--block-tokens {self.block_tokens}: not known", "choose 16, 32, 64 or 128"
            )
        self._check_together()
        for name in self.no_fuse:
            if name not in FUSIONS:
                raise UnsupportedError(f"unknown fusion: {name!r}", nearest(name, FUSIONS))

    def _check_together(self) -> None:
        if self.untuned and self.db is not None:
            raise RequestError(
                "--untuned: uses no records, and --db names some", "leave one of the two out"
            )
        if self.deterministic and self.target.startswith("cuda"):
            raise RequestError(
                "--deterministic: not for cuda",
                "its tensor cores sum prompts in another order: leave it out, or say --target llvm",
            )
        if self.prefill_weights != "packed":
            copies.check(self.prefill_weights, self.target, self.activations)
