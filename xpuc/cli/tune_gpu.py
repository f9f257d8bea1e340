"""`xpuc tune` for GPUs: candidates into a bundle, a bundle measured, results into records."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpuc.cli import quantities, sources
from xpuc.cli.tune import DEFAULT_MINUTES
from xpuc.errors import FileError, RequestError, UnsupportedError, XpucError

if TYPE_CHECKING:
    from xpuc.tuning.boards import Tracker
    from xpuc.tuning.box import Card
    from xpuc.tuning.export import Shortlist
    from xpuc.tuning.recording import Imported
    from xpuc.tuning.replay import Replay
    from xpuc.tuning.trials import Trial

_NEWEST = "sm_90a"  # what a bundle is for, where neither a GPU nor an option says it
_MODES = ("export", "replay", "imported")
_OF_CPUS = ("cpu", "threads", "report", "trials")
_OF_GPUS = ("results", "candidates")
Facts = dict[str, Any]
Progress = Callable[[], AbstractContextManager[Any]]


def is_meant(model: Path | None, options: Facts) -> bool:
    """Whether the options are of a GPU."""
    from xpuc.artifact import read_manifest

    wanted = any(options[mode] for mode in _MODES) or options["target"].split()[:1] == ["cuda"]
    if not wanted and model is not None and model.is_dir():
        return bool(read_manifest(model).target["kind"] == "cuda")
    return wanted


def run(model: Path | None, options: Facts, as_json: bool, progress: Progress) -> None:
    """`xpuc tune` with these options."""
    modes = [mode for mode in _MODES if options[mode]]
    _refuse(model, options, modes)
    with progress() as watch:
        if options["replay"]:
            told = _replayed(options["replay"], options, watch)
        elif options["imported"]:
            told = _imported(options["imported"], options["db"])
        elif options["export"]:
            assert model is not None
            told = _exported(model, options["export"], options, watch)
        else:
            assert model is not None
            told = _all_of_it(model, options, watch)
    lines = told.pop("lines")
    click.echo(json.dumps(told, indent=1) if as_json else "\n".join(lines))


def refuse_its_own(options: Facts) -> None:
    """RequestError for an option that only a session on a GPU has."""
    for name in _OF_GPUS:
        if options[name]:
            raise RequestError(f"--{name}: for a GPU only", "leave it out, or say --target cuda")


def _refuse(model: Path | None, options: Facts, modes: list[str]) -> None:
    """What does not go together."""
    if len(modes) > 1:
        raise RequestError(
            "--export, --replay and --import: each is a command of its own", "give one of them"
        )
    if (model is None) != (modes in (["replay"], ["imported"])):
        named = "no MODEL" if model is None else f"a MODEL ({model})"
        raise RequestError(
            f"xpuc tune: {named}",
            "--replay BUNDLE and --import RESULTS take none, everything else does",
        )
    if options["tracker"] and modes in (["export"], ["imported"]):
        raise RequestError(
            f"--tracker: not with --{modes[0].removesuffix('ed')}, which measures nothing",
            "leave it out, or have --replay BUNDLE measure on the boards",
        )
    for name in _OF_CPUS:
        if options[name]:
            raise UnsupportedError(
                f"--{name}: not for a GPU", "see docs/tuning.md for what a session on one takes"
            )


@contextmanager
def _tracker(options: Facts) -> Iterator[Tracker | None]:
    """The one to measure with; None on this machine."""
    if not options["tracker"]:
        yield None
        return
    from xpuc.tuning.boards import Tracker

    boards = Tracker(options["tracker"], options["key"] or "cuda")
    try:
        yield boards
    finally:
        boards.close()


# --- candidates into a bundle ---


def _exported(model: Path, path: Path, options: Facts, watch: Any) -> Facts:
    from xpuc import tune_db
    from xpuc.codegen.compile import Options
    from xpuc.tuning import export
    from xpuc.tuning.tasks import subject

    sources.require(model)
    sources.require_writable(path)
    if path.exists() and not path.is_file():  # a bundle would take its place
        raise FileError(f"{path}: is not a regular file", "name another file with --export")
    watch.say("reading the model")
    folder = options["db"] or tune_db.user_folder()
    target = _target(options["target"])
    found = subject(model, options["kernel"], Options(target=target, db=folder))
    if found.target.facts.kind != "cuda":
        raise RequestError(
            f"{model}: is for {found.target.facts.kind}, and a bundle is for a GPU",
            "give its checkpoint",
        )
    if len(found.target.archs) != 1:
        raise RequestError(
            f"{model}: for {', '.join(found.target.archs)}; tuning is for one architecture",
            f"give its checkpoint, and --target 'cuda -arch={_NEWEST}'",
        )
    most = options["candidates"] or export.CANDIDATES
    db = tune_db.load("cuda", found.target.facts.cpu, folder)
    lists = export.export(found, db, path, most=most, watch=watch.at)
    size = path.stat().st_size
    return {
        "bundle": str(path), "bytes": size, "arch": found.target.archs[0],
        "tasks": [_list_facts(each) for each in lists],
        "lines": _list_lines(lists, path, size, found.target.archs[0]),
    }  # fmt: skip


def _target(wanted: str) -> str:
    """The target with one architecture: the one named, else this machine's GPU's, else H200's."""
    from xpuc.codegen.target import resolve

    archs = () if wanted.split() == ["cuda"] else resolve(wanted).archs
    if len(archs) > 1:
        raise RequestError(
            f"--target {wanted}: several architectures, and a card has one",
            f"tune for each of its own, such as --target 'cuda -arch={_NEWEST}'",
        )
    if archs:
        return wanted
    from xpuc.runtime.nvidia import first_gpu
    from xpuc.runtime.places import own_arch

    try:
        return f"cuda -arch={own_arch(first_gpu().capability)}"
    except XpucError:
        return f"cuda -arch={_NEWEST}"


