"""What weights are multiplied with: int8 activations (q8a) if packed in blocks, f32 if floats."""

from __future__ import annotations

from collections.abc import Iterable

from xpuc.ir.formats import format_of

Q8_BLOCK = 32  # columns of a quantised activation that stand together
Q8_HALF = 16  # columns of it that share a scale


def reads_q8(format_name: str) -> bool:
    """Whether weights of this format take int8 activations: those that come in blocks do."""
    return format_of(format_name).n > 1


def same_activation(format_names: Iterable[str]) -> bool:
    """Whether weights of all these formats can share one activation."""
    return len({reads_q8(name) for name in format_names}) == 1
