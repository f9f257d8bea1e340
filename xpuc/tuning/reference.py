"""What a kernel should make of a case, in numpy and double precision.

Nothing here knows how kernels work: weights are what their format says, activations what their
integers stand for, attention is softmax over the tokens a row sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from xpuc.artifact import KV_GROUP
from xpuc.ir.activation import Q8_BLOCK, Q8_HALF
from xpuc.ir.formats import dequantize, format_of
from xpuc.tuning.inputs import Case, Site

Doubles = NDArray[np.float64]

_ROWS = 16  # rows that are compared
_WEIGHTS_AT_ONCE = 1 << 20
_TOLERANCE = 1e-5  # sums of single precision, in terms of the largest value

_expected: WeakKeyDictionary[Case, Doubles] = WeakKeyDictionary()


def error(site: Site, case: Case, outputs: Sequence[np.ndarray]) -> float:
    """The largest difference from the reference, in terms of the largest reference value.

    `case` is the site's; `outputs` are the tensors of its result, tuples flattened; at most 16 rows
    are compared. Of a quantised result, what differs is beyond the half step that rounding takes.
    An id is no error if it is the argmax, or its logit so close to the best that rounding decides.
    What is not a number is infinitely wrong.
    """
    if case not in _expected:  # a session checks every candidate of a task by the same case
        _expected[case] = _reference(site, case)
    expected = _expected[case]
    if site.op == "head_argmax":
        return _choice_error(outputs[0][: len(expected)], expected)
    if len(outputs) == 4:
        return _q8a_error([o[:, : len(expected)] for o in outputs], expected)
    return _largest(outputs[0][: len(expected)] - expected) / _largest(expected)


def _largest(values: np.ndarray) -> float:
    """The largest magnitude; infinity if a value is not a number."""
    largest = float(np.abs(values).max())
    return math.inf if math.isnan(largest) else largest


def _choice_error(ids: np.ndarray, logits: Doubles) -> float:
    """How much worse than the best the logits of the chosen ids are."""
    if ids.min() < 0 or ids.max() >= logits.shape[1]:
        return math.inf
    missing = logits.max(axis=1) - logits[np.arange(len(ids)), ids]
    worst = _largest(missing) / _largest(logits)
    return worst if worst > _TOLERANCE else 0.0


@np.errstate(invalid="ignore")  # a wrong kernel's infinities
def _q8a_error(outputs: Sequence[np.ndarray], expected: Doubles) -> float:
    """Of (n, k) quantised: integers times scales, the scales, and both kinds of sums."""
    quants, scale, sums, both = (o.astype(np.float64) for o in outputs)
    halves = (Q8_BLOCK // Q8_HALF, Q8_HALF)
    quants = quants.reshape(*quants.shape[:2], *halves)
    wanted = expected.reshape(len(expected), -1, *halves).transpose(1, 0, 2, 3)
    step = np.abs(wanted).max(axis=3) / 127
    off = np.abs(quants * scale[..., None] - wanted) - step[..., None] / 2
    differences = (
        np.maximum(off, 0),
        (scale - step) * 127,  # as the largest value that the scale gives
        sums - scale * quants.sum(axis=3),
        both - sums.sum(axis=2),
    )
    return max(_largest(d) for d in differences) / _largest(expected)


def _reference(site: Site, case: Case) -> Doubles:
    """The result of the first rows: (rows, columns); of head_argmax its logits."""
    if site.op == "attention":
        return _attention(site, case)
    x, biases = _activation(case)
    parts = [_product(w.format, raw, x) for w, raw in zip(site.weights, case.raw, strict=True)]
    if site.op == "gate_up":
        gate, up = parts
        return _ACTIVATIONS[site.attrs["activation"]](gate) * up
    has_bias = site.attrs.get("bias", (False,) * len(parts))
    rest = iter(biases)
    return np.concatenate(
        [p + next(rest) if has else p for p, has in zip(parts, has_bias, strict=True)], axis=1
    )


def _silu(x: Doubles) -> Doubles:
    return _opened(x, x / 2)


def _gelu_tanh(x: Doubles) -> Doubles:
    return _opened(x, math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _opened(x: Doubles, gate: Doubles) -> Doubles:
    """x times a gate that tanh opens from 0 to 1."""
    result: Doubles = x / 2 * (1 + np.tanh(gate))
    return result


_ACTIVATIONS: dict[str, Callable[[Doubles], Doubles]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def _activation(case: Case) -> tuple[Doubles, tuple[np.ndarray, ...]]:
    """The values (rows, k) that the activation stands for, and the operands after it."""
    first = case.operands[0]
    if first.dtype != np.int8:
        return first[:_ROWS].astype(np.float64), case.operands[1:]
    quants, scale = (o[:, :_ROWS].astype(np.float64) for o in case.operands[:2])
    blocks, rows, _ = quants.shape
    values = quants.reshape(blocks, rows, -1, Q8_HALF) * scale[..., None]
    return values.transpose(1, 0, 2, 3).reshape(rows, -1), case.operands[4:]


def _product(format: str, raw: np.ndarray, x: Doubles) -> Doubles:
    """x W^T of packed rows, some of them at a time."""
    out = np.empty((len(x), len(raw)))
    step = max(1, _WEIGHTS_AT_ONCE // x.shape[1])
    for start in range(0, len(raw), step):
        weights = dequantize(format_of(format), raw[start : start + step])
        out[:, start : start + step] = x @ weights.T.astype(np.float64)
    return out


def _attention(site: Site, case: Case) -> Doubles:
    q, *pool, positions, tiles, work, table = case.operands
    keys, values = _keys_and_values(pool)
    rows, attrs = min(case.rows, _ROWS), site.attrs
    sequences = np.empty(case.rows, np.int64)
    for first, count, first_work, _ in tiles:
        sequences[first : first + count] = work[first_work, 2]
    out = np.empty((rows, q.shape[1]))
    for sequence in np.unique(sequences[:rows]):
        own = np.flatnonzero(sequences[:rows] == sequence)
        context = int(positions[own].max()) + 1
        blocks = table[sequence, : -(-context // site.block_tokens)]
        # (heads, tokens, head_dim); keys lie with their tokens last.
        k, v = (
            array[blocks].transpose(order).reshape(attrs["kv_heads"], -1, attrs["head_dim"])
            for array, order in ((keys, (1, 0, 3, 2)), (values, (1, 0, 2, 3)))
        )
        out[own] = _attend(attrs, q[own], positions[own], (k[:, :context], v[:, :context]))
    return out


def _keys_and_values(pool: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Keys (blocks, heads, head_dim, tokens) and values (blocks, heads, tokens, head_dim)."""
    if len(pool) == 2:
        keys, values = pool
        return keys, values
    keys, key_scales, values, value_scales = (array.astype(np.float64) for array in pool)
    return (
        keys * np.repeat(key_scales, KV_GROUP, axis=2),
        values * np.repeat(value_scales, KV_GROUP, axis=2).swapaxes(2, 3),
    )


def _attend(
    attrs: Mapping[str, Any],
    q: np.ndarray,
    positions: np.ndarray,
    context: tuple[np.ndarray, np.ndarray],
) -> Doubles:
    """Rows (rows, heads head_dim) of one sequence over its keys and values, each (heads, t, d)."""
    keys, values = (c.astype(np.float64) for c in context)
    heads, tokens, head_dim = keys.shape
    queries = q.reshape(len(q), heads, -1, head_dim).transpose(1, 0, 2, 3).astype(np.float64)
    scores = np.einsum("hrgd,htd->hrgt", queries, keys, optimize=True) * attrs["scale"]
    if attrs["softcap"]:
        scores = attrs["softcap"] * np.tanh(scores / attrs["softcap"])
    ages = positions[:, None] - np.arange(tokens)  # (rows, tokens)
    seen = (ages >= 0) & (ages < (attrs["window"] or tokens))
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    result: Doubles = np.einsum("hrgt,htd->rhgd", weights, values, optimize=True)
    return result.reshape(q.shape)
