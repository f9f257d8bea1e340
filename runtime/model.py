"""Model: an artifact loaded through tvm_ffi and its own TVM runtime; runs one step at a time."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import tvm_ffi

from xpuc.artifact import (
    LIBRARY,
    RUNTIME,
    Manifest,
    Tail,
    compile_again,
    digest,
    read_manifest,
)
from xpuc.errors import ArtifactError, RequestError
from xpuc.runtime import checks, memory
from xpuc.runtime.batch import Batch, Result, Ticket
from xpuc.runtime.calls import Calls, HostRunner, Runner
from xpuc.runtime.gpu_runner import GpuRunner
from xpuc.runtime.kv_pool import KvPool, in_layer_order, pages
from xpuc.runtime.modes import Mode, Modes, modes_of
from xpuc.runtime.places import Gpu, Place, place_of
from xpuc.runtime.weights import make_copies, planes_of

# What opens a compiled model, and what the TVM runtime library alone registers.
_LOADER = "ffi.Module.load_from_bytes.relax.VMExecutable"


class Model:
    """A loaded artifact.

    All calls must come from one thread: TVM keeps a thread pool for each thread that launches.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        place: Place,
        statement: memory.MemoryStatement,
        context: int,
        modes: Modes,
    ) -> None:
        self.directory, self.manifest, self.memory = directory, manifest, statement
        self.n_vocab = manifest.n_vocab
        self.block_tokens = manifest.kv.block_tokens
        self.segment_tokens = manifest.kv.segment_tokens
        self.tile_rows = manifest.kv.tile_rows
        self.windows = manifest.kv.windows
        self.n_blocks = tuple(pool.n_blocks for pool in statement.pools)
        self.max_context = context
        self.max_chunk = manifest.max_chunk
        self.max_batch = manifest.max_batch
        self.max_out_rows = manifest.max_out_rows
        self.tails = tuple(dict.fromkeys(e.tail for e in manifest.entry_points))
        self.buckets = tuple(
            sorted(
                e.rows for e in manifest.entry_points if e.kind == "decode" and e.tail == "logits"
            )
        )
        self._modes = modes
        self.is_replayed = modes.graphs.is_on
        self._place = place
        vm = _open_library(directory, place)
        takes_copies = statement.prefill.copies > 0
        entries = {
            (e.rows, e.tail): vm[e.name]
            for e in sorted(manifest.entry_points, key=lambda e: e.arch)  # one's own win
            if (e.kind == "decode" or e.copies == takes_copies)
            and (not e.arch or place.runs(e.arch))
        }
        self._weights = [place.tensor(plane) for plane in planes_of(directory, manifest)]
        copies = make_copies(vm, manifest, self._weights) if takes_copies else []
        self.kv = tuple(
            KvPool(n, manifest.kv, window, place)
            for n, window in zip(self.n_blocks, self.windows, strict=True)
        )
        self._pools = in_layer_order(pool.tensors for pool in self.kv)
        operands = tvm_ffi.convert([*self._pools, *self._weights])
        for_prompts = tvm_ffi.convert([*self._pools, *self._weights, *copies])
        self._calls = Calls(vm, entries, operands, for_prompts, self.max_out_rows, self.n_vocab)
        self._runner = runner_of(place, self._calls, graphs=self.is_replayed)

    @property
    def modes(self) -> Modes:
        """How it may be decoded."""
        refusal = self._runner.graph_refusal
        if refusal is None:
            return self._modes
        return replace(self._modes, graphs=Mode("replayed", False, f"a capture failed: {refusal}"))

    def submit(self, batch: Batch, *, tail: Tail, follows: Ticket | None = None) -> Ticket:
        """See StepModel."""
        return self._runner.submit(batch, tail=tail, follows=follows)

    def collect(self, ticket: Ticket) -> Result:
        """See StepModel."""
        return self._runner.collect(ticket)

    def run(self, batch: Batch, *, tail: Tail) -> Result:
        """See StepModel."""
        return self._runner.collect(self._runner.submit(batch, tail=tail))

    def copy_block(self, group: int, source: int, destination: int) -> None:
        """Block `destination` of a group holds the K/V that `source` does."""
        self.kv[group].copy(source, destination)

    @contextmanager
    def instrument(
        self, see: Callable[[str, Any, tuple[Any, ...]], None], *, after: bool = False
    ) -> Iterator[None]:
        """Inside, `see(name, function, arguments)` is told of every call before the VM makes it, or
        `after` that."""

        def called(name: str, function: Any, before: bool, _: Any, arguments: Any) -> None:
            if before != after:
                see(name, function, arguments)

        with self._calls.observed(called):
            yield

    def array(self, tensor: Any) -> npt.NDArray[Any]:
        """What a tensor of the model's holds."""
        return self._place.array(tensor)

    def operands(self) -> dict[int, str]:
        """What lies at which address: planes by name, arrays of the pools as `keys.LAYER`."""
        layout = self.manifest.kv
        pools = [f"{a.name}.{i}" for i in range(len(layout.layers)) for a in layout.arrays(i)]
        names = [*pools, *(plane.name for plane in self.manifest.planes)]
        tensors = [*self._pools, *self._weights]
        return {tensor.data_ptr(): name for tensor, name in zip(tensors, names, strict=True)}

    def loop(self, name: str, elements: int) -> Callable[[], float]:
        """One of the library's loops that measure the machine, on so many int32: the seconds of a
        call."""
        function, operand = self._calls.vm[name], pages((elements,), "int32")
        operand[:] = 1  # untouched pages of zeros would all be one
        tensor = self._place.tensor(operand)
        return lambda: self._runner.seconds(lambda: function(tensor))

    def replayer(
        self, works: Sequence[tuple[str, Callable[[], object]]]
    ) -> Callable[[], dict[str, float]]:
        """What makes some calls that `instrument` told of again: seconds by their names."""
        return self._runner.replayer(works)


