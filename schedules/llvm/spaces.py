"""What a tuning session may try: the values of each knob that are worth measuring at a site."""

from __future__ import annotations

from collections.abc import Sequence

from xpuc.schedules import Site, Space
from xpuc.schedules.llvm.layouts import layout_of
from xpuc.schedules.llvm.products import MOST_UNROLLED

_AHEAD_BYTES = (0, 256, 512, 1024, 1536, 2048, 3072, 4096)
_TILES = (8, 16, 32, 64, 128)


def linear_space(site: Site) -> Space:
    """Of products with packed weights: how far ahead to ask, how much to unroll, rows a tile."""
    space: dict[str, Sequence[int]] = {"prefetch_bytes": _AHEAD_BYTES}
    sub_blocks = {layout_of(w.format).sub_blocks for w in site.weights}
    unrolls = tuple(u for u in (1, 2, 4, 8) if u <= max(sub_blocks))
    if len(unrolls) > 1:
        space["unroll"] = unrolls
    if site.n is None or site.n > MOST_UNROLLED:
        space["m_tile"] = _TILES
    return space
