"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from xpuc.cli import parameter_types

Command = Callable[..., Any]

threads = click.option(
    "-t",
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Threads. Default: one a core.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_ctx = click.option(
    "-c",
    "--ctx",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of context. Default: as compiled.",
)
_machine = (
    click.option(
        "--target",
        default="llvm",
        show_default=True,
        metavar="TARGET",
        help="llvm (the CPU), cuda, or 'cuda -arch=sm_90a'; compile takes several architectures,"
        " sm_80,sm_90a.",
    ),
    click.option(
        "--cpu",
        metavar="NAME",
        help="LLVM's name of the CPU that runs it, such as znver3 or x86-64-v3. Default: this one.",
    ),
    click.option(
        "--db",
        type=parameter_types.FOLDER,
        metavar="DIR",
        help="Folder of tuned records. Default: ~/.config/xpuc/tune_db.",
    ),
)


def loading(command: Command) -> Command:
    """Give a command the options of loading a model: ctx and threads."""
    return _ctx(threads(command))


def machine(command: Command) -> Command:
    """Give a command those of the machine that is compiled for: target, cpu and db."""
    for option in reversed(_machine):
        command = option(command)
    return command
