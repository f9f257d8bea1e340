"""Checkpoint to artifact, the whole story: read, graph, passes, lower, build, pack, write."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tvm import IRModule

import xpuc
from xpuc import tune_db
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
from xpuc.codegen import build, lower, roof, target, tvm_runtime
from xpuc.codegen.weights import Tensor, tensors_of, write_weights
from xpuc.errors import RequestError, UnsupportedError, XpucError, nearest
from xpuc.frontend.model import Model, open_model
from xpuc.frontend.tokenizer import TokenizerSpec, convert_tokenizer
from xpuc.ir.builder import PoolLayout
from xpuc.ir.text import to_text
from xpuc.passes import FUSIONS, Pass, run, without
from xpuc.schedules import TargetFacts, tails_of, target_of
from xpuc.tune_db import TuneDb

SEGMENT_TOKENS = 128  # context that one attention work item covers
_KV_DTYPES = {"f16": "float16", "f32": "float32", "q8_0": "q8_0"}
OUT_ROWS = 64  # rows a prefill call gives logits of, or one a sequence if those are more


@dataclass(frozen=True)
class Options:
    """What changes the compiled code.

    `ctx`, `max_chunk` and `block_tokens` in tokens; a `ctx` of 0 is the checkpoint's own, at most
    8192. `max_batch` in sequences.
    """

    target: str = "llvm"
    cpu: str | None = None
    ctx: int = 0
    max_batch: int = 8
    max_chunk: int = 512
    activations: str = "int8"  # int8 | f32
    kv: str = "f16"  # f16 | f32 | q8_0
    block_tokens: int = 16
    no_fuse: tuple[str, ...] = ()
    deterministic: bool = False
    tokenizer_pre: str | None = None
    db: Path | None = None  # folder of tuned records, in place of the user's
    untuned: bool = False  # use no records
    synthetic: int | None = None  # leave the weights out: a load makes them up from this seed

    @property
    def max_out_rows(self) -> int:
        """Rows a prefill call may give logits of: in a mixed step every sequence wants one."""
        return max(OUT_ROWS, self.max_batch)

    def check(self) -> None:
        """Refuse what cannot be compiled before any work starts."""
        for name, value, allowed in (
            ("activations", self.activations, ("int8", "f32")),
            ("kv", self.kv, tuple(_KV_DTYPES)),
        ):
            if value not in allowed:
                raise RequestError(
                    f"--{name} {value}: not known", f"choose one of {', '.join(allowed)}"
                )
        for name, size, low, high in (
            ("ctx", self.ctx, 0, 1 << 20),
            ("max-batch", self.max_batch, 1, 256),
            ("max-chunk", self.max_chunk, 16, 4096),
            ("synthetic", self.synthetic or 0, 0, (1 << 63) - 1),
        ):
            if not low <= size <= high:
                raise RequestError(f"--{name} {size}: out of range", f"choose {low} to {high}")
        if self.block_tokens not in (16, 32, 64, 128):
            raise RequestError(
                f"--block-tokens {self.block_tokens}: not known", "choose 16, 32, 64 or 128"
            )
        if self.deterministic and self.target.startswith("cuda"):
            raise RequestError(
                "--deterministic: not for cuda",
                "its tensor cores sum prompts in another order: leave it out, or say --target llvm",
            )
        for name in self.no_fuse:
            if name not in FUSIONS:
                raise UnsupportedError(f"unknown fusion: {name!r}", nearest(name, FUSIONS))


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
    destination = Path(out) if out else Path(path).with_suffix(".xpuc")
    _check_destination(destination)
    work = _Work(Path(path), options, progress, Path(dump_ir) if dump_ir else None)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=destination.parent, prefix=f".{destination.name}."
    ) as folder:
        staging = Path(folder) / "artifact"
        staging.mkdir()
        compiled = work.run(staging)
        if destination.exists():
            destination.rename(Path(folder) / "replaced")
        staging.rename(destination)
    return dataclasses.replace(compiled, path=destination)


def _check_destination(destination: Path) -> None:
    if destination.exists() and not (destination / MANIFEST).is_file():
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
        roofs = roof.add_roofs(lowered)
        built = self.phase(
            "build", lambda: build.build(lowered.finish(), made.machine, staging / LIBRARY)
        )
        tensors = tensors_of(made.module["decode"], made.weight_names, model, made.machine)
        synthetic: Synthetic | None = self.phase(
            "weights", partial(self.weights, staging / WEIGHTS, tensors)
        )
        self.phase("runtime", lambda: tvm_runtime.bundle(staging, made.machine.facts.kind))
        manifest = dataclasses.replace(
            self.manifest(model, made.machine, pool),
            entry_points=made.entries,
            planes=tuple(p for t in tensors for p in t.planes),
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
        pool = PoolLayout(_KV_DTYPES[self.options.kv], self.options.block_tokens)
        tails = tails_of(target_of(machine.facts.kind))
        module, weight_names = self.phase("graph", lambda: model.graph(pool, tails))
        module, fusions = self.phase("passes", partial(self.passes, module))
        lowered, entries = self.phase("lower", partial(self.lower, model, module, machine, pool))
        return _Made(machine, pool, module, weight_names, fusions, lowered, entries)

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
        self, model: Model, module: IRModule, machine: target.CompileTarget, pool: PoolLayout
    ) -> tuple[lower.Lowered, tuple[EntryPoint, ...]]:
        """Every entry point: decode for each bucket of rows, prefill for any chunk."""
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
            lower.lower(lowered, module["prefill" + suffix], "prefill" + suffix, None, bounds)
            entries.append(EntryPoint("prefill" + suffix, "prefill", 0, tail))
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
