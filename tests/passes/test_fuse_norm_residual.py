from tvm.ir import assert_structural_equal

from xpuc.passes import named

run = named("fuse_norm_residual")
PLAIN = {"eps": 1e-5, "residual": False, "post_norm": False, "quantize": False}


def test_add_and_the_norm_of_the_sum_become_one(module):
    def before(b):
        x, d, w = b.row("x", 64), b.row("d", 64), b.vector("w", 64)
        h = b.op("add", x, d)
        return b.op("silu", b.op("block_norm", h, w, **PLAIN)), b.op("silu", h)

    def expected(b):
        x, d, w = b.row("x", 64), b.row("d", 64), b.vector("w", 64)
        done = b.op("block_norm", x, d, w, **(PLAIN | {"residual": True}))
        y, h = b.item(done, 1), b.item(done, 0)
        return b.op("silu", y), b.op("silu", h)

    after, report = run(module(before))
    assert_structural_equal(after, module(expected))
    assert report.applied == 1


def test_a_norm_of_the_added_row_is_taken_in(module):
    def before(b):
        x, d = b.row("x", 64), b.row("d", 64)
        post, w = b.vector("post", 64), b.vector("w", 64)
        h = b.op("add", x, b.op("block_norm", d, post, **PLAIN))
        return b.op("silu", b.op("block_norm", h, w, **PLAIN)), b.op("silu", h)

    def expected(b):
        x, d = b.row("x", 64), b.row("d", 64)
        post, w = b.vector("post", 64), b.vector("w", 64)
        done = b.op("block_norm", x, d, post, w, **(PLAIN | {"residual": True, "post_norm": True}))
        y, h = b.item(done, 1), b.item(done, 0)
        return b.op("silu", y), b.op("silu", h)

    after, _ = run(module(before))
    assert_structural_equal(after, module(expected))


def test_a_bias_is_not_a_residual(module):
    def before(b):
        x, bias, w = b.row("x", 64), b.vector("bias", 64), b.vector("w", 64)
        return b.op("block_norm", b.op("add", x, bias), w, **PLAIN)

    after, _ = run(module(before))
    assert_structural_equal(after, module(before))


def test_a_sum_without_a_norm_is_left(module):
    def before(b):
        return b.op("silu", b.op("add", b.row("x", 64), b.row("d", 64)))

    after, _ = run(module(before))
    assert_structural_equal(after, module(before))
