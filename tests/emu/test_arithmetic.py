"""half, bfloat16, dp4a and the bit intrinsics against numpy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emu.raw import Memory, Module

DTYPES = {"half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16}
OPERATIONS = {
    "a + b": np.add,
    "a - b": np.subtract,
    "a * b": np.multiply,
    "a / b": np.divide,
    "__hfma(a, b, c)": None,
    "-a": lambda a, _: -a,
    "__habs(a)": lambda a, _: abs(a),
    "max(a, b)": np.maximum,
}


@pytest.mark.parametrize("type_", DTYPES)
@pytest.mark.parametrize("expression", OPERATIONS)
def test_16_bit_floats_round_as_the_hardware_does(type_, expression):
    source = f"""
    {type_} max({type_} a, {type_} b) {{ return __hgt(a, b) ? a : b; }}
    extern "C" __global__ void k(const {type_}* x, {type_}* y) {{
      {type_} a = x[3 * threadIdx.x], b = x[3 * threadIdx.x + 1], c = x[3 * threadIdx.x + 2];
      y[threadIdx.x] = {expression};
    }}"""
    dtype = DTYPES[type_]
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((1024, 3)) * np.exp(rng.uniform(-9, 9, (1024, 3)))).astype(dtype)
    y = Memory(1024, np.uint16)
    Module(source).run("k", 1, 1024, Memory.of(x.view(np.uint16)), y)
    a, b, c = x.astype(np.float64).T
    operation = OPERATIONS[expression]
    with np.errstate(over="ignore"):
        exact = a * b + c if operation is None else operation(a, b)
        np.testing.assert_array_equal(y.read(), exact.astype(dtype).view(np.uint16))


def test_every_half_survives_the_way_to_float_and_back():
    source = """
    extern "C" __global__ void k(half* x, float* y) {
      int i = blockIdx.x * 1024 + threadIdx.x;
      y[i] = __half2float(x[i]);
      x[i] = __float2half_rn(y[i]);
    }"""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    x, y = Memory.of(halves), Memory(65536)
    Module(source).run("k", 64, 1024, x, y)
    np.testing.assert_array_equal(y.read(), halves.astype(np.float32))
    np.testing.assert_array_equal(x.read(), halves)


INTEGERS = {
    "__dp4a(a, b, c)": lambda a, b, c: (bytes_of(a, "b") * bytes_of(b, "b")).sum(1) + c,
    "int(__dp4a(unsigned(a), unsigned(b), unsigned(c)))": lambda a, b, c: (
        (bytes_of(a, "B") * bytes_of(b, "B")).sum(1) + c
    ),
    "__vsub4(a, b)": lambda a, b, _: packed(bytes_of(a, "b") - bytes_of(b, "b")),
    "__vadd4(a, b)": lambda a, b, _: packed(bytes_of(a, "b") + bytes_of(b, "b")),
    "__vsubss4(a, b)": lambda a, b, _: packed(
        np.clip(bytes_of(a, "b") - bytes_of(b, "b"), -128, 127)
    ),
    "__byte_perm(a, b, 0x7150)": lambda a, b, _: packed(
        np.stack(
            [
                bytes_of(a, "B")[:, 0],
                *bytes_of(b, "B")[:, [1]].T,
                bytes_of(a, "B")[:, 1],
                bytes_of(b, "B")[:, 3],
            ],
            1,
        )
    ),
    "__popc(a)": lambda a, _b, _c: np.array([int(x & 0xFFFFFFFF).bit_count() for x in a]),
    "__clz(a)": lambda a, _b, _c: np.array([32 - int(x & 0xFFFFFFFF).bit_length() for x in a]),
    "__mulhi(a, b)": lambda a, b, _: a * b >> 32,
    "__float_as_int(__int_as_float(a))": lambda a, _b, _c: a,
}


def bytes_of(words: np.ndarray, kind: str) -> np.ndarray:
    return words.astype(np.int32).view(f"{kind}").reshape(-1, 4).astype(np.int64)


def packed(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.astype(np.uint8)).view(np.int32)[:, 0]


@pytest.mark.parametrize("expression", INTEGERS)
def test_integer_intrinsics(expression):
    source = f"""
    extern "C" __global__ void k(const int* x, int* y) {{
      int a = x[threadIdx.x], b = x[threadIdx.x + 256], c = x[threadIdx.x + 512];
      y[threadIdx.x] = {expression};
    }}"""
    x = np.random.default_rng(2).integers(-(2**31), 2**31, 768).astype(np.int32)
    y = Memory(256, np.int32)
    Module(source).run("k", 1, 256, Memory.of(x), y)
    a, b, c = x.reshape(3, 256).astype(np.int64)
    expected = INTEGERS[expression](a, b, c)
    np.testing.assert_array_equal(y.read(), expected.astype(np.int64).astype(np.int32))
