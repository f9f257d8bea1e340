"""`xpuc bench`: how fast an artifact runs, and beside llama.cpp."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpuc.cli import (
    bench_engine,
    engine_options,
    parameter_types,
    quantities,
    shared_options,
    sources,
)
from xpuc.errors import FileError, RequestError

if TYPE_CHECKING:
    from xpuc.bench import Case, Profile, Row
    from xpuc.bench.peer import Peer


class _Lengths(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """`512` or `128,512`: as llama-bench takes them."""

    name = "lengths"

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            lengths = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a number or several with commas between", param, ctx)
        for each in lengths:
            if not self.low <= each <= self.high:
                self.fail(f"{each} is out of range: choose {self.low} to {self.high}", param, ctx)
        return lengths


_ROUNDS = 5
_BUSY = 0.5  # load average of a machine with other work
_TOKENS = _Lengths(0, 1 << 20)
# Parameters that --engine has no use for.
_OF_THE_MODEL = (
    "prompts", "generated", "depths", "batches", "vs", "peer_model", "peer_python", "profile",
    *engine_options.MODES,
)  # fmt: skip


@click.command()
@click.argument("model", type=parameter_types.PATH, metavar="ARTIFACT|MODEL")
@click.option(
    "-p",
    "--n-prompt",
    "prompts",
    type=_TOKENS,
    default="512",
    show_default=True,
    metavar="N",
    help="Prompt tokens (pp512); 0: none.",
)
@click.option(
    "-n",
    "--n-gen",
    "generated",
    type=_TOKENS,
    default="128",
    show_default=True,
    metavar="N",
    help="Generated tokens (tg128); 0: none.",
)
@click.option(
    "-d",
    "--n-depth",
    "depths",
    type=_TOKENS,
    default="0",
    show_default=True,
    metavar="DEPTH",
    help="Tokens of context before them.",
)
@click.option(
    "-b",
    "--batch",
    "batches",
    type=_Lengths(1, 256),
    default="1",
    show_default=True,
    metavar="BATCH",
    help="Sequences that generate together.",
)
@shared_options.threads
@click.option(
    "-r",
    "--rounds",
    type=click.IntRange(1, 1000),
    metavar="N",
    help=f"How often each test runs; the median counts. Default: {_ROUNDS};"
    f" with --engine {bench_engine.ROUNDS}.",
)
@click.option(
    "--vs",
    type=click.Choice(["llama.cpp"]),
    help="Run this peer too, interleaved, and print the ratio.",
)
@click.option(
    "--model",
    "peer_model",
    type=parameter_types.PATH,
    metavar="FILE.gguf",
    help="With --vs: the checkpoint for the peer, which the artifact was compiled from.",
)
@click.option(
    "--peer-python",
    metavar="PATH",
    help="With --vs: Python interpreter that has the peer's package. Default: this one.",
)
@click.option(
    "--profile", is_flag=True, help="Also say what each kernel of a step takes, and its limit."
)
@engine_options.modes
@click.option("--engine", is_flag=True, help="Measure what requests notice of the engine instead.")
@bench_engine.options
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON list, one object a test; with --engine one object.",
)
def command(
    model: Path,
    vs: str | None,
    peer_model: Path | None,
    engine: bool,
    as_json: bool,
    **rest: Any,
) -> None:
    """Measure the speed, alone or beside llama.cpp.

    Tests have llama-bench's names: pp512 reads a prompt, tg128 generates. N, DEPTH and BATCH may be
    several numbers with commas between. The bandwidth is that of reading memory in as many
    threads, the int8 peak that of multiplying bytes in registers, both measured in the same run;
    a multiply-add is two operations.

    --profile runs one step of each test over and over: the chunk, or the token halfway. MB are of
    weights and K/V, which come from memory; the limit is the time to read them, or to multiply all
    weights at the int8 peak, whichever is longer: arithmetic in f32, as attention's, is not in it.
    "between kernels" is what is left of the step; it is below zero where the noise is larger.

    --engine measures what a step costs beside the model; a load of requests on a K/V pool that is
    too small for them, as vllm bench serve counts it; what a stream notices of a long prompt, with
    the chunk budget and without; and the first token of a prompt whose beginning is known. Ctrl-C
    ends it with what is done.
    """
    bench_engine.refuse_others(engine, _OF_THE_MODEL)
    sources.require(model)
    if engine:
        _measure_engine(model, as_json, rest)
        return
    from xpuc.bench import Session, cases
    from xpuc.bench.ours import Ours
    from xpuc.runtime.model import default_threads

    compared = _compared(vs, model, peer_model, rest["peer_python"])
    wanted = cases(rest["prompts"], rest["generated"], rest["depths"], rest["batches"])
    if not wanted:
        raise RequestError("-p 0 and -n 0 leave nothing to measure", "give one of them a length")
    _check_batch(model, max(case.batch for case in wanted))
    threads = rest["threads"] or default_threads()
    # A peer that is not there, or cannot read the model, says so before the model is compiled.
    with _peer(compared, threads, wanted, rest["peer_python"]) as peer:
        artifact = sources.artifact(model, max(case.n_context for case in wanted))
        ours = Ours.load(
            artifact, threads, wanted, **{name: rest[name] for name in engine_options.MODES}
        )
        session = Session(wanted, ours, threads, peer)
        try:
            rows = session.run(rest["rounds"] or _ROUNDS, _progress, by_kernel=rest["profile"])
        finally:
            _progress(None, "")
    facts = [dataclasses.asdict(row) for row in rows]
    click.echo(json.dumps(facts, indent=1) if as_json else "\n".join(_table(rows)))


def _measure_engine(model: Path, as_json: bool, rest: dict[str, Any]) -> None:
    from xpuc.runtime.model import default_threads

    threads, rounds = rest["threads"] or default_threads(), rest["rounds"] or bench_engine.ROUNDS
    sizes = {name: rest[name] for name in bench_engine.NAMES if rest[name] != ()}
    bench_engine.run(sources.artifact(model), threads, rounds, sizes, as_json)


def _check_batch(model: Path, batch: int) -> None:
    """Refuse what an artifact that is yet to be compiled would be refused for."""
    if batch > sources.DEFAULT_BATCH and not sources.is_artifact(model):
        raise RequestError(
            f"-b {batch}: a MODEL is compiled for batches of up to {sources.DEFAULT_BATCH}",
            f"give the artifact that xpuc compile --max-batch {batch} makes of it",
        )


def _compared(
    vs: str | None, model: Path, peer_model: Path | None, peer_python: str | None
) -> Path | None:
    """The checkpoint that the peer runs, which is that of MODEL; None without a peer, whose options
    are refused then."""
    if vs is None:
        for flag, value in (("--model", peer_model), ("--peer-python", peer_python)):
            if value is not None:
                raise RequestError(f"{flag} needs --vs", f"add --vs llama.cpp, or leave {flag} out")
        return None
    if peer_model is None and sources.is_artifact(model):
        raise RequestError(f"--vs {vs}: needs the checkpoint", "name it with --model FILE.gguf")
    if peer_model is not None:
        _check_same(model, peer_model)
    return peer_model or model


def _check_same(model: Path, checkpoint: Path) -> None:
    """A ratio between two different models would say nothing."""
    from xpuc.artifact import read_manifest
    from xpuc.frontend.gguf import open_gguf

    sources.require(checkpoint, "a GGUF checkpoint")
    found = open_gguf(checkpoint).digest()
    if sources.is_artifact(model):
        source = read_manifest(model).source
        wanted, what = source["xxh3_128"], f"what {model} was compiled from ({source['file']})"
    else:
        wanted, what = open_gguf(model).digest(), f"the model of {model}"
    if found != wanted:
        raise FileError(
            f"{checkpoint}: is not {what}", "give that one with --model, or compile this one"
        )


@contextmanager
def _peer(
    checkpoint: Path | None, threads: int, wanted: Sequence[Case], python: str | None
) -> Iterator[Peer | None]:
    """llama.cpp with the checkpoint loaded; None without one."""
    if checkpoint is None:
        yield None
        return
    from xpuc.bench.peer import Peer

    peer = Peer(checkpoint, threads, wanted, python)
    try:
        yield peer
    finally:
        peer.close()


def _progress(number: int | None, test: str) -> None:
    """One line on a terminal's stderr, rewritten."""
    if sys.stderr.isatty():
        text = "" if number is None else f"round {number + 1}: {test}"
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def _table(rows: list[Row]) -> list[str]:
    compared = rows[0].peer is not None
    computed = any(row.pct_int8_peak is not None for row in rows)
    head = ["test", "tok/s", "spread", "MB/token", "GB/s", "of bandwidth"]
    head += ["of int8 peak"] if computed else []
    table = [head + (["llama.cpp", "flash", "ratio"] if compared else [])]
    for row in rows:
        cells = [
            row.test, f"{row.tok_s:,.1f}", f"{100 * row.spread:.0f} %",
            f"{row.bytes_per_token / 1e6:,.1f}", f"{row.gb_s:.1f}", f"{row.pct_bandwidth:.0f} %",
        ]  # fmt: skip
        if computed:
            cells.append(_percent(row.pct_int8_peak))
        if row.ratio is not None:
            cells += [
                f"{row.peer_tok_s:,.1f}",
                "on" if row.peer_flash_attention else "off",
                f"{row.ratio:.2f}",
            ]
        table.append(cells)
    lines = quantities.columns(table, right=range(1, len(table[0])))
    for row in rows:
        if row.profile is not None:
            lines += ["", f"{row.test}: {row.profile.step}", *_kernels(row.profile)]
    return lines + _circumstances(rows[0])


