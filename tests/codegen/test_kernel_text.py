"""Kernels are found in CUDA source, left out, and have no body where an architecture lacks them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from xpuc.codegen.cuda.kernel_text import for_alone, without_others

FIRST = 'extern "C" __global__ void __launch_bounds__'
HEAD = '#define FOO {\n#include "x.h"\n'
A, B = f"{FIRST}(128) a_kernel(int n)", f"{FIRST}(64, 2) b_kernel(float* x)"
SOURCE = f"{HEAD}{A};\n{B};\n{A} {{\n  if (n) {{ n = 1; }}\n}}\n\n{B} {{\n  *x = 1;\n}}\n\n"


def test_all_kernels_but_those_named_are_left_out() -> None:
    assert without_others(SOURCE, ["b_kernel"]) == f"{HEAD}{B};\n{B} {{\n  *x = 1;\n}}\n\n"
    assert without_others(SOURCE, ["a_kernel", "b_kernel"]) == SOURCE
    assert without_others(HEAD, ["a_kernel"]) == HEAD


def test_a_kernel_for_some_architectures_has_its_body_there_alone() -> None:
    made = for_alone(SOURCE, {"a_kernel": ["sm_90a", "sm_100a"]})
    assert made == SOURCE.replace(
        "\n  if (n) { n = 1; }\n",
        "\n#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM90_ALL)"
        "\n  if (n) { n = 1; }\n#endif\n",
    )
    assert for_alone(SOURCE, {}) == SOURCE


@pytest.mark.parametrize(
    ("macro", "stores"), [("-D__CUDA_ARCH_FEAT_SM90_ALL", True), ("-DX", False)]
)
def test_a_preprocessor_reads_it_so(macro: str, stores: bool) -> None:
    gcc = shutil.which("gcc")
    assert gcc is not None
    source = for_alone(SOURCE.replace(HEAD, ""), {"b_kernel": ["sm_90a"]})
    done = subprocess.run(
        [gcc, "-E", "-P", macro, "-"], input=source, capture_output=True, text=True, check=True
    )
    assert ("*x = 1;" in done.stdout) == stores
    assert "n = 1;" in done.stdout
    assert done.stdout.count("{") == done.stdout.count("}")
