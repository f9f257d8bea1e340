"""`xpuc score`: how likely a model finds a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpuc.cli import parameter_types, quantities, shared_options, sources
from xpuc.errors import FileError, RequestError

if TYPE_CHECKING:
    from xpuc.runtime.engine import Engine, Score
    from xpuc.runtime.generation import Codec


@click.command()
@click.argument("model", type=parameter_types.PATH, metavar="ARTIFACT|MODEL")
@click.option(
    "--ids",
    type=parameter_types.PATH,
    metavar="FILE.json",
    help="Token ids: [1, 2, ...], or what xpuc tokenize --json prints; - is stdin.",
)
@click.option(
    "-f", "--file", type=parameter_types.PATH, metavar="TEXT", help="A text file; - is stdin."
)
@click.option(
    "--top",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    metavar="K",
    help="Also the K likeliest tokens at each position.",
)
@click.option(
    "--window",
    type=click.IntRange(min=4),
    metavar="N",
    help="Perplexity as llama-perplexity counts it: the second half of each window of N tokens.",
)
@click.option(
    "--windows",
    type=click.IntRange(min=1),
    metavar="M",
    help="With --window: the first M windows only.",
)
@shared_options.loading
@shared_options.as_json
def command(
    model: Path, ids: Path | None, file: Path | None, top: int, as_json: bool, **rest: Any
) -> None:
    """Say how likely a model finds a text.

    Each token is predicted from those before it (teacher forcing).

    With --window, each window of the text is read by itself, its first half being context.

    --json prints {"positions": [{"id", "logprob", "top": [[id, logprob], ...]}, ...], "nll",
    "perplexity"}. Logprobs are natural; the first token's is null, because nothing predicts it,
    and nll is the mean over the others. With --window it prints {"windows": [mean nll, ...],
    "scored", "nll", "perplexity", "error"}.
    """
    if (ids is None) == (file is None):
        raise RequestError("give the text one way, with --ids or with -f", "see xpuc score --help")
    if rest["windows"] and not rest["window"]:
        raise RequestError("--windows needs --window", "add --window N, or leave --windows out")
    if rest["window"] and top:
        raise RequestError("--top: not with --window", "leave one of the two out")
    given = read_ids(ids) if ids is not None else None
    text = sources.text(None, file) if file is not None else ""
    artifact = sources.artifact(model, rest["ctx"])
    from xpuc.runtime.engine import load

    engine = load(artifact, threads=rest["threads"], ctx=rest["ctx"], n_sequences=1)
    codec = engine.prompts.codec("a text")
    wanted = given if given is not None else codec.encode(text)
    if rest["window"]:
        click.echo(_windows(engine, wanted, rest["window"], rest["windows"], as_json))
        return
    scored = engine.score(wanted, top)
    click.echo(json.dumps(_facts(scored)) if as_json else "\n".join(_table(codec, scored, top)))


def read_ids(path: Path) -> list[int]:
    """Token ids from a JSON file: a list, or an object with a list under "ids"."""
    name = "stdin" if str(path) == "-" else str(path)
    try:
        found = json.loads(sources.text(None, path))
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{name}: not JSON ({error})", "give a list of token ids: [1, 2, 3]"
        ) from None
    if isinstance(found, dict):
        found = found.get("ids")
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise FileError(
            f"{name}: holds no list of token ids", 'give [1, 2, 3] or {"ids": [1, 2, 3]}'
        )
    return found


def _windows(engine: Engine, ids: list[int], window: int, most: int | None, as_json: bool) -> str:
    from xpuc.runtime.perplexity import perplexity

    codec = engine.prompts.codec("a text")
    adds_bos = codec.encode("")[:1] == [codec.bos_id]
    found = perplexity(engine.teacher_forced, ids, window, most, codec.bos_id if adds_bos else None)
    means = [sum(each) / len(each) for each in found.nll]
    facts = {"windows": means, "scored": found.n_scored, "nll": found.mean_nll,
             "perplexity": found.value, "error": found.error}  # fmt: skip
    if as_json:
        return json.dumps(facts)
    n = f"{quantities.count(len(means), 'window')} of {window} tokens, {found.n_scored:,} scored"
    return f"{n}, perplexity {found.value:.4f} +/- {found.error:.4f}"


def _facts(scored: Score) -> dict[str, Any]:
    return {
        "positions": [
            {"id": each.id, "logprob": each.logprob, "top": [list(pair) for pair in each.top]}
            for each in scored.positions
        ],
        "nll": scored.nll,
        "perplexity": scored.perplexity,
    }


def _table(codec: Codec, scored: Score, top: int) -> list[str]:
    lines = []
    if top:

        def shown(id_: int) -> str:
            return json.dumps(codec.pieces([id_])[0], ensure_ascii=False)

        rows = [
            (i, shown(each.id), "-" if each.logprob is None else f"{each.logprob:.4f}",
             " ".join(f"{shown(id_)} {logprob:.3f}" for id_, logprob in each.top))
            for i, each in enumerate(scored.positions)
        ]  # fmt: skip
        lines = quantities.columns(rows, right=[0, 2])
    n = quantities.count(len(scored.positions), "token")
    means = f"mean nll {scored.nll:.4f} nats, perplexity {scored.perplexity:.4f}"
    return [*lines, f"{n}, {means}"]
