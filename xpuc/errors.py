"""What a user did or gave that xpuc cannot work with: a message and a hint, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class XpucError(Exception):
    """`message` names the file and the item and what was found; `hint` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}\n{hint}")
        self.message = message
        self.hint = hint


class FileError(XpucError):
    """A file that is missing, truncated or malformed."""


class UnsupportedError(XpucError):
    """Something well formed that xpuc does not support (a format, an architecture, an option)."""


class ArtifactError(XpucError):
    """An artifact that does not fit this machine or this version of xpuc."""


class RequestError(XpucError):
    """A request that cannot be served (too long, bad sampling parameters, a full queue)."""


class FieldError(RequestError):
    """A field of a request, or several, whose values cannot be used.

    The message begins with their names, as Python knows them; `what` is the rest of it.
    """

    def __init__(self, fields: Iterable[str], what: str, hint: str) -> None:
        self.fields, self.what = tuple(fields), what
        super().__init__(f"{' and '.join(self.fields)}{what}", hint)

    def named(self, names: Mapping[str, str]) -> FieldError:
        """The same with other names, of those fields that have one."""
        return FieldError((names.get(each, each) for each in self.fields), self.what, self.hint)


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint for an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}known: {', '.join(names)}"
