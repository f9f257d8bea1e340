"""A dumped module reads back as it was, and what is no dump is refused by line."""

from itertools import pairwise

import pytest
import tvm
from tiny_models import write_tiny

from xpuc.errors import FileError, UnsupportedError
from xpuc.frontend.model import open_model
from xpuc.ir.builder import PoolLayout
from xpuc.ir.text import parse, to_text
from xpuc.passes import PIPELINE, named, run

ROWS = ("llama", "llama_softcaps", "qwen2", "qwen3", "gemma3")


@pytest.fixture(scope="module", params=ROWS)
def dumps(request, tmp_path_factory):
    """(name, module) of the graph and of what each pass makes of it."""
    folder = tmp_path_factory.mktemp("models")
    path = write_tiny(request.param, folder / "m.gguf", weights="Q8_0", layers=1)
    module, _ = open_model(path).graph(PoolLayout("float16", 16))
    made = [("graph", module)]
    run(module, between=lambda number, name, module: made.append((name, module)))
    return made


def test_every_dump_reads_back_as_it_was(dumps):
    for name, module in dumps:
        read = parse(to_text(module), name)
        tvm.ir.assert_structural_equal(read, module)
        assert to_text(read) == to_text(module)


def test_a_pass_on_a_dump_gives_the_next_dump(dumps):
    assert [name for name, _ in dumps[1:]] == [step.name for step in PIPELINE]
    for (_, before), (name, after) in pairwise(dumps):
        replayed, _ = named(name)(parse(to_text(before)))
        assert to_text(replayed) == to_text(after)


GOOD = """\
n = TypeVar("n")
@I.ir_module
class Module:
    @R.function
    def decode(x: R.Tensor((n, 4), dtype="float32"), w: R.Tensor((4,), dtype="float32")):
        with R.dataflow():
            lv: R.Tensor((n, 4), dtype="float32") = R.xpuc.rms_norm(x, eps=1e-05, groups=1)
            lv1: R.Tensor((n, 4), dtype="float32") = R.xpuc.mul(lv, w)
            gv: R.Tensor((n, 4), dtype="float32") = lv1
            R.output(gv)
        return gv
"""


def test_a_module_by_hand():
    module = parse(GOOD)
    assert [gv.name_hint for gv in module.get_global_vars()] == ["decode"]
    tvm.ir.assert_structural_equal(parse(to_text(module)), module)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mul(lv, w)", "mul(lv2, w)", "t.py:8: is not computed before it is read: lv2"),
        ("mul(lv, w)", "mul(lv", "t.py:8: not a dump of a module: '(' was never closed"),
        ("lv1: R.Tensor((n, 4)", "lv1: R.Tensor((n, 5)", "t.py:8: lv1 is R.Tensor((n, 4)"),
        ("eps=1e-05", "eps=open('x')", "t.py:7: not a number, text or list of them: open('x')"),
        ("R.xpuc.mul(lv, w)", "__import__('os')", "t.py:8: not part of a dump: __import__('os')"),
        ("R.xpuc.mul(lv, w)", "lv[0]", "t.py:8: no such item: lv[0]"),
        ("R.xpuc.mul(lv, w)", 'R.xpuc.mul(lv, metadata["c"][0])', "t.py:8: no such constant"),
        ("(n, 4), dtype", "(n, f()), dtype", "t.py:5: not a dimension: f()"),
        ('lv: R.Tensor((n, 4), dtype="float32")', "lv: R.Object", "t.py:7: not a type: R.Object"),
        ("w: R.Tensor", "*w: R.Tensor", "t.py:8: is not computed before it is read: w"),
        ("        return gv", "        return lv", "t.py:5: not one dataflow block and its result"),
        ("gv: R", "gw: R", "t.py:5: gv is not computed"),
        (
            "            lv1:",
            "            print(1)\n            lv1:",
            "t.py:8: not part of a dump",
        ),
        ('n = TypeVar("n")', "print(1)", "t.py:1: not part of a dump: print(1)"),
        ("    @R.function\n    def", "    x = 1\n    def", "t.py:4: not part of a dump: x = 1"),
        (GOOD, "", "t.py: holds no module"),
        (GOOD, "metadata = tvm.ir.load_json('{')", "t.py:1: damaged constants"),
    ],
)
def test_what_is_no_dump_is_refused_by_line(old, new, message, capfd):
    assert old in GOOD
    changed = GOOD.replace(old, new)
    if new:
        assert changed != GOOD
    with pytest.raises(FileError) as caught:
        parse(changed, "t.py")
    assert message in caught.value.message
    assert capfd.readouterr().err == ""


def test_an_unknown_operation_is_named_with_the_nearest():
    with pytest.raises(UnsupportedError) as caught:
        parse(GOOD.replace("rms_norm", "rms_nrm"), "t.py")
    assert caught.value.message == "t.py:7: unknown operation: 'rms_nrm'"
    assert "'rms_norm'" in caught.value.hint


def test_nothing_of_the_text_is_run(tmp_path):
    trap = tmp_path / "trap"
    for line in (f"open({str(trap)!r}, 'w')", f"x = open({str(trap)!r}, 'w')"):
        with pytest.raises(FileError):
            parse(f"{line}\n{GOOD}")
    assert not trap.exists()
