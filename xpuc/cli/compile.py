"""`xpuc compile`: a checkpoint becomes an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpuc.cli import parameter_types, quantities, shared_options, sources
from xpuc.cli.inspect_artifact import prefill_weights

if TYPE_CHECKING:
    from xpuc.codegen.compile import Compiled


@click.command()
@click.argument("model", type=parameter_types.PATH)
@shared_options.machine
@click.option(
    "-o",
    "--out",
    type=parameter_types.PATH,
    metavar="OUT",
    help="Where the artifact goes. Default: MODEL with .xpuc in place of its suffix.",
)
@click.option(
    "--ctx",
    type=int,
    default=0,
    metavar="N",
    help="Tokens a sequence may have. Default: what the checkpoint says, at most 8192.",
)
@click.option(
    "--max-batch",
    type=int,
    default=8,
    show_default=True,
    metavar="N",
    help="Sequences that can run together.",
)
@click.option(
    "--activations",
    type=click.Choice(["int8", "f32"]),
    default="int8",
    show_default=True,
    help="What packed weights are multiplied with: int8 is fast, f32 is exact.",
)
@click.option(
    "--kv",
    type=click.Choice(["f16", "f32", "q8_0"]),
    default="f16",
    show_default=True,
    help="How keys and values are kept; q8_0 takes 17/32 of the memory of f16.",
)
@click.option(
    "--prefill-weights",
    type=click.Choice(["packed", "int8", "auto"]),
    default="packed",
    show_default=True,
    help="What a GPU multiplies prompts with: int8 makes copies at load, a byte a weight; auto"
    " where memory allows.",
)
@click.option(
    "--block-tokens",
    type=int,
    default=16,
    show_default=True,
    metavar="N",
    help="Tokens of a K/V block: 16, 32, 64 or 128.",
)
@click.option(
    "--max-chunk",
    type=int,
    default=512,
    show_default=True,
    metavar="N",
    help="Prompt tokens of one step.",
)
@click.option(
    "--no-fuse",
    multiple=True,
    metavar="NAME",
    help="Leave a fusion out (fuse_qkv, ...); may be repeated.",
)
@click.option(
    "--deterministic", is_flag=True, help="The same bits however tokens are batched and chunked."
)
@click.option(
    "--dump-ir",
    type=parameter_types.PATH,
    metavar="DIR",
    help="Write the graph after each pass, numbered; xpuc opt replays a pass.",
)
@click.option(
    "--tokenizer-pre", metavar="NAME", help="Use this pre-tokenizer, whatever the checkpoint names."
)
@click.option("--untuned", is_flag=True, help="Use no tuned records, shipped ones neither.")
@click.option(
    "--synthetic",
    type=int,
    metavar="SEED",
    help="Leave the weights out: a load makes some up from this seed. For measuring a model's speed"
    " where its weights are not at hand; the answers mean nothing.",
)
@shared_options.as_json
def command(
    model: Path, out: Path | None, dump_ir: Path | None, as_json: bool, **options: Any
) -> None:
    """Compile a checkpoint to an artifact.

    MODEL is a GGUF file, or any part of a split one. The artifact appears whole or not at all.
    """
    sources.require(model, "a GGUF checkpoint")
    from xpuc.cli.progress import phases

    with phases() as progress:
        progress("compiler", 0, 0)
        from xpuc.codegen.compile import Options, compile_model

        chosen = Options(**options)
        compiled = compile_model(
            model, chosen.target, out, options=chosen, dump_ir=dump_ir, progress=progress
        )
    for warning in compiled.manifest.tokenizer.get("warnings", ()):
        click.echo(f"note: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(_facts(compiled), indent=1))
    else:
        click.echo("\n".join(_table(compiled)))


def _facts(compiled: Compiled) -> dict[str, Any]:
    manifest = compiled.manifest
    return {
        "path": str(compiled.path),
        "arch": manifest.arch,
        "name": manifest.name,
        "context": manifest.context,
        "target": manifest.target,
        "bytes": {
            "artifact": sum(facts["bytes"] for facts in manifest.files.values()),
            "library": compiled.library_bytes,
            "weights": compiled.weight_bytes,
            "source_tensors": compiled.source_tensor_bytes,
        },
        "prefill_weights": manifest.prefill_weights,
        "entry_points": [entry.name for entry in manifest.entry_points],
        "operations": manifest.operations,
        "records_ignored": manifest.decisions["records_ignored"],
        "fusions": manifest.decisions.get("fusions", {}),
        "memory": manifest.memory,
        "seconds": compiled.seconds | {"total": round(sum(compiled.seconds.values()), 3)},
    }


def _table(compiled: Compiled) -> list[str]:
    """The closing table: bytes, kernels, fusions, seconds."""
    facts = _facts(compiled)
    n_bytes, seconds = facts["bytes"], facts["seconds"]
    packed, source = n_bytes["weights"], n_bytes["source_tensors"]
    cpu = facts["target"]["cpu"]
    rows = [
        ("artifact", f"{compiled.path} ({quantities.size(n_bytes['artifact'])})"),
        ("model", f"{facts['name']} ({facts['arch']}, {facts['context']:,} tokens, for {cpu})"),
        ("weights", f"{quantities.size(packed)}, {quantities.ratio(packed, source)} of the "
                    f"{quantities.size(source)} of tensors in the checkpoint{_made_up(compiled)}"),
        ("prompts", prefill_weights(
            facts["prefill_weights"], [copy.size for copy in compiled.manifest.copies]
        )),
        ("library", quantities.size(n_bytes["library"])),
        ("entries", ", ".join(facts["entry_points"])),
        ("kernels", _kernels(facts["operations"], facts["records_ignored"])),
        ("fusions", ", ".join(_fusion(*item) for item in facts["fusions"].items()) or "none"),
        ("seconds", ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())),
    ]  # fmt: skip
    return quantities.columns(rows)


def _made_up(compiled: Compiled) -> str:
    synthetic = compiled.manifest.synthetic
    return "" if synthetic is None else f"; not in it: {synthetic}"


def _kernels(operations: list[dict[str, Any]], ignored: dict[str, int]) -> str:
    """How many operations that can be tuned use a record, and what was left out."""
    tunable = [o for o in operations if o["knobs"]]
    tuned = sum(o["origin"] == "tuned" for o in tunable)
    portable = sum(o["origin"] == "portable" for o in operations)
    parts = [f"{len(operations)}, {tuned} of {len(tunable)} tunable ones by a tuned record"]
    parts += [f"{portable} target-free"] if portable else []
    parts += [f"{quantities.count(n, 'record')} left out ({why})" for why, n in ignored.items()]
    return "; ".join(parts)


def _fusion(name: str, report: dict[str, Any]) -> str:
    if report.get("switched_off"):
        return f"{name} off"
    refused = sum(report.get("refused", {}).values())
    return f"{name} {report['applied']}" + (f" ({refused} refused)" if refused else "")
