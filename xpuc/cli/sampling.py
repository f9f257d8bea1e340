"""The options of a request, named as llama.cpp names them, and the SamplingParams they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from xpuc.cli import parameter_types, sources
from xpuc.errors import RequestError
from xpuc.runtime.sampling_params import DEFAULT_ORDER, SamplingParams

_DEFAULTS = SamplingParams()
# Option, field, type, help. The default is the field's.
_OPTIONS: tuple[tuple[tuple[str, ...], str, type, str], ...] = (
    (
        ("--temp", "--temperature"),
        "temperature",
        float,
        "Temperature; 0 takes the likeliest token.",
    ),
    (("--dynatemp-range",), "dynatemp_range", float, "Temperatures around it, by entropy; 0: off."),
    (("--dynatemp-exp",), "dynatemp_exponent", float, "Exponent of the entropy."),
    (("--top-k",), "top_k", int, "Keep the K likeliest tokens; 0: all."),
    (("--top-p",), "top_p", float, "Keep the likeliest tokens up to this probability; 1: all."),
    (("--min-p",), "min_p", float, "Keep tokens this likely relative to the likeliest; 0: all."),
    (("--typical",), "typical_p", float, "Locally typical sampling; 1: off."),
    (("--top-nsigma",), "top_n_sigma", float, "Keep logits within so many deviations; -1: off."),
    (("--xtc-probability",), "xtc_probability", float, "How often XTC drops top choices; 0: off."),
    (("--xtc-threshold",), "xtc_threshold", float, "Which choices XTC may drop; above 0.5: off."),
    (("--repeat-penalty",), "repeat_penalty", float, "Penalty on repeated tokens; 1: off."),
    (("--repeat-last-n",), "penalty_last_n", int, "Tokens that penalties look at; -1: all."),
    (("--presence-penalty",), "presence_penalty", float, "Penalty on tokens that occurred."),
    (("--frequency-penalty",), "frequency_penalty", float, "Penalty per occurrence."),
    (("--dry-multiplier",), "dry_multiplier", float, "DRY penalty on repeated sequences; 0: off."),
    (("--dry-base",), "dry_base", float, "Growth of the DRY penalty with length."),
    (("--dry-allowed-length",), "dry_allowed_length", int, "Repetitions so long cost nothing."),
    (("--dry-penalty-last-n",), "dry_last_n", int, "Tokens that DRY looks at; -1: all."),
)


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all of them, as arguments named like the fields of SamplingParams."""
    decorators = [
        click.option(
            *names,
            field,
            type=kind,
            default=getattr(_DEFAULTS, field),
            show_default=True,
            help=text,
        )
        for names, field, kind, text in _OPTIONS
    ]
    decorators += [
        click.option("--dry-sequence-breaker", "dry_breakers", multiple=True, metavar="TEXT",
                     help="Text that breaks a sequence for DRY, not the usual; none: nothing."),
        click.option("--samplers", default=";".join(DEFAULT_ORDER), metavar="A;B;...",
                     help=f"Samplers in the order they run. Default: {', '.join(DEFAULT_ORDER)}."),
        click.option("-l", "--logit-bias", multiple=True, metavar="ID+BIAS",
                     help="Make a token likelier (15043+1) or less so (15043-1); repeatable."),
        click.option("-s", "--seed", type=int, default=-1, show_default=True,
                     help="Of the random numbers; -1: a new one."),
        click.option("--ignore-eos", is_flag=True, help="Never choose an end of the answer."),
        click.option("--stop", multiple=True, metavar="TEXT",
                     help="Stop before this text; may be repeated."),
        click.option("--json-schema", type=parameter_types.PATH, metavar="FILE",
                     help="The answer is JSON of this schema; - is stdin."),
        click.option("--regex", metavar="REGEX",
                     help="The answer matches this, whole, in the syntax of Rust."),
        click.option("--grammar", type=parameter_types.PATH, metavar="FILE",
                     help="The answer follows this grammar, Lark or GBNF; - is stdin."),
    ]  # fmt: skip
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def params(values: dict[str, Any]) -> SamplingParams:
    """The request that the options ask for; RequestError names the one that is out of range."""
    chosen = dict(values)
    for name in ("seed", "max_tokens"):
        if chosen[name] == -1:
            chosen[name] = None
    breakers = chosen.pop("dry_breakers")
    if breakers:
        chosen["dry_breakers"] = () if breakers == ("none",) else breakers
    for name in ("json_schema", "grammar"):
        if chosen[name] is not None:
            chosen[name] = sources.text(None, chosen[name])
    chosen["logit_bias"] = dict(map(_bias, chosen["logit_bias"]))
    return SamplingParams(**chosen)


def _bias(text: str) -> tuple[int, float]:
    for sign in "+-":
        token, found, value = text.partition(sign)
        if found and token.isdecimal():
            try:
                return int(token), float(sign + value)
            except ValueError:
                break
    raise RequestError(
        f"--logit-bias {text}: not understood", "write a token id and a bias: 15043+1 or 15043-inf"
    )
