"""Chat messages to the prompt text a model was trained on, through its Jinja template.

The template comes from the model file, so it runs in Jinja's sandbox. Names, filters and white
space follow the `transformers` library, which the templates are written for. Importing this module
costs 0.1 s (Jinja): import it where a chat is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xpuc.errors import RequestError

Message = Mapping[str, Any]


def render(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of `messages` ({"role", "content", …} each).

    variables: more names the template may ask for ("enable_thinking"). RequestError for a template
    that does not parse, refuses the messages, or fails on them.
    """
    names = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": add_generation_prompt,
        **(variables or {}),
    }
    try:
        return _compiled(template).render(names)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"chat template: line {error.lineno}: {error.message}",
            "use --raw to send the prompt as it is",
        ) from error
    except Exception as error:  # a template is the model's program: any fault in it is one of these
        raise RequestError(
            f"chat template: {error}",
            "check the roles and the order of the messages, or use --raw",
        ) from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (the name and type Jinja asks for)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