def runner_of(place: Place, calls: Calls, *, graphs: bool) -> Runner:
    """Who makes the calls of a model that lies there."""
    if isinstance(place, Gpu):
        return GpuRunner(calls, place, graphs=graphs)
    return HostRunner(calls)


def load_model(
    path: str | Path,
    *,
    threads: int | None = None,
    ctx: int | None = None,
    n_sequences: int | None = None,
    rings: bool = True,
    graphs: bool = True,
    pipeline: bool = True,
) -> Model:
    """Load an artifact for `n_sequences` sequences of up to `ctx` tokens (default: its limits).

    Without `rings` layers with a window keep all tokens too, for a caller who goes back to earlier
    ones. Without `graphs` and `pipeline` these modes are off where they could be on.
    ArtifactError says what does not fit: version, machine, damaged files, memory.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    checks.check_versions(directory, manifest)
    checks.check_target(directory, manifest)
    checks.check_files(directory, manifest)
    context = ctx or manifest.context
    if context > manifest.context:
        raise RequestError(
            f"{directory}: compiled for {manifest.context} tokens of context, {context} asked for",
            f"compile it again with --ctx {context}",
        )
    n = n_sequences or manifest.max_batch
    # Read once, when the runtime library starts its thread pool.
    os.environ["TVM_NUM_THREADS"] = str(threads or default_threads())
    open_runtime(directory)
    place = place_of(manifest, directory)
    statement = memory.plan(manifest, n, context, rings=rings, free=place.free_bytes())
    modes = modes_of(manifest, graphs=graphs, pipeline=pipeline)
    return Model(directory, manifest, place, statement, context, modes)


def default_threads() -> int:
    """One thread for each physical core this process may use."""
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = {_first_sibling(cpu) for cpu in cpus}
    return max(1, len(cores))


def _first_sibling(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text().strip() if path.is_file() else str(cpu)


def _open_library(directory: Path, place: Place) -> Any:
    """The Relax VM of the artifact's library."""
    try:
        with _fresh_name(directory / LIBRARY) as path:
            vm = tvm_ffi.load_module(str(path))["vm_load_executable"]()
    except (OSError, RuntimeError) as error:
        raise _unloadable(directory, LIBRARY, error) from None
    vm["vm_initialization"](*place.vm_devices)
    return vm


def open_runtime(directory: Path) -> None:
    """The TVM runtime the artifact carries, unless one is there (a compiler's, another artifact's).

    A second one in a process registers the same functions again, and that ends the process. So if
    the machine has a compiler with the very same library, it is that copy which is opened: a later
    `import tvm` finds it there.
    """
    if tvm_ffi.get_global_func(_LOADER, allow_missing=True) is not None:
        return
    path, tvm = directory / RUNTIME, importlib.util.find_spec("tvm")
    if tvm is not None and tvm.origin is not None:
        installed = Path(tvm.origin).parent / RUNTIME
        if installed.is_file() and digest(installed) == digest(path):
            path = installed
    try:
        ctypes.CDLL(str(path.resolve()), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _unloadable(directory, RUNTIME, error) from None


def _unloadable(directory: Path, name: str, error: Exception) -> ArtifactError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ArtifactError(
        f"{directory / name}: cannot be loaded ({reason})",
        f"on this machine, {compile_again(directory)}",
    )


@contextmanager
def _fresh_name(path: Path) -> Iterator[Path]:
    """The library under a name that no library was loaded by.

    The dynamic loader asks for the name first: of an artifact that was compiled again while it was
    loaded, it would give the old library.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="xpuc-")
    except OSError:  # nowhere to write: then hardly anything was compiled here either
        yield path.resolve()
        return
    with folder as name:
        link = Path(name) / path.name
        link.symlink_to(path.resolve())
        yield link
