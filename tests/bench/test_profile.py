"""A step by kernel: what its launches cost at least, and that the rows add up to the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from cli_runs import manifest
from fake_model import FakeModel

from xpuc.artifact import Manifest, Plane
from xpuc.bench import Case, Session
from xpuc.bench.launches import Launch, launches
from xpuc.bench.ours import Ours, kv_bytes, streamed_weights
from xpuc.bench.profile import REST, Profiler
from xpuc.bench.roofs import Roofs
from xpuc.runtime.batch import Batch

QS, D, NORM = (
    Plane("w.qs", "uint8", 8 * 32),
    Plane("w.d", "float16", 8),
    Plane("norm", "float32", 16),
)


def operation(op: str, kernel: str, *weights: tuple[str, int, int]) -> dict[str, Any]:
    return {"op": op, "weights": [list(weight) for weight in weights], "kernels": [kernel]}


WEIGHT = ("Q4_0", 8, 64)
FACTS = manifest(
    planes=(QS, D, NORM),
    decisions={
        "memory_read": {"elements": 8, "bytes": 32},
        "operations": [
            operation("embed", "embed_r1", WEIGHT),
            operation("linear", "linear_r1", WEIGHT, WEIGHT),
            operation("block_norm", "rms_r1"),
            operation("qk_prep", "qk_prep_r1"),
            operation("attention", "attention_r1"),
        ],
    },
)


class Shown(FakeModel):
    """A FakeModel that seems to make the calls of `script`, (kernel, arguments), in every step."""

    def __init__(self) -> None:
        super().__init__()
        made = {plane.name: np.zeros(plane.size, plane.dtype) for plane in FACTS.planes}
        layers = [f"{which}.{layer}" for layer in range(2) for which in ("keys", "values")]
        made |= {name: np.zeros((4, 2, 16, 4), np.float16) for name in layers}
        self.tensors = {name: tvm_ffi.from_dlpack(array) for name, array in made.items()}
        self.script: list[tuple[str, tuple[Any, ...]]] = []
        self.ran: list[str] = []

    def operands(self) -> dict[int, str]:
        return {tensor.data_ptr(): name for name, tensor in self.tensors.items()}

    @contextlib.contextmanager
    def instrument(self, see: Callable[..., None]) -> Iterator[None]:
        yield
        for name, arguments in self.script:
            see(name, lambda *_, name=name: self.ran.append(name), arguments)

    def call(self, kernel: str, *arguments: Any) -> None:
        """Add to the script; a name stands for the plane or the pool, an array for itself."""
        given = (
            self.tensors[a] if isinstance(a, str) else tvm_ffi.from_dlpack(a) for a in arguments
        )
        self.script.append((kernel, tuple(given)))


def prepared(case: Case) -> tuple[Shown, Ours]:
    model = Shown()
    return model, Ours(model, FACTS, [case])


def found(model: Shown, batch: Batch) -> list[Launch]:
    return launches(model, FACTS, batch)


def q8(n: int) -> np.ndarray:
    """int8 activations of n rows of 64 columns."""
    return np.zeros((2, n, 32), np.int8)


def test_a_projection_reads_its_planes_and_multiplies_all_weights() -> None:
    model, ours = prepared(Case("tg", 4))
    model.call("linear_r1", q8(3), np.ones(5, np.float32), "w.qs", "w.d", "w.d")
    model.call("linear_r1", np.zeros((3, 64), np.float32), "w.qs", "w.d")
    quantised, exact = found(model, ours.step(Case("tg", 4)))
    assert quantised.n_bytes == exact.n_bytes == 256 + 16
    assert quantised.operations == 2 * 3 * (8 + 8) * 64
    assert exact.operations == 0  # f32 on f32


def test_an_embedding_reads_the_rows_of_the_tokens() -> None:
    case = Case("tg", 4, batch=3)
    model, ours = prepared(case)
    model.call("embed_r1", np.zeros(4, np.int32), "w.qs", "w.d")
    (launch,) = found(model, ours.step(case))
    assert (launch.n_bytes, launch.operations) == (3 * 272 // 8, 0)


def test_a_norm_reads_its_weights_and_computes_no_integers() -> None:
    model, ours = prepared(Case("tg", 4))
    model.call("rms_r1", q8(1), "norm")
    (launch,) = found(model, ours.step(Case("tg", 4)))
    assert (launch.n_bytes, launch.operations) == (64, 0)


@pytest.mark.parametrize(
    ("case", "written", "wide", "narrow"),
    [
        (Case("tg", 4, 5), 1, 8, 8),  # position 7
        (Case("tg", 4, 20), 1, 23, 8),
        (Case("tg", 4, 20, 2), 2, 46, 16),
        (Case("pp", 6), 6, 6, 6),
        (Case("pp", 6, 20), 6, 26, 13),  # the first row sees 8 tokens, and so on
        (Case("pp", 40, 4), 16, 20, 20),  # the first chunk, whose first row sees all before it
    ],
)
def test_attention_reads_the_context_once_a_sequence(
    case: Case, written: int, wide: int, narrow: int
) -> None:
    model, ours = prepared(case)
    for layer in range(2):  # the second has a window of 8 tokens
        model.call("qk_prep_r1", q8(1), f"keys.{layer}", f"values.{layer}")
        model.call("attention_r1", q8(1), f"keys.{layer}", f"values.{layer}")
    costs = [launch.n_bytes for launch in found(model, ours.step(case))]
    per_token = 2 * 2 * 16 * 2
    assert costs == [n * per_token for n in (written, wide, written, narrow)]


def test_calls_of_the_vm_itself_are_no_kernels() -> None:
    model, ours = prepared(Case("tg", 4))
    model.call("vm.builtin.alloc_tensor", q8(1))
    assert found(model, ours.step(Case("tg", 4))) == []


def test_rows_are_kernels_and_add_up_to_the_step() -> None:
    case = Case("tg", 4, 5, 2)
    model, ours = prepared(case)
    for _ in range(2):
        model.call("rms_r1", q8(1), "norm")
        model.call("linear_r1", q8(2), "w.qs", "w.d")
    profiler = Profiler(model, FACTS, ours.step(case))
    profiler.round()
    assert model.ran[:4] == ["rms_r1", "linear_r1"] * 2
    made = profiler.profile(Roofs(1e9, 1e12))
    assert made.step == "2 rows up to position 7"
    assert {row.kernel: row.launches for row in made.rows[:-1]} == {"rms_r1": 2, "linear_r1": 2}
    assert made.rows[-1].kernel == REST
    assert sum(row.us for row in made.rows) == pytest.approx(made.step_us)
    assert sum(row.pct_step for row in made.rows) == pytest.approx(100)
    times = [row.us for row in made.rows[:-1]]
    assert times == sorted(times, reverse=True)
    (linear,) = (row for row in made.rows if row.kernel == "linear_r1")
    assert linear.n_bytes == 2 * 272
    assert linear.limited_by == "memory"
    assert linear.pct_limit == pytest.approx(100 * linear.limit_us / linear.us)


def test_operations_of_a_token() -> None:
    model, ours = prepared(Case("tg", 4, 0, 4))
    model.call("linear_r1", q8(4), "w.qs")
    assert ours.operations_per_token(Case("tg", 4, 0, 4)) == 2 * 16 * 64


def test_a_row_says_how_much_of_the_peak_its_steps_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpuc.bench.session._PAUSE_S", 0)
    wanted = [Case("pp", 8), Case("tg", 4), Case("tg", 4, 0, 2)]
    model = Shown()
    model.call("linear_r1", q8(2), "w.qs")
    session = Session(wanted, Ours(model, FACTS, wanted), 1)
    monkeypatch.setattr(session.loops, "measure", lambda repeat: Roofs(1e9, 1e9))
    prompt, alone, together = session.run(1, lambda *at: None, by_kernel=True)
    assert (alone.int8_peak_gop_s, alone.int8_gop_s, alone.pct_int8_peak) == (1.0, None, None)
    for row, per_token in ((prompt, 2 * 2 * 16 * 64 / 8), (together, 2 * 16 * 64)):
        assert row.int8_gop_s == pytest.approx(per_token * row.tok_s / 1e9)
        assert row.pct_int8_peak == pytest.approx(100 * row.int8_gop_s)
    assert [row.profile.rows[0].kernel for row in (prompt, alone, together)] == ["linear_r1"] * 3


def planes_read(facts: Manifest, entry: str) -> int:
    """Bytes of the planes of the matrices that an entry point multiplies with."""
    from xpuc.schedules.llvm import planes

    return sum(
        each["uses"].get(entry, 0) * plane.size * np.dtype(plane.dtype).itemsize
        for each in facts.decisions["operations"]
        if each["op"] != "embed"
        for weight in each["weights"]
        for plane in planes(*weight)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "entry"),
    [
        (Case("tg", 4, 60), "decode_greedy"),
        (Case("tg", 4, 60, 2), "cols_2_greedy"),
        (Case("pp", 32, 60), "prefill_greedy"),
    ],
)
def test_a_real_step_is_its_kernels(case: Case, entry: str, artifact: Path) -> None:
    ours = Ours.load(artifact, 2, [case])
    profiler = Profiler(ours.model, ours.manifest, ours.step(case))
    profiler.round()
    made = profiler.profile(Roofs(1e10, 1e11))
    decided = [each for each in ours.manifest.decisions["operations"] if entry in each["uses"]]
    launched = sum(each["uses"][entry] * len(each["kernels"]) for each in decided)
    assert len(profiler.launches) == sum(row.launches for row in made.rows) == launched
    assert sum(row.us for row in made.rows) == pytest.approx(made.step_us)
    products = [launch for launch in profiler.launches if launch.operations]
    assert sum(launch.n_bytes for launch in products) == planes_read(ours.manifest, entry)
    if case.kind == "tg":
        elements = sum(
            each["uses"][entry] * rows * columns
            for each in decided
            if each["op"] != "embed"
            for _, rows, columns in each["weights"]
        )
        assert ours.operations_per_token(case) == 2 * elements
        pools = [launch for launch in profiler.launches if launch.kernel.startswith("attention")]
        context = case.depth + case.n_tokens // 2 + 1
        expected = case.batch * kv_bytes(ours.manifest, context)
        assert sum(launch.n_bytes for launch in pools) == expected


@pytest.mark.slow
def test_a_step_reads_the_weights_once(artifact: Path) -> None:
    case = Case("tg", 4)
    ours = Ours.load(artifact, 2, [case])
    read = launches(ours.model, ours.manifest, ours.step(case))
    weights = sum(
        launch.n_bytes
        for launch in read
        if not launch.kernel.startswith(("attention", "qk", "embed"))
    )
    aside = sum(
        p.size * 4
        for p in ours.manifest.planes
        if p.name.endswith(("q_norm.weight", "k_norm.weight"))
    )
    assert weights == streamed_weights(ours.manifest.planes) - aside


@pytest.mark.slow
def test_repeating_the_launches_gives_the_same_token(artifact: Path) -> None:
    case = Case("tg", 4, 20)
    ours = Ours.load(artifact, 2, [case])
    batch = ours.step(case)
    token = ours.model.run(batch, tail="greedy").copy()
    read = launches(ours.model, ours.manifest, batch)
    ids = np.from_dlpack(read[-1].arguments[-1])
    for _ in range(2):
        ids[...] = -7
        for launch in read:
            launch.function(*launch.arguments)
        np.testing.assert_array_equal(ids, token)
    np.testing.assert_array_equal(ours.model.run(batch, tail="greedy"), token)
