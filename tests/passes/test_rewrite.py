from tvm import IRModule, relax

from xpuc.passes import named
from xpuc.passes.rewrite import Report


def test_variants_of_a_step_count_once(module):
    def body(b):
        normed = b.op("rms_norm", b.row("x", 64), eps=1e-6, groups=1)
        return b.op("mul", normed, b.vector("w", 64))

    step = module(body)["decode"]
    both = IRModule({name: relax.Function(step.params, step.body, step.ret_ty).with_attr(
        "global_symbol", name) for name in ("decode", "prefill")})  # fmt: skip
    after, report = named("fuse_norm_mul")(both)
    assert report == Report(applied=1)
    assert after.script().count("xpuc.block_norm") == 2


def test_the_larger_numbers_of_two_reports_stand():
    report = Report(2, {"a": 1, "b": 3})
    report.join(Report(1, {"b": 2, "c": 4}))
    assert report == Report(2, {"a": 1, "b": 3, "c": 4})
