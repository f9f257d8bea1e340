"""The greedy token without logits: it is the argmax of what `linear` computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_calls import build, call
from packed_weights import Packed, activation, of_rows, random_x
from tiny_weights import random_matrix

from xpuc.schedules.llvm.head import head_argmax
from xpuc.schedules.llvm.isa import isa_for
from xpuc.schedules.llvm.linear import linear
from xpuc.schedules.llvm.products import LinearKnobs

AVX2 = isa_for(frozenset({"avx2", "fma"}))
KNOBS = LinearKnobs(m_tile=8)
ROWS, K = 2100, 64  # more row groups than chunks


@pytest.fixture(scope="module")
def head() -> Packed:
    """Random rows, the second half like the first, so that every value appears twice."""
    raw, _ = random_matrix(np.random.default_rng(0), "Q8_0", (ROWS // 2, K), 0.05)
    return of_rows("Q8_0", np.concatenate([raw, raw]))


def logits(w: Packed, args: list[Any]) -> Any:
    func = linear((w.weight,), K, None, activation="q8", bias=(False,), isa=AVX2, knobs=KNOBS)
    (y,) = call(build(func), [*args, *w.planes], [((args[0].shape[1], ROWS), "float32")])
    return y


def greedy(w: Packed, args: list[Any], n: int | None, n_vocab: int) -> list[int]:
    func = head_argmax(w.weight, K, n, activation="q8", isa=AVX2, knobs=KNOBS, n_vocab=n_vocab)
    (ids,) = call(build(func), [*args, *w.planes], [((args[0].shape[1],), "int32")])
    return list(ids)


@pytest.mark.parametrize("n", [1, 2, None])
@pytest.mark.parametrize("n_vocab", [ROWS, 1061, 3])
def test_it_is_the_first_largest_logit(head: Packed, n: int | None, n_vocab: int) -> None:
    args, _ = activation("q8", random_x(n or 11, K))
    want = logits(head, args)[:, :n_vocab].argmax(1)
    assert greedy(head, args, n, n_vocab) == list(want)
    assert (want < ROWS // 2).all()


def test_a_nan_makes_no_token(head: Packed) -> None:
    args, _ = activation("q8", random_x(3, K))
    args[1][1, 1] = np.nan
    ids = greedy(head, args, None, ROWS)
    assert ids[1] == -1
    assert -1 not in (ids[0], ids[2])


def test_infinite_logits_are_numbers(head: Packed) -> None:
    args, _ = activation("q8", random_x(1, K))
    args[1][0, 0, 0] = np.inf
    y = logits(head, args)[:, :40]
    assert np.isinf(y).all()
    assert greedy(head, args, 1, 40) == [int(y.argmax())]
