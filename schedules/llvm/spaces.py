"""What a tuning session may try: the values of each knob that are worth measuring at a site."""

from __future__ import annotations

from collections.abc import Sequence

from xpuc.schedules import Site, Space
from xpuc.schedules.llvm.layouts import layout_of
from xpuc.schedules.llvm.products import MOST_UNROLLED

_AHEAD_BYTES = (0, 256, 512, 1024, 1536, 2048, 3072, 4096)
_TILES = (8, 16, 32, 64, 128)
_KEY_BYTES = (0, 16384, 32768, 65536, 131072)


def linear_space(site: Site) -> Space:
    """Of products with packed weights: bytes asked for ahead, unrolling, streams, rows a tile."""
    space: dict[str, Sequence[int]] = {"prefetch_bytes": _AHEAD_BYTES}
    sub_blocks = {layout_of(w.format).sub_blocks for w in site.weights}
    unrolls = tuple(u for u in (1, 2, 4, 8) if u <= max(sub_blocks))
    if len(unrolls) > 1:
        space["unroll"] = unrolls
    if site.n == 1:
        space["groups"] = (1, 2)
    if site.n is None or site.n > MOST_UNROLLED:
        space["m_tile"] = _TILES
    return space


def attention_space(site: Site) -> Space:
    """Of decode: chains of sums, and what is asked for ahead. Of prefill: queries of a tile."""
    if site.n is None:
        return {"tile_queries": (3, 4, 5, 6)}
    return {
        "chains": (4, 6, 8, 12, 16),
        "fetch_next": _KEY_BYTES,
        "fetch_values": (0, 1),
        "fetch_keys": (0, 1),
    }
