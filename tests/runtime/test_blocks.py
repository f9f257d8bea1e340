"""No block is ever lost or owned by two who did not share it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from xpuc.runtime.blocks import BlockPool, PoolFull

N_BLOCKS = 12


class Pool(RuleBasedStateMachine):
    """A pool beside a model of it: a list of holdings, each a list of blocks."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(N_BLOCKS)
        self.held: list[list[int]] = []

    @rule(target=holdings, n=st.integers(0, N_BLOCKS + 2))
    def allocate(self, n: int) -> list[int]:
        n_free = self.pool.n_free
        if n > n_free:
            with pytest.raises(PoolFull, match=f"{n_free} of {N_BLOCKS} are free"):
                self.pool.allocate(n)
            assert self.pool.n_free == n_free
            n = 0
        blocks = self.pool.allocate(n)
        in_use = {block for holding in self.held for block in holding}
        assert len(set(blocks)) == n
        assert not in_use & set(blocks)
        self.held.append(blocks)
        return blocks

    @rule(target=holdings, holding=holdings, n=st.integers(0, N_BLOCKS))
    def share_a_prefix(self, holding: list[int], n: int) -> list[int]:
        shared = holding[:n]
        self.pool.share(shared)
        self.held.append(shared)
        return shared

    @rule(holding=consumes(holdings))
    def free(self, holding: list[int]) -> None:
        self.pool.free(holding)
        # By identity: equal holdings may come from one being shared whole.
        self.held = [each for each in self.held if each is not holding]

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.pool.check()
        assert self.pool.n_free + self.pool.n_used == self.pool.n_blocks
        for block in range(N_BLOCKS):
            assert self.pool.n_owners(block) == sum(block in each for each in self.held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_a_freed_block_is_reused_before_an_untouched_one() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3)
    pool.free(first)
    assert pool.allocate(3) == first


def test_freeing_twice_is_our_mistake() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._free.popleft()
    with pytest.raises(AssertionError, match="lost"):
        pool.check()
