"""The target-free kernel of each operation, where no schedule of the target takes it.

Operations on packed weights are not here: a target's schedules own the layout of its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, tirx

from xpuc.codegen.kernels.activation import add, gelu_tanh, mul, silu, softcap
from xpuc.codegen.kernels.argmax import argmax
from xpuc.codegen.kernels.attention import attention
from xpuc.codegen.kernels.columns import add_columns, scale_columns
from xpuc.codegen.kernels.kv_write import kv_write
from xpuc.codegen.kernels.quantize import quantize
from xpuc.codegen.kernels.rms_norm import rms_norm
from xpuc.codegen.kernels.rope import rope, rope_table
from xpuc.codegen.kernels.take_columns import take_columns
from xpuc.codegen.kernels.take_rows import take_rows
from xpuc.schedules import Emitter, Site, Var


def emit(emitter: Emitter, site: Site) -> Var:
    """Launch the kernel of the site's operation."""
    kernel = KERNELS[site.op](site)
    if not isinstance(site.result, relax.TupleType):
        return emitter.launch(kernel, site.operands, [site.result])
    outputs = list(site.result.fields)
    if site.op == "kv_write":
        return emitter.launch_in_place(kernel, site.operands, outputs, range(3, len(site.operands)))
    return emitter.launch(kernel, site.operands, outputs)


def _columns(site: Site, operand: int = 0) -> int:
    return int(site.operands[operand].ty.shape[1])


def _rows_out(site: Site) -> int | None:
    """Rows of the result where they are known."""
    rows = site.result.shape[0]
    return int(rows) if isinstance(rows, tirx.IntImm) else None


def _by_rank(whole: Callable[..., Any], by_column: Callable[..., Any]) -> Callable[[Site], Any]:
    """A binary operation: by column where the second operand is one value a column."""

    def build(site: Site) -> Any:
        d, second = _columns(site), site.operands[1].ty.shape
        if len(second) == 2:
            return whole(d, site.n)
        return by_column(int(second[0]), site.n, d // int(second[0]))

    return build


def _attention(site: Site) -> Any:
    a = site.attrs
    return attention(
        a["heads"], a["kv_heads"], a["head_dim"], site.n,
        n_blocks=None, block_tokens=site.block_tokens, kv_dtype=site.kv_dtype,
        scale=a["scale"], window=a["window"], softcap=a["softcap"],
    )  # fmt: skip


def _kv_write(site: Site) -> Any:
    _, kv_heads, head_dim, block_tokens = site.operands[3].ty.shape
    return kv_write(
        int(kv_heads), int(head_dim), site.n,
        n_blocks=None, block_tokens=int(block_tokens), kv_dtype=site.kv_dtype,
    )  # fmt: skip


KERNELS: dict[str, Callable[[Site], Any]] = {
    "rms_norm": lambda s: rms_norm(
        _columns(s) // s.attrs["groups"], s.n, s.attrs["eps"], s.attrs["groups"]
    ),
    "mul": _by_rank(mul, scale_columns),
    "add": _by_rank(add, add_columns),
    "silu": lambda s: silu(_columns(s), s.n),
    "gelu_tanh": lambda s: gelu_tanh(_columns(s), s.n),
    "softcap": lambda s: softcap(_columns(s), _rows_out(s), s.attrs["cap"]),
    "rope_table": lambda s: rope_table(int(s.operands[1].ty.shape[0]) * 2, s.n, s.attrs["mscale"]),
    "rope": lambda s: rope(
        s.attrs["heads"], s.attrs["head_dim"], _columns(s, 1), s.n, s.attrs["pairing"]
    ),
    "kv_write": _kv_write,
    "attention": _attention,
    "take_rows": lambda s: take_rows(_columns(s), s.n, None),
    "columns": lambda s: take_columns(_columns(s), s.attrs["start"], s.attrs["width"], s.n),
    "argmax": lambda s: argmax(_columns(s), _rows_out(s)),
    "quantize": lambda s: quantize(_columns(s), s.n),
}
