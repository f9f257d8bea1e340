from tvm.ir import assert_structural_equal

from xpuc.passes import named

run = named("fuse_norm_mul")
NORM = {"eps": 1e-5, "residual": False, "post_norm": False, "quantize": False}


def test_norm_and_weights_become_one(module):
    def before(b):
        x, w = b.row("x", 64), b.vector("w", 64)
        return b.op("mul", b.op("rms_norm", x, eps=1e-5, groups=1), w)

    def expected(b):
        x, w = b.row("x", 64), b.vector("w", 64)
        return b.op("block_norm", x, w, **NORM)

    after, report = run(module(before))
    assert_structural_equal(after, module(expected))
    assert report.applied == 1


def test_a_norm_of_each_head_is_left(module):
    def before(b):
        x, w = b.row("x", 64), b.vector("w", 16)
        return b.op("mul", b.op("rms_norm", x, eps=1e-5, groups=4), w)

    after, report = run(module(before))
    assert_structural_equal(after, module(before))
    assert report.applied == 0


def test_a_norm_with_another_reader_is_left(module):
    def before(b):
        x, w = b.row("x", 64), b.vector("w", 64)
        y = b.op("rms_norm", x, eps=1e-5, groups=1)
        return b.op("add", b.op("mul", y, w), y)

    after, _ = run(module(before))
    assert_structural_equal(after, module(before))
