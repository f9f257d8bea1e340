"""ldmatrix, mma.sync and wgmma against numpy. Fragments are laid out here as the PTX ISA's figures
have them: thread `lane` is group lane // 4, member lane % 4."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emu.raw import CudaError, Memory, Module

RNG = np.random.default_rng(3)
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "s8": np.int8, "u8": np.uint8}
GROUP, MEMBER = np.arange(32) // 4, np.arange(32) % 4


def random(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype in ("s8", "u8"):
        limits = np.iinfo(DTYPES[dtype])
        return RNG.integers(limits.min, limits.max + 1, shape).astype(DTYPES[dtype])
    return RNG.standard_normal(shape).astype(DTYPES[dtype])


def registers(rows: np.ndarray) -> np.ndarray:
    """Each row of elements that fill a register, as that register."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(*rows.shape[:-1], -1).view(np.uint32)


def fragments(matrix: np.ndarray, row_halves: int) -> np.ndarray:
    """(32, registers) of the operand with rows (A, or B transposed) of k elements."""
    per = 4 // matrix.dtype.itemsize
    found = []
    for k in range(0, matrix.shape[1], 4 * per):
        for half in range(row_halves):
            columns = k + MEMBER[:, None] * per + np.arange(per)
            found.append(registers(matrix[GROUP[:, None] + 8 * half, columns]))
    return np.concatenate(found, axis=1)


def mma_source(k: int, sum_: str, dtype: str, n_a: int, n_b: int) -> str:
    letter, type_ = ("f", "float") if sum_ == "f32" else ("r", "int")

    def names(first: int, count: int) -> str:
        return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"

    text = (
        f"mma.sync.aligned.m16n8k{k}.row.col.{sum_}.{dtype}.{dtype}.{sum_} "
        f"{names(0, 4)}, {names(4, n_a)}, {names(4 + n_a, n_b)}, {names(4 + n_a + n_b, 4)};"
    )
    out = ", ".join(f'"={letter}"(d[{i}])' for i in range(4))
    in_ = [f'"r"(a[{i}])' for i in range(n_a)] + [f'"r"(b[{i}])' for i in range(n_b)]
    in_ += [f'"{letter}"(d[{i}])' for i in range(4)]
    return f"""
    extern "C" __global__ void k(const unsigned* a, const unsigned* b, {type_}* d) {{
      a += {n_a} * threadIdx.x;
      b += {n_b} * threadIdx.x;
      d += 4 * threadIdx.x;
      asm volatile("{text}" : {out} : {", ".join(in_)});
    }}"""


@pytest.mark.parametrize(
    ("k", "dtype"),
    [(8, "f16"), (16, "f16"), (8, "bf16"), (16, "bf16"), (16, "s8"), (32, "s8"), (32, "u8")],
)
def test_mma_m16n8(k, dtype, order):
    a, b = random(dtype, (16, k)), random(dtype, (8, k))
    whole = dtype in ("s8", "u8")
    number = np.int32 if whole else np.float32
    c = (100 * RNG.standard_normal((16, 8))).astype(number)
    rows = GROUP[:, None] + np.array([0, 0, 8, 8])
    columns = 2 * MEMBER[:, None] + np.array([0, 1, 0, 1])
    fa, fb = fragments(a, 2), fragments(b, 1)
    d = Memory.of(c[rows, columns])
    source = mma_source(k, "s32" if whole else "f32", dtype, fa.shape[1], fb.shape[1])
    Module(source).run("k", 1, 32, Memory.of(fa), Memory.of(fb), d)
    wide = np.int64 if whole else np.float64
    expected = (c + a.astype(wide) @ b.astype(wide).T)[rows, columns]
    if whole:
        np.testing.assert_array_equal(d.read(), expected)
    else:
        np.testing.assert_allclose(d.read(), expected, rtol=1e-5, atol=1e-5)


