from tvm.ir import assert_structural_equal

from xpuc.passes import named

quantize = named("quantize_activations")
fuse = named("fuse_quantize")
NORM = {"eps": 1e-5, "residual": False, "post_norm": False}


def test_linears_of_one_row_share_its_quantisation(module):
    def before(b):
        x = b.row("x", 64)
        y = b.op("linear", x, b.q4_0("a", 32, 64), format="Q4_0", rows=32)
        return y, b.op("linear", x, b.q4_0("b", 96, 64), format="Q4_0", rows=96)

    def expected(b):
        x, a, w = b.row("x", 64), b.q4_0("a", 32, 64), b.q4_0("b", 96, 64)
        q = b.op("quantize", x)
        y = b.op("linear", q, a, format="Q4_0", rows=32)
        return y, b.op("linear", q, w, format="Q4_0", rows=96)

    after, report = quantize(module(before))
    assert_structural_equal(after, module(expected))
    assert report.applied == 2


def test_float_weights_keep_float_activations(module):
    def before(b):
        return b.op("linear", b.row("x", 64), b.f16("a", 32, 64), format="F16", rows=32)

    after, _ = quantize(module(before))
    assert_structural_equal(after, module(before))


def test_a_norm_quantises_what_only_linears_read(module):
    def before(b):
        x, w, a = b.row("x", 64), b.vector("w", 64), b.q4_0("a", 32, 64)
        q = b.op("quantize", b.op("block_norm", x, w, **NORM, quantize=False))
        return b.op("linear", q, a, format="Q4_0", rows=32)

    def expected(b):
        x, w, a = b.row("x", 64), b.vector("w", 64), b.q4_0("a", 32, 64)
        q = b.op("block_norm", x, w, **NORM, quantize=True)
        return b.op("linear", q, a, format="Q4_0", rows=32)

    after, report = fuse(module(before))
    assert_structural_equal(after, module(expected))
    assert report.applied == 1


def test_at_a_residual_only_the_normed_row_is_quantised(module):
    attrs = NORM | {"residual": True}

    def before(b):
        x, d, w, a = b.row("x", 64), b.row("d", 64), b.vector("w", 64), b.q4_0("a", 64, 64)
        done = b.op("block_norm", x, d, w, **attrs, quantize=False)
        h, y = b.item(done, 0), b.item(done, 1)
        return b.op("add", h, b.op("linear", b.op("quantize", y), a, format="Q4_0", rows=64))

    def expected(b):
        x, d, w, a = b.row("x", 64), b.row("d", 64), b.vector("w", 64), b.q4_0("a", 64, 64)
        done = b.op("block_norm", x, d, w, **attrs, quantize=True)
        h, q = b.item(done, 0), b.item(done, 1)
        return b.op("add", h, b.op("linear", q, a, format="Q4_0", rows=64))

    after, _ = fuse(module(before))
    assert_structural_equal(after, module(expected))


def test_a_row_that_is_also_read_as_floats_is_quantised_apart(module):
    def before(b):
        x, w, a = b.row("x", 64), b.vector("w", 64), b.q4_0("a", 64, 64)
        y = b.op("block_norm", x, w, **NORM, quantize=False)
        return b.op("add", y, b.op("linear", b.op("quantize", y), a, format="Q4_0", rows=64))

    after, _ = fuse(module(before))
    assert_structural_equal(after, module(before))
