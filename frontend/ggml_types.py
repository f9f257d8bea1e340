"""The tensor types of ggml: what a GGUF type id stands for, and which of them xpuc decodes.

Ids and block layouts are those of ggml.h and ggml-common.h. A type stays here when xpuc cannot
decode it, so that it is refused by name and `xpuc inspect` can still list the tensors that use it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """`block_weights` consecutive weights of a row are stored in `block_bytes` bytes."""

    id: int
    name: str
    block_weights: int
    block_bytes: int
    is_supported: bool = False
    replacement: str = ""  # set when ggml has removed the type: the one to quantise to instead


_DECODED: list[tuple[int, str, int, int]] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (30, "BF16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (20, "IQ4_NL", 32, 18),
    (23, "IQ4_XS", 256, 136),
]

_KNOWN: list[tuple[int, str, int, int]] = [
    (9, "Q8_1", 32, 40),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
]

# The interleaved types were rows of their replacement, repacked for one processor.
_REMOVED: list[tuple[int, str, int, int, str]] = [
    (4, "Q4_2", 16, 10, "Q4_0"),
    (5, "Q4_3", 16, 12, "Q4_1"),
    (31, "Q4_0_4_4", 32, 18, "Q4_0"),
    (32, "Q4_0_4_8", 32, 18, "Q4_0"),
    (33, "Q4_0_8_8", 32, 18, "Q4_0"),
    (36, "IQ4_NL_4_4", 32, 18, "IQ4_NL"),
    (37, "IQ4_NL_4_8", 32, 18, "IQ4_NL"),
    (38, "IQ4_NL_8_8", 32, 18, "IQ4_NL"),
]

TYPES: dict[int, GgmlType] = {
    type_.id: type_
    for type_ in (
        *(GgmlType(*row, is_supported=True) for row in _DECODED),
        *(GgmlType(*row) for row in _KNOWN),
        *(GgmlType(*row[:4], replacement=row[4]) for row in _REMOVED),
    )
}

SUPPORTED: tuple[str, ...] = tuple(name for _, name, _, _ in _DECODED)