def _kernels(profile: Profile) -> list[str]:
    """A line a kernel, the longest first, and the step."""
    table = [["kernel", "launches", "us", "of step", "MB", "of limit", ""]]
    for row in profile.rows:
        table.append([
            row.kernel, f"{row.launches or '-'}", f"{row.us:,.1f}", f"{row.pct_step:.1f} %",
            f"{row.n_bytes / 1e6:,.2f}", _percent(row.pct_limit), row.limited_by or "",
        ])  # fmt: skip
    total = [sum(row.launches for row in profile.rows), f"{profile.step_us:,.1f}", "100.0 %"]
    n_bytes = sum(row.n_bytes for row in profile.rows)
    table.append(["step", *map(str, total), f"{n_bytes / 1e6:,.2f}", "", ""])
    return quantities.columns(table, right=range(1, 6), indent=2)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _circumstances(row: Row) -> list[str]:
    """How it was measured."""
    peak = row.int8_peak_gop_s
    lines = [
        f"\nmedians of {quantities.count(row.rounds, 'round')},"
        f" {quantities.count(row.threads, 'thread')};"
        f" memory is read at {row.bandwidth_gb_s:.1f} GB/s"
        + (f", int8 peak {peak:.0f} Gop/s" if peak is not None else "")
    ]
    if row.load_average > _BUSY:
        busy = f"the machine was busy (load {row.load_average:.1f})"
        lines.append(f"{busy}: rates are too low, and ratios say little")
    if row.peer is not None:
        lines.append(f"peer: {row.peer}; the better of flash attention on and off")
    return lines
