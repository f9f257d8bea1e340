from tvm.ir import assert_structural_equal

from xpuc.passes import named

run = named("fuse_qkv")


def projections(b, bias):
    x = b.row("x", 64)
    out = []
    for name, rows in (("q", 64), ("k", 32), ("v", 32)):
        y = b.op("linear", x, b.q4_0(name, rows, 64), format="Q4_0", rows=rows)
        if bias:
            y = b.op("add", y, b.vector(f"{name}_bias", rows))
        out.append(y)
    return tuple(out)


def joined(b, bias):
    x = b.row("x", 64)
    weights, biases = [], []
    for name, rows in (("q", 64), ("k", 32), ("v", 32)):
        weights.append(b.q4_0(name, rows, 64))
        if bias:
            biases.append(b.vector(f"{name}_bias", rows))
    group = b.op(
        "linear_group", x, *weights, *biases,
        formats=["Q4_0"] * 3, rows=[64, 32, 32], bias=[bias] * 3,
    )  # fmt: skip
    starts = ((0, 64), (64, 32), (96, 32))
    return tuple(b.op("columns", group, start=start, width=width) for start, width in starts)


def test_linears_of_one_row_become_one_group(module):
    after, report = run(module(lambda b: projections(b, bias=False)))
    assert_structural_equal(after, module(lambda b: joined(b, bias=False)))
    assert report.applied == 1


def test_biases_are_taken_in(module):
    after, _ = run(module(lambda b: projections(b, bias=True)))
    assert_structural_equal(after, module(lambda b: joined(b, bias=True)))


def test_one_linear_is_left(module):
    def before(b):
        x, y = b.row("x", 64), b.row("y", 64)
        one = b.op("linear", x, b.q4_0("a", 64, 64), format="Q4_0", rows=64)
        return one, b.op("linear", y, b.q4_0("b", 64, 64), format="Q4_0", rows=64)

    after, _ = run(module(before))
    assert_structural_equal(after, module(before))


def test_formats_with_different_activations_are_refused_with_the_reason(module):
    def before(b):
        x = b.row("x", 64)
        one = b.op("linear", x, b.q4_0("a", 64, 64), format="Q4_0", rows=64)
        return one, b.op("linear", x, b.f16("b", 64, 64), format="F16", rows=64)

    after, report = run(module(before))
    assert_structural_equal(after, module(before))
    assert report.refused == {"Q4_0, F16 read different activations": 1}