LDMATRIX = """
extern "C" __global__ void k(const half* x, unsigned* y) {
  __shared__ __align__(16) half tile[32 * 8];
  for (int i = threadIdx.x; i < 256; i += 32) tile[i] = x[i];
  SYNC
  unsigned address = __cvta_generic_to_shared(tile + 8 * threadIdx.x + OFFSET);
  unsigned r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4TRANS.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  for (int i = 0; i < 4; ++i) y[4 * threadIdx.x + i] = r[i];
}
"""


def ldmatrix(trans: str = "", sync: str = "__syncthreads();", offset: int = 0) -> np.ndarray:
    source = LDMATRIX.replace("TRANS", trans).replace("SYNC", sync).replace("OFFSET", str(offset))
    y = Memory((32, 4), np.uint32)
    Module(source).run("k", 1, 32, Memory.of(np.arange(256, dtype=np.float16)), y)
    return y.read()


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(trans, order):
    matrices = np.arange(256, dtype=np.float16).reshape(4, 8, 8)
    if trans:
        matrices = matrices.transpose(0, 2, 1)
    pairs = matrices[:, GROUP[:, None], 2 * MEMBER[:, None] + np.arange(2)]
    np.testing.assert_array_equal(ldmatrix(trans), registers(pairs)[..., 0].T)


def test_ldmatrix_wants_aligned_rows():
    with pytest.raises(CudaError, match="misaligned address: ldmatrix"):
        ldmatrix(offset=4)


def test_an_operation_of_half_a_warp_fails(order):
    source = LDMATRIX.replace("TRANS", "").replace("OFFSET", "0")
    source = source.replace("SYNC", "__syncthreads(); if (threadIdx.x % 2) __syncwarp();")
    with pytest.raises(CudaError, match="lanes of one mask are at"):
        Module(source).run("k", 1, 32, Memory(256, np.float16), Memory((32, 4), np.uint32))


WGMMA = """
__device__ unsigned long long descriptor(unsigned address) {
  return (unsigned long long)(address >> 4 & 0x3fff) | (unsigned long long)(LEADING >> 4) << 16 |
         (unsigned long long)(STRIDE >> 4) << 32 | (unsigned long long)LAYOUT << 62;
}
extern "C" __global__ void k(const uint4* a, const unsigned* held, const uint4* b, SUM* d) {
  __shared__ __align__(1024) uint4 sa[64 * UNITS];
  __shared__ __align__(1024) uint4 sb[NCOLS * UNITS];
  for (int i = threadIdx.x; i < 64 * UNITS; i += 128) sa[i] = a[i];
  for (int i = threadIdx.x; i < NCOLS * UNITS; i += 128) sb[i] = b[i];
  __syncthreads();
  SUM r[NCOLS / 2];
  for (int i = 0; i < NCOLS / 2; ++i) r[i] = 3;
  for (int k = 0; k < STEPS; ++k) {
    FIRST
    unsigned long long db = descriptor(__cvta_generic_to_shared(sb) + k * STEP);
    int scale = k > 0;
    FENCED
    asm volatile("{.reg .pred p;\\n setp.ne.b32 p, %SCALE, 0;\\n INSTRUCTION }"
                 : OUTPUTS : FACTOR, "l"(db), "r"(scale));
    COMMITTED
    WAITED
  }
  for (int i = 0; i < NCOLS / 2; ++i) d[threadIdx.x * (NCOLS / 2) + i] = r[i];
  LAST
}
"""
WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;");'
ORDERED = {
    "FENCED": 'asm volatile("wgmma.fence.sync.aligned;");',
    "COMMITTED": 'asm volatile("wgmma.commit_group.sync.aligned;");',
    "WAITED": WAIT,
    "LAST": "",
}


