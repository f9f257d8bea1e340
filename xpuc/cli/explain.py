"""`xpuc explain`: how each operation of an artifact runs, why, and what it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpuc.cli import parameter_types, quantities, shared_options, sources
from xpuc.cli.inspect_artifact import fusion, prefill_weights
from xpuc.errors import RequestError, XpucError

if TYPE_CHECKING:
    from xpuc.artifact import Manifest
    from xpuc.bench.explain import Explained, Step
    from xpuc.bench.predict import PredictedStep

_ENTRY = "decode_greedy"
GPUS = ("A100", "H100", "H200")


@click.command()
@click.argument("artifact", type=parameter_types.PATH)
@click.option(
    "--kernel", metavar="GLOB", help="Only operations so named, such as 'linear *' or '*Q4_K*'."
)
@click.option(
    "--entry",
    default=_ENTRY,
    show_default=True,
    metavar="NAME",
    help="The entry point: decode, cols_8, prefill, each also _greedy, for cuda _sampled.",
)
@click.option(
    "-d",
    "--n-depth",
    "depth",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="DEPTH",
    help="Tokens of context before the step that is measured.",
)
@click.option(
    "--measure/--no-measure",
    default=True,
    help="Run the step here and time its kernels (default), or say what was decided only.",
)
@click.option(
    "--gpu",
    type=click.Choice(GPUS),
    help="Predict a decode step on this GPU from the manifest, for an artifact of target cuda.",
)
@shared_options.threads
@shared_options.as_json
def command(artifact: Path, as_json: bool, **options: Any) -> None:
    """Say for each operation how it runs, why, and what it takes.

    The schedule and its knobs, whether a tuned record was used and if not why, the fusions made
    and refused, and for the step of an entry point: bytes, the time that the machine's limits
    allow (predicted; that of the record where there is one) and the time it takes (measured).
    """
    sources.require(artifact, "an ARTIFACT")
    if not sources.is_artifact(artifact):
        raise RequestError(f"{artifact}: is not an artifact", "xpuc compile makes one of it")
    from xpuc.artifact import read_manifest

    manifest = read_manifest(artifact)
    chosen = _chosen(manifest, options["entry"], options["kernel"])
    predicted = _predicted(manifest, chosen, options)
    measured, why_not = _measured(artifact, manifest, options)
    from xpuc.bench.explain import explain

    device = manifest.decisions.get("device")
    found = [explain(operation, options["entry"], measured, device) for operation in chosen]
    fusions = manifest.decisions["fusions"]
    ignored = manifest.decisions["records_ignored"]
    if as_json:
        facts = {
            "entry": options["entry"],
            "operations": [each.as_json() for each in found],
            "fusions": fusions,
            "records_ignored": ignored,
            "prefill_weights": manifest.prefill_weights,
            "roofs": measured.roofs.as_json() if measured else None,
            "step_us": round(measured.step_us, 1) if measured else None,
            "not_measured": why_not,
            "predicted": predicted.as_json() if predicted else None,
        }
        click.echo(json.dumps(facts, indent=1))
        return
    click.echo("\n".join(_lines(found, manifest, measured, why_not)))
    if predicted:
        click.echo("\n".join(predicted.lines()))


def _chosen(manifest: Manifest, entry: str, kernel: str | None) -> list[dict[str, Any]]:
    """The operations of an entry point whose names match."""
    from fnmatch import fnmatch

    names = [each.name for each in manifest.entry_points]
    if entry not in names:
        raise RequestError(f"--entry {entry}: there is none", f"choose one of {', '.join(names)}")
    own = [o for o in manifest.operations if entry in o["uses"]]
    chosen = [o for o in own if kernel is None or fnmatch(o["name"], kernel)]
    if not chosen:
        known = ", ".join(sorted({o["op"] for o in own}))
        raise RequestError(
            f"--kernel {kernel}: no operation of {entry} is called so", f"it has {known}"
        )
    return chosen


def _predicted(
    manifest: Manifest, chosen: list[dict[str, Any]], options: Mapping[str, Any]
) -> PredictedStep | None:
    """The step on the GPU that is named, if one is."""
    gpu, entry = options["gpu"], options["entry"]
    if gpu is None:
        return None
    if manifest.target["kind"] != "cuda":
        raise RequestError(
            f"--gpu {gpu}: the artifact is for {manifest.target['kind']}",
            "compile the model with --target cuda",
        )
    from xpuc.bench.predict import predict

    (rows,) = (each.rows for each in manifest.entry_points if each.name == entry)
    if not rows:
        raise RequestError(
            f"--gpu {gpu}: steps of {entry} have any number of rows",
            "name an entry point of a fixed number, such as --entry decode_greedy",
        )
    return predict(chosen, entry, rows, options["depth"], gpu)


def _measured(
    artifact: Path, manifest: Manifest, options: Mapping[str, Any]
) -> tuple[Step | None, str | None]:
    """The profile of the entry point's step, or why there is none."""
    if not options["measure"] or options["gpu"]:
        return None, None
    from xpuc.bench.explain import measure
    from xpuc.runtime.model import default_threads

    threads = options["threads"] or default_threads()
    try:
        return measure(artifact, manifest, options["entry"], options["depth"], threads), None
    except XpucError as error:
        return None, error.message


def _lines(
    found: list[Explained], manifest: Manifest, measured: Step | None, why_not: str | None
) -> Iterator[str]:
    for each in found:
        yield each.name
        yield from quantities.columns(each.lines(), indent=2)
        yield ""
    yield "fusions"
    fusions = manifest.decisions["fusions"]
    yield from quantities.columns([(n, *fusion(f)) for n, f in fusions.items()], indent=2)
    sizes = [copy.size for copy in manifest.copies]
    yield f"\nprefill weights: {prefill_weights(manifest.prefill_weights, sizes)}"
    ignored = manifest.decisions["records_ignored"]
    if ignored:
        yield "\nrecords left out"
        rows = [(f"{n:,}", why) for why, n in ignored.items()]
        yield from quantities.columns(rows, right=[0], indent=2)
    yield ""
    if measured:
        yield from measured.lines()
    elif why_not:
        yield f"not measured: {why_not}"
