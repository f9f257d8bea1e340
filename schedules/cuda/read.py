"""Reading a GPU's memory as fast as it can be read: the roof over kernels that stream weights."""

from __future__ import annotations

from tvm import tirx

from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.tir import WARP

NAME = "memory_read"
_WARPS, _VECTORS = 8, 8  # 16-byte loads a thread has in flight


def memory_read(n_bytes: int) -> tirx.PrimFunc:
    """Sums over w int32 (n_bytes / 4,); output y int32 (threads,), as `sums` counts them."""
    width = _WARPS * WARP
    blocks = sums(n_bytes) // width

    def body() -> None:
        w = tir.arg("w", (n_bytes // 4,), "int32")
        y = tir.arg("y", (blocks * width,), "int32")
        threads = tir.launch((blocks,), _WARPS)
        total = tir.const(0, "int32")
        loaded = []
        for i in range(_VECTORS):
            at = ((threads.block[0] * _VECTORS + i) * width + threads.thread) * 4
            loaded.append(tir.let(tir.load(w, at, 4)))
        for vector in loaded:
            for lane in range(4):
                total = total + tir.element(vector, lane)
        tir.store(y, threads.block[0] * width + threads.thread, total)

    return tir.prim_func(NAME, body)


def sums(n_bytes: int) -> int:
    """Threads that read so much; n_bytes has to be whole blocks of them."""
    block = _WARPS * WARP * _VECTORS * 16
    assert n_bytes % block == 0, f"{n_bytes} bytes are not whole blocks of {block}"
    return n_bytes // block * _WARPS * WARP
