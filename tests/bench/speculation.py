"""What drafts by prompt lookup gain: `python tests/bench/speculation.py model.xpuc [rounds]`.

An engine with drafts and one without answer the same requests in turns; their answers are equal.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from xpuc.runtime.engine import Engine, Result, load
from xpuc.runtime.speculation import Speculation

DRAFT_MAX = 3
CODE = """def area(width, height):
    return width * height


def volume(width, height, depth):
    return area(width, height) * depth
"""
TEXT = (
    "The mill stood at the end of the lane, where the river turned. Nobody had ground corn there"
    " since the war, but its wheel still moved when the water was high, and children were told not"
    " to go near it after dark."
)
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "repeat code, greedy": (f"Repeat this code exactly:\n\n{CODE}", {"temperature": 0}),
    "repeat text, greedy": (f"Repeat this text exactly:\n\n{TEXT}", {"temperature": 0}),
    "repeat text, temperature 0.8": (
        f"Repeat this text exactly:\n\n{TEXT}",
        {"temperature": 0.8, "seed": 1},
    ),
    "a story, greedy": ("Write a short story about a lighthouse.", {"temperature": 0}),
}


def answer(engine: Engine, text: str, options: dict[str, Any]) -> Result:
    return engine.generate([{"role": "user", "content": text}], max_tokens=96, **options)


def main() -> None:
    """The best of each engine's rounds counts: what is taken by others is not theirs."""
    artifact, rounds = sys.argv[1], int((sys.argv[2:] or ["4"])[0])
    plain = load(artifact, n_sequences=1)
    drafting = load(artifact, n_sequences=1, speculation=Speculation(draft_max=DRAFT_MAX))
    click.echo(f"{'tokens/s':30}{'without':>9}{'with':>9}{'ratio':>7}  accepted")
    for name, (text, options) in REQUESTS.items():
        pairs = [
            (answer(plain, text, options), answer(drafting, text, options)) for _ in range(rounds)
        ]
        if any(without.ids != drafted.ids for without, drafted in pairs):
            sys.exit(f"{name}: drafts have changed the answer")
        without, drafted = (
            max(e.timings.tokens_per_s for e in each) for each in zip(*pairs, strict=True)
        )
        of = pairs[0][1].timings
        click.echo(
            f"{name:30}{without:9.0f}{drafted:9.0f}{drafted / without:7.2f}"
            f"  {of.n_accepted} of {of.n_drafted}"
        )


if __name__ == "__main__":
    main()