def _list_facts(found: Shortlist) -> Facts:
    return {
        "name": found.task.name,
        "tried": len(found.tried),
        "refused": [{"knobs": dict(t.knobs), "reason": t.refused} for t in found.refused],
        "kept": [dict(t.knobs) for t in found.kept],
    }


def _list_lines(lists: list[Shortlist], path: Path, size: int, arch: str) -> list[str]:
    rows = [["operation", "tried", "refused", "kept", "most were refused for"]]
    for found in lists:
        rows.append([found.task.name, str(len(found.tried)), str(len(found.refused)),
                     str(len(found.kept)), _commonest(found)])  # fmt: skip
    return [
        *quantities.columns(rows, right=range(1, 4)),
        "",
        f"bundle   {path}, {quantities.size(size)}, for {arch}",
        f"next     xpuc tune --replay {shlex.quote(str(path))}, on a machine with such a GPU",
    ]


def _commonest(found: Shortlist) -> str:
    """The reason for which most were refused, numbers aside; "" if none was."""
    alike: dict[str, list[str]] = {}
    for tried in found.refused:
        alike.setdefault(tried.refused.strip("0123456789. "), []).append(tried.refused)
    return max(alike.values(), key=len, default=[""])[0]


# --- a bundle measured ---


def _replayed(path: Path, options: Facts, watch: Any) -> Facts:
    from xpuc.tuning import bundle

    results = options["results"] or path.with_suffix(".jsonl")
    with tempfile.TemporaryDirectory(prefix="xpuc-tune-") as name:
        manifest, digest = bundle.unpack(path, Path(name))
        with _tracker(options) as boards:
            replay = _replay(boards, Path(name), manifest, results, watch.trying)
            card = replay.check(path)
            replay.start(card, digest, resumes=options["resume"])
            ended = replay.run(60 * (options["minutes"] or DEFAULT_MINUTES))
    trials = _last(results)
    order = [t.name for t in manifest.tasks]
    return {
        "card": card.name, "driver": card.driver, "ended": ended, "results": str(results),
        "tasks": [_task_facts(name, trials.get(name, [])) for name in order],
        "lines": [
            *_task_lines(order, trials),
            "",
            f"on {card}",
            *([] if ended == "done" else [f"{_ENDS[ended]}: --resume goes on"]),
            f"results  {results}",
            f"next     xpuc tune --import {shlex.quote(str(results))}, where the model is compiled",
        ],
    }  # fmt: skip


def _replay(boards: Tracker | None, *bundle: Any) -> Replay:
    """See Replay, and RemoteReplay, which imports tvm."""
    if boards is None:
        from xpuc.tuning.replay import Replay

        return Replay(*bundle)
    from xpuc.tuning.remote import RemoteReplay

    return RemoteReplay(boards, *bundle)


_ENDS = {"budget": "the budget was spent", "stopped": "stopped before the end"}


def _last(results: Path) -> dict[str, list[Trial]]:
    """The trials of each task; of a candidate that was tried again, the last."""
    from xpuc.tuning.trials import TrialLog

    found: dict[str, dict[tuple[str, bool], Trial]] = {}
    for trial in TrialLog(results).read():
        found.setdefault(trial.task, {})[trial.kernel, trial.concludes] = trial
    return {task: list(trials.values()) for task, trials in found.items()}


