"""How a prefix is recognised: a chain of hashes over the full blocks of a sequence's tokens."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from xxhash import xxh3_128_digest


class Link(NamedTuple):
    """A full block of a sequence, with all that came before it.

    digest   xxh3_128 of `content`; names the tokens from the first to the end of this block
    content  digest of the block before (16 bytes), the block's tokens (int32, little endian), the
             extra keys; compared on a hit, so that equal digests alone never serve a block
    """

    digest: bytes
    content: bytes


class Hasher:
    """Chains of links over blocks of `block_tokens` tokens.

    `seed` is whatever two pools must agree on for their K/V to be the same: model digest, K/V
    dtype, layout, rope parameters. It is the first block's parent, so it is in every digest.
    """

    def __init__(self, block_tokens: int, seed: bytes = b"") -> None:
        assert block_tokens > 0, block_tokens
        self.block_tokens = block_tokens
        self.root = xxh3_128_digest(seed)
        self._pack = struct.Struct(f"<{block_tokens}i").pack

    def extend(
        self, links: list[Link], tokens: Many[int], n_blocks: int, extra: bytes = b""
    ) -> None:
        """Append links until `links` covers the first `n_blocks` full blocks of `tokens`.

        extra: what else the K/V hangs on (an adapter's name, a tenant's salt); the same each time.
        """
        size = self.block_tokens
        parent = links[-1].digest if links else self.root
        for start in range(len(links) * size, n_blocks * size, size):
            content = parent + self._pack(*tokens[start : start + size]) + extra
            parent = xxh3_128_digest(content)
            links.append(Link(parent, content))


class PrefixSource(Protocol):
    """Where blocks that left the pools may come back from: the block store, to the scheduler.

    Called while a step is planned; must not raise. `group` is the place of a pool among its likes.
    """

    def n_leading(self, group: int, links: Many[Link]) -> int:
        """How many of `links`, from the first on, may be there."""
        ...

    def fill(self, group: int, blocks: Many[int], links: Many[Link]) -> int:
        """Write the K/V of links[i] into the pool's blocks[i] from the first on, as long as they
        are there and whole; how many were."""
        ...
