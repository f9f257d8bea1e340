"""What each row of logits was, by the text it follows: digests in place of rows of 262,144 numbers.

The key of a row is its whole text, taken from the tokens the model was given. So rows of any two
engines can be compared, whatever brought them there: another batch, another chunk, K/V that was
computed, found, read from a store, or written for tokens that were only a guess.

As a program it answers one line of JSON (`Errand`) in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash
from compare import margins
from numpy.typing import NDArray

from xpuc.artifact import Tail
from xpuc.runtime.batch import Batch
from xpuc.runtime.engine import Engine, load
from xpuc.runtime.plan import Plan

OPTIONS: dict[str, Any] = {"ignore_eos": True, "logprobs": 0}  # logits, not the likeliest id alone


class Row(NamedTuple):
    """xxh3_128 of a row's bytes, its likeliest id, and the nats between that and the second."""

    digest: str
    likeliest: int
    margin: float


class Seen(NamedTuple):
    """A row of a request: of which sequence, after how many tokens of which text (a digest)."""

    sequence: int
    n_tokens: int
    text: str
    row: Row


Rows = dict[str, Row]  # by text


@dataclass
class Recorder:
    """Stands between an engine and its model, and keeps the rows that tokens are chosen from.

    chunks     sizes of the prompt chunks, in the order of the steps
    kinds      calls of the model by kind, and `mixed`: those that read and wrote at once
    preempted  sequences that had to yield after they had begun to answer
    resumed    how many tokens of each of them were found when it went on
    """

    engine: Engine
    seen: list[Seen] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    preempted: set[int] = field(default_factory=set)
    resumed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = self.engine.model
        self._plan_step = self.engine.scheduler.plan
        self._plan = Plan()
        self._out: set[int] = set()
        self.engine.model = self
        self.engine.scheduler.plan = self._planned  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, batch: Batch, *, tail: Tail) -> NDArray[Any]:
        rows = self._model.run(batch, tail=tail)
        texts = self._texts(batch)
        for number, row in zip(batch.out_rows.tolist(), rows, strict=True):
            sequence, n_prompt, text = texts[number]
            if len(text) >= n_prompt:
                assert tail == "logits", "the requests ask for logprobs"
                self.seen.append(Seen(sequence, len(text), text_digest(text), row_of(row)))
        return rows

    def _planned(self) -> Plan:
        self._plan = self._plan_step()
        for span in self._plan.spans:
            if span.sequence.request.id in self._out:
                self._out.remove(span.sequence.request.id)
                self.resumed.append(span.start)
        waiting = self.engine.scheduler.preempted
        self._out |= {each.request.id for each in waiting if each.n_generated}
        self.preempted |= self._out
        return self._plan

    def _texts(self, batch: Batch) -> list[tuple[int, int, list[int]]]:
        """Of each row of the call: its sequence, the length of its prompt, the text to its end."""
        given = batch.tokens.tolist()
        texts: list[tuple[int, int, list[int]]] = []
        for span in self._plan.spans:
            before = span.sequence.tokens[: span.start]
            first, n_prompt = len(texts), span.sequence.n_prompt
            for n in range(1, span.count + len(span.drafts) + 1):
                text = before + given[first : first + n]
                texts.append((span.sequence.request.id, n_prompt, text))
        counts = [span.count for span in self._plan.spans]
        chunks = [s.count for s in self._plan.spans if s.start + s.count <= s.sequence.n_prompt]
        self.chunks += chunks
        self.kinds[batch.kind] += 1
        self.kinds["mixed"] += 0 < len(chunks) < len(counts)
        return texts


def text_digest(text: Sequence[int]) -> str:
    return xxhash.xxh3_128_hexdigest(np.asarray(text, np.int32))


def row_of(logits: NDArray[np.float32]) -> Row:
    digest = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(logits))
    return Row(digest, int(logits.argmax()), float(margins(logits)))


def rows_by_text(seen: Iterable[Seen]) -> Rows:
    """Of rows that are each of another text, or alike."""
    rows: Rows = {}
    for each in seen:
        assert rows.setdefault(each.text, each.row) == each.row, "two rows for one text"
    return rows


def check_same(
    alone: Rows, seen: Sequence[Seen], *, bits: bool = True, margin: float = 0.05
) -> int:
    """How many rows were compared: each that `alone` knows the text of.

    Without `bits` only the likeliest id counts, where it leads by `margin` nats or more.
    """
    n = 0
    for each in seen:
        expected = alone.get(each.text)
        if expected is None:
            continue
        n += 1
        where = f"the row after {each.n_tokens} tokens of sequence {each.sequence} differs"
        if bits:
            assert each.row == expected, where
        else:
            is_sure = expected.margin >= margin
            assert not is_sure or each.row.likeliest == expected.likeliest, where
    return n


@dataclass
class Errand:
    """Prompts to answer in another process."""

    artifact: str
    store: str
    prompts: list[list[int]]
    options: dict[str, Any]
    loading: dict[str, Any]

    def run(self) -> dict[str, Any]:
        with load(self.artifact, store=self.store, **self.loading) as engine:
            recorder = Recorder(engine)
            engine.generate(self.prompts, **self.options)
        return {"seen": recorder.seen, "store_tokens": engine.kv.counters.store_tokens}


if __name__ == "__main__":
    json.dump(Errand(**json.load(sys.stdin)).run(), sys.stdout)
