"""`xpuc inspect`: what is in a checkpoint or an artifact, and the memory it takes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from xpuc.cli import inspect_artifact, inspect_gguf, parameter_types, shared_options, sources
from xpuc.errors import RequestError


@click.command()
@click.argument("file", type=parameter_types.PATH, metavar="FILE|ARTIFACT")
@click.option("--verify", is_flag=True, help="Of an artifact: compare every byte with the digests.")
@shared_options.as_json
def command(file: Path, verify: bool, as_json: bool) -> None:
    """Show what is in a checkpoint or an artifact.

    Of a FILE (GGUF): metadata, tensors, types, sizes. Of an ARTIFACT: the manifest, its files,
    what the compiler decided. Of both: the memory it takes.
    """
    sources.require(file, "a GGUF checkpoint or ARTIFACT")
    if sources.is_artifact(file):
        facts = inspect_artifact.facts(file, verify=verify)
        lines = inspect_artifact.lines
    elif verify:
        raise RequestError(f"{file}: a checkpoint holds no digests to verify", "leave --verify out")
    else:
        facts = inspect_gguf.facts(file)
        lines = inspect_gguf.lines
    if as_json:
        click.echo(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        click.echo("\n".join(lines(facts)))
