"""The arrays of a task on its target, and what a call costs at least."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from xpuc.artifact import pool_arrays
from xpuc.codegen.compile import SEGMENT_TOKENS
from xpuc.schedules import Site, target_of
from xpuc.tuning import inputs
from xpuc.tuning.inputs import Case, Layout, draw, matrix_blocks
from xpuc.tuning.results import Cost
from xpuc.tuning.tasks import Task
from xpuc.tuning.workbench import Job


def job_of(task: Task) -> Job:
    """A task as it is put on a workbench."""
    cases = tuple(make(task.site, rows) for rows in task.rows)
    costs = tuple(cost(task.site, rows) for rows in task.rows)
    return Job(task.name, task.site, cases, costs, task.schedule.tolerance)


def make(site: Site, rows: int, *, depth: int = 1024, seed: int = 0) -> Case:
    """See inputs.draw: in the layout of the site's target."""
    return draw(site, layout_of(site), rows, depth=depth, seed=seed)


def symbols(site: Site, rows: int, *, depth: int = 1024) -> dict[str, int]:
    """See inputs.symbols."""
    return inputs.symbols(site, layout_of(site), rows, depth=depth)


def layout_of(site: Site) -> Layout:
    """That of the site's target."""
    target, a = target_of(site.target.kind), site.attrs
    is_attention = site.op == "attention"
    tile_rows = target.tile_rows(a["heads"], a["kv_heads"], a["head_dim"]) if is_attention else 1
    return Layout(
        matrix_blocks, lambda m, raw: target.pack(m.format, raw), tile_rows, SEGMENT_TOKENS
    )


def cost(site: Site, rows: int, *, depth: int = 1024) -> Cost:
    """What a call of `rows` rows must read, write and multiply; `depth` as for `inputs.make`.

    Every plane and every visible key and value is read once. Small indices are not counted.
    """
    if site.op == "attention":
        return _attention_cost(site, rows, depth)
    facts, target = site.facts(), target_of(site.target.kind)
    tensors = [*facts["operands"], *_tensors(facts["result"])]
    planes = [p for w in site.weights for p in target.planes(w.format, w.rows, w.columns)]
    n_bytes = sum(p.size * np.dtype(p.dtype).itemsize for p in planes)
    return Cost(
        rows,
        n_bytes + sum(_bytes(t, rows) for t in tensors),
        2 * rows * sum(w.rows * w.columns for w in site.weights),
    )


def _attention_cost(site: Site, rows: int, depth: int) -> Cost:
    attrs, facts = site.attrs, site.facts()
    positions = [depth - 1] * rows if site.n else range(depth, depth + rows)
    seen = [min(p + 1, attrs["window"] or p + 1) for p in positions]
    # The rows of a prefill see one context: what the first sees, and one token more for each.
    read = sum(seen) if site.n else seen[0] + rows - 1
    arrays = pool_arrays(site.kv_dtype, site.block_tokens, attrs["kv_heads"], attrs["head_dim"])
    token_bytes = sum(array.block_bytes for array in arrays) // site.block_tokens
    tensors = [facts["operands"][0], *_tensors(facts["result"])]
    return Cost(
        rows,
        read * token_bytes + sum(_bytes(t, rows) for t in tensors),
        2 * 2 * attrs["heads"] * attrs["head_dim"] * sum(seen),
    )


def _tensors(facts: list[Any]) -> Iterator[list[Any]]:
    """The tensors of a type in `Site.facts`, tuples flattened: [dtype, dimension, ...]."""
    if isinstance(facts[0], str):
        yield facts
        return
    for field in facts:
        yield from _tensors(field)


def _bytes(tensor: list[Any], rows: int) -> int:
    """Bytes of a tensor whose only symbol, if any, is the number of rows."""
    dtype, *shape = tensor
    itemsize: int = np.dtype(dtype).itemsize
    return itemsize * math.prod(rows if isinstance(d, str) else int(d) for d in shape)
