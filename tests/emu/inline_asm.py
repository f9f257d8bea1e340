"""Finds the inline assembly of a CUDA C source and splits it into its parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

_ASM = re.compile(r"\b(?:asm|__asm__)\s*(?:volatile\b|__volatile__\b)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.S)
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\"": '"', r"\\": "\\"}


@dataclass(frozen=True)
class InlineAsm:
    """One asm statement: source[begin:end] is it, with its semicolon."""

    begin: int
    end: int
    text: str  # the PTX, `%%` still doubled
    operands: tuple[str, ...]  # C expressions of %0, %1, ...
    n_outputs: int


def find(source: str) -> Iterator[InlineAsm]:
    """The asm statements of a source, in order."""
    position = 0
    while match := _ASM.search(source, position):
        close = _closing(source, match.end() - 1)
        sections = _split(source[match.end() : close], ":")
        outputs, inputs = (_operands(s) for s in [*sections[1:3], "", ""][:2])
        text = "".join(_unescaped(part) for part in _STRING.findall(sections[0]))
        semicolon = source.index(";", close)
        yield InlineAsm(match.start(), semicolon + 1, text, tuple(outputs + inputs), len(outputs))
        position = semicolon + 1


def _unescaped(text: str) -> str:
    return re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), text)


def _closing(source: str, opening: int) -> int:
    """Where the parenthesis at `opening` closes."""
    depth = 0
    for i, char in _code(source, opening):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i
    raise ValueError(f"an asm statement does not end: {source[opening : opening + 80]!r}")


def _code(source: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """The characters outside string literals, with their places."""
    i = start
    while i < len(source):
        string = _STRING.match(source, i)
        if string:
            i = string.end()
            continue
        yield i, source[i]
        i += 1


def _split(source: str, separator: str) -> list[str]:
    """Split where the separator stands outside strings and brackets."""
    depth, cuts = 0, [-1]
    for i, char in _code(source):
        depth += (char in "([{") - (char in ")]}")
        if char == separator and depth == 0:
            cuts.append(i)
    cuts.append(len(source))
    return [source[a + 1 : b] for a, b in pairwise(cuts)]


def _operands(section: str) -> list[str]:
    """The expressions of `"=r"(x), "r"(y)`."""
    parts = [part.strip() for part in _split(section, ",") if part.strip()]
    return [part[part.index("(", part.index('"', 1) + 1) + 1 : -1].strip() for part in parts]
