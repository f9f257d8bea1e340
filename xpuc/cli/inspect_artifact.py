"""What `xpuc inspect` says of an artifact."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xpuc.cli import quantities

_TENSOR = re.compile(r".*\.(weight|bias)")


def facts(path: Path, *, verify: bool) -> dict[str, Any]:
    """The manifest, the memory statement, how it may be decoded, and with `verify` how many bytes
    were compared.

    `kv_bytes_per_token` are of the layers that see all tokens; those with a window take at most
    `kv_bytes_of_windows` a sequence, however long it is.
    """
    from xpuc.artifact import read_manifest
    from xpuc.runtime import checks, memory
    from xpuc.runtime.modes import modes_of

    manifest = read_manifest(path)
    verified = checks.verify(path, manifest) if verify else None
    statement = memory.plan(manifest, manifest.max_batch, manifest.context)
    of_one = memory.sequence_pools(manifest, manifest.context)
    return {
        "path": str(path),
        "manifest": json.loads(manifest.to_json()),
        "kv_bytes_per_token": manifest.kv.block_bytes(0) // manifest.kv.block_tokens,
        "kv_bytes_of_windows": sum(pool.n_bytes for pool in of_one if pool.window),
        "memory": dataclasses.asdict(statement)
        | {"kv_pool": statement.kv_pool, "total": statement.total},
        "modes": dataclasses.asdict(modes_of(manifest)),
        "verified_bytes": verified,
    }


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts for people."""
    manifest = facts["manifest"]
    total = sum(each["bytes"] for each in manifest["files"].values())
    yield f"{facts['path']}: artifact format {manifest['format_version']}, {quantities.size(total)}"
    yield from quantities.columns([*_rows(facts), *_modes(facts["modes"])], indent=2)
    yield "\nfiles"
    rows = [
        (name, quantities.size(each["bytes"]), each["xxh3_128"])
        for name, each in manifest["files"].items()
    ]
    yield from quantities.columns(rows, right=[1], indent=2)
    yield "\nweights"
    yield from quantities.columns(_weights(manifest["planes"]), right=[1], indent=2)
    yield "\nfusions"
    fusions = [
        (name, *fusion(each)) for name, each in manifest["decisions"].get("fusions", {}).items()
    ]
    yield from quantities.columns(fusions or [("none", "", "")], indent=2)
    yield "\noperations"
    operations = [
        (each["name"], each["schedule"], each["origin"], _knobs(each["knobs"]))
        for each in manifest["decisions"].get("operations", [])
    ]
    yield from quantities.columns(operations or [("none", "", "", "")], indent=2)
    yield f"\nmemory, for {manifest['max_batch']} sequences of {manifest['context']:,} tokens"
    yield from (f"  {line}" for line in _statement(facts["memory"]))
    if facts["verified_bytes"] is not None:
        yield f"\nverified: {quantities.size(facts['verified_bytes'])}, all as the manifest says"


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    manifest = facts["manifest"]
    target, kv, source = manifest["target"], manifest["kv"], manifest["source"]
    tokenizer = manifest["tokenizer"]
    yield "model", f"{manifest['name']} ({manifest['arch']}), {manifest['n_layers']} layers"
    yield (
        "source",
        f"{source['file']}, {quantities.size(source['bytes'])}, xxh3 {source['xxh3_128']}",
    )
    if synthetic := manifest["synthetic"]:
        yield "weights", f"synthetic (seed {synthetic['seed']}), made up at load: no answers"
    yield (
        "made by",
        f"xpuc {manifest['xpuc_version']}, tvm {manifest['tvm_version']}, "
        + (f"apache-tvm-ffi {manifest['tvm_ffi_version']}"),
    )
    yield "target", f"{target['kind']} {target['triple']} {target['cpu']}"
    yield (
        "context",
        f"{manifest['context']:,} tokens, {manifest['max_batch']} sequences, "
        + (f"{manifest['max_chunk']} prompt tokens a step"),
    )
    exact = ", deterministic" if manifest["deterministic"] else ""
    yield "activations", f"{manifest['activations']}{exact}"
    copies = [copy["size"] for copy in manifest["copies"]]
    yield "prefill weights", prefill_weights(manifest["prefill_weights"], copies)
    of_windows = facts["kv_bytes_of_windows"]
    once = f", {quantities.size(of_windows)} for windows of a sequence" if of_windows else ""
    yield (
        "K/V",
        f"{kv['dtype']}, {kv['block_tokens']} tokens a block, "
        + (f"{quantities.size(facts['kv_bytes_per_token'])} a token{once}"),
    )
    yield (
        "tokenizer",
        f"{tokenizer.get('model')}, {manifest['n_vocab']:,} tokens, "
        + (f"chat template: {tokenizer.get('chat_template') or 'none'}"),
    )
    yield "entries", ", ".join(each["name"] for each in manifest["entry_points"])


def prefill_weights(policy: str, copies: Sequence[int]) -> str:
    """The policy, and the matrices of which there are int8 copies, by their bytes."""
    if not copies:
        return policy
    return f"{policy}, {len(copies):,} matrices have int8 copies, {quantities.size(sum(copies))}"


def _modes(modes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for mode in modes.values():
        yield f"{mode['name']} decode", f"{'on' if mode['is_on'] else 'off'} ({mode['reason']})"


def _statement(memory: Mapping[str, Any]) -> list[str]:
    from xpuc.runtime.memory import MemoryStatement, PoolMemory, PrefillWeights

    terms = {name: memory[name] for name in MemoryStatement.__annotations__}
    pools = tuple(PoolMemory(**pool) for pool in memory["pools"])
    prefill = PrefillWeights(**memory["prefill"])
    return MemoryStatement(**terms | {"pools": pools, "prefill": prefill}).lines()


def _weights(planes: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Tensor, bytes and the planes it is kept in."""
    tensors: dict[str, list[Mapping[str, Any]]] = {}
    for plane in planes:
        tensor = _TENSOR.match(plane["name"])
        tensors.setdefault(tensor[0] if tensor else plane["name"], []).append(plane)
    rows = []
    for name, parts in tensors.items():
        total = sum(plane_bytes(each["dtype"], each["size"]) for each in parts)
        kept = [f"{each['name'].removeprefix(name)}:{each['dtype']}".strip(".:") for each in parts]
        rows.append((name, quantities.size(total), " ".join(kept)))
    return rows


def plane_bytes(dtype: str, size: int) -> int:
    """Bytes of `size` elements of a type such as `int16`."""
    return size * int(re.sub(r"\D", "", dtype)) // 8


def fusion(report: Mapping[str, Any]) -> tuple[str, str]:
    """How often a fusion was made, and what was refused and why."""
    if report.get("switched_off"):
        return "off", ""
    refused = "; ".join(f"{n} refused: {reason}" for reason, n in report.get("refused", {}).items())
    return f"{report.get('applied', 0):,}", refused


def _knobs(knobs: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in knobs.items())
