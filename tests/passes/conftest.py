"""A step function from a few lines: what pass tests compare before and after with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm import IRModule, relax, tirx

from xpuc.ir import ops


class Builder:
    """Parameters first, then operations; every tensor is (n, d) f32 unless said otherwise."""

    def __init__(self) -> None:
        self.bb = relax.BlockBuilder()
        self.n = tirx.Var("n", "int64")
        self.params: list[Any] = []

    def row(self, name: str, d: int) -> Any:
        return self.param(name, (self.n, d), "float32")

    def vector(self, name: str, d: int) -> Any:
        return self.param(name, (d,), "float32")

    def param(self, name: str, shape: tuple[Any, ...], dtype: str) -> Any:
        self.params.append(relax.Var(name, ops.tensor(shape, dtype)))
        return self.params[-1]

    def q4_0(self, name: str, rows: int, columns: int) -> Any:
        return self.param(name, (rows, columns // 32 * 18), "uint8")

    def f16(self, name: str, rows: int, columns: int) -> Any:
        return self.param(name, (rows, columns * 2), "uint8")

    def op(self, name: str, *operands: Any, **attrs: Any) -> Any:
        return self.bb.emit(ops.call(name, *operands, **attrs))

    def item(self, value: Any, index: int) -> Any:
        return self.bb.emit(relax.TupleGetItem(value, index))


@pytest.fixture(scope="session")
def module() -> Callable[[Callable[[Builder], Any]], IRModule]:
    """`module(body)`: the module whose function `decode` is `body`, which returns its result."""

    def build(body: Callable[[Builder], Any]) -> IRModule:
        b = Builder()
        with b.bb.function("decode"):
            with b.bb.dataflow():
                out = body(b)
                results = out if isinstance(out, tuple) else (out,)
                value = relax.Tuple(list(results)) if len(results) > 1 else results[0]
                out = b.bb.emit_output(value)
            b.bb.emit_func_output(out, b.params)
        return b.bb.finalize()

    return build
