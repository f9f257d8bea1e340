"""The command line: one file a command, imported when the command is called.

Importing this module or a command's imports click and nothing heavier; what a command needs is
imported when it runs, so that `xpuc --help` answers at once.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

import xpuc
from xpuc import interrupts
from xpuc.cli import failures
from xpuc.errors import FieldError, RequestError, nearest

COMMANDS = (
    "compile",
    "run",
    "tokenize",
    "score",
    "inspect",
    "explain",
    "bench",
    "tune",
    "doctor",
    "opt",
)


class _Program(click.Group):
    """Finds a command by the name of its file, and ends every failure as `failures` says."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise RequestError(f"unknown command: {args[0]!r}", nearest(args[0], COMMANDS))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # click would end it with a blank line and "Aborted!"
            raise failures.Interrupted from error
        except click.UsageError as error:
            if error.ctx is None:  # its parser does not say whose it is
                error.ctx = self._invoked(ctx)
            raise
        except FieldError as error:
            called = self._invoked(ctx)
            raise error.named(failures.flags(called) if called else {}) from error

    def _invoked(self, ctx: click.Context) -> click.Context | None:
        """Of the command that was called."""
        name = ctx.invoked_subcommand
        command = self.get_command(ctx, name) if name else None
        return click.Context(command, ctx, name) if command else None

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> None:
        """Run one command line and exit: 0, or as `failures` says."""
        extra.pop("standalone_mode", None)
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")  # what its encoding lacks
        ended_by: list[int] = []
        with interrupts.heeding(ended_by.append):
            try:
                code = super().main(args, prog_name or "xpuc", standalone_mode=False, **extra)
            except Exception as error:
                code = failures.report(error)
        if ended_by:
            code = failures.SIGNALLED + ended_by[0]
        sys.exit(code if isinstance(code, int) else 0)


@click.group(
    name="xpuc",
    cls=_Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(xpuc.__version__, prog_name="xpuc", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Compile a language model to one artifact, and run it.

    \b
    xpuc compile model.gguf -o model.xpuc
    xpuc run model.xpuc -p "The capital of France is"

    A MODEL is a checkpoint (GGUF), an ARTIFACT what xpuc compile makes of it. XPUC_CACHE names
    the folder of compiled models (default ~/.cache/xpuc); XPUC_DEBUG=1 shows where an error
    comes from.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
