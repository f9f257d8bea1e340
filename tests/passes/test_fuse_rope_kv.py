import pytest
from tvm.ir import assert_structural_equal

from xpuc import passes

run = passes.named("fuse_rope_kv")
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 16}


def inputs(b):
    i32 = "int32"
    return {
        "table": b.row("table", 16),
        "slots": b.param("slots", (b.n,), i32),
        "k_pool": b.param("k_pool", (9, 2, 16, 16), "float16"),
        "v_pool": b.param("v_pool", (9, 2, 16, 16), "float16"),
        "positions": b.param("positions", (b.n,), i32),
        "tiles": b.param("tiles", (3, 4), i32),
        "work": b.param("work", (3, 4), i32),
        "block_table": b.param("block_table", (3, 8), i32),
    }


def norms(b, norm):
    return (b.vector("q_norm", 16), b.vector("k_norm", 16)) if norm else (None, None)


def attention(b, q, k_pool, v_pool, i):
    return b.op(
        "attention", q, k_pool, v_pool, i["positions"], i["tiles"], i["work"], i["block_table"],
        **HEADS, scale=0.25, window=0, softcap=0.0, quantize=False,
    )  # fmt: skip


def prepare(b, x, weight, heads, table):
    if weight is not None:
        x = b.op("mul", b.op("rms_norm", x, eps=1e-6, groups=heads), weight)
    return b.op("rope", x, table, heads=heads, head_dim=16, pairing="neox")


def before(b, norm, joined):
    if joined:
        qkv = b.row("qkv", 128)
        q, k, v = (b.op("columns", qkv, start=s, width=w) for s, w in ((0, 64), (64, 32), (96, 32)))
    else:
        q, k, v = b.row("q", 64), b.row("k", 32), b.row("v", 32)
    i = inputs(b)
    q_norm, k_norm = norms(b, norm)
    q = prepare(b, q, q_norm, 4, i["table"])
    k = prepare(b, k, k_norm, 2, i["table"])
    pools = b.op("kv_write", k, v, i["slots"], i["k_pool"], i["v_pool"])
    return attention(b, q, b.item(pools, 0), b.item(pools, 1), i)


def expected(b, norm, joined):
    rows = [b.row("qkv", 128)] if joined else [b.row("q", 64), b.row("k", 32), b.row("v", 32)]
    i = inputs(b)
    weights = [w for w in norms(b, norm) if w is not None]
    done = b.op(
        "qk_prep", *rows, i["table"], i["slots"], *weights, i["k_pool"], i["v_pool"],
        **HEADS, pairing="neox", eps=1e-6 if norm else 0.0, norm=norm, joined=joined,
    )  # fmt: skip
    q, k_pool, v_pool = (b.item(done, index) for index in range(3))
    return attention(b, q, k_pool, v_pool, i)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_norm_rope_and_write_become_one(module, norm, joined):
    after, report = run(module(lambda b: before(b, norm, joined)))
    assert_structural_equal(after, module(lambda b: expected(b, norm, joined)))
    assert report.applied == 1


def test_a_rotated_row_that_others_read_is_left(module):
    def body(b):
        q, k, v = b.row("q", 64), b.row("k", 32), b.row("v", 32)
        i = inputs(b)
        q, k = prepare(b, q, None, 4, i["table"]), prepare(b, k, None, 2, i["table"])
        pools = b.op("kv_write", k, v, i["slots"], i["k_pool"], i["v_pool"])
        return attention(b, q, b.item(pools, 0), b.item(pools, 1), i), b.op("silu", k)

    after, report = run(module(body))
    assert_structural_equal(after, module(body))
    assert report.applied == 0


def test_q_and_k_that_are_normed_differently_are_left(module):
    def body(b):
        q, k, v = b.row("q", 64), b.row("k", 32), b.row("v", 32)
        i = inputs(b)
        q_norm, k_norm = norms(b, True)
        q = prepare(b, q, q_norm, 4, i["table"])
        k = b.op("mul", b.op("rms_norm", k, eps=1e-5, groups=2), k_norm)
        k = prepare(b, k, None, 2, i["table"])
        pools = b.op("kv_write", k, v, i["slots"], i["k_pool"], i["v_pool"])
        return attention(b, q, b.item(pools, 0), b.item(pools, 1), i)

    after, report = run(module(body))
    assert_structural_equal(after, module(body))
    assert report.refused == {"q and k are not prepared alike": 1}


def test_norms_of_whole_rows_stay_before_the_rotation(module):
    """Norms over all heads at once (OLMo 2) are not those of each head that qk_prep takes."""

    def body(b):
        q, k, v = b.row("q", 64), b.row("k", 32), b.row("v", 32)
        i = inputs(b)
        q = b.op("mul", b.op("rms_norm", q, eps=1e-6, groups=1), b.vector("q_norm", 64))
        k = b.op("mul", b.op("rms_norm", k, eps=1e-6, groups=1), b.vector("k_norm", 32))
        q, k = prepare(b, q, None, 4, i["table"]), prepare(b, k, None, 2, i["table"])
        pools = b.op("kv_write", k, v, i["slots"], i["k_pool"], i["v_pool"])
        return attention(b, q, b.item(pools, 0), b.item(pools, 1), i)

    after, report = run(module(body))
    text = after.script()
    assert report.applied == 1
    assert (text.count("xpuc.rms_norm"), text.count("norm=False")) == (2, 1)


def test_the_norm_of_an_only_kv_head_is_not_taken_for_that_of_a_row(module):
    def body(b):
        q, k, v = b.row("q", 64), b.row("k", 16), b.row("v", 16)
        i = inputs(b) | {
            "k_pool": b.param("k_pool_1", (9, 1, 16, 16), "float16"),
            "v_pool": b.param("v_pool_1", (9, 1, 16, 16), "float16"),
        }
        q_norm, k_norm = norms(b, True)
        q, k = prepare(b, q, q_norm, 4, i["table"]), prepare(b, k, k_norm, 1, i["table"])
        pools = b.op("kv_write", k, v, i["slots"], i["k_pool"], i["v_pool"])
        return attention(b, q, b.item(pools, 0), b.item(pools, 1), i)

    _, reports = passes.run(module(body))
    assert reports["fuse_rope_kv"].applied == 1
