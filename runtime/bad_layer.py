"""Where a model's numbers go bad: the first layer in which a kernel writes one that is none.

The token whose logits are unfit is computed once more, one kernel after the other, and what each
has written is looked at. That finds damaged weights and overflows, which come again.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import tvm_ffi

from xpuc.runtime.batch import Batch
from xpuc.runtime.blocks import NO_BLOCK
from xpuc.runtime.model import Model
from xpuc.runtime.plan import Span
from xpuc.runtime.sequence import Sequence


def first_bad_layer(model: Model, sequence: Sequence) -> str:
    """Of the last token that was computed of a sequence, which still has its blocks; in words."""
    position = sequence.n_computed - 1
    if not _is_there(model, sequence, position):
        return "which layer is at fault is not known: K/V that its window begins with is gone"
    batch, watch = Batch(model), _Watch(model)
    batch.fill([Span(sequence, position, 1)])
    with model.instrument(watch.see, after=True):
        model.run(batch, tail="logits")
    return watch.found or "computed again, every layer gives numbers"


def _is_there(model: Model, sequence: Sequence, position: int) -> bool:
    """Whether it has all blocks that a row at the position sees."""
    size = model.block_tokens
    for window, blocks in zip(model.windows, sequence.blocks, strict=True):
        first = max(0, position - window + 1) // size if window else 0
        if NO_BLOCK in blocks[first : position // size + 1]:
            return False
    return True


class _Watch:
    """Told of every call that was made; `found` says which was the first to write a bad number."""

    def __init__(self, model: Model) -> None:
        self.found = ""
        self._model, self._operands = model, model.operands()
        self._operations = {
            kernel: each for each in model.manifest.operations for kernel in each["kernels"]
        }
        self._layer = "the embedding"

    def see(self, name: str, _: Any, arguments: tuple[Any, ...]) -> None:
        operation = self._operations.get(name)
        if operation is None or self.found:
            return
        tensors = [each for each in arguments if isinstance(each, tvm_ffi.Tensor)]
        own = [each for each in tensors if each.data_ptr() not in self._operands]
        for each in tensors:
            self._layer = _layer_of(self._operands.get(each.data_ptr(), "")) or self._layer
        if operation["op"] == "attention":
            # Parts of a context that a row does not see are written by nobody.
            own = (
                own[-_n_tensors(operation["result"]) :] if name == operation["kernels"][-1] else []
            )
        if any(map(self._is_bad, own)):
            self.found = f"the first bad numbers are those of {self._layer} ({name})"

    def _is_bad(self, tensor: Any) -> bool:
        if not str(tensor.dtype).startswith("float"):
            return False
        return not np.isfinite(self._model.array(tensor)).all()


def _layer_of(operand: str) -> str:
    """Of a plane (blk.3.attn_q.weight.qs) or an array of a pool (keys.3)."""
    number = re.match(r"(?:blk|keys|values|key_scales|value_scales)\.(\d+)", operand)
    if number is not None:
        return f"layer {number[1]}"
    return "the output head" if operand.startswith("output") else ""


def _n_tensors(result: list[Any]) -> int:
    """Of a result, as facts of a site have it."""
    return sum(map(_n_tensors, result)) if isinstance(result[0], list) else 1
