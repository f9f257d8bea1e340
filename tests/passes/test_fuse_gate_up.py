import pytest
from tvm.ir import assert_structural_equal

from xpuc.passes import named

run = named("fuse_gate_up")


def feed_forward(b, activation, swap=False, up_format="Q4_0"):
    x = b.row("x", 64)
    gate = b.op("linear", x, b.q4_0("gate", 96, 64), format="Q4_0", rows=96)
    up_weight = b.q4_0("up", 96, 64) if up_format == "Q4_0" else b.f16("up", 96, 64)
    up = b.op("linear", x, up_weight, format=up_format, rows=96)
    gate = b.op(activation, gate)
    return b.op("mul", *((up, gate) if swap else (gate, up)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("swap", [False, True])
def test_gate_activation_and_up_become_one(module, activation, swap):
    def expected(b):
        x, gate, up = b.row("x", 64), b.q4_0("gate", 96, 64), b.q4_0("up", 96, 64)
        return b.op(
            "gate_up", x, gate, up,
            formats=["Q4_0", "Q4_0"], rows=96, activation=activation, quantize=False,
        )  # fmt: skip

    after, report = run(module(lambda b: feed_forward(b, activation, swap)))
    assert_structural_equal(after, module(expected))
    assert report.applied == 1


def test_formats_with_different_activations_are_refused_with_the_reason(module):
    before = module(lambda b: feed_forward(b, "silu", up_format="F16"))
    after, report = run(before)
    assert_structural_equal(after, before)
    assert report.refused == {"Q4_0 and F16 read different activations": 1}


def test_linears_of_different_rows_are_left(module):
    def before(b):
        x, y = b.row("x", 64), b.row("y", 64)
        gate = b.op("linear", x, b.q4_0("gate", 96, 64), format="Q4_0", rows=96)
        up = b.op("linear", y, b.q4_0("up", 96, 64), format="Q4_0", rows=96)
        return b.op("mul", b.op("silu", gate), up)

    after, _ = run(module(before))
    assert_structural_equal(after, module(before))
