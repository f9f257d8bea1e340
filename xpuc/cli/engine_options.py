"""The options of an engine, and the arguments of runtime.engine.load that they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from xpuc.cli import parameter_types, quantities, sources
from xpuc.errors import RequestError
from xpuc.runtime.chunks import BUDGET_MS

# Those of runtime.policies, which takes longer to import than help may take.
POLICIES = ("fcfs", "priority", "lpm", "vllm")
MODES = ("pipeline", "graphs")
_MOST_BYTES = 1 << 62


class _Size(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """`20G`, `512M`: bytes."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            size = quantities.n_bytes(value)
        except ValueError:
            self.fail(f"{value!r} is no size such as 512M or 20G", param, ctx)
        if size > _MOST_BYTES:
            self.fail(f"{value} is more than a file can hold", param, ctx)
        return size


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all of them."""
    decorators = [
        click.option("--store", type=parameter_types.PATH, metavar="DIR",
                     help="Keep K/V in this folder; the next run finds the prefixes there."),
        click.option("--store-bytes", type=_Size(), metavar="SIZE",
                     help="Most bytes of the store, such as 512M. Default: 20G."),
        click.option("--policy", type=click.Choice(POLICIES), default="fcfs", show_default=True,
                     metavar="NAME",
                     help=f"In which order requests are served: {', '.join(POLICIES)}."),
        click.option("--chunk-budget-ms", type=parameter_types.Number(0, min_open=True),
                     default=BUDGET_MS, show_default=True, metavar="MS",
                     help="How long prompts may hold up answers; inf: no bound."),
        click.option("--step-log", type=parameter_types.PATH, metavar="FILE",
                     help="Add a line of JSON to this file for every step."),
        click.option("--draft-max", type=click.IntRange(min=0), default=0, show_default=True,
                     metavar="N", help="Guess up to N tokens a step from the text before; 0: none."
                     " The answer stays the same."),
    ]  # fmt: skip
    for decorator in reversed(decorators):
        function = decorator(function)
    return modes(function)


def modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command those that switch modes of decoding off."""
    helps = {
        "pipeline": "On a GPU: queue a step before the one before it is read.",
        "graphs": "On a GPU: queue the launches of a step as one CUDA graph.",
    }
    for name in reversed(MODES):
        flags = f"--{name}/--no-{name}"
        function = click.option(flags, default=True, help=helps[name])(function)
    return function


def arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Take them out of `values`; what they are to `load`."""
    from xpuc.runtime.speculation import Speculation

    if values["step_log"] is not None:
        sources.require_writable(values["step_log"])
    names = ("store", "store_bytes", "policy", "chunk_budget_ms", "step_log", *MODES)
    given = {name: values.pop(name) for name in names}
    if given["store_bytes"] is None:
        del given["store_bytes"]
    elif given["store"] is None:
        raise RequestError(
            "--store-bytes needs --store", "add --store DIR, or leave --store-bytes out"
        )
    return given | {"speculation": Speculation(draft_max=values.pop("draft_max"))}