def core_matrices(matrix: np.ndarray) -> np.ndarray:
    """K-major without swizzle: 8 rows of 16 bytes together; along k, then along the rows."""
    units = matrix.view(np.uint8).reshape(matrix.shape[0] // 8, 8, -1, 16)
    return np.ascontiguousarray(units.transpose(0, 2, 1, 3))


def swizzled(matrix: np.ndarray) -> np.ndarray:
    """K-major in 128-byte rows whose 16-byte units are XORed with the row's number."""
    units = matrix.view(np.uint8).reshape(matrix.shape[0], 8, 16)
    rows = np.arange(matrix.shape[0])[:, None]
    placed = np.empty_like(units)
    placed[rows, np.arange(8) ^ (rows % 8)] = units
    return placed


DESCRIBED = "unsigned long long da = descriptor(__cvta_generic_to_shared(sa) + k * STEP);"
HELD = "const unsigned* a4 = held + 4 * (threadIdx.x * STEPS + k);"


@pytest.mark.parametrize(("dtype", "n"), [("f16", 64), ("bf16", 8), ("s8", 24)])
@pytest.mark.parametrize("layout", ["core", "swizzle 128", "registers"])
def test_wgmma(dtype, n, layout):
    got, expected = wgmma(dtype, n, layout)
    tolerance = 0 if dtype == "s8" else 1e-4
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("order_of_things", "message"),
    [
        ({"FENCED": ""}, "no wgmma.fence since the last wait"),
        ({"COMMITTED": ""}, "ended before its wgmma were waited for"),
        ({"WAITED": ""}, "ended before its wgmma were waited for"),
    ],
)
def test_wgmma_that_nothing_orders_fails_the_launch(order_of_things, message):
    with pytest.raises(CudaError, match=message):
        wgmma("f16", 8, "registers", **order_of_things)


def test_sums_of_wgmma_are_poison_until_they_are_waited_for():
    got, _ = wgmma("f16", 8, "registers", WAITED="", LAST=WAIT)
    assert np.isnan(got).all()


def wgmma(dtype, n, layout, **order_of_things):
    """The product of two matrices that a warpgroup makes, and what it should be."""
    whole = dtype == "s8"
    size = np.dtype(DTYPES[dtype]).itemsize
    k, per = 128 // size, 32 // size
    a, b = random(dtype, (64, k)), random(dtype, (n, k))
    sum_, type_, letter = ("s32", "int", "r") if whole else ("f32", "float", "f")
    first = 4 if layout == "registers" else 1  # operands that name a
    flat = layout == "core"
    registers_ = ", ".join(f"%{i}" for i in range(n // 2))
    signs = "" if whole else ", 1, 1, 0" + ", 0" * (first == 1)
    at = n // 2
    named = f"%{at}" if first == 1 else "{" + ", ".join(f"%{at + i}" for i in range(4)) + "}"
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k{per}.{sum_}.{dtype}.{dtype} "
        f"{{{registers_}}}, {named}, %{at + first}, p{signs};"
    )
    outputs = ", ".join(f'"+{letter}"(r[{i}])' for i in range(n // 2))
    source = WGMMA
    for word, text in {
        **ORDERED,
        **order_of_things,
        "INSTRUCTION": instruction,
        "OUTPUTS": outputs,
        "SCALE": str(at + first + 1),
        "FIRST": DESCRIBED if first == 1 else HELD,
        "FACTOR": '"l"(da)' if first == 1 else ", ".join(f'"r"(a4[{i}])' for i in range(4)),
        "LEADING": "128",
        "STRIDE": "1024",
        "LAYOUT": "0" if flat else "1",
        "STEPS": str(k // per),
        "STEP": "256" if flat else "32",
        "UNITS": "8",
        "NCOLS": str(n),
        "SUM": type_,
    }.items():
        source = source.replace(word, text)
    place = core_matrices if flat else swizzled
    number = np.int32 if whole else np.float32
    d = Memory((128, n // 8, 2, 2), number)
    held = np.concatenate([fragments(a[row : row + 16], 2) for row in range(0, 64, 16)])
    inputs = [Memory.of(given) for given in (place(a), held, place(b))]
    Module(source).run("k", 1, 128, *inputs, d)
    thread = np.arange(128)
    rows = 16 * (thread // 32) + thread % 32 // 4
    got = np.empty((64, n), number)
    for j, half, e in np.ndindex(n // 8, 2, 2):
        got[rows + 8 * half, 8 * j + 2 * (thread % 4) + e] = d.read()[:, j, half, e]
    wide = np.int64 if whole else np.float64
    return got, a.astype(wide) @ b.astype(wide).T
