"""docs/cli.md: the help of every command. `python tests/cli_docs.py` writes it, a test compares."""

from __future__ import annotations

from pathlib import Path

import click

from xpuc.cli import COMMANDS, main

PATH = Path(__file__).parent.parent / "docs" / "cli.md"
WIDTH = 96
_INTRODUCTION = """\
# The command line

Written by `python tests/cli_docs.py` from the commands' own `--help`; a test compares the two.

Every mistake of a user ends in two lines on stderr and exit code 2, a bug in one line and exit code
1, Ctrl-C in exit code 130, SIGTERM in 143; all of them leave nothing half done. `--json` prints one
JSON value on stdout, whose keys stay as they are; what is for people besides the result goes to
stderr.
"""


def help_of(command: click.Command, name: str, parent: click.Context | None = None) -> str:
    """What `--help` prints, at a fixed width."""
    ctx = click.Context(
        command, parent, name, terminal_width=WIDTH, help_option_names=["-h", "--help"]
    )
    return command.get_help(ctx)


def text() -> str:
    """The whole page."""
    root = click.Context(main, None, "xpuc")
    sections = [("xpuc", help_of(main, "xpuc"))]
    for name in COMMANDS:
        command = main.get_command(root, name)
        assert command is not None
        sections.append((f"xpuc {name}", help_of(command, name, root)))
    blocks = [f"## {title}\n\n```\n{body}\n```\n" for title, body in sections]
    return "\n".join([_INTRODUCTION, *blocks])


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
