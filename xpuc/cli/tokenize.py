"""`xpuc tokenize`: text to token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from xpuc.cli import parameter_types, quantities, sources
from xpuc.errors import RequestError

if TYPE_CHECKING:
    from xpuc.runtime.tokenizer import Tokenizer


@click.command()
@click.argument("model", type=parameter_types.PATH, metavar="ARTIFACT|MODEL")
@click.option("-p", "--prompt", metavar="TEXT", help="The text; else it is read from stdin.")
@click.option(
    "-f", "--file", type=parameter_types.PATH, help="Read the text from a file; - is stdin."
)
@click.option(
    "--bos/--no-bos",
    default=None,
    help="With or without the begin token. Default: as the model wants it.",
)
@click.option(
    "--special/--no-special",
    default=True,
    help="Read <|...|> in the text as special tokens (default) or as text.",
)
@click.option("--tokenizer-pre", metavar="NAME", help="Of a MODEL: use this pre-tokenizer.")
@click.option("--json", "as_json", is_flag=True, help='Print {"ids": [...], "pieces": [...]}.')
def command(
    model: Path,
    prompt: str | None,
    file: Path | None,
    bos: bool | None,
    special: bool,
    tokenizer_pre: str | None,
    as_json: bool,
) -> None:
    """Print the tokens of a text.

    They are those that xpuc run would read. A MODEL (GGUF) need not be compiled for it.
    """
    sources.require(model)
    is_artifact = sources.is_artifact(model)
    if is_artifact and tokenizer_pre is not None:
        raise RequestError(
            f"--tokenizer-pre: {model} is an artifact, which has one",
            "leave it out, or give the MODEL",
        )
    text = sources.text(prompt, file)
    tokenizer = _of_artifact(model) if is_artifact else _of_checkpoint(model, tokenizer_pre)
    ids = tokenizer.encode(text, parse_special=special, add_bos=bos)
    pieces = tokenizer.pieces(ids)
    if as_json:
        click.echo(json.dumps({"ids": ids, "pieces": pieces}, ensure_ascii=False))
    elif ids:
        rows = [
            (id_, json.dumps(piece, ensure_ascii=False))
            for id_, piece in zip(ids, pieces, strict=True)
        ]
        click.echo("\n".join(quantities.columns(rows, right=[0])))


def _of_artifact(path: Path) -> Tokenizer:
    from xpuc.runtime.tokenizer import load_tokenizer

    return load_tokenizer(path)


def _of_checkpoint(path: Path, pre: str | None) -> Tokenizer:
    import tokenizers

    from xpuc.frontend.gguf import open_gguf
    from xpuc.frontend.tokenizer import convert_tokenizer
    from xpuc.runtime.tokenizer import Tokenizer

    metadata = open_gguf(path, strict=False).metadata
    spec = convert_tokenizer(metadata, path=str(path), pre=pre)
    return Tokenizer(tokenizers.Tokenizer.from_str(spec.json), spec.facts)
