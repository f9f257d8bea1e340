from tvm.ir import assert_structural_equal

from xpuc.passes import named

run = named("fuse_tail")


def test_head_and_argmax_become_one(module):
    def before(b):
        y = b.op("linear", b.row("x", 64), b.q4_0("head", 320, 64), format="Q4_0", rows=320)
        return b.op("argmax", y)

    def expected(b):
        return b.op("head_argmax", b.row("x", 64), b.q4_0("head", 320, 64), format="Q4_0", rows=320)

    after, report = run(module(before))
    assert_structural_equal(after, module(expected))
    assert report.applied == 1


def test_a_softcap_between_them_does_not_matter(module):
    def before(b):
        y = b.op("linear", b.row("x", 64), b.q4_0("head", 320, 64), format="Q4_0", rows=320)
        return b.op("argmax", b.op("softcap", y, cap=30.0))

    def expected(b):
        return b.op("head_argmax", b.row("x", 64), b.q4_0("head", 320, 64), format="Q4_0", rows=320)

    after, _ = run(module(before))
    assert_structural_equal(after, module(expected))


def test_an_argmax_of_something_else_is_left(module):
    def before(b):
        return b.op("argmax", b.op("silu", b.row("x", 64)))

    after, _ = run(module(before))
    assert_structural_equal(after, module(before))
