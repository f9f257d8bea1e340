"""K and V rows into the paged pool, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from xpuc.artifact import KV_GROUP, pool_arrays
from xpuc.codegen.kernels.definition import Expr, f32, full_name, size

_SMALLEST_NORMAL = 1.1754943508222875e-38

Row = Callable[[Expr], Expr]  # column -> what a row has there


def kv_write(
    n_kv_heads: int,
    head_dim: int,
    n: int | None,
    *,
    n_blocks: int | None,
    block_tokens: int,
    kv_dtype: str,
) -> tirx.PrimFunc:
    """k, v f32 (n, n_kv_heads * head_dim), slots i32 (n,), the pool, changed at the slots only.

    The pool is the arrays of `pool_arrays`, each with `n_blocks` first. Slot = block * block_tokens
    + offset in the block; a row of slot -1 is skipped.
    """
    # TE has no way to say "the rest of this buffer stays", so this one is built as TIR.
    rows, blocks = size(n, "n"), size(n_blocks, "n_blocks")
    pool = f"{n_blocks or 'b'}x{block_tokens}"
    name = full_name("kv_write", n, f"{n_kv_heads}x{head_dim}", pool, kv_dtype)
    is_q8 = kv_dtype == "q8_0"
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        k = _argument("k", (rows, n_kv_heads * head_dim), "float32")
        v = _argument("v", (rows, n_kv_heads * head_dim), "float32")
        slots = _argument("slots", (rows,), "int32")
        arrays = [
            _argument(a.name, (blocks, *a.shape), a.dtype)
            for a in pool_arrays(kv_dtype, block_tokens, n_kv_heads, head_dim)
        ]
        last = head_dim // KV_GROUP if is_q8 else head_dim
        with T.grid(rows, n_kv_heads, last) as loops, T.sblock("write"):
            r, h, e = T.axis.remap("SSS", loops)
            with T.If(slots[r] >= 0), T.Then():
                # int64, as every index: a pool may pass 2^31 elements.
                slot = tirx.Cast("int64", slots[r])
                block, token = slot // block_tokens, slot % block_tokens

                def of(x: Expr) -> Row:
                    return lambda c: x[r, h * head_dim + c]

                if is_q8:
                    where = (block, h, e, token)
                    _quantize(of(k), arrays[:2], where, lambda c: (block, h, c, token))
                    _quantize(of(v), arrays[2:], where, lambda c: (block, h, token, c))
                else:
                    keys, values = arrays
                    T.buffer_store(keys, tirx.Cast(kv_dtype, of(k)(e)), [block, h, e, token])
                    T.buffer_store(values, tirx.Cast(kv_dtype, of(v)(e)), [block, h, token, e])
    return builder.get()


def _quantize(
    row: Row,
    arrays: Sequence[Expr],
    where: tuple[Expr, ...],
    place: Callable[[Expr], tuple[Expr, ...]],
) -> None:
    """The codes and the scale of a group of columns.

    `where` the scale goes, its third number is the group; `place` is where the code of a column
    goes. The scale is max|x| / 127, a code x times its inverse with halves rounded away from zero.
    Codes are zero where the scale is zero, below normal range or not finite; a NaN makes it NaN.
    """
    codes, scales = arrays
    first = where[2] * KV_GROUP
    # Compared as integers, the magnitude bits of a NaN are the largest of all.
    largest = tirx.const(0, "int32")
    for i in range(KV_GROUP):
        bits = tirx.reinterpret("int32", row(first + i)) & tirx.const(0x7FFFFFFF, "int32")
        largest = T.bind(tirx.Max(largest, bits))
    scale = T.bind(tirx.reinterpret("float32", largest) / f32(127))
    inverse = T.bind(tirx.Select(scale >= f32(_SMALLEST_NORMAL), f32(1) / scale, f32(0)))
    T.buffer_store(scales, tirx.Cast("float16", scale), where)
    with T.serial(0, KV_GROUP) as i:
        c = first + i
        x = T.bind(row(c) * inverse)
        whole = T.bind(tirx.Cast("int32", x))
        half = tirx.Cast("int32", f32(2) * (x - tirx.Cast("float32", whole)))
        code = tirx.Select(inverse > f32(0), whole + half, tirx.const(0, "int32"))
        T.buffer_store(codes, tirx.Cast("int8", code), place(c))


def _argument(name: str, shape: tuple[Expr, ...], dtype: str) -> Expr:
    return T.arg(name, T.buffer(shape, dtype, layout=None))
