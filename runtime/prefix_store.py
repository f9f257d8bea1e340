"""The block store behind the block pool: what is evicted is kept, and found for the next prefix."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from xpuc.artifact import LIBRARY, Manifest
from xpuc.runtime.prefix import Link
from xpuc.runtime.store import BlockStore

STORE_BYTES = 20 << 30  # unless another bound is given
log = logging.getLogger(__name__)


class BlockMemory(Protocol):
    """Where the K/V of a block lies; runtime.kv_pool.KvPool is one."""

    @property
    def block_bytes(self) -> int: ...

    def buffers(self, block: int, /) -> list[npt.NDArray[np.uint8]]: ...


class PrefixStore:
    """The scheduler's PrefixSource on a BlockStore; `save` is for the pool's on_evict.

    A block's key is its link's digest, and the store's identity has to be the seed of the pool's
    digests: then equal keys are equal tokens on the same model.

    Nothing here raises. The block store gets over a disk that fails; after any other error it is
    not asked again, and the requests go on without it.
    """

    def __init__(self, store: BlockStore, memory: BlockMemory) -> None:
        self.blocks = store
        self._memory = memory
        self._is_open = True

    def fill(self, blocks: Many[int], links: Many[Link]) -> int:
        """Write the K/V of links[i] into blocks[i] from the first on; how many were there."""
        if not self._is_open:
            return 0
        keys = [link.digest for link in links]
        try:
            n = self.blocks.longest(keys)
            # From the end, because a use makes a block stay: a prefix is to lose its end first.
            for place in reversed(range(n)):
                if not self.blocks.get(keys[place], self._memory.buffers(blocks[place])):
                    n = place
        except Exception as error:
            self._give_up(error)
            return 0
        return n

    def save(self, block: int, digest: bytes) -> None:
        """Keep a block that is about to be overwritten."""
        if self._is_open:
            try:
                self.blocks.put(digest, self._memory.buffers(block))
            except Exception as error:
                self._give_up(error)

    def save_all(self, cached: Iterable[tuple[int, Link]]) -> None:
        """Keep those of the pool's blocks that are not kept yet, the newest first: within a prefix
        that is its end, which is then the first to go."""
        for block, link in reversed(list(cached)):
            if self._is_open and not self._has(link.digest):
                self.save(block, link.digest)

    def close(self) -> None:
        """Nothing is found or kept from now on; harmless when repeated."""
        self._is_open = False
        try:
            self.blocks.close()
        except Exception as error:
            log.warning("the block store was not closed well: %s", error)

    def _has(self, digest: bytes) -> bool:
        try:
            return self.blocks.contains(digest)
        except Exception as error:
            self._give_up(error)
            return False

    def _give_up(self, error: Exception) -> None:
        self._is_open = False
        log.warning("the block store is not used any more: %s", error)


def open_store(
    path: str | Path, memory: BlockMemory, identity: bytes, max_bytes: int
) -> PrefixStore:
    """The store of `identity` in a folder; XpucError if it cannot be opened or is in use."""
    blocks = BlockStore.open(
        Path(path), identity=identity, block_bytes=memory.block_bytes, max_bytes=max_bytes
    )
    return PrefixStore(blocks, memory)


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
