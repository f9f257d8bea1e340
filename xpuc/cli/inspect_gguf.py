"""What `xpuc inspect` says of a GGUF checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuc.cli import quantities

if TYPE_CHECKING:
    from xpuc.frontend.gguf import GgufFile, Metadata, PackedTensor

_MANY = 16  # values of an array that are shown
_WIDE = 90  # characters of a value that are shown


def facts(path: Path) -> dict[str, Any]:
    """Everything `--json` prints; tensors that xpuc cannot decode are listed too."""
    from xpuc.frontend.ggml_types import SUPPORTED
    from xpuc.frontend.gguf import open_gguf

    model = open_gguf(path, strict=False)
    tensors = [_tensor(each, SUPPORTED) for each in model.tensors.values()]
    return {
        "path": str(path),
        "files": [str(each) for each in model.paths],
        "format": f"GGUF v{model.version}",
        "alignment": model.alignment,
        "bytes": model.n_bytes,
        "metadata": {key: _value(model.metadata, key) for key in model.metadata},
        "types": _types(tensors),
        "memory": _memory(model),
        "tensors": tensors,
    }


def _tensor(tensor: PackedTensor, supported: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "type": tensor.format,
        "shape": list(tensor.shape),
        "bytes": tensor.data.nbytes,
        "offset": tensor.offset,
        "supported": tensor.format in supported,
    }


def _value(metadata: Metadata, key: str) -> dict[str, Any]:
    """{"type", "value"}, or {"type", "count"} of an array too long to show."""
    kind, count = metadata.kind(key), metadata.n_values(key)
    if not kind.endswith("[]"):
        return {"type": kind, "value": metadata[key]}
    if count > _MANY:
        return {"type": kind, "count": count}
    values = metadata[key]
    listed = values if isinstance(values, list) else values.tolist()  # type: ignore[union-attr]
    return {"type": kind, "count": count, "value": listed}


def _types(tensors: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tensors, weights and bytes of each type."""
    types: dict[str, dict[str, Any]] = {}
    for each in tensors:
        row = types.setdefault(each["type"], {"tensors": 0, "weights": 0, "bytes": 0})
        row["tensors"] += 1
        row["weights"] += math.prod(each["shape"])
        row["bytes"] += each["bytes"]
    return types


def _memory(model: GgufFile) -> dict[str, Any]:
    """Bytes of the weights, and of K and V (f16) that a token writes; None where the metadata do
    not tell. Layers that see only `window` tokens (0: there are none) keep no more of them.
    """
    per_token = _kv_values_per_token(model.metadata)
    return {
        "weights": sum(each.data.nbytes for each in model.tensors.values()),
        "kv_bytes_per_token": None if per_token is None else 2 * per_token,
        "context": _number(model.metadata, "context_length"),
        "window": _number(model.metadata, "attention.sliding_window"),
    }


def _kv_values_per_token(metadata: Metadata) -> int | None:
    layers, heads = _number(metadata, "block_count"), _number(metadata, "attention.head_count")
    width = _number(metadata, "embedding_length")
    if not (layers and heads and width):
        return None
    key = _number(metadata, "attention.key_length") or width // heads
    value = _number(metadata, "attention.value_length") or width // heads
    kv_heads = metadata.get(
        f"{metadata.get('general.architecture')}.attention.head_count_kv", heads
    )
    if isinstance(kv_heads, int):
        return layers * kv_heads * (key + value)
    return int(sum(kv_heads)) * (key + value)  # type: ignore[arg-type]


def _number(metadata: Metadata, name: str) -> int:
    found = metadata.get(f"{metadata.get('general.architecture')}.{name}", 0)
    return found if isinstance(found, int) else 0


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts for people."""
    yield f"{facts['path']}: {facts['format']}, {quantities.size(facts['bytes'])}, " + (
        f"{quantities.count(len(facts['tensors']), 'tensor')} in "
        f"{quantities.count(len(facts['files']), 'file')}"
    )
    yield "\nmetadata"
    rows = [(key, each["type"], _shown(each)) for key, each in facts["metadata"].items()]
    yield from quantities.columns(rows, indent=2)
    yield "\ntypes"
    yield from quantities.columns(_type_rows(facts), right=[1, 2, 3], indent=2)
    yield "\ntensors"
    tensors = [
        (
            each["name"],
            each["type"],
            " x ".join(map(str, each["shape"])),
            quantities.size(each["bytes"]),
        )
        for each in facts["tensors"]
    ]
    yield from quantities.columns(tensors, right=[3], indent=2)
    yield "\nmemory"
    yield from quantities.columns(_memory_rows(facts["memory"]), indent=2)


def _type_rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    unknown = {each["type"] for each in facts["tensors"] if not each["supported"]}
    rows: list[tuple[str, ...]] = [("type", "tensors", "weights", "bytes", "")]
    for name, row in facts["types"].items():
        note = "not supported by xpuc" if name in unknown else ""
        numbers = (f"{row['tensors']:,}", f"{row['weights']:,}", quantities.size(row["bytes"]))
        rows.append((name, *numbers, note))
    return rows


def _memory_rows(memory: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "weights", quantities.size(memory["weights"])
    per_token, context = memory["kv_bytes_per_token"], memory["context"]
    if per_token is None:
        yield "K/V", "not told by the metadata"
    else:
        yield "K/V of a token (f16)", quantities.size(per_token)
        total = quantities.size(per_token * context)
        window = memory["window"]
        less = f" at most: some layers keep {window:,} or little more" if window else ""
        yield f"K/V of {context:,} tokens", total + less


def _shown(entry: Mapping[str, Any]) -> str:
    if "value" not in entry:
        return f"{entry['count']:,} values"
    value = entry["value"]
    text = f"{value:.7g}" if entry["type"] == "float32" else repr(value)
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."
