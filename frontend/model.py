"""Model: an opened checkpoint, whatever its file format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tvm import IRModule

from xpuc.artifact import SUFFIXES, Tail
from xpuc.errors import FileError
from xpuc.frontend.arch import architecture
from xpuc.frontend.config import ModelConfig, Reader
from xpuc.frontend.gguf import GgufFile, PackedTensor, open_gguf
from xpuc.ir.builder import Graph, PoolLayout


@dataclass(frozen=True)
class Model:
    """Configuration, metadata and packed tensors by GGUF name."""

    path: str
    source: GgufFile
    config: ModelConfig

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.source.metadata

    @property
    def tensors(self) -> Mapping[str, PackedTensor]:
        return self.source.tensors

    def graph(
        self, pool: PoolLayout, tails: Sequence[Tail] = ("logits", "greedy")
    ) -> tuple[IRModule, tuple[str, ...]]:
        """The step as the paper writes it, and the weights it takes in order.

        Two functions for each of `tails`: `prefill` gives the logits of `out_rows`, `decode` those
        of every row; `*_greedy` give the id of the largest logit instead, and `*_sampled` an id
        drawn as `sampling` says, an index input that they alone have.
        """
        functions: dict[str, Any] = {}
        for name, every_row in (("prefill", False), ("decode", True)):
            for tail in tails:
                graph = Graph(
                    self.path, self.tensors, pool, self.config.windows, every_row=every_row
                )
                full_name = name + SUFFIXES[tail]
                functions[full_name] = graph.function(full_name, partial(self._body, graph, tail))
        return IRModule(functions), graph.weight_names

    def _body(self, graph: Graph, tail: Tail) -> Any:
        logits = architecture(self.config.arch, self.path).build(graph, self.config)
        if tail == "greedy":
            return graph.op("argmax", logits)
        return graph.op("sample", logits, graph.sampling()) if tail == "sampled" else logits


def open_model(path: str | Path) -> Model:
    """Open a checkpoint; what is unreadable, unknown or incomplete is an XpucError."""
    source = open_gguf(path)
    name = str(path)
    arch = source.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise FileError(
            f"{name}: metadata key general.architecture is missing", "the file is not a model"
        )
    module = architecture(arch, name)
    return Model(name, source, module.config(Reader(source.metadata, arch, name), source.tensors))
