"""The options and the tables of `xpuc bench --engine`."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpuc.cli import quantities
from xpuc.cli.parameter_types import Number
from xpuc.errors import RequestError
from xpuc.runtime.chunks import BUDGET_MS

if TYPE_CHECKING:
    from xpuc.bench.engine_session import Report
    from xpuc.bench.load import LoadResult
    from xpuc.bench.quantiles import Quantiles
    from xpuc.bench.stall import Stall

ROUNDS = 1  # unless -r says otherwise


_OPTIONS = (
    ("--requests", "n_requests", click.IntRange(1, 100_000), 100, "N", "Requests of the load."),
    ("--rate", "rate", Number(0, math.inf, min_open=True), 4.0, "R",
     "How many of them come a second, at random; inf: all at once."),
    ("--seed", "seed", click.IntRange(0), 1, "N", "What the load is drawn from."),
    ("--stall-prompt", "stall_prompt", click.IntRange(2), 4096, "N",
     "Tokens of the prompt that comes into a stream."),
    ("--prefix", "prefix", click.IntRange(1), 1024, "N", "Tokens that prompts share."),
    ("--chunk-budget-ms", "budget_ms", Number(0, 1e6, min_open=True), BUDGET_MS, "MS",
     "How long a prompt may keep a stream waiting."),
)  # fmt: skip
_PARTS = ("overhead", "load", "stall", "reuse")
NAMES = ("parts", *(name for _, name, *_ in _OPTIONS), "with_store")  # of the parameters
_HEAD = ["p50", "p90", "p99", "max", "p99 spread"]


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the sizes of the engine's measurements."""
    store = click.option(
        "--store",
        "with_store",
        is_flag=True,
        help="With --engine: the load with a block store too.",
    )
    command = store(command)
    for flag, name, kind, default, metavar, text in reversed(_OPTIONS):
        add = click.option(
            flag, name, type=kind, default=default, show_default=True, metavar=metavar,
            help=f"With --engine: {text[0].lower()}{text[1:]}",
        )  # fmt: skip
        command = add(command)
    only = click.option(
        "--only", "parts", multiple=True, type=click.Choice(_PARTS),
        help="With --engine: measure this part; may be repeated. Default: all.",
    )  # fmt: skip
    return only(command)


def run(artifact: Path, threads: int, rounds: int, sizes: dict[str, Any], as_json: bool) -> None:
    """Measure and print; after Ctrl-C what is done, and then KeyboardInterrupt."""
    from xpuc.bench.engine_session import EngineSession, Sizes
    from xpuc.bench.subject import Subject
    from xpuc.cli.progress import phases

    subject = Subject.of(artifact, threads)
    with phases() as watch:
        report = EngineSession(subject, Sizes(**sizes), watch).run(rounds)
    if as_json:
        click.echo(json.dumps(_facts(report, sizes, threads), indent=1))
    else:
        click.echo("\n".join(_lines(report, sizes, threads)))
    if report.stopped:
        raise KeyboardInterrupt


def refuse_others(is_engine: bool, others: Sequence[str]) -> None:
    """Options of one kind of measurement say nothing to the other (`others`: without --engine)."""
    ctx = click.get_current_context()
    wrong = others if is_engine else NAMES
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if parameter.name in wrong and source is click.core.ParameterSource.COMMANDLINE:
            flag = max(parameter.opts, key=len)
            raise RequestError(
                f"{flag} {'is not for --engine' if is_engine else 'needs --engine'}",
                f"leave {flag} out" if is_engine else f"add --engine, or leave {flag} out",
            )


def _facts(report: Report, sizes: dict[str, Any], threads: int) -> dict[str, Any]:
    facts = dataclasses.asdict(report)
    for name in ("loads", "stored_loads"):
        for served, each in zip(facts[name], getattr(report, name), strict=True):
            served["load"]["generated_tok_s"] = each.load.generated_tok_s
    rate = sizes["rate"] if math.isfinite(sizes["rate"]) else None
    return {"threads": threads, "sizes": sizes | {"rate": rate}} | facts


def _lines(report: Report, sizes: dict[str, Any], threads: int) -> Iterator[str]:
    if report.overheads:
        yield from _overheads(report)
    if report.loads:
        yield from _load(report, sizes)
    if report.stored_loads:
        yield from _saving(report)
    if report.stalls or report.free_stalls:
        yield from _stalls(report)
    if report.reuses:
        yield from _reuses(report)
    yield from report.notes
    n = max(len(report.overheads), len(report.loads), len(report.stalls), len(report.reuses))
    yield f"medians of {quantities.count(n, 'round')}, {quantities.count(threads, 'thread')}" + (
        "; stopped before all were done" if report.stopped else ""
    )


def _overheads(report: Report) -> Iterator[str]:
    table = [["beside the model, us a step", "running", *_HEAD, "of step"]]
    for rounds in zip(*report.overheads, strict=True):
        parts = [each.of_step for each in rounds if each.of_step is not None]
        table.append([
            rounds[0].what, str(rounds[0].n_running), *_cells([each.us for each in rounds], 0),
            f"{100 * statistics.median(parts):.1f} %" if parts else "-",
        ])  # fmt: skip
    yield from _columns(table)


