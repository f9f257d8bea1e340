"""`xpuc opt`: one pass on a dumped graph."""

from __future__ import annotations

from pathlib import Path

import click

from xpuc.cli import parameter_types, sources
from xpuc.files import write_whole


@click.command()
@click.argument("file", type=parameter_types.PATH)
@click.option(
    "--pass",
    "names",
    multiple=True,
    required=True,
    metavar="NAME",
    help="The pass to run; may be repeated.",
)
@click.option(
    "-o", "--out", type=parameter_types.PATH, help="Where the graph goes. Default: stdout."
)
def command(file: Path, names: tuple[str, ...], out: Path | None) -> None:
    """Run passes on a dumped graph.

    FILE is one that xpuc compile --dump-ir wrote; the graph after the passes is printed.
    """
    if out is not None:
        sources.require_writable(out)
    text = sources.decoded(sources.require(file, "a dumped graph").read_bytes(), str(file))
    from xpuc.ir.text import parse, to_text
    from xpuc.passes import named

    passes = [named(name) for name in names]
    module = parse(text, str(file))
    done = []
    for step in passes:
        module, report = step(module)
        reasons = "".join(f"; {n} refused: {reason}" for reason, n in report.refused.items())
        done.append(f"{step.name}: {report.applied} rewritten{reasons}")
    result = to_text(module)
    if out is None:
        click.echo(result, nl=False)
    else:
        write_whole(out, result)
    click.echo("\n".join(done), err=True)
