import pytest
from tvm import relax, tirx
from tvm.ir import assert_structural_equal

from xpuc.frontend.model import open_model
from xpuc.ir import ops
from xpuc.ir.builder import PoolLayout
from xpuc.passes import named, run

hoist = named("hoist_take_rows")
HEADS = {"heads": 1, "kv_heads": 1, "head_dim": 64, "scale": 1.0, "window": 0, "softcap": 0.0}


def wanted(b):
    return b.param("rows", (tirx.Var("m", "int64"),), "int32")


def attention(b, x):
    """Whose rows depend on one another."""
    index = [b.param(n, (4,), "int32") for n in ("positions", "tiles", "work", "block_table")]
    pools = [b.param(n, (2, 1, 64, 16), "float16") for n in ("keys", "values")]
    return b.op("attention", x, *pools, *index, **HEADS, quantize=False)


def block(b, x, h):
    """x + silu(rms_norm(h) * w + bias) W^T: all of it makes a row by itself."""
    w, bias, matrix = b.vector("w", 64), b.vector("bias", 64), b.q4_0("W", 64, 64)
    y = b.op("mul", b.op("rms_norm", h, eps=1e-5, groups=1), w)
    y = b.op("silu", b.op("add", y, bias))
    return b.op("add", x, b.op("linear", y, matrix, format="Q4_0", rows=64))


def test_rows_are_taken_where_they_are_not_made_one_by_one(module):
    def before(b):
        x, rows = b.row("x", 64), wanted(b)
        return b.op("take_rows", block(b, x, attention(b, x)), rows)

    def expected(b):
        x, rows = b.row("x", 64), wanted(b)
        out = attention(b, x)
        w, bias, matrix = b.vector("w", 64), b.vector("bias", 64), b.q4_0("W", 64, 64)
        y = b.op("rms_norm", b.op("take_rows", out, rows), eps=1e-5, groups=1)
        y = b.op("silu", b.op("add", b.op("mul", y, w), bias))
        y = b.op("linear", y, matrix, format="Q4_0", rows=64)
        return b.op("add", b.op("take_rows", x, rows), y)

    after, report = hoist(module(before))
    assert_structural_equal(after, module(expected))
    assert report.applied == 1


def test_rows_that_something_else_reads_are_made_once(module):
    """Such as those that attention reads: what it needs of all rows is taken from them."""

    def before(b):
        x, rows = b.op("silu", b.row("x", 64)), wanted(b)
        return b.op("take_rows", b.op("add", attention(b, x), x), rows)

    def expected(b):
        x, rows = b.op("silu", b.row("x", 64)), wanted(b)
        out = attention(b, x)
        return b.op("add", b.op("take_rows", out, rows), b.op("take_rows", x, rows))

    after, _ = hoist(module(before))
    assert_structural_equal(after, module(expected))


def test_a_row_that_is_a_result_of_the_step_too_is_left(module):
    def before(b):
        h = b.op("silu", b.op("silu", b.row("x", 64)))
        return h, b.op("take_rows", h, wanted(b))

    after, report = hoist(module(before))
    assert_structural_equal(after, module(before))
    assert report.applied == 0


def test_nothing_is_before_attention(module):
    def before(b):
        return b.op("take_rows", attention(b, b.op("silu", b.row("x", 64))), wanted(b))

    after, report = hoist(module(before))
    assert_structural_equal(after, module(before))
    assert report.applied == 0


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_the_last_layer_reads_a_whole_prompt_and_goes_on_with_the_wanted_rows(name, tiny_model):
    """With every other pass after it, which finds what it finds in a decode step."""
    model = open_model(tiny_model(name, weights="Q8_0", layers=2))
    module, _ = run(model.graph(PoolLayout("float16", 16))[0])

    def rows(function, op):
        values = (b.value for b in module[function].body.blocks[0].bindings)
        return [_rows(value.ty) for value in values if ops.name_of(value) == op]

    n_layers = model.config.n_layers
    for op in ("qk_prep", "attention"):
        assert rows("prefill", op) == ["n"] * n_layers
    for op in ("gate_up", "block_norm", "linear"):
        of_prompt, of_decode = rows("prefill", op), rows("decode", op)
        assert of_decode == ["n"] * len(of_prompt)
        n_wanted = {"gate_up": 1, "block_norm": 2, "linear": 3}[op]
        assert of_prompt == ["n"] * (len(of_prompt) - n_wanted) + ["m"] * n_wanted


def _rows(ty):
    """The symbol of its rows."""
    while isinstance(ty, relax.TupleType):
        ty = ty.fields[0]
    return next(d.name for d in ty.shape if isinstance(d, tirx.Var))
