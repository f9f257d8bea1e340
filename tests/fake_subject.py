"""An artifact to be served, without one: engines on a FakeModel."""

from __future__ import annotations

from typing import Any

from fake_model import FakeModel

from xpuc.bench.subject import Subject
from xpuc.runtime.engine import Engine
from xpuc.runtime.prefix_store import open_store


def fake_subject(
    *, context: int = 96, max_batch: int = 4, opened: list[Engine] | None = None
) -> Subject:
    """Its engines are added to `opened`."""

    def open_(
        *,
        ctx: int,
        n_sequences: int,
        warm_rows: int = 0,
        store: Any = None,
        **options: Any,
    ) -> Engine:
        assert ctx <= context
        model = FakeModel(
            n_blocks=n_sequences * -(-ctx // 4), max_context=ctx, max_batch=max_batch,
            max_chunk=32,
        )  # fmt: skip
        kept = None if store is None else open_store(store, model.kv, b"fake", 1 << 30)
        engine = Engine(model, store=kept, identity=b"fake", **options)
        if warm_rows:
            engine.warm_up(warm_rows)
        if opened is not None:
            opened.append(engine)
        return engine

    return Subject(open_, context, max_batch, max_chunk=32, n_vocab=97)
