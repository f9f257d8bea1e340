"""Checkpoint to artifact, the whole story: read, graph, passes, lower, build, pack, write."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

from tvm import IRModule

import xpuc
from xpuc import interrupts, tune_db
from xpuc.artifact import (
    CHAT_TEMPLATE,
    LIBRARY,
    MANIFEST,
    SUFFIXES,
    TOKENIZER,
    WEIGHTS,
    EntryPoint,
    KvLayout,
    Manifest,
    Synthetic,
    file_facts,
)
from xpuc.codegen import build, copies, lower, roof, target, tvm_runtime
from xpuc.codegen.options import KV_DTYPES, Options
from xpuc.codegen.weights import Tensor, tensors_of, write_weights
from xpuc.errors import FileError, XpucError
from xpuc.frontend.model import Model, open_model
from xpuc.frontend.tokenizer import TokenizerSpec, convert_tokenizer
from xpuc.ir.builder import PoolLayout
from xpuc.ir.text import to_text
from xpuc.passes import Pass, run, without
from xpuc.schedules import TargetFacts, tails_of, target_of
from xpuc.tune_db import TuneDb

__all__ = ["SEGMENT_TOKENS", "Compiled", "Options", "buckets", "compile_model", "operations"]

SEGMENT_TOKENS = 128  # context that one attention work item covers
_BESIDE_WEIGHTS = 64 << 20  # bytes: the library, what it is linked of, TVM's runtime
Progress = Callable[[str, int, int], None]  # phase, done, total (bytes or steps)


@dataclass
class Compiled:
    """What `xpuc compile` reports."""

    path: Path
    manifest: Manifest
    seconds: dict[str, float] = field(default_factory=dict)
    library_bytes: int = 0
    weight_bytes: int = 0
    source_tensor_bytes: int = 0


def compile_model(
    path: str | Path,
    target: str | None = None,
    out: str | Path | None = None,
    *,
    options: Options | None = None,
    dump_ir: str | Path | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> Compiled:
    """Compile a checkpoint into an artifact directory (default: the checkpoint's name with .xpuc).

    A `target` goes before that of the options. The artifact appears whole or not at all. XpucError
    says what is wrong with the checkpoint or an option.
    """
    options = options or Options()
    if target is not None:
        options = dataclasses.replace(options, target=target)
    options.check()
    destination = Path(out) if out else _beside(Path(path))
    _check_destination(destination)
    work = _Work(Path(path), options, progress, Path(dump_ir) if dump_ir else None)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=destination.parent, prefix=f".{destination.name}."
    ) as folder:
        staging = Path(folder) / "artifact"
        staging.mkdir()
        compiled = work.run(staging)
        with interrupts.put_off():  # one of the two is always there
            if destination.exists():
                destination.rename(Path(folder) / "replaced")
            staging.rename(destination)
    return dataclasses.replace(compiled, path=destination)


def _beside(checkpoint: Path) -> Path:
    if not checkpoint.name:  # . or /
        raise FileError(f"{checkpoint}: is a directory", "give the path of a GGUF file")
    return checkpoint.with_suffix(".xpuc")


def _check_destination(destination: Path) -> None:
    if os.path.lexists(destination) and not (destination / MANIFEST).is_file():
        raise XpucError(
            f"{destination}: exists and is not an xpuc artifact", "choose another path with -o"
        )


def operations(path: Path, options: Options) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What the artifact's manifest would say of its operations, and the rows of its entry points.

    Nothing is built. XpucError says what is wrong with the checkpoint or an option.
    """
    options.check()
    made = _Work(path, options, lambda phase, done, total: None, None).made(open_model(path))
    found = [o.as_manifest() for o in made.lowered.operations.values()]
    return found, {entry.name: entry.rows for entry in made.entries}


def _require_room(folder: Path, n_bytes: int) -> None:
    """XpucError where the disk has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise XpucError(
            f"the artifact takes up to {-(-n_bytes >> 20):,} MiB; {free >> 20:,} MiB of the disk"
            " are free",
            "free some, or choose a path on another disk with -o",
        )


@dataclass(frozen=True)
class _Made:
    """A model between reading and building: the module after the passes, and lowered."""

    machine: target.CompileTarget
    pool: PoolLayout
    module: IRModule
    weight_names: Sequence[str]
    fusions: dict[str, Any]
    lowered: lower.Lowered
    entries: tuple[EntryPoint, ...]
    copied: copies.Matrices

    def tensor_names(self) -> dict[str, str]:
        """The checkpoint's name of each weight by its parameter."""
        weights = self.module["decode"].params[-len(self.weight_names) :]  # they are last
        return dict(zip((p.name for p in weights), self.weight_names, strict=True))


class _Work:
    """One compilation."""

    def __init__(
        self, path: Path, options: Options, progress: Progress, dump_ir: Path | None
    ) -> None:
        self.path, self.options, self.progress, self.dump_ir = path, options, progress, dump_ir
        self.seconds: dict[str, float] = {}

    @cached_property
    def machine(self) -> target.CompileTarget:
        """What is compiled for."""
        return target.resolve(self.options.target, self.options.cpu)

    def phase(self, name: str, step: Callable[[], Any]) -> Any:
        self.progress(name, 0, 0)
        start = time.perf_counter()
        result = step()
        self.seconds[name] = round(time.perf_counter() - start, 3)
        return result

    def run(self, staging: Path) -> Compiled:
        """The phases in order."""
        build.require_tools(self.machine)
        model: Model = self.phase("read", lambda: open_model(self.path))
        tokenizer: TokenizerSpec = self.phase("tokenizer", partial(self.tokenizer, model))
        made = self.made(model)
        lowered, pool = made.lowered, made.pool
        tensors = tensors_of(made.module["decode"], made.weight_names, model, made.machine)
        in_file = tensors if self.options.synthetic is None else []
        _require_room(staging, sum(tensor.n_bytes for tensor in in_file) + _BESIDE_WEIGHTS)
        roofs = roof.add_roofs(lowered)
        built = self.phase(
            "build",
            lambda: build.build(
                lowered.finish(), made.machine, staging / LIBRARY, alone=lowered.alone()
            ),
        )
        synthetic: Synthetic | None = self.phase(
            "weights", partial(self.weights, staging / WEIGHTS, tensors)
        )
        self.phase("runtime", lambda: tvm_runtime.bundle(staging, made.machine.facts.kind))
        manifest = dataclasses.replace(
            self.manifest(model, made.machine, pool),
            entry_points=made.entries,
            planes=tuple(p for t in tensors for p in t.planes),
            prefill_weights=self.options.prefill_weights,
            copies=copies.records(
                made.copied, target_of(made.machine.facts.kind), made.tensor_names()
            ),
            tokenizer=tokenizer.facts,
            decisions={
                "fusions": made.fusions,
                "operations": [o.as_manifest() for o in lowered.operations.values()],
                "records_ignored": dict(lowered.plan.db.ignored),
                **roofs,
                **({"device": built.device.as_manifest()} if built.device else {}),
            },
            memory={
                "weights": sum(tensor.n_bytes for tensor in tensors),
                "activations": max(built.activation_bytes.values()),
            },
            synthetic=synthetic,
        )
        return self.phase("write", partial(self.write, staging, manifest, tokenizer, model))

    def made(self, model: Model) -> _Made:
        """The phases from the graph to the module of the target, before anything is built."""
        machine = self.machine
        pool = PoolLayout(KV_DTYPES[self.options.kv], self.options.block_tokens)
        tails = tails_of(target_of(machine.facts.kind))
        module, weight_names = self.phase("graph", lambda: model.graph(pool, tails))
        module, fusions = self.phase("passes", partial(self.passes, module))
        kernels, policy = target_of(machine.facts.kind), self.options.prefill_weights
        copied = copies.copied(module["prefill"], kernels, policy)
        lowered, entries = self.phase(
            "lower", partial(self.lower, model, module, machine, pool, copied)
        )
        return _Made(machine, pool, module, weight_names, fusions, lowered, entries, copied)

    def tokenizer(self, model: Model) -> TokenizerSpec:
        return convert_tokenizer(model.metadata, path=model.path, pre=self.options.tokenizer_pre)

    def pipeline(self) -> tuple[Pass, ...]:
        left_out = list(self.options.no_fuse)
        if self.options.activations == "f32":
            left_out.append("quantize_activations")
        return without(left_out)

    def passes(self, module: IRModule) -> tuple[IRModule, dict[str, Any]]:
        """Run the pipeline; each fusion's count and its refusals go into the manifest."""
        if self.dump_ir is not None:
            self.dump_ir.mkdir(parents=True, exist_ok=True)
            self.dump(0, "graph", module)
        module, reports = run(module, self.pipeline(), self.dump if self.dump_ir else None)
        decided: dict[str, Any] = {name: dataclasses.asdict(r) for name, r in reports.items()}
        return module, decided | {name: {"switched_off": True} for name in self.options.no_fuse}

    def dump(self, number: int, name: str, module: IRModule) -> None:
        assert self.dump_ir is not None
        path = self.dump_ir / f"{number:02d}_{name}.py"
        path.write_text(to_text(module), encoding="utf-8")

    def lower(
        self,
        model: Model,
        module: IRModule,
        machine: target.CompileTarget,
        pool: PoolLayout,
        copied: copies.Matrices,
    ) -> tuple[lower.Lowered, tuple[EntryPoint, ...]]:
        """Every entry point: decode for each bucket of rows, prefill for any chunk.

        Prefill once more for architectures of a GPU with kernels of their own for prompts.
        """
        options, kernels = self.options, target_of(machine.facts.kind)
        plan = lower.Plan(
            target=machine.facts, schedules=kernels.SCHEDULES, planes=kernels.planes,
            db=self.records(machine.facts), block_tokens=pool.block_tokens,
            kv_dtype=pool.dtype, deterministic=options.deterministic,
        )  # fmt: skip
        lowered = lower.Lowered(plan)
        chunk, context = options.max_chunk, self.context(model)
        segments = -(-context // SEGMENT_TOKENS)
        entries = []
        for tail in tails_of(kernels):
            suffix = SUFFIXES[tail]
            for rows in buckets(options.max_batch):
                name = ("decode" if rows == 1 else f"cols_{rows}") + suffix
                bounds = {"t": rows, "w": rows * segments}
                lower.lower(lowered, module["decode" + suffix], name, rows, bounds)
                entries.append(EntryPoint(name, "decode", rows, tail))
            bounds = {"n": chunk, "t": chunk, "w": chunk * segments, "m": options.max_out_rows}
            prefill = module["prefill" + suffix]
            variants = copies.VARIANTS[options.prefill_weights if copied else "packed"]
            for facts, (more, takes) in product((machine.facts, *machine.special), variants):
                arch = "" if facts is machine.facts else facts.cpu
                name = "_".join(filter(None, ("prefill", more, arch))) + suffix
                taken = copied if takes else ()
                lower.lower(lowered, prefill, name, None, bounds, taken, facts)
                entries.append(EntryPoint(name, "prefill", 0, tail, takes, arch))
        if kernels.COPIES is not None:
            copies.add_makers(lowered, kernels.COPIES, copied)
        return lowered, tuple(entries)

    def records(self, facts: TargetFacts) -> TuneDb:
        """The tuned records that this compilation may use."""
        if self.options.untuned:
            return TuneDb()
        return tune_db.load(facts.kind, facts.cpu, self.options.db or tune_db.user_folder())

    def name(self, model: Model) -> str:
        """The model's, which one without its weights does not bear alone."""
        name = str(model.metadata.get("general.name", self.path.stem))
        seed = self.options.synthetic
        return name if seed is None else f"{name}, {Synthetic(seed, ())}"

    def context(self, model: Model) -> int:
        """Tokens a sequence may have: --ctx, else the checkpoint's up to 8192; whole blocks."""
        wanted = self.options.ctx or min(model.config.context, 8192)
        return -(-wanted // self.options.block_tokens) * self.options.block_tokens

    def weights(self, path: Path, tensors: Sequence[Tensor]) -> Synthetic | None:
        """Write the weight file, unless the weights are made up; how, then."""
        if self.options.synthetic is not None:
            ranges = tuple(each for tensor in tensors for each in tensor.ranges())
            return Synthetic(self.options.synthetic, ranges)
        total, done = sum(tensor.n_bytes for tensor in tensors), 0

        def advance(n: int) -> None:
            nonlocal done
            done += n
            self.progress("weights", done, total)

        write_weights(path, tensors, advance)
        return None

    def manifest(self, model: Model, machine: target.CompileTarget, pool: PoolLayout) -> Manifest:
        cfg, options = model.config, self.options
        kernels = target_of(machine.facts.kind)
        layers = tuple((a.kv_heads, a.head_dim, a.window) for a in cfg.layers)
        tile_rows = min(kernels.tile_rows(a.heads, a.kv_heads, a.head_dim) for a in cfg.layers)
        versions = tvm_runtime.versions()
        return Manifest(
            xpuc_version=xpuc.__version__,
            tvm_version=versions.tvm, tvm_ffi_version=versions.tvm_ffi,
            target=machine.as_manifest(), arch=cfg.arch,
            name=self.name(model),
            n_vocab=cfg.n_vocab, d_model=cfg.d_model, n_layers=cfg.n_layers,
            context=self.context(model), max_batch=options.max_batch,
            max_chunk=options.max_chunk, max_out_rows=options.max_out_rows,
            deterministic=options.deterministic, activations=options.activations,
            kv=KvLayout(pool.dtype, pool.block_tokens, SEGMENT_TOKENS, tile_rows, layers),
            entry_points=(), planes=(), tokenizer={},
            source={
                "file": self.path.name, "bytes": model.source.n_bytes,
                "xxh3_128": model.source.digest(),
            },
            decisions={}, memory={},
        )  # fmt: skip

    def write(
        self, staging: Path, manifest: Manifest, tokenizer: TokenizerSpec, model: Model
    ) -> Compiled:
        """Tokenizer, template, report, and the manifest last, with a digest of every file."""
        (staging / TOKENIZER).write_text(tokenizer.json, encoding="utf-8")
        if tokenizer.chat_template is not None:
            (staging / CHAT_TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")
        reports = staging / "reports"
        reports.mkdir()
        facts = {
            "seconds": self.seconds,
            "decisions": manifest.decisions,
            "memory": manifest.memory,
        }
        (reports / "compile.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        manifest = dataclasses.replace(manifest, files=file_facts(staging))
        (staging / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        return Compiled(
            staging, manifest, self.seconds,
            library_bytes=(staging / LIBRARY).stat().st_size,
            weight_bytes=manifest.memory["weights"],
            source_tensor_bytes=sum(t.data.nbytes for t in model.tensors.values()),
        )  # fmt: skip


def buckets(max_batch: int) -> tuple[int, ...]:
    """Row counts with a decode entry of their own: powers of two, and max_batch itself."""
    powers = [1 << i for i in range(max_batch.bit_length()) if 1 << i <= max_batch]
    return tuple(sorted({*powers, max_batch}))
