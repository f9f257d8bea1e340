"""The target-free kernels against numpy, built for a fixed and for a symbolic number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import kv_pools
import numpy as np
import pytest
import reference_ops as ops
import tvm
from activations import q8a, q8a_shapes

from xpuc.codegen.kernels.activation import add, gelu_tanh, mul, silu, softcap
from xpuc.codegen.kernels.argmax import argmax
from xpuc.codegen.kernels.attention import attention
from xpuc.codegen.kernels.columns import add_columns, scale_columns
from xpuc.codegen.kernels.embed import embed
from xpuc.codegen.kernels.kv_write import kv_write
from xpuc.codegen.kernels.linear import linear
from xpuc.codegen.kernels.quantize import quantize
from xpuc.codegen.kernels.rms_norm import rms_norm
from xpuc.codegen.kernels.rope import rope, rope_table
from xpuc.codegen.kernels.take_columns import take_columns
from xpuc.codegen.kernels.take_rows import take_rows
from xpuc.ir.formats import format_of, formats, row_bytes

Array = np.ndarray[Any, Any]
N = 5
each_n = pytest.mark.parametrize("n", [N, None], ids=["static", "symbolic"])


def run(func: Any, inputs: Sequence[Array], *outputs: tuple[tuple[int, ...], str]) -> list[Array]:
    """Compile and call: the outputs, then the inputs as they are afterwards."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": "znver1"})
    filled = [
        np.full(shape, 77, dtype) for shape, dtype in outputs
    ]  # 77: not what memory starts as
    arguments = [tvm.runtime.tensor(a) for a in [*inputs, *filled]]
    tvm.compile(func, target=target)[func.attrs["global_symbol"]](*arguments)
    results = [a.numpy() for a in arguments]
    return results[len(inputs) :] + results[: len(inputs)]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def packed(name: str, rows: int, k: int) -> tuple[Array, Array]:
    """Random bytes of a format with scales of ordinary size, and the weights they stand for."""
    rng = np.random.default_rng(3)
    format = format_of(name)
    raw = rng.integers(0, 256, (rows, row_bytes(format, k)), dtype=np.uint8)
    if format.n == 1:
        weights = rng.standard_normal((rows, k)).astype(np.float32)
        raw = gguf.quantize(weights, gguf.GGMLQuantizationType[name]).view(np.uint8)
    else:
        blocks = raw.reshape(-1, format.nbytes)
        halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0,))
        halves = (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else halves
        for at in halves:
            size = rng.uniform(-0.01, 0.01, len(blocks)).astype("<f2")
            blocks[:, at : at + 2] = size.view(np.uint8).reshape(-1, 2)
    weights = gguf.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(rows, k)
    return raw.reshape(rows, -1), weights


@each_n
@pytest.mark.parametrize("name", sorted(formats()))
def test_linear(name: str, n: int | None) -> None:
    raw, weights = packed(name, 6, 512)
    x = normal(N, 512)
    y, *_ = run(linear(format_of(name), 6, 512, n), [x, raw], ((N, 6), "float32"))
    exact = x.astype(np.float64) @ weights.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(weights).T
    assert np.abs(y - exact).max() <= 512 * np.finfo(np.float32).eps * size.max()
    assert np.abs(exact).max() > 0.01 * size.max()


@each_n
@pytest.mark.parametrize("name", ["F32", "Q4_0", "Q6_K"])
def test_embed(name: str, n: int | None) -> None:
    raw, weights = packed(name, 9, 256)
    tokens = np.array([8, 0, 3, 3, 7], np.int32)
    func = embed(format_of(name), 9, 256, n, scale=25.298)
    y, *_ = run(func, [tokens, raw], ((N, 256), "float32"))
    np.testing.assert_array_equal(y, weights[tokens] * np.float32(25.298))


@each_n
@pytest.mark.parametrize("groups", [1, 3])
def test_rms_norm(groups: int, n: int | None) -> None:
    x = normal(N, groups * 64) * np.arange(1, groups * 64 + 1, dtype=np.float32)
    y, *_ = run(rms_norm(64, n, 1e-2, groups), [x], (x.shape, "float32"))
    one = np.ones(64, np.float32)
    expected = ops.rms_norm(x.reshape(N, groups, 64), one, 1e-2).reshape(x.shape)
    np.testing.assert_allclose(y, expected, rtol=2e-6)


def test_rms_norm_of_zeros_is_zeros() -> None:
    x = np.zeros((N, 32), np.float32)
    y, *_ = run(rms_norm(32, N, 1e-6), [x], (x.shape, "float32"))
    np.testing.assert_array_equal(y, x)


@each_n
@pytest.mark.parametrize("groups", [1, 3])
def test_column_vectors(groups: int, n: int | None) -> None:
    x, w = normal(N, groups * 32), normal(32, seed=1)
    scaled, *_ = run(scale_columns(32, n, groups), [x, w], (x.shape, "float32"))
    np.testing.assert_array_equal(scaled, x * np.tile(w, groups))
    added, *_ = run(add_columns(32, n, groups), [x, w], (x.shape, "float32"))
    np.testing.assert_array_equal(added, x + np.tile(w, groups))


@each_n
def test_take_columns(n: int | None) -> None:
    x = normal(N, 40)
    y, *_ = run(take_columns(40, 7, 12, n), [x], ((N, 12), "float32"))
    np.testing.assert_array_equal(y, x[:, 7:19])


@each_n
def test_rope_table(n: int | None) -> None:
    positions = np.array([0, 1, 77, 100_003, 1_048_575], np.int32)
    inv_freq = 10000.0 ** (-np.arange(16) / 16)
    table, *_ = run(rope_table(32, n, 1.25), [positions, inv_freq], ((N, 32), "float32"))
    angles = positions[:, None] * inv_freq
    expected = 1.25 * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(table, expected, atol=2e-7)


@each_n
@pytest.mark.parametrize("n_rot", [16, 12])
@pytest.mark.parametrize("pairing", ["norm", "neox"])
def test_rope(pairing: str, n_rot: int, n: int | None) -> None:
    x = normal(N, 3 * 16)
    angles = np.random.default_rng(2).uniform(0, 6, (N, n_rot // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    y, *_ = run(rope(3, 16, n_rot, n, pairing), [x, table], (x.shape, "float32"))
    expected = x.reshape(N, 3, 16).copy()
    turned = expected[..., :n_rot]  # a view: turned in place
    half = n_rot // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2))
        if pairing == "norm"
        else (slice(0, half), slice(half, None))
    )
    pairs = (turned[..., first] + 1j * turned[..., second]) * np.exp(1j * angles)[:, None]
    turned[..., first], turned[..., second] = pairs.real, pairs.imag
    np.testing.assert_allclose(y.reshape(N, 3, 16), expected, atol=1e-6)


@each_n
@pytest.mark.parametrize("n_blocks", [4, None])
@pytest.mark.parametrize(("dtype", "dim"), [("float16", 8), ("float32", 8), ("q8_0", 64)])
def test_kv_write(dtype: str, dim: int, n_blocks: int | None, n: int | None) -> None:
    heads, tokens = 2, 16
    k, v = normal(N, heads * dim), normal(N, heads * dim, seed=1)
    v[2] = 0
    v[3, 1:dim:2] = 0.5
    v[3, 0:dim:32] = 127  # a scale of 1, so the halves are ties
    slots = np.array([63, -1, 0, 17, 16], np.int32)
    pool = kv_pools.filled(4, heads, dim, dtype=dtype, block_tokens=tokens, filler=3.0)
    func = kv_write(heads, dim, n, n_blocks=n_blocks, block_tokens=tokens, kv_dtype=dtype)
    _, _, _, *after = run(func, [k, v, slots, *pool])
    for row, slot in enumerate(slots):
        if slot >= 0:
            place = divmod(int(slot), tokens)
            kv_pools.write(pool, dtype, place, *(x[row].reshape(heads, dim) for x in (k, v)))
    for array, expected in zip(after, pool, strict=True):
        np.testing.assert_array_equal(array, expected)


@dataclass(frozen=True)
class Batch:
    """Rows of several sequences over one pool, and what attention over it must give."""

    inputs: list[Array]
    expected: Array


HEADS, KV_HEADS, TOKENS = 4, 2, 16
DIMS = {"float16": 8, "float32": 8, "q8_0": 64}
CONTEXTS = ((20, 6), (141, 1), (1, 1))  # tokens of a sequence, how many of them are rows
PADDING = 2
ROWS = sum(count for _, count in CONTEXTS) + PADDING


def batch(dtype: str, *, window: int, softcap: float) -> Batch:
    """Blocks are scattered; what nobody may read is NaN in the pools and no block in the table."""
    rng = np.random.default_rng(5)
    table = np.full((len(CONTEXTS), 10), 2**30, np.int32)
    dim = DIMS[dtype]
    pool = kv_pools.filled(20, KV_HEADS, dim, dtype=dtype, block_tokens=TOKENS, filler=np.nan)
    free = list(rng.permutation(20))
    q = normal(ROWS, HEADS * dim, seed=6)
    positions = np.full(ROWS, 3, np.int32)
    tiles: list[tuple[int, ...]] = []
    work: list[tuple[int, ...]] = []
    expected = np.zeros_like(q)
    row = 0
    for sequence, (total, count) in enumerate(CONTEXTS):
        k, v = (normal(total, KV_HEADS, dim, seed=7 + 2 * sequence + i) for i in range(2))
        for position in range(total):
            if position % TOKENS == 0:
                table[sequence, position // TOKENS] = free.pop()
            block = table[sequence, position // TOKENS]
            kv_pools.write(pool, dtype, (block, position % TOKENS), k[position], v[position])
        mine = slice(row, row + count)
        positions[mine] = range(total - count, total)
        expected[mine] = ops.attention(
            q[mine].reshape(count, HEADS, dim), kv_pools.kept(dtype, k), kv_pools.kept(dtype, v),
            scale=0.5, window=window, cap=softcap,
        ).reshape(count, -1)  # fmt: skip
        for start in range(row, row + count, 4):
            here = min(4, row + count - start)
            oldest = max(0, positions[start] - window + 1) if window else 0
            segments = range(oldest // 128, positions[start + here - 1] // 128 + 1)
            tiles.append((start, here, len(work), len(segments)))
            work += [(start, here, sequence, segment) for segment in segments]
        row += count
    index = [positions, np.array(tiles, np.int32), np.array(work, np.int32), table]
    return Batch([q, *pool, *index], expected)


def attention_kernel(n: int | None, **changes: Any) -> Any:
    facts = {"n_blocks": None, "block_tokens": TOKENS, "kv_dtype": "float16", "scale": 0.5}
    facts |= changes
    return attention(HEADS, KV_HEADS, DIMS[str(facts["kv_dtype"])], n, **facts)


@pytest.mark.parametrize(
    ("n", "dtype", "window", "softcap"),
    [
        (ROWS, "float16", 0, 0.0),
        (None, "float16", 0, 0.0),
        (None, "float32", 7, 0.0),
        (None, "float16", 0, 2.0),
        (ROWS, "float32", 1, 2.0),
        (None, "q8_0", 9, 2.0),
    ],
)
def test_attention(n: int | None, dtype: str, window: int, softcap: float) -> None:
    rows = batch(dtype, window=window, softcap=softcap)
    func = attention_kernel(n, kv_dtype=dtype, window=window, softcap=softcap)
    y, *_ = run(func, rows.inputs, (rows.expected.shape, "float32"))
    np.testing.assert_allclose(y, rows.expected, atol=2e-6)
    np.testing.assert_array_equal(y[-PADDING:], 0)


@each_n
@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (silu, ops.silu),
        (gelu_tanh, ops.gelu_tanh),
        (lambda d, n: softcap(d, n, 30.0), lambda x: ops.softcap(x, 30.0)),
    ],
    ids=["silu", "gelu_tanh", "softcap"],
)
def test_activation(
    kernel: Callable[..., Any], expected: Callable[[Array], Array], n: int | None
) -> None:
    x = normal(N, 40, scale=20.0)
    x[0, :6] = [0.0, -0.0, 100.0, -100.0, 3e4, -3e4]
    y, *_ = run(kernel(40, n), [x], (x.shape, "float32"))
    np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)


@each_n
def test_add_and_mul(n: int | None) -> None:
    x, y = normal(N, 24), normal(N, 24, seed=1)
    np.testing.assert_array_equal(run(add(24, n), [x, y], (x.shape, "float32"))[0], x + y)
    np.testing.assert_array_equal(run(mul(24, n), [x, y], (x.shape, "float32"))[0], x * y)


@pytest.mark.parametrize(("n", "m"), [(N, 3), (None, None)], ids=["static", "symbolic"])
def test_take_rows(n: int | None, m: int | None) -> None:
    x, rows = normal(N, 24), np.array([4, 0, 4], np.int32)
    y, *_ = run(take_rows(24, n, m), [x, rows], ((3, 24), "float32"))
    np.testing.assert_array_equal(y, x[rows])


@each_n
def test_argmax(n: int | None) -> None:
    logits = normal(N, 50)
    logits[1] = -np.inf
    logits[2, [7, 30, 49]] = 9.0
    logits[3, [0, 20]] = np.nan, np.inf
    logits[4, 49] = np.nan
    tokens, *_ = run(argmax(50, n), [logits], ((N,), "int32"))
    np.testing.assert_array_equal(tokens, [logits[0].argmax(), 0, 7, -1, -1])


@each_n
def test_quantize(n: int | None) -> None:
    x = normal(N, 96)
    x[1, :32] = 0
    x[2, :32] = -5.0  # the extreme of every sum
    x[3, :16] = np.arange(16) / 2  # ties, once 127 makes the scale 1
    x[3, 15] = 127
    x[4, 32:64] = 1e-40
    results = run(quantize(96, n), [x], *q8a_shapes(x.shape[1], len(x)))
    *exact, total = q8a(x)
    for result, expected in zip(results, exact, strict=False):
        np.testing.assert_array_equal(result, expected)
    np.testing.assert_allclose(results[3], total, rtol=0, atol=1e-6 * np.abs(x).max())
    assert list(results[0][0, 3, :8]) == [0, 0, 1, 2, 2, 2, 3, 4]


@pytest.mark.parametrize("at", [0, 17, 31])
def test_quantize_does_not_lose_a_nan(at: int) -> None:
    x = normal(N, 64)
    x[0, at] = np.nan
    x[1, 32 + at] = -np.inf
    xq, xd, xs, _, _ = run(quantize(64, None), [x], *q8a_shapes(x.shape[1], len(x)))
    half = at // 16
    assert np.isnan(xd[0, 0, half])
    assert np.isnan(xs[0, 0, half])
    assert np.isinf(xd[1, 1, half])
    assert not xq[0, 0, 16 * half : 16 * half + 16].any()
    assert np.isfinite(xd).sum() == xd.size - 2


def test_a_row_alone_gives_the_bits_it_gives_among_others() -> None:
    """For the kernels that sum: one fixed order, whatever the number of rows built for."""
    raw, _ = packed("Q4_K", 6, 512)
    x = normal(N, 512)
    together, *_ = run(linear(format_of("Q4_K"), 6, 512, None), [x, raw], ((N, 6), "float32"))
    normed, *_ = run(rms_norm(512, None, 1e-5), [x], (x.shape, "float32"))
    for row in (0, N - 1):
        one = x[row : row + 1]
        alone, *_ = run(linear(format_of("Q4_K"), 6, 512, 1), [one, raw], ((1, 6), "float32"))
        np.testing.assert_array_equal(alone[0], together[row])
        alone, *_ = run(rms_norm(512, 1, 1e-5), [one], (one.shape, "float32"))
        np.testing.assert_array_equal(alone[0], normed[row])


def test_kernels_that_differ_have_different_names() -> None:
    """A name is all that a profile and a crash say of a kernel: no fact may be missing in it."""
    q4, q8 = format_of("Q4_0"), format_of("Q8_0")
    pool: dict[str, Any] = {"n_blocks": None, "block_tokens": 16, "kv_dtype": "float16"}
    funcs = [
        *(linear(*a) for a in ((q4, 8, 64, 1), (q8, 8, 64, 1), (q4, 9, 64, 1), (q4, 8, 32, 1))),
        *(linear(q4, 8, 64, n) for n in (2, None)),
        *(embed(q4, 8, 64, 1, scale) for scale in (1.0, 2.5)),
        *(rms_norm(*a) for a in ((8, 1, 1e-5), (8, 1, 1e-6), (8, 1, 1e-5, 2), (4, 1, 1e-5, 2))),
        *(make(8, 1, groups) for make in (scale_columns, add_columns) for groups in (1, 2)),
        *(take_columns(*a) for a in ((8, 0, 4, 1), (8, 4, 4, 1), (8, 0, 2, 1), (9, 0, 4, 1))),
        *(rope_table(*a) for a in ((8, 1), (8, 1, 1.5), (16, 1))),
        *(rope(2, 8, *a) for a in ((8, 1, "norm"), (8, 1, "neox"), (6, 1, "norm"))),
        *(kv_write(2, 8, 1, **(pool | one)) for one in ({}, {"n_blocks": 3}, {"block_tokens": 32})),
        *(kv_write(2, 64, 1, **(pool | {"kv_dtype": d})) for d in ("float32", "float16", "q8_0")),
        *(attention_kernel(1, **one) for one in ({}, {"window": 4}, {"scale": 0.25})),
        *(attention_kernel(1, **one) for one in ({"softcap": 5.0}, {"kv_dtype": "float32"})),
        *(
            attention(4, 2, 64, 1, scale=0.5, **(pool | {"kv_dtype": d}))
            for d in ("q8_0", "float16")
        ),
        *(attention_kernel(1, **one) for one in ({"n_blocks": 3}, {"block_tokens": 32})),
        *(attention(4, heads, 8, 1, scale=0.5, **pool) for heads in (1, 4)),
        *(make(8, 1) for make in (silu, gelu_tanh, add, mul, argmax)),
        *(softcap(8, 1, cap) for cap in (20.0, 30.0)),
        *(take_rows(8, *a) for a in ((1, 1), (2, 1), (1, 2), (None, None))),
        *(quantize(32, n) for n in (1, None)),
    ]
    names = [func.attrs["global_symbol"] for func in funcs]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
