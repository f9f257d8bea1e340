"""`xpuc doctor`: what this machine can compile for and run, and what adds the rest."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from xpuc.cli import quantities, shared_options

if TYPE_CHECKING:
    from xpuc.cli.diagnosis import Finding


@click.command()
@shared_options.as_json
def command(as_json: bool) -> None:
    """Say what this machine can do, and what it lacks.

    That is: what it can compile for and run, what is missing, and the command that adds it.

    Exits with 1 where something is missing that running or compiling for the CPU needs.
    """
    from xpuc.cli.diagnosis import examine, verdicts

    findings = examine()
    told = verdicts(findings)
    if as_json:
        facts = {"findings": [dataclasses.asdict(each) for each in findings], **told}
        click.echo(json.dumps(facts, indent=1))
    else:
        click.echo("\n".join(_lines(findings, told)))
    if not (told["can_run"] and told["can_compile"]):
        raise click.exceptions.Exit(1)


def _lines(findings: list[Finding], told: dict[str, bool]) -> list[str]:
    rows = [(each.mark, each.subject, each.found) for each in findings]
    lines = quantities.columns(rows)
    fixes = [(each.subject, each.fix) for each in findings if each.fix]
    if fixes:
        lines += ["", "what adds the rest:", *quantities.columns(fixes, indent=2)]
    words = {True: "yes", False: "no"}
    lines.append("")
    for target, suffix in (("llvm", ""), ("cuda", "_cuda")):
        runs, compiles = (words[told[f"can_{what}{suffix}"]] for what in ("run", "compile"))
        lines.append(f"run: {runs}; compile: {compiles} (--target {target})")
    return lines
