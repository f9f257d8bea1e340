"""K and V rows into the paged pool, in place."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from xpuc.codegen.kernels.definition import Expr, full_name, size


def kv_write(
    n_kv_heads: int,
    head_dim: int,
    n: int | None,
    *,
    n_blocks: int | None,
    block_tokens: int,
    kv_dtype: str,
) -> tirx.PrimFunc:
    """k, v f32 (n, n_kv_heads * head_dim), slots i32 (n,), the pools, changed at the slots only.

    K pool (n_blocks, n_kv_heads, head_dim, block_tokens), V pool (n_blocks, n_kv_heads,
    block_tokens, head_dim), both `kv_dtype`. Slot = block * block_tokens + offset in the block;
    a row of slot -1 is skipped.
    """
    # TE has no way to say "the rest of this buffer stays", so this one is built as TIR.
    rows, blocks = size(n, "n"), size(n_blocks, "n_blocks")
    pool = f"{n_blocks or 'b'}x{block_tokens}"
    name = full_name("kv_write", n, f"{n_kv_heads}x{head_dim}", pool, kv_dtype)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        k = _argument("k", (rows, n_kv_heads * head_dim), "float32")
        v = _argument("v", (rows, n_kv_heads * head_dim), "float32")
        slots = _argument("slots", (rows,), "int32")
        k_pool = _argument("k_pool", (blocks, n_kv_heads, head_dim, block_tokens), kv_dtype)
        v_pool = _argument("v_pool", (blocks, n_kv_heads, block_tokens, head_dim), kv_dtype)
        with T.grid(rows, n_kv_heads, head_dim) as loops, T.sblock("write"):
            r, h, e = T.axis.remap("SSS", loops)
            with T.If(slots[r] >= 0), T.Then():
                # int64, as every index: a pool may pass 2^31 elements.
                slot = tirx.Cast("int64", slots[r])
                block, token = slot // block_tokens, slot % block_tokens
                column = h * head_dim + e
                T.buffer_store(k_pool, tirx.Cast(kv_dtype, k[r, column]), [block, h, e, token])
                T.buffer_store(v_pool, tirx.Cast(kv_dtype, v[r, column]), [block, h, token, e])
    return builder.get()


def _argument(name: str, shape: tuple[Expr, ...], dtype: str) -> Expr:
    return T.arg(name, T.buffer(shape, dtype, layout=None))
