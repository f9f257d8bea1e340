"""Two artifacts in turns: `python tests/bench/pairs.py old.xpuc new.xpuc [rounds] [depth]`.

For changes too small for `xpuc bench` on a machine that others use: 8 tokens of the one, 8 of the
other, and the median of the ratios. The model alone, two threads.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import click

from xpuc.bench.cases import Case
from xpuc.bench.ours import Ours

TOKENS = 8


def main() -> None:
    old, new, *numbers = sys.argv[1:]
    rounds, depth = (*map(int, numbers), *(60, 1024)[len(numbers) :])
    case = Case("tg", TOKENS, depth=depth)
    sides = [Ours.load(Path(path), 2, [case]) for path in (old, new)]
    for side in sides:
        side.warm_up()
        side.run(case)
    times = [tuple(side.run(case) / TOKENS for side in sides) for _ in range(rounds)]
    for name, side in zip((old, new), zip(*times, strict=True), strict=True):
        click.echo(f"{name}: {1e3 * statistics.median(side):.3f} ms a token at depth {depth}")
    ratios = statistics.quantiles([after / before for before, after in times], n=4)
    click.echo(f"new / old: {ratios[1]:.3f} (quartiles {ratios[0]:.3f}, {ratios[2]:.3f})")


if __name__ == "__main__":
    main()
