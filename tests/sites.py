"""Sites of every operation a tuning session measures, small, and their kernels called on a case."""

from __future__ import annotations

from typing import Any

from activations import q8a_shapes
from kernel_calls import build, call

from xpuc.artifact import pool_arrays
from xpuc.schedules import Site, TargetFacts, launches, llvm, site_of
from xpuc.tuning.inputs import Case

TARGET = TargetFacts("llvm", "x86-64-v3", frozenset({"avx2", "fma"}))
Rows = int | str  # a symbol if the site is for any number of rows
Weights = list[tuple[str, int, int]]  # format, rows, columns


def site(
    op: str, attrs: dict[str, Any], rows: Rows, tensors: list[Any], result: list[Any],
    weights: Weights | None = None, kv_dtype: str = "float16",
) -> Site:  # fmt: skip
    facts = {
        "op": op, "attrs": attrs, "rows": rows if isinstance(rows, int) else None,
        "operands": tensors, "weights": weights or [], "result": result,
        "block_tokens": 16, "kv_dtype": kv_dtype,
    }  # fmt: skip
    return site_of(facts, TARGET, llvm.planes)


def activation(kind: str, columns: int, rows: Rows) -> list[Any]:
    """The types of an activation's tensors: kind q8 or f32."""
    if kind == "f32":
        return [["float32", rows, columns]]
    # A number of rows no other dimension has, to find their place.
    shapes = q8a_shapes(columns, 12345)
    return [[d, *(rows if s == 12345 else s for s in shape)] for shape, d in shapes]


def linear(rows: Rows, weights: Weights, kind: str = "q8", bias: bool = False) -> Site:
    """A linear, or a group of several."""
    sizes = [size for _, size, _ in weights]
    tensors = activation(kind, weights[0][2], rows)
    attrs: dict[str, Any] = {"format": weights[0][0], "rows": sizes[0]}
    if len(weights) > 1:
        attrs = {"formats": [f for f, _, _ in weights], "rows": sizes, "bias": [bias] * len(sizes)}
        tensors += [["float32", size] for size in sizes if bias]
    op = "linear_group" if len(weights) > 1 else "linear"
    return site(op, attrs, rows, tensors, ["float32", rows, sum(sizes)], weights)


def gate_up(
    rows: Rows, weights: Weights, act: str = "silu", kind: str = "q8", quantize: bool = True
) -> Site:
    size, columns = weights[0][1:]
    attrs = {
        "formats": [f for f, _, _ in weights], "rows": size,
        "activation": act, "quantize": quantize,
    }  # fmt: skip
    result = activation("q8", size, rows) if quantize else ["float32", rows, size]
    return site("gate_up", attrs, rows, activation(kind, columns, rows), result, weights)


def head_argmax(rows: Rows, weight: tuple[str, int, int], kind: str = "q8") -> Site:
    attrs = {"format": weight[0], "rows": weight[1]}
    tensors = activation(kind, weight[2], rows)
    return site("head_argmax", attrs, rows, tensors, ["int32", rows], [weight])


def attention(
    rows: Rows, heads: tuple[int, int, int] = (4, 2, 16), kv_dtype: str = "float16", **attrs: Any
) -> Site:
    """`heads`: those of queries, those of the pool, columns of one."""
    names = ("heads", "kv_heads", "head_dim")
    given = dict(zip(names, heads, strict=True)) | {
        "scale": 0.25, "window": 0, "softcap": 0.0, "quantize": False
    } | attrs  # fmt: skip
    queries, kv_heads, head_dim = heads
    width = queries * head_dim
    tensors = [
        ["float32", rows, width],
        *([a.dtype, "blocks", *a.shape] for a in pool_arrays(kv_dtype, 16, kv_heads, head_dim)),
        ["int32", rows], ["int32", "t", 4], ["int32", "w", 4], ["int32", "s", "b"],
    ]  # fmt: skip
    result = activation("q8", width, rows) if given["quantize"] else ["float32", rows, width]
    return site("attention", given, rows, tensors, result, kv_dtype=kv_dtype)


def computed(where: Site, case: Case) -> list[Any]:
    """The result's tensors by the kernels of the first schedule that accepts, with its defaults."""
    schedule = next(s for s in llvm.SCHEDULES if s.op == where.op and s.accepts(where))
    variables = [*where.operands, *(p for w in where.weights for p in w.planes)]
    arrays = [*case.operands, *(p for planes in case.planes for p in planes)]
    known = dict(zip(variables, arrays, strict=True))
    results: list[Any] = []
    for launch in launches(schedule, where, schedule.knobs()):
        types = [(_shape(o, case), str(o.ty.dtype)) for o in launch.outputs]
        results = call(build(launch.kernel), [known[v] for v in launch.inputs], types)
        known.update(zip(launch.outputs, results, strict=True))
    return results


def _shape(var: Any, case: Case) -> tuple[int, ...]:
    return tuple(case.symbols[d.name] if hasattr(d, "name") else int(d) for d in var.ty.shape)