def _cells(rounds: Sequence[Quantiles], digits: int = 1) -> list[str]:
    """Medians over the rounds, and (largest - smallest) / median of their p99."""
    values = [
        f"{statistics.median(getattr(each, name) for each in rounds):,.{digits}f}"
        for name in ("p50", "p90", "p99", "max")
    ]
    return [*values, _spread([each.p99 for each in rounds])]


def _spread(values: Sequence[float]) -> str:
    from xpuc.bench.session import spread

    return f"{100 * spread(values):.0f} %" if len(values) > 1 and any(values) else "-"


def _columns(table: list[list[str]]) -> list[str]:
    return [*quantities.columns(table, right=range(1, len(table[0]))), ""]


def _load(report: Report, sizes: dict[str, Any]) -> Iterator[str]:
    loads = [served.load for served in report.loads]
    count = quantities.count(loads[0].n_requests, "request")
    table = [[f"load of {count}, {sizes['rate']:g} a second, ms", *_HEAD]]
    for name, field in (
        ("queue wait", "queue_wait_ms"), ("time to first token", "first_token_ms"),
        ("time per output token", "per_token_ms"), ("gap between tokens", "token_gap_ms"),
    ):  # fmt: skip
        table.append([name, *_cells([getattr(each, field) for each in loads])])
    yield from _columns(table)[:-1]
    yield from (_sums(each) for each in loads)
    yield ""


def _sums(load: LoadResult) -> str:
    ended = ", ".join(f"{n} {reason}" for reason, n in sorted(load.ended.items()))
    part = 100 * load.pool_blocks / max(1, load.wanted_blocks)
    leaked = f"{load.n_leaked} blocks LEAKED" if load.n_leaked else "no block leaked"
    return (
        f"{load.prompt_tokens:,} + {load.generated_tokens:,} tokens in {load.seconds:.1f} s,"
        f" {quantities.rate(load.generated_tok_s)} generated; ended: {ended}; {leaked};"
        f" pool of {load.pool_blocks} blocks ({part:.0f} % of what is wanted):"
        f" {quantities.count(load.n_preempted, 'preemption')}; prefix hits"
        f" {100 * load.hit_rate:.0f} %; {quantities.count(load.n_small, 'small chunk')}"
    )


def _saving(report: Report) -> Iterator[str]:
    table = [["ms, without and with a block store", *_HEAD]]
    for name, field in (("gap between tokens", "token_gap_ms"), ("planning a step", "plan_ms")):
        for suffix, served in (("", report.loads), (", store", report.stored_loads)):
            if served:
                cells = _cells([getattr(each.load, field) for each in served], 2)
                table.append([f"{name}{suffix}", *cells])
    yield from _columns(table)[:-1]
    saved = [each.saving for each in report.stored_loads if each.saving is not None]
    us = [each.us for each in saved]
    yield (
        f"saving a block: {statistics.median(each.p50 for each in us):,.0f} us (p99"
        f" {statistics.median(each.p99 for each in us):,.0f} us),"
        f" {quantities.count(us[0].n, 'block')};"
        f" {100 * statistics.median(each.of_steps for each in saved):.1f} % of all steps"
    )
    yield ""


def _stalls(report: Report) -> Iterator[str]:
    both = [*report.stalls, *report.free_stalls]
    n = both[0].prompt_tokens
    table = [[f"gap in a stream, a prompt of {n:,} tokens, ms", *_HEAD, "prompt s", "chunks"]]
    table.append(["before it comes", *_cells([each.alone_ms for each in both], 1), "", ""])
    for name, stalls in (("", report.stalls), ("no budget", report.free_stalls)):
        if stalls:
            table.append([name or f"budget {stalls[0].budget_ms:g} ms", *_stall_cells(stalls)])
    yield from _columns(table)[:-1]
    small = sum(each.n_small for each in report.stalls)
    yield f"{quantities.count(small, 'small chunk')} within the budget"
    yield ""


def _stall_cells(stalls: Sequence[Stall]) -> list[str]:
    seconds = statistics.median(each.first_token_ms for each in stalls) / 1000
    least = min(each.smallest_chunk for each in stalls)
    most = max(each.largest_chunk for each in stalls)
    gaps = _cells([each.gap_ms for each in stalls])
    return [*gaps, f"{seconds:.1f}", f"{least} to {most}"]


def _reuses(report: Report) -> Iterator[str]:
    first = report.reuses[0]
    table = [[f"first token of a prompt of {first.prompt_tokens:,}, ms", "p50", "spread", "of new",
              "found"]]  # fmt: skip
    for name, field in (
        ("new", "cold"), (f"{first.prefix_tokens:,} of its tokens in memory", "shared"),
        ("in the block store, after a restart", "stored"),
    ):  # fmt: skip
        found = [each for reuse in report.reuses if (each := getattr(reuse, field)) is not None]
        if found:
            parts = [
                getattr(each, field).ms / each.cold.ms
                for each in report.reuses
                if getattr(each, field) is not None
            ]
            times = [each.ms for each in found]
            tokens = found[0].found_tokens + found[0].stored_tokens
            table.append([
                name, f"{statistics.median(times):,.1f}", _spread(times),
                f"{statistics.median(parts):.3f}", f"{tokens:,}",
            ])  # fmt: skip
    yield from _columns(table)
