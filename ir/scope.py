"""The scope that a Relax function is built in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tvm import relax
from tvm.error import InternalError

Var = Any


@contextmanager
def function(
    builder: relax.BlockBuilder,
    name: str,
    params: Sequence[Var] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """`builder.function`, which also ends its open block where an exception leaves it.

    TVM's leaves the block open, and the builder's destructor writes a warning of it on stderr.
    """
    with builder.function(name, params and list(params), attrs and dict(attrs)):
        try:
            yield
        except BaseException:
            with suppress(InternalError):  # no block is open: an interrupt between two of them
                builder._end_block()
            raise
