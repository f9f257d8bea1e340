"""The words of GPU kernels: what they build, before any compiler sees it."""

from __future__ import annotations

from xpuc.schedules.cuda import tir


def scale_rows() -> None:
    n = tir.rows_var()
    x, y = (tir.arg(name, (n, 256), "float32") for name in "xy")
    threads = tir.launch((n,), 2)
    at = (threads.block[0], threads.thread * 4)
    parts = tir.let(tir.load(x, at, 4))
    tir.store(y, at, tir.vector([tir.element(parts, i) * 2.0 for i in range(4)]), 4)


def test_a_kernel_is_final_and_says_what_one_thread_does() -> None:
    kernel = tir.prim_func("scale_rows", scale_rows)
    assert kernel.attrs["global_symbol"] == "scale_rows"
    assert kernel.attrs["tirx.is_scheduled"]
    assert not kernel.attrs.get("s_tir", False)
    text = kernel.script()
    assert "T.cta_id([n])" in text
    assert "T.warp_id([2])" in text
    assert "T.thread_id([64])" in text
    assert "T.alloc_local((4,))" in text  # a vector is gathered in registers
