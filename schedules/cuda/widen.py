"""Int8 copies of packed weights: the elements of a matrix, a byte each, row after row.

A prompt is multiplied with them (int8_matmul.py) under `--prefill-weights int8` or `auto`. A copy
is exact and holds the elements alone: their scales and minimums stay where they are packed.
"""

from __future__ import annotations

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.blocks import WORDS, words
from xpuc.schedules.cuda.layouts import UNITS
from xpuc.schedules.packed import COLUMNS, packed

GROUP = 256  # columns of a block of the formats that pay, and of an activation's scale
_WARPS = 4

# Instructions that a warp issues for 16 rows of x by 8 of a matrix by 32 columns, of tiles of
# 128 x 128 for sm_90a: with the copy, and decoding to f16 on the way. The tensor cores take half
# the time with it. Tests hold the machine code to these.
INSTRUCTIONS: dict[str, tuple[float, float]] = {
    "IQ4_XS": (10.2, 13.0),
    "Q4_K": (11.7, 12.0),
    "Q5_K": (11.7, 12.4),
}


def pays(format: str) -> bool:
    """Whether prompts take fewer instructions with a copy than with the packed matrix."""
    return format in INSTRUCTIONS


def why_not(format: str) -> str:
    """Why a format has no copies, in a few words."""
    facts = packed(format)
    if not facts.is_quantised:
        return "floats"
    if facts.columns == GROUP:
        return "a scale for every 16 columns: 2 mma and 8 multiply-adds instead of 1 and 4"
    return "a float scale for every 32 columns: 4 conversions more"


def element_planes(format: str) -> tuple[str, ...]:
    """The planes of a packed matrix that `widen` reads, in order."""
    return ("qs", "top")[: len(UNITS[packed(format).bits])]


def codes_per_word(format: str) -> int:
    """Elements of a matrix for each word of its plane `qs`."""
    return COLUMNS // UNITS[packed(format).bits][0]


def widen(format: str) -> tirx.PrimFunc:
    """codes int8 (c,): the elements of c / 32 sub-blocks in the order of their columns.

    Arguments: the planes `element_planes` of the matrix, of any size, codes.
    """
    assert pays(format), f"{format} has no copies"
    facts = packed(format)

    def body() -> None:
        planes = {
            name: tir.arg(name, (tir.rows_var(f"n_{name}"),), "uint32")
            for name in element_planes(format)
        }
        c = tir.rows_var("c")
        codes = tir.view(tir.arg("codes", (c,), "int8"), (c // 4,), "uint32")
        width = _WARPS * tir.WARP
        threads = tir.launch(((c // COLUMNS + width - 1) // width,), _WARPS)
        index = tir.let(threads.block[0] * width + threads.thread)
        with tir.when(index < c // COLUMNS):
            found = words(facts, planes, index)
            for first in range(0, WORDS, 4):
                four = tir.vector(found[first : first + 4])
                tir.store(codes, index * WORDS + first, four, 4)

    return tir.prim_func(f"widen_{format.lower()}", body)
