"""`xpuc tune`: measure which knobs run a model's kernels fastest here."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpuc.cli import parameter_types, quantities, shared_options, sources
from xpuc.errors import RequestError, UnsupportedError, XpucError, nearest

if TYPE_CHECKING:
    from xpuc.tuning.results import Findings, TaskResult
    from xpuc.tuning.session import Status
    from xpuc.tuning.tasks import Subject
    from xpuc.tuning.trials import TrialLog

DEFAULT_MINUTES = 10.0
_KINDS = ("llvm", "cuda")


@click.command()
@click.argument("model", type=parameter_types.PATH, metavar="MODEL|ARTIFACT", required=False)
@shared_options.machine
@click.option(
    "--minutes",
    type=parameter_types.Number(min=0.1),
    metavar="M",
    help=f"Stop after so many. Default: {DEFAULT_MINUTES:.0f}, if --trials is not given.",
)
@click.option(
    "--trials", type=click.IntRange(min=1), metavar="N", help="Stop after so many candidates."
)
@click.option(
    "--kernel",
    metavar="GLOB",
    help="Tune the operations so named only, such as 'linear Q4_1:* rows=1'.",
)
@click.option(
    "--tracker", metavar="HOST:PORT", help="Measure on the boards of this TVM RPC tracker."
)
@click.option("--key", metavar="K", help="The boards' key there. Default: cpu, or of a GPU cuda.")
@click.option(
    "-t",
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Threads that a kernel runs in. Default: one a core; a board has TVM_NUM_THREADS.",
)
@click.option("--resume", is_flag=True, help="Go on where the session before was stopped.")
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Of a MODEL: compile it before and after, and measure both (default), or predict.",
)
@click.option(
    "--report",
    type=parameter_types.FILE,
    metavar="FILE",
    help="Where the HTML report goes. Default: tune-report.html in the folder of the records.",
)
@click.option(
    "--export",
    type=parameter_types.FILE,
    metavar="BUNDLE",
    help="Of a GPU: compile the candidates into one file, for a machine without a compiler.",
)
@click.option(
    "--replay",
    type=parameter_types.FILE,
    metavar="BUNDLE",
    help="Measure a bundle on the GPU of this machine; no MODEL.",
)
@click.option(
    "--results",
    type=parameter_types.FILE,
    metavar="FILE",
    help="Of --replay: what it finds. Default: BUNDLE with .jsonl in place of its suffix.",
)
@click.option(
    "--import",
    "imported",
    type=parameter_types.FILE,
    metavar="RESULTS",
    help="Make records of what a replay has found; no MODEL.",
)
@click.option(
    "--candidates",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of a GPU: how many of an operation are timed, besides what is in use. Default: 6.",
)
@shared_options.as_json
def command(model: Path | None, as_json: bool, **options: Any) -> None:
    """Measure how a model's kernels run fastest on a machine.

    The machine is this one, or the boards of a tracker. What takes most of a step is tuned first.
    Candidates are checked, then timed beside what is in use; a record is kept if it is faster
    beyond the noise. Records take effect when the model is compiled next. Ctrl-C ends a session
    with all that is done; --resume goes on.

    For a GPU candidates are compiled and judged by their code first. Where the GPU is on another
    machine and no tracker knows it, --export makes a bundle of them here, --replay measures it
    there, and --import makes records of the results here.
    """
    from xpuc.cli import tune_gpu

    kind = (options["target"].split() or [""])[0]
    if kind not in _KINDS:
        raise UnsupportedError(f"--target {kind}: cannot be tuned for", nearest(kind, _KINDS))
    if options["key"] and not options["tracker"]:
        raise RequestError("--key needs --tracker", "add --tracker HOST:PORT, or leave --key out")
    if tune_gpu.is_meant(model, options):
        if options["tracker"]:
            _need_extra()
        tune_gpu.run(model, options, as_json, _progress)
        return
    tune_gpu.refuse_its_own(options)
    if model is None:
        raise RequestError("xpuc tune: no MODEL or ARTIFACT", "give the path of one")
    sources.require(model)
    if options["cpu"] and sources.is_artifact(model):
        raise RequestError(
            f"--cpu: {model} is an artifact, which has one", "leave it out, or give the MODEL"
        )
    _need_extra()
    from xpuc import tune_db

    folder = options["db"] or tune_db.user_folder()
    page = options["report"] or folder / "tune-report.html"
    sources.require_writable(page)
    with tempfile.TemporaryDirectory(prefix="xpuc-tune-") as scratch, _progress() as watch:
        findings, subject = _tuned(model, folder, Path(scratch), watch, options)
        watch.say("measuring the model")
        try:
            findings.speeds = _speeds(subject, findings, folder, Path(scratch), options)
        except XpucError as error:  # the records are there all the same
            findings.notes = dict(findings.notes) | {"speeds": error.message}
    findings.notes = dict(findings.notes) | {"next": _next(subject, options["db"])}
    from xpuc.tuning import report

    report.write(findings, page)
    if as_json:
        click.echo(json.dumps(_facts(findings, page), indent=1))
    else:
        click.echo("\n".join(_table(findings, page)))


def _need_extra() -> None:
    """Refuse before any work what would fail after it."""
    from importlib.util import find_spec

    wanted = ("tvm", "cloudpickle", "psutil", "tornado", "matplotlib")
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"xpuc tune: needs {', '.join(missing)}", "pip install 'xpuc[compile,tune]'"
        )


def _tuned(
    model: Path, folder: Path, scratch: Path, watch: _Watch, options: dict[str, Any]
) -> tuple[Findings, Subject]:
    import os

    from xpuc import tune_db
    from xpuc.codegen.compile import Options
    from xpuc.runtime.model import default_threads
    from xpuc.tuning.boards import ThisMachine, Tracker
    from xpuc.tuning.programs import Builder
    from xpuc.tuning.session import Budget, Session
    from xpuc.tuning.tasks import subject

    watch.say("reading the model")
    threads = options["threads"] or default_threads()
    boards = (
        Tracker(options["tracker"], options["key"] or "cpu")
        if options["tracker"]
        else ThisMachine(threads)
    )
    found = subject(
        model, options["kernel"], Options(target=options["target"], cpu=options["cpu"], db=folder)
    )
    kind, cpu = found.target.facts.kind, found.target.facts.cpu
    minutes = options["minutes"] or (None if options["trials"] else DEFAULT_MINUTES)
    builder = Builder(scratch, max(1, os.cpu_count() or 1))
    session = Session(
        found, boards, builder, tune_db.load(kind, cpu, folder), folder,
        _log(folder, kind),
        Budget(60 * minutes if minutes else None, options["trials"]),
        threads, watch, options["resume"],
    )  # fmt: skip
    try:
        return session.run(), found
    finally:
        builder.close()
        boards.close()


def _log(folder: Path, kind: str) -> TrialLog:
    from xpuc.tuning.trials import TrialLog

    return TrialLog(folder / "trials" / f"{kind}.jsonl")


def _speeds(
    subject: Subject, findings: Findings, folder: Path, scratch: Path, options: dict[str, Any]
) -> list[Any]:
    from xpuc import tune_db
    from xpuc.tuning import speed

    # The boards of a tracker run the model, not this machine.
    if options["tracker"] or "stopped" in findings.notes:
        return []
    machine = subject.target.facts
    log = _log(folder, machine.kind)
    if subject.is_artifact:
        before = tune_db.load(machine.kind, machine.cpu, log.before)
        n = speed.n_of_other_records(findings.results, before)
        if n:
            findings.notes = dict(findings.notes) | {"artifact": _other_records(n)}
        return speed.predicted(speed.bench(subject.path, findings.threads, 3), findings.results)
    if not options["verify"] or not any(result.record for result in findings.results):
        return []
    from xpuc.codegen.compile import Options, compile_model

    made = scratch / "before.xpuc", scratch / "after.xpuc"
    for out, records in zip(made, (log.before, folder), strict=True):
        compile_model(subject.path, out=out, options=Options(cpu=options["cpu"], db=records))
    return speed.measured(*made, findings.threads)


def _other_records(n: int) -> str:
    return (
        f"{quantities.count(n, 'operation')} of the artifact"
        f" {'does' if n == 1 else 'do'} not use what the records before the session say:"
        " what compiling it again gains by them is not in the prediction"
    )


def _next(subject: Subject, db: Path | None) -> str:
    """The command that uses the records."""
    from xpuc.codegen.target import resolve

    path, cpu = str(subject.path), subject.target.facts.cpu
    words = ["xpuc", "compile", *(["MODEL", "-o", path] if subject.is_artifact else [path])]
    words += ["--db", str(db)] if db else []
    words += ["--cpu", cpu] if cpu != resolve("llvm").facts.cpu else []
    return shlex.join(words)


class _Watch:
    """What a session tells, on a terminal's stderr."""

    def __init__(self, show: Callable[[str, int, int], None]) -> None:
        self._show = show

    def say(self, what: str) -> None:
        self._show(what, 0, 0)

    def at(self, task: str, done: int, total: int) -> None:
        """A task's candidates are compiled."""
        self._show(task, done, total)

    def trying(self, task: str, done: int, total: int, trials: int) -> None:
        """A bundle's task is measured."""
        self._show(f"{task}: {quantities.count(trials, 'trial')}", done, total)

    def __call__(self, status: Status) -> None:
        best = f", best {status.best:.2f}x" if status.doing == "tuning" else ""
        gain = 100 * (1 / (1 - status.saved) - 1)
        saved = f", +{gain:.1f} % tokens/s predicted" if status.saved else ""
        trials = quantities.count(status.trials, "trial")
        self._show(f"{status.task}: {trials}{best}{saved}", status.done, status.total)


