"""Running commands in the test's process, and what they run on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner

from xpuc.artifact import MANIFEST, EntryPoint, KvLayout, Manifest, Plane
from xpuc.cli import main

SIZES = ("--max-batch", 2, "--ctx", 256, "--max-chunk", 64)  # options of compile


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def invoke(*args: object, stdin: str | bytes | None = None) -> Outcome:
    """`xpuc ARGS` as a user types it."""
    result = CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)
    return Outcome(result.exit_code, result.stdout, result.stderr)


def manifest(**changes: Any) -> Manifest:
    """Of a model of two layers, the second with a window of 8 tokens, and an untied head."""
    made = Manifest(
        xpuc_version="0.1.0",
        tvm_version="0.27.0.post1",
        tvm_ffi_version="0.1.14.post1",
        target={"kind": "llvm", "triple": "x86_64-linux", "cpu": "znver3", "features": ["avx2"]},
        arch="llama",
        name="Tiny",
        n_vocab=97,
        d_model=64,
        n_layers=2,
        context=96,
        max_batch=4,
        max_chunk=16,
        max_out_rows=8,
        deterministic=False,
        activations="int8",
        kv=KvLayout("float16", 4, 8, 4, ((2, 16, 0), (2, 16, 8))),
        entry_points=(EntryPoint("decode", "decode", 1, "logits"),),
        planes=(
            Plane("token_embd.weight.qs", "uint8", 1000),
            Plane("blk.0.attn_q.weight.d", "float16", 100),
            Plane("output.weight.qs", "uint8", 3000),
        ),
        tokenizer={"model": "gpt2", "chat_template": "gguf"},
        source={"file": "tiny.gguf", "bytes": 5000, "xxh3_128": "0" * 32},
        decisions={
            "fusions": {"fuse_qkv": {"applied": 2, "refused": {}}},
            "operations": [],
            "records_ignored": {},
            "memory_read": {"elements": 8, "bytes": 32},
        },
        memory={"weights": 4200, "activations": 1 << 20},
    )
    return dataclasses.replace(made, **changes)


def write_manifest(folder: Path, **changes: Any) -> Path:
    """An artifact of nothing but a manifest."""
    folder.mkdir()
    (folder / MANIFEST).write_text(manifest(**changes).to_json(), encoding="utf-8")
    return folder
