"""Kernels that spill are given room, the others are left as they are."""

from __future__ import annotations

import re

from xpuc.codegen.cuda.ptxas import KernelUsage
from xpuc.codegen.cuda.room import without_spills

HEAD = "struct helper {};\n"
BOUNDS = re.compile(r"__launch_bounds__\((\d+)(?:, (\d+))?\) (\w+)\(int n\) {")


def text(name: str, bounds: str = "128") -> tuple[str, str]:
    """A kernel's declaration and definition, as TVM writes them."""
    first = f'extern "C" __global__ void __launch_bounds__({bounds}) {name}(int n)'
    return f"{first};\n", f"{first} {{\n  n = 1;\n}}\n"


def source(**bounds: str) -> str:
    texts = [text(name, each) for name, each in bounds.items()]
    return HEAD + "".join(t[0] for t in texts) + "".join(t[1] for t in texts)


class Ptxas:
    """Spills kernels of more resident blocks than there is room for; a source is a call."""

    def __init__(self, **room: int) -> None:
        self.room, self.asked = room, list[str]()

    def __call__(self, source: str) -> tuple[bytes, list[KernelUsage]]:
        self.asked.append(source)
        assert source.startswith(HEAD)
        found = [(name, int(blocks or 16)) for _, blocks, name in BOUNDS.findall(source)]
        return source.encode(), [
            KernelUsage(name, "sm_80", 72, 0, 0, 8 * (n > self.room[name]), 0, 0)
            for name, n in found
        ]


def test_what_does_not_spill_is_compiled_once() -> None:
    ptxas = Ptxas(a=16)
    code, _ = without_spills(ptxas, source(a="128"))
    assert ptxas.asked == [source(a="128")]
    assert code.decode() == ptxas.asked[0]


def test_a_kernel_asks_for_fewer_blocks_until_nothing_spills() -> None:
    # 72 registers of 128 threads: 7 blocks of a multiprocessor.
    ptxas = Ptxas(a=16, b=5, c=6)
    code, usage = without_spills(ptxas, source(a="128", b="128", c="128"))
    assert ptxas.asked[1:] == [
        source(b="128, 6", c="128, 6"),
        source(b="128, 5"),
        source(a="128", b="128, 5", c="128, 6"),
    ]
    assert code.decode() == ptxas.asked[-1]
    assert not any(row.spill_store_bytes for row in usage)


def test_what_spills_whatever_room_it_has_is_left_with_all_of_it() -> None:
    ptxas = Ptxas(a=0)
    code, _ = without_spills(ptxas, source(a="256"))
    assert code.decode() == source(a="256, 1")