@contextmanager
def _progress() -> Iterator[_Watch]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task("", total=None)
    with bar:
        yield _Watch(
            lambda text, done, total: bar.update(
                task, description=text, completed=done, total=total or None
            )
        )


def _facts(findings: Findings, page: Path) -> dict[str, Any]:
    return {
        "subject": findings.subject,
        "target": findings.target,
        "boards": findings.boards,
        "threads": findings.threads,
        "seconds": round(findings.seconds, 1),
        "roofs": findings.roofs.as_json(),
        "tasks": [_task_facts(result) for result in findings.results],
        "speeds": [dataclasses.asdict(each) for each in findings.speeds],
        "retried": findings.retried,
        "records": findings.records_path,
        "report": str(page),
        "notes": dict(findings.notes),
    }


def _task_facts(result: TaskResult) -> dict[str, Any]:
    return {
        "name": result.task.name,
        "share": round(result.share, 4),
        "baseline": [dataclasses.asdict(m) for m in result.baseline],
        "trials": sum(not trial.concludes for trial in result.trials),
        "gain": round(result.kept.gain, 4) if result.kept else None,
        "record": dataclasses.asdict(result.record) if result.record else None,
        "reason": result.reason,
    }


def _table(findings: Findings, page: Path) -> list[str]:
    rows = [["operation", "share", "us", "tuned us", "gain", "of roof", "trials", "outcome"]]
    for result in findings.results:
        kept = result.kept
        best = kept.measured[-1] if kept else None
        base = result.baseline[-1] if result.baseline else None
        shown = best or base
        rows.append(
            [
                result.task.name, f"{100 * result.share:.0f} %", f"{base.us:,.1f}" if base else "",
                f"{best.us:,.1f}" if best else "",
                f"{kept.gain:.2f}x" if kept else "",
                f"{100 * shown.of_roof:.0f} % of {shown.roof}" if shown else "",
                str(sum(not trial.concludes for trial in result.trials)), result.reason,
            ]
        )  # fmt: skip
    lines = quantities.columns(rows, right=range(1, 5))
    n_kept = sum(result.record is not None for result in findings.results)
    of = quantities.count(len(findings.results), "operation")
    lines.append(
        f"\n{quantities.count(n_kept, 'record')} for {of}"
        f" in {findings.seconds:.0f} s, {quantities.count(findings.threads, 'thread')};"
        f" {findings.roofs}"
    )
    if findings.retried:
        lines.append(f"{quantities.count(findings.retried, 'measurement')} discarded for drift")
    for each in findings.speeds:
        how = "measured" if each.measured else "predicted"
        lines.append(f"{each.test}: {each.before:,.1f} -> {each.after:,.1f} tok/s ({how})")
    told = ("stopped", "boards", "budget", "artifact", "speeds")
    lines += [findings.notes[n] for n in told if n in findings.notes]
    lines += [
        f"records  {findings.records_path}",
        f"report   {page}",
        f"next     {findings.notes['next']}",
    ]
    return lines
