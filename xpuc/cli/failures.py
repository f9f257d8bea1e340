"""How a command ends that does not succeed: what the user can mend in two lines, a bug in one.

    error: model.gguf: tensor blk.0.attn_q.weight is IQ2_XS, which xpuc cannot decode
    hint: supported: Q4_0 Q4_1 ...

Exit codes: 2 for these, 1 for a bug, 130 after Ctrl-C, 143 after SIGTERM. XPUC_DEBUG=1 prints the
traceback first.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from difflib import get_close_matches

import click
from click.exceptions import (
    BadOptionUsage,
    BadParameter,
    MissingParameter,
    NoSuchOption,
    UsageError,
)

from xpuc.errors import XpucError

USAGE, BUG, INTERRUPTED = 2, 1, 130
SIGNALLED = 128  # and the number of the signal that asked the process to end
# What an OSError says of a disk or a device, which is not always told with a name.
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}

# What would end the line, or tell the terminal something; a path may have it.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

# A missing package -> what needs it, and what adds it.
_PACKAGES = {
    "tvm": ("the compiler needs apache-tvm", "pip install 'xpuc[compile]'"),
    "tvm_ffi": ("running a model needs apache-tvm-ffi", "pip install --upgrade xpuc"),
    "tokenizers": ("text needs the package tokenizers", "pip install --upgrade xpuc"),
}


class Interrupted(Exception):
    """Ctrl-C, on its way through click."""


def report(error: Exception) -> int:
    """Print what happened on stderr; the exit code."""
    if os.environ.get("XPUC_DEBUG") == "1":
        click.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    if isinstance(error, Interrupted | click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    lines = _mendable(error)
    if lines is None:
        kind, text = type(error).__name__, " ".join(str(error).split())
        click.echo(f"bug: {kind}: {text or 'no message'} (XPUC_DEBUG=1 shows where)", err=True)
        return BUG
    for name, text in zip(("error", "hint"), lines, strict=True):
        click.echo(f"{name}: {_CONTROL.sub(_escaped, text)}", err=True)
    return USAGE


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _mendable(error: Exception) -> tuple[str, str] | None:
    """(message, hint) of what the user did or gave; None for our own mistake."""
    if isinstance(error, XpucError):
        return error.message, error.hint
    if isinstance(error, UsageError):
        return _usage(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _PACKAGES:
        what, how = _PACKAGES[str(error.name).split(".")[0]]
        return f"{what}, which is not installed", how
    if isinstance(error, OSError) and error.strerror:
        said, hint = error.strerror.lower(), "check the path, its permissions and the space left"
        if error.filename is not None:
            return f"{error.filename}: {said}", hint
        if error.errno in _OF_THE_DISK:
            return f"reading or writing a file: {said}", hint
    if isinstance(error, MemoryError):
        return "not enough memory", "ask for a smaller context (--ctx), or free some"
    return None


def _usage(error: UsageError) -> tuple[str, str]:
    """click's message in xpuc's form."""
    ctx = error.ctx
    command = ctx.command_path if ctx else "xpuc"
    see = f"see {command} --help"
    if isinstance(error, NoSuchOption) and ctx is not None:
        close = get_close_matches(error.option_name, _options(ctx), n=3)
        return (
            f"unknown option: {error.option_name}",
            f"did you mean {', '.join(close)}? {see}" if close else see,
        )
    if isinstance(error, MissingParameter) and error.param is not None and ctx is not None:
        return (
            f"{_shown(error.param, ctx)} is missing",
            _usage_line(ctx),
        )
    if isinstance(error, BadParameter) and error.param is not None and ctx is not None:
        return f"{_shown(error.param, ctx)}: {_sentence(error.message)}", see
    if isinstance(error, BadOptionUsage):
        return _sentence(error.message), see
    extra = re.match(r"Got unexpected extra arguments? \((.*)\)", error.message)
    if extra and ctx is not None:
        return f"unexpected argument: {extra[1]}", _usage_line(ctx)
    return _sentence(error.format_message()), see


def flags(ctx: click.Context) -> dict[str, str]:
    """How each option of a command is typed, by its parameter."""
    return {
        str(param.name): _shown(param, ctx)
        for param in ctx.command.params
        if isinstance(param, click.Option)
    }


def _usage_line(ctx: click.Context) -> str:
    return f"type {' '.join(ctx.get_usage().removeprefix('Usage: ').split())}"


def _options(ctx: click.Context) -> list[str]:
    params = ctx.command.get_params(ctx)
    return [
        name for p in params if isinstance(p, click.Option) for name in (*p.opts, *p.secondary_opts)
    ]


def _shown(param: click.Parameter, ctx: click.Context) -> str:
    """`--ctx` for an option, `MODEL` for an argument."""
    return max(param.opts, key=len) if isinstance(param, click.Option) else param.make_metavar(ctx)


def _sentence(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:]
