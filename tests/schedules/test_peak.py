"""The loop of byte products: what it computes, and the instructions it is made of."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from kernel_calls import build, call
from tvm import IRModule, tirx

from xpuc.schedules.llvm import peak
from xpuc.schedules.llvm.isa import Avx2, Generic, Isa, Vnni


def by_hand(x: np.ndarray, chunk: int) -> np.ndarray:
    """The sums of one chunk, on AVX2: int32 (8,)."""
    low = [(x.view(np.uint8) + np.uint8(i)) & 15 for i in range(8)]
    factors = sum(each.astype(np.int32) for each in low)
    total = np.zeros(8, np.int32)
    for chain in range(5):
        acc = x + np.int32(chunk + chain)
        for _ in range(peak.STEPS):
            acc = acc + (factors * acc.view(np.int8)).reshape(8, 4).sum(1, dtype=np.int32)
        total = total + acc
    return total


def test_its_sums_are_right() -> None:
    x = np.array([0, 1, -1, 0x01020304, -0x7F6E5D4C, 0x0F0F0F0F, 12345, -(2**31)], np.int32)
    kernel = peak.int8_peak(Avx2())
    (sums,) = call(build(kernel), [x], [((peak.CHUNKS, 8), "int32")])
    for chunk in (0, 1, peak.CHUNKS - 1):
        np.testing.assert_array_equal(sums[chunk], by_hand(x, chunk))


def loop_of(isa: Isa, cpu: str) -> list[str]:
    """The instructions of the innermost loop, which jumps back to its own label."""
    kernel = peak.int8_peak(isa)
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    built = tirx.build(IRModule({peak.NAME: kernel}), target=target)
    loops = re.findall(
        r"^(\.\w+):[^\n]*\n((?:(?!\.\w+:).*\n)*?)\s+j\w+\s+\1$",
        built.inspect_source("asm"),
        re.MULTILINE,
    )
    bodies = [re.findall(r"^\s+(?:{\w+}\s+)?([a-z]\w+)", body, re.MULTILINE) for _, body in loops]
    return max(bodies, key=lambda body: sum(word.startswith(("vpmadd", "vpdp")) for word in body))


@pytest.mark.parametrize("cpu", ["haswell", "znver3"])
def test_eight_products_are_widened_once(cpu: str) -> None:
    loop = loop_of(Avx2(), cpu)
    assert loop.count("vpmaddubsw") == 8 * loop.count("vpmaddwd") > 0


@pytest.mark.parametrize("cpu", ["znver4", "sapphirerapids", "alderlake"])
def test_nothing_but_products_where_they_add_up(cpu: str) -> None:
    loop = loop_of(Vnni(), cpu)
    assert set(loop) - {"addl", "decl", "incl"} == {"vpdpbusd"}
    assert len(loop) >= 12


def test_a_cpu_without_byte_products_has_no_such_loop() -> None:
    assert peak.int8_peak(Generic()) is None
    assert peak.operations(Generic()) == 0


def test_operations_count_two_for_each_product() -> None:
    turns = peak.CHUNKS * peak.STEPS
    assert peak.operations(Avx2()) == turns * 5 * 8 * 32 * 2
    assert peak.operations(Vnni()) == turns * 12 * 32 * 2
