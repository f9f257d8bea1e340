"""What a step that samples has to give, in numpy: its options as arrays hold them, and its draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xpuc.artifact import BANNED, SAMPLING_BANNED, SAMPLING_FIELDS, SAMPLING_WORDS, TOP_K

Options = dict[str, Any]  # u, fields of SamplingParams, and banned: ids

OFF: Options = {"u": 0.5, "temperature": 1.0, "top_k": TOP_K, "top_p": 1.0, "min_p": 0.0}
GREEDY: Options = {"temperature": 0.0, "top_k": 1}


def rows_of(options: Sequence[Options]) -> npt.NDArray[np.int32]:
    """Rows of `sampling`; what is not said is off, and what no field covers is anything."""
    rows = np.full((len(options), SAMPLING_WORDS), -1, np.int32)
    for row, given in zip(rows, options, strict=True):
        values = OFF | given
        values["min_p"] = math.log(values["min_p"]) if values["min_p"] else -math.inf
        for name, dtype, at in SAMPLING_FIELDS:
            row.view(dtype)[at] = values[name]
        for place, id_ in enumerate(values.get("banned", ())):
            row[SAMPLING_BANNED + place] = id_
    return rows


def options_of(row: npt.NDArray[np.int32]) -> Options:
    """Those of a row of `sampling`."""
    found = {name: row.view(dtype)[at].item() for name, dtype, at in SAMPLING_FIELDS}
    banned = row[SAMPLING_BANNED : SAMPLING_BANNED + BANNED]
    return found | {"min_p": math.exp(found["min_p"]), "banned": banned[banned >= 0].tolist()}


def draw(logits: npt.NDArray[np.float32], given: Options) -> tuple[int, float]:
    """(id, how near to another the decision was), by the definitions, in f64."""
    o = OFF | given
    if np.isnan(logits).any():
        return -1, math.inf
    logits = logits.copy()
    logits[list(o.get("banned", ()))] = -np.inf
    if o["temperature"] == 0:
        return int(logits.argmax()), math.inf
    order = np.lexsort((np.arange(len(logits)), -logits))[: o["top_k"]]
    x = logits[order].astype(np.float64)
    kept, edge = _kept(x - x[0], o["top_p"], o["min_p"])
    order, x = order[kept], x[kept]
    reached = np.exp((x - x[0]) / o["temperature"]).cumsum()
    reached /= reached[-1]
    return int(order[(reached > o["u"]).argmax()]), min(edge, abs(reached - o["u"]).min())


def _kept(x: npt.NDArray[np.float64], top_p: float, min_p: float) -> tuple[Any, float]:
    """Of falling logits, the first 0: (what both leave, how near to more or less)."""
    kept, edges = np.ones(len(x), bool), [math.inf]
    if top_p < 1:
        reached = np.exp(x).cumsum()
        reached /= reached[-1]
        kept = np.append(0.0, reached[:-1]) < top_p
        edges.append(abs(reached - top_p).min())
    if min_p:
        above = x - math.log(min_p)
        kept &= above >= 0
        edges.append(abs(above).min())
    kept[0] = True
    return kept, min(edges)
