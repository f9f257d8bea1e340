"""The block store behind the block pool: what is evicted is kept, and found for the next prefix."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from collections.abc import Sequence as Many
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from xpuc.artifact import LIBRARY, Manifest
from xpuc.runtime.extents import place_bytes
from xpuc.runtime.prefix import Link
from xpuc.runtime.store import BlockStore

STORE_BYTES = 20 << 30  # unless another bound is given
log = logging.getLogger(__name__)


class BlockMemory(Protocol):
    """Where the K/V of a block lies; runtime.kv_pool.KvPool is one."""

    @property
    def block_bytes(self) -> int: ...

    def fetch(self, block: int, /) -> list[npt.NDArray[np.uint8]]:
        """Its bytes, in memory of the process."""

    def buffers(self, block: int, /) -> list[npt.NDArray[np.uint8]]:
        """Where `send` takes its bytes from."""

    def send(self, block: int, /) -> None:
        """The block holds what was written to its buffers."""


class PrefixStore:
    """The scheduler's PrefixSource: a BlockStore for each group; `save` is for a pool's on_evict.

    A block's key is its link's digest, and the stores' identity has to be the seed of the pools'
    digests: then equal keys are equal tokens on the same model.

    Nothing here raises. A block store gets over a disk that fails; after any other error none is
    asked again, and the requests go on without them.
    """

    def __init__(self, stores: Many[BlockStore], memories: Many[BlockMemory]) -> None:
        self.stores = tuple(stores)
        self._memories = tuple(memories)
        self._is_open = True

    def n_leading(self, group: int, links: Many[Link]) -> int:
        """How many of `links`, from the first on, have an entry."""
        if not (self._is_open and links):
            return 0
        try:
            return self.stores[group].longest([link.digest for link in links])
        except Exception as error:
            self._give_up(error)
            return 0

    def fill(self, group: int, blocks: Many[int], links: Many[Link]) -> int:
        """Write the K/V of links[i] into blocks[i] from the first on; how many were there."""
        if not self._is_open:
            return 0
        store, memory = self.stores[group], self._memories[group]
        try:
            n = store.longest([link.digest for link in links])
            # From the end, because a use makes a block stay: a prefix is to lose its end first.
            for place in reversed(range(n)):
                if store.get(links[place].digest, memory.buffers(blocks[place])):
                    memory.send(blocks[place])
                else:
                    n = place
        except Exception as error:
            self._give_up(error)
            return 0
        return n

    def save(self, group: int, block: int, digest: bytes) -> None:
        """Keep a block that is about to be overwritten."""
        if self._is_open:
            try:
                self.stores[group].put(digest, self._memories[group].fetch(block))
            except Exception as error:
                self._give_up(error)

    def save_all(self, group: int, cached: Iterable[tuple[int, Link]]) -> None:
        """Keep those of a pool's blocks that are not kept yet, the newest first: within a prefix
        that is its end, which is then the first to go."""
        for block, link in reversed(list(cached)):
            if self._is_open and not self._has(group, link.digest):
                self.save(group, block, link.digest)

    def close(self) -> None:
        """Nothing is found or kept from now on; harmless when repeated."""
        self._is_open = False
        for store in self.stores:
            try:
                store.close()
            except Exception as error:
                log.warning("the block store was not closed well: %s", error)

    def _has(self, group: int, digest: bytes) -> bool:
        try:
            return self.stores[group].contains(digest)
        except Exception as error:
            self._give_up(error)
            return False

    def _give_up(self, error: Exception) -> None:
        self._is_open = False
        log.warning("the block store is not used any more: %s", error)


def open_store(
    path: str | Path, memories: Many[BlockMemory], identity: bytes, max_bytes: int
) -> PrefixStore:
    """The store of `identity` in a folder; XpucError if it cannot be opened or is in use.

    The groups of blocks, each with its memory, share the bytes so that all keep as many.
    """
    total = sum(place_bytes(memory.block_bytes) for memory in memories)
    with ExitStack() as opened:
        stores = []
        for group, memory in enumerate(memories):
            store = BlockStore.open(
                Path(path),
                identity=identity + (b"" if len(memories) == 1 else b" group %d" % group),
                block_bytes=memory.block_bytes,
                max_bytes=max_bytes * place_bytes(memory.block_bytes) // total,
            )
            opened.callback(store.close)
            stores.append(store)
        opened.pop_all()
    return PrefixStore(stores, memories)


def identity_of(manifest: Manifest) -> bytes:
    """All that decides what the bytes of a block mean.

    The checkpoint's digest stands for its weights and its rope parameters, the library's for how
    they are computed: another build of the kernels may round otherwise.
    """
    facts: dict[str, Any] = {
        "source": manifest.source["xxh3_128"],
        "library": manifest.files[LIBRARY]["xxh3_128"],
        "dtype": manifest.kv.dtype,
        "block_tokens": manifest.kv.block_tokens,
        "layers": manifest.kv.layers,
    }
    return json.dumps(facts, sort_keys=True).encode()
