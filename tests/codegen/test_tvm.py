"""What xpuc counts on of the installed TVM, and would otherwise lose without a word."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: with apache-tvm-ffi 0.1.15 it ends by a signal.
TENSORIZE = """
from tvm import te
from tvm.s_tir import Schedule, TensorIntrin
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

def add_16():
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("add_16")
        a, b, c = (T.arg(n, T.buffer((16,), "int32", offset_factor=1, layout=None)) for n in "abc")
        with T.sblock("root"):
            T.reads(a[0:16], b[0:16])
            T.writes(c[0:16])
            with T.serial(0, 16) as i, T.sblock("c"):
                at = T.axis.spatial(16, i)
                T.reads(a[at], b[at])
                T.writes(c[at])
                T.buffer_store(c, a[at] + b[at], [at])
    return builder.get()

TensorIntrin.register("add_16", add_16(), add_16())
a, b = (te.placeholder((64,), "int32", name=n) for n in "ab")
c = te.compute((64,), lambda i: a[i] + b[i], name="c")
schedule = Schedule(te.create_prim_func([a, b, c]))
_, inner = schedule.split(schedule.get_loops(schedule.get_sblock("c"))[0], [4, 16])
schedule.tensorize(inner, "add_16")
print(schedule.mod.script().count("match_buffer"))
"""

# 75 s of parsing TVMScript at import, which nothing here needs.
SLOW = "tvm.s_tir.tensor_intrin"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_tensorize_does_not_end_the_process() -> None:
    assert run(TENSORIZE) == "3"


@pytest.mark.slow
def test_the_compiler_imports_nothing_that_is_parsed() -> None:
    code = (
        "import sys, xpuc.codegen.compile, xpuc.schedules.cuda.tir\n"
        "from xpuc.codegen.cuda import driver\n"
        "driver.load()\n"
        f"print({SLOW!r} in sys.modules)"
    )
    assert run(code) == "False"