def _task_facts(name: str, trials: list[Trial]) -> Facts:
    from dataclasses import asdict

    ends = [t for t in trials if t.concludes]
    return {
        "name": name,
        "outcome": ends[-1].outcome if ends else None,
        "knobs": ends[-1].knobs if ends else None,
        "measured": [asdict(m) for m in ends[-1].measured] if ends else [],
        "trials": [
            {"knobs": t.knobs, "outcome": t.outcome, "gain": round(t.gain, 4)}
            for t in trials if not t.concludes
        ],
    }  # fmt: skip


def _task_lines(order: list[str], trials: dict[str, list[Trial]]) -> list[str]:
    rows = [["operation", "us", "tuned us", "gain", "of roof", "trials", "outcome"]]
    for name in order:
        own = trials.get(name, [])
        end = next((t for t in reversed(own) if t.concludes), None)
        last = end.measured[-1] if end and end.measured else None
        failed = Counter(t.outcome for t in own if t.outcome not in ("measured", "kept"))
        outcome = end.outcome if end else "not reached"
        failed.pop(outcome, None)
        rows.append(
            [
                name, f"{last.default_us:,.2f}" if last else "",
                f"{last.us:,.2f}" if end and last and end.outcome == "kept" else "",
                f"{end.gain:.2f}x" if end and end.outcome == "kept" else "",
                f"{100 * last.of_roof:.0f} % of {last.roof}" if last else "",
                str(sum(not t.concludes for t in own)),
                ", ".join([outcome, *(f"{n} {what}" for what, n in failed.items())]),
            ]
        )  # fmt: skip
    return quantities.columns(rows, right=range(1, 4))


# --- results into records ---


def _imported(results: Path, db: Path | None) -> Facts:
    from xpuc import tune_db
    from xpuc.tuning.recording import record

    found = record(results, db or tune_db.user_folder())
    return {**_import_facts(found), "lines": _import_lines(found, db)}


def _import_facts(found: Imported) -> Facts:
    return {
        "card": found.header.card, "driver": found.header.driver,
        "path": str(found.path) if found.path else None,
        "records": [
            {"key": vars(r.key), "schedule": r.schedule, "knobs": r.knobs, "gain": round(r.gain, 4)}
            for r in found.records
        ],
        "left_out": dict(found.left_out),
    }  # fmt: skip


def _import_lines(found: Imported, db: Path | None) -> list[str]:
    count = quantities.count(len(found.records), "record")
    lines = [f"{count}, measured on {found.header.card}, driver {found.header.driver}"]
    lines += [f"{quantities.count(n, 'operation')}: {why}" for why, n in found.left_out.items()]
    if found.path is not None:
        option = f" --db {shlex.quote(str(db))}" if db else ""
        lines += [f"records  {found.path}", f"next     xpuc compile MODEL --target cuda{option}"]
    return lines


# --- all of it ---


def _all_of_it(model: Path, options: Facts, watch: Any) -> Facts:
    from xpuc import tune_db

    sources.require(model)
    with _tracker(options) as boards:
        options = options | {"target": _target_for(_card(boards), options["target"])}
    trials = (options["db"] or tune_db.user_folder()) / "trials"
    path, results = trials / "cuda.zip", options["results"] or trials / "cuda.jsonl"
    goes_on = options["resume"] and path.is_file()
    made = {"lines": []} if goes_on else _exported(model, path, options, watch)
    measured = _replayed(path, options | {"results": results}, watch)
    recorded = _imported(results, options["db"])
    lines = [*measured["lines"][:-1], *recorded["lines"]]
    return {"export": _without(made), "replay": _without(measured), **recorded, "lines": lines}


def _card(boards: Tracker | None) -> Card:
    """The GPU that is measured on; ArtifactError if there is none."""
    from xpuc.errors import ArtifactError

    if boards is not None:
        from xpuc.tuning.remote import card_of

        return card_of(boards)
    from xpuc.tuning.box import own_card

    try:
        return own_card()
    except ArtifactError as error:
        raise ArtifactError(
            f"--target cuda: {error.message}",
            "--tracker HOST:PORT measures on the boards of a TVM RPC tracker; with --export BUNDLE"
            " the candidates are made here, to be measured where a GPU is",
        ) from None


def _target_for(card: Card, wanted: str) -> str:
    """The target with one architecture, which a GPU runs; ArtifactError if it does not.

    Nothing is compiled before that is known.
    """
    from xpuc.runtime.places import own_arch

    if wanted.split() == ["cuda"]:
        return f"cuda -arch={own_arch(card.capability)}"
    target = _target(wanted)
    _, _, arch = target.partition("-arch=")
    if arch:
        card.must_run(arch, f"--target '{target}'")
    return target


def _without(told: Facts) -> Facts:
    return {name: value for name, value in told.items() if name != "lines"}
