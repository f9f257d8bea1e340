"""How a model may be decoded besides one row a step: decided once, with the reason.

batched    several sequences share one pass over the weights
pipelined  a step is queued before the one before it is read; needs a device, whose schedules
           choose the ids and take their embeddings
replayed   the launches of a step are queued as one, a captured graph; needs a device
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xpuc.artifact import EntryPoint, Manifest

_ENDS = ("embed", "argmax", "head_argmax", "sample")  # operations that take ids and give them
_WHEN_ON = {
    "pipelined": "the ids of a step are on the device where the next one begins",
    "replayed": "as CUDA graphs, captured when a shape of call comes again",
}


@dataclass(frozen=True, slots=True)
class Mode:
    """`reason` says why it is on, or what refuses it."""

    name: str
    is_on: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name} decode: {'on' if self.is_on else 'off'} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Modes:
    """Latched: what a request does changes none of them."""

    batched: Mode
    pipelined: Mode
    graphs: Mode

    def __iter__(self) -> Iterator[Mode]:
        return iter((self.batched, self.pipelined, self.graphs))


def modes_of(manifest: Manifest, *, pipeline: bool = True, graphs: bool = True) -> Modes:
    """What an artifact allows; without `pipeline` and `graphs` these are off."""
    return Modes(
        _batched(manifest),
        _on_a_device("pipelined", manifest, pipeline, "pipeline", _unfollowable(manifest)),
        _on_a_device("replayed", manifest, graphs, "graphs", None),
    )


def _batched(manifest: Manifest) -> Mode:
    rows = {e.name: e.rows for e in manifest.entry_points if e.kind == "decode" and e.rows > 1}
    if not rows:
        return Mode("batched", False, "compiled for one row a step, --max-batch 1")
    for operation in manifest.operations:
        if operation["weights"] and operation["origin"] == "portable" and _is_of(operation, rows):
            reason = f"{operation['name']}: no schedule of the target takes several rows of it"
            return Mode("batched", False, reason)
    return Mode("batched", True, f"up to {max(rows.values())} rows a step")


def _is_of(operation: dict[str, dict[str, int]], entries: dict[str, int]) -> bool:
    return not entries.keys().isdisjoint(operation["uses"])


def _on_a_device(
    name: str, manifest: Manifest, wanted: bool, option: str, refusal: str | None
) -> Mode:
    if manifest.target["kind"] == "llvm":
        return Mode(name, False, "no device: target llvm computes on the host")
    if not wanted:
        return Mode(name, False, f"switched off: {option}=False")
    if refusal is not None:
        return Mode(name, False, refusal)
    return Mode(name, True, _WHEN_ON[name])


def _unfollowable(manifest: Manifest) -> str | None:
    """Why a step cannot begin with the ids that the one before it has left on the device."""
    entries = {e.name: e.rows for e in manifest.entry_points if e.kind == "decode" and _has_ids(e)}
    for operation in manifest.operations:
        is_portable = operation["op"] in _ENDS and operation["origin"] == "portable"
        if is_portable and _is_of(operation, entries):
            return f"{operation['name']}: no schedule of the target"
    return None


def _has_ids(entry: EntryPoint) -> bool:
    return entry.tail != "logits"
