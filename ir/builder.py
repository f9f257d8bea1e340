"""Graph: the step of a decoder as a Relax function, built by an architecture file op by op.

Weights become parameters named by their GGUF tensor name when they are first used; a matrix keeps
the bytes of its format (rows, row bytes), a vector is f32. The parameters of a step are, in order:
the index inputs, the arrays of each layer's K/V pool, the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tvm import relax, tirx

from xpuc.artifact import KV_GROUP, SAMPLING_WORDS, pool_arrays
from xpuc.errors import FileError, UnsupportedError
from xpuc.ir import ops, scope
from xpuc.ir.formats import format_of, row_bytes

Var = Any

# name -> shape in symbols. n rows (tokens), t tiles, w work items, s sequences, b blocks a sequence
# may have, m rows whose logits are wanted. All int32; runtime/batch.py fills them.
INDEX_INPUTS: dict[str, tuple[str | int, ...]] = {
    "tokens": ("n",),
    "positions": ("n",),
    "slots": ("n",),
    "tiles": ("t", 4),
    "work": ("w", 4),
    "block_table": ("s", "b"),
    "out_rows": ("m",),
}
_OF_GROUP = ("slots", "block_table")


def index_inputs(n_groups: int) -> dict[str, tuple[str | int, ...]]:
    """Those of a step over so many groups of layers: of each but the first `slots.i` and
    `block_table.i` come last."""
    return INDEX_INPUTS | {
        _of_group(name, i): INDEX_INPUTS[name] for i in range(1, n_groups) for name in _OF_GROUP
    }


def _of_group(name: str, i: int) -> str:
    return f"{name}.{i}" if i else name


class TensorFacts(Protocol):
    """What the graph needs to know of a checkpoint's tensor."""

    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class PoolLayout:
    """The K/V pool of a layer, in blocks of `block_tokens` tokens."""

    dtype: str  # float16 | float32 | q8_0
    block_tokens: int


class Graph:
    """One step function under construction.

    `windows` are those of the groups of layers. With `every_row` the logits of all rows are wanted
    (decode), otherwise those of `out_rows`.
    """

    def __init__(
        self,
        path: str,
        tensors: Mapping[str, TensorFacts],
        pool: PoolLayout,
        windows: tuple[int, ...],
        *,
        every_row: bool,
    ) -> None:
        self.path, self.tensors, self.pool, self.every_row = path, tensors, pool, every_row
        self.windows = windows
        self.builder = relax.BlockBuilder()
        self._weights: dict[str, Var] = {}
        self._pools: list[tuple[Var, ...]] = []
        symbols = {s: tirx.Var(s, "int64") for s in ("n", "t", "w", "s", "b", "m")}
        self.blocks = [tirx.Var(_of_group("blocks", i), "int64") for i in range(len(windows))]
        self.inputs = {
            name: relax.Var(
                name, ops.tensor([symbols[d] if isinstance(d, str) else d for d in shape], "int32")
            )
            for name, shape in index_inputs(len(windows)).items()
        }

    def op(self, name: str, *operands: Var, **attrs: Any) -> Var:
        """Emit an operation of ir/ops."""
        return self.builder.emit(ops.call(name, *operands, **attrs))

    def has(self, name: str) -> bool:
        return name in self.tensors

    def vector(self, name: str, size: int) -> Var:
        """A weight vector (norm or bias), f32 (size,)."""
        facts = self._facts(name)
        if tuple(facts.shape) != (size,):
            raise self._wrong_shape(name, (size,))
        return self._weight(name, ops.tensor((size,)))

    def matrix(self, name: str, rows: int, columns: int) -> Var:
        """A weight matrix in the bytes of its format, uint8 (rows, row bytes)."""
        facts = self._facts(name)
        if tuple(facts.shape) != (rows, columns):
            raise self._wrong_shape(name, (rows, columns))
        width = row_bytes(format_of(facts.format), columns)
        return self._weight(name, ops.tensor((rows, width), "uint8"))

    def linear(self, x: Var, name: str, rows: int) -> Var:
        """x W^T of the matrix `name`.weight, plus `name`.bias where the checkpoint has one."""
        weight = f"{name}.weight"
        columns = ops.columns_of(x.ty)
        w = self.matrix(weight, rows, columns)
        y = self.op("linear", x, w, format=self._facts(weight).format, rows=rows)
        if self.has(f"{name}.bias"):
            y = self.op("add", y, self.vector(f"{name}.bias", rows))
        return y

    def norm(self, x: Var, name: str, eps: float, groups: int = 1) -> Var:
        """RMS norm of each of `groups` column groups, times the vector `name`.weight."""
        size = ops.columns_of(x.ty) // groups
        y = self.op("rms_norm", x, eps=eps, groups=groups)
        return self.op("mul", y, self.vector(f"{name}.weight", size))

    def item(self, value: Var, index: int) -> Var:
        """One of the results of an operation that has several."""
        return self.builder.emit(relax.TupleGetItem(value, index))

    def constant(self, value: np.ndarray) -> Var:
        """A constant held in the compiled library."""
        return relax.const(value, str(value.dtype))

    def index(self, name: str, window: int) -> Var:
        """The index input `name` of the group of a window."""
        return self.inputs[_of_group(name, self.windows.index(window))]

    def kv_pool(self, kv_heads: int, head_dim: int, window: int) -> tuple[Var, ...]:
        """The arrays of the next layer's pool, in the order of `pool_arrays`."""
        dtype, i = self.pool.dtype, len(self._pools)
        if dtype == "q8_0" and head_dim % KV_GROUP:
            raise UnsupportedError(
                f"{self.path}: K/V of {head_dim} columns a head cannot be kept in q8_0,"
                f" which takes {KV_GROUP} at a time",
                "compile with --kv f16",
            )
        blocks = self.blocks[self.windows.index(window)]
        arrays = pool_arrays(dtype, self.pool.block_tokens, kv_heads, head_dim)
        self._pools.append(
            tuple(
                relax.Var(f"{a.name}.{i}", ops.tensor((blocks, *a.shape), a.dtype)) for a in arrays
            )
        )
        return self._pools[-1]

    def sampling(self) -> Var:
        """The index input of that name, the last one: a row for each whose logits are wanted."""
        rows = self.inputs["tokens" if self.every_row else "out_rows"].ty.shape[0]
        self.inputs["sampling"] = relax.Var("sampling", ops.tensor((rows, SAMPLING_WORDS), "int32"))
        return self.inputs["sampling"]

    def function(self, name: str, body: Callable[[], Var]) -> relax.Function:
        """Build `body` into a function."""
        with scope.function(self.builder, name):
            with self.builder.dataflow():
                out = self.builder.emit_output(body())
            pools = [v for layer in self._pools for v in layer]
            params = [*self.inputs.values(), *pools, *self._weights.values()]
            self.builder.emit_func_output(out, params)
        return self.builder.finalize()[name]

    @property
    def weight_names(self) -> tuple[str, ...]:
        return tuple(self._weights)

    def _weight(self, name: str, ty: Any) -> Var:
        if name not in self._weights:
            self._weights[name] = relax.Var(name, ty)
        return self._weights[name]

    def _facts(self, name: str) -> TensorFacts:
        if name not in self.tensors:
            raise FileError(
                f"{self.path}: tensor {name} is missing", "the file is not a complete model"
            )
        return self.tensors[name]

    def _wrong_shape(self, name: str, wanted: tuple[int, ...]) -> FileError:
        return FileError(
            f"{self.path}: tensor {name} has shape {tuple(self.tensors[name].shape)},"
            f" expected {wanted}",
            "the metadata and the tensors do not belong together",
        )
