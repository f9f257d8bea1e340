"""Reading memory as fast as the machine can: the roof over kernels that stream weights."""

from __future__ import annotations

from tvm import tirx

from xpuc.schedules.llvm import tir

NAME = "memory_read"
LANES = 8
_VECTORS, _STREAMS, _AHEAD = 8, 4, 256  # several streams are faster than one; elements ahead


def memory_read(n_bytes: int, parts: int = 256) -> tirx.PrimFunc:
    """Sums over w int32 (n_bytes / 4,), in `parts` parallel parts; output y int32 (8 parts,).

    A part has a stretch of each quarter of the memory: streams far apart are read faster.
    """
    size = n_bytes // 4 // parts  # of a part
    each = LANES * _VECTORS
    assert size * parts * 4 == n_bytes, f"{n_bytes} bytes are not {parts} equal parts"
    assert size % each == 0, f"a part of {size} elements is not whole steps of {each}"

    def body() -> None:
        w = tir.arg("w", (parts * size,), "int32")
        y = tir.arg("y", (parts * LANES,), "int32")
        with tir.parallel(0, parts) as part:
            sums = tir.scratch(each, "int32")
            for i in range(_VECTORS):
                tir.store(sums, i * LANES, tir.const(0, "int32", LANES), LANES)
            per_stream = _VECTORS // _STREAMS
            with tir.serial(0, size // each) as step:
                for i in range(_VECTORS):
                    stream, vector = divmod(i, per_stream)
                    stretch = (stream * parts + part) * (size // _STREAMS)
                    start = stretch + step * LANES * per_stream
                    if vector == 0:
                        tir.prefetch(w, start + _AHEAD)
                    new = tir.load(w, start + vector * LANES, LANES)
                    tir.store(sums, i * LANES, tir.load(sums, i * LANES, LANES) + new, LANES)
            total = tir.tree_sum(tir.load(sums, i * LANES, LANES) for i in range(_VECTORS))
            tir.store(y, part * LANES, total, LANES)

    return tir.prim_func(NAME, body)
