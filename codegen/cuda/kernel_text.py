"""Kernels in CUDA source as TVM writes it: all of them declared, then each with its body."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise

KERNEL = re.compile(
    r'extern "C" __global__ void __launch_bounds__\((\d+)(?:, (\d+))?\) (\w+)(?=\()'
)  # threads, resident blocks, name


def without_others(source: str, names: Collection[str]) -> str:
    """The source less all kernels but those named."""
    head, kernels = _split(source)
    return head + "".join(text for name, text in kernels if name in names)


def for_alone(source: str, archs: Mapping[str, Collection[str]]) -> str:
    """The source in which the kernels of these names have a body on their architectures only.

    Those are of one compute capability alone (sm_90a), with instructions that others do not
    compile. On others the kernels do nothing, and nobody is to launch them.
    """
    head, kernels = _split(source)
    return head + "".join(
        _guarded(text, archs[name]) if name in archs else text for name, text in kernels
    )


def _guarded(text: str, archs: Collection[str]) -> str:
    start, end = text.find("{"), text.rfind("}")
    if start < 0:  # a declaration
        return text
    numbers = (arch.removeprefix("sm_").removesuffix("a") for arch in archs)
    condition = " || ".join(f"defined(__CUDA_ARCH_FEAT_SM{n}_ALL)" for n in sorted(numbers))
    return f"{text[: start + 1]}\n#if {condition}{text[start + 1 : end]}#endif\n{text[end:]}"


def _split(source: str) -> tuple[str, list[tuple[str, str]]]:
    """What goes before kernels, and the name and text of each declaration and each kernel."""
    found = list(KERNEL.finditer(source))
    starts = [*(match.start() for match in found), len(source)]
    texts = (source[start:end] for start, end in pairwise(starts))
    return source[: starts[0]], [(match[3], text) for match, text in zip(found, texts, strict=True)]
