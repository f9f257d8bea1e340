"""What a tuning session may try on a GPU: the values of each knob that are worth timing at a site.

Values whose kernel cannot be (`gate_up` has blocks of 32 rows) are refused when it is built, those
that take too much of a multiprocessor when it is compiled (`tuning/prefilter.py`).

Not here, as they decide the order of sums, which is the bits of the result: a row split among
warps, the segments of a context and the four warps that share one, the chunks of a prompt's.
"""

from __future__ import annotations

from xpuc.schedules import Site, Space
from xpuc.schedules.cuda.products import MOST_ROWS, TILE, lane_columns
from xpuc.schedules.cuda.tir import WARP
from xpuc.schedules.operands import result_rows
from xpuc.schedules.packed import packed


def linear_space(site: Site) -> Space:
    """Of products of whole rows: warps of a block, rows of a warp, turns asked for ahead."""
    return {"warps": (1, 2, 4, 8), **_rows_and_turns(site, result_rows(site))}


def gate_up_space(site: Site) -> Space:
    """The same, a block of 32 rows of both matrices for a block of threads."""
    return {"warps": (2, 4, 8, 16), **_rows_and_turns(site, site.n)}


def head_space(site: Site) -> Space:
    """The same, and how often a warp takes rows."""
    of_row = _rows_and_turns(site, result_rows(site))
    return {"warps": (4, 8), **of_row, "passes": (1, 4, 16)}


def matmul_space(site: Site) -> Space:
    """Of products on tensor cores: the sides of a tile, and the warps along each."""
    return {
        "rows": (32, 64, 128), "columns": (32, 64, 128),
        "row_warps": (1, 2, 4), "column_warps": (1, 2, 4),
    }  # fmt: skip


def hopper_space(site: Site) -> Space:
    """Of products of warpgroups: the sides of a tile, what is under way and decoded at once."""
    return {
        "rows": (64, 128, 256), "warpgroups": (1, 2, 4), "stages": (2, 3, 4), "parts": (2, 4),
        "resident": (1, 2),
    }  # fmt: skip


def decode_space(site: Site) -> Space:
    """Of a decoding row's attention: warps, blocks before a head of the pool, bytes in flight."""
    group = site.attrs["heads"] // site.attrs["kv_heads"]
    return {
        "warps": (4, 8),
        "splits": tuple(s for s in (1, 2, 4) if group % s == 0),
        "ahead": (1, 2, 4, 8),
    }


def flash_space(site: Site) -> Space:
    """Of a prompt's attention: warps of a block, which has 16 queries for each, bytes in flight."""
    return {"warps": (1, 2, 4), "ahead": (1, 2, 4, 8)}


def _rows_and_turns(site: Site, n: int | None) -> Space:
    """With many activations, sums of few rows and turns fit into a thread's registers."""
    sums = n if n is not None and n <= MOST_ROWS else TILE
    lane = min(lane_columns(packed(w.format)) for w in site.weights)
    turns = site.weights[0].columns // lane // WARP
    most = 4 if sums <= 4 else 2
    return {
        "rows": tuple(r for r in (1, 2, 4) if r <= most),
        "ahead": tuple(a for a in (1, 2, 4) if a == 1 or a <= min(most, turns)),
    }
