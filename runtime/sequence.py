"""A request and the sequence of tokens it grows into; plain Python, so decisions stay testable."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

from xpuc.runtime.ngram import Lookup
from xpuc.runtime.prefix import Link
from xpuc.runtime.sampling_params import SamplingParams

__all__ = ["FinishReason", "Request", "SamplingParams", "Sequence", "State"]

FinishReason = Literal["stop", "length", "cancelled", "error"]


class State(enum.Enum):
    NEW = "new"  # no scheduler has it yet
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked.

    id        rises with arrival, so it is the age: the largest is the youngest
    priority  with the policy of that name the smallest is served first
    salt      requests share K/V only with those of the same salt
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    salt: bytes = b""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way.

    tokens      prompt, then what was generated
    n_computed  how many of them have their K/V in the pools
    blocks      for each group of layers its pool's blocks that hold it, in order of position; -1
                where no later row sees any of it, see kv_blocks.py
    epoch       counts how often a block was replaced by another, so that a batch knows when a row
                of a block table that it wrote before still holds

    The scheduler's own:

    rank          place among its likes, see policies.py
    links         the chain over its full blocks, as far as it was needed
    n_room        tokens that it has blocks for in every group
    n_found       leading blocks that were found or shared rather than computed by this sequence
    n_published   leading blocks that others can find
    n_due         computed tokens up to which none of its blocks is to be published or given back
    may_share     whether the block it writes next may be another's as well
    n_overtaken   times a later one was admitted while this one headed the queue
    n_cached      leading blocks that were in the pool when it was last looked for them
    lookup        what drafts come from, once one was asked for
    decoded_in    the step in which it had its turn, where sequences decode singly
    n_drafted     draft tokens computed for it; n_accepted: those that were right
    """

    request: Request
    tokens: list[int] = field(init=False)
    n_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    epoch: int = 0
    state: State = State.NEW
    finish_reason: FinishReason | None = None
    rank: tuple[int, int] = (0, 0)
    links: list[Link] = field(default_factory=list)
    n_room: int = 0
    n_found: int = 0
    n_published: int = 0
    n_due: int = 0
    may_share: bool = False
    n_overtaken: int = 0
    n_cached: int = 0
    decoded_in: int = 0
    lookup: Lookup | None = None
    n_drafted: int = 0
    n_accepted: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens the model has not seen yet; 1 is a decode step, wherever the token came from."""
        return len(self.tokens) - self.n_computed

    @property
    def generated_ids(self) -> list[int]:
        return self.tokens[self.n_prompt :]
