"""A bundle's candidates checked and timed on a GPU of another machine, through TVM's RPC tracker.

Here are the compiler, the bundle and the results; there, TVM's own RPC server, which gives each
connection a process of its own. A kernel that breaks the GPU's context ends it, and so does a
network that breaks: what was run then is tried once more, on another connection.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xpuc import interrupts
from xpuc.errors import ArtifactError, XpucError
from xpuc.tuning import bundle
from xpuc.tuning.boards import GpuBoard, Tracker
from xpuc.tuning.box import Card
from xpuc.tuning.kernels import BoardLost
from xpuc.tuning.replay import Play, Replay
from xpuc.tuning.roofs import RoofKernels
from xpuc.tuning.trials import CRASHED, LOST, Trial, TrialLog


class RemoteReplay(Replay):
    """A replay on the boards of a tracker, one at a time; all have the same GPU."""

    def __init__(self, boards: Tracker, *replay: Any) -> None:
        super().__init__(*replay)
        self._boards = boards
        self._card: Card | None = None
        self._stopped = threading.Event()

    def check(self, what: Path) -> Card:
        """See Replay."""
        self._card = card_of(self._boards)
        self._card.must_run(self.manifest.arch, str(what))
        return self._card

    def run(self, seconds: float) -> str:
        """See Replay. Ctrl-C a second time does not wait for a board."""
        with interrupts.noted(self._stopped):
            return super().run(seconds)

    def play(self, deadline: float) -> str | None:
        """See Replay."""

        def is_spent() -> bool:
            return self._stopped.is_set() or time.monotonic() >= deadline

        log = TrialLog(self.results)
        try:
            with _connected(self._boards) as (board, card):
                if card != self._card:
                    raise XpucError(
                        f"{self._boards.name}: has {card}; it had {self._card}",
                        "give the boards of each kind of GPU a key of their own",
                    )
                roofs = RoofKernels(board, self.folder / bundle.ROOFS, self.manifest.loops)
                played = Play(board, roofs, self.folder, self.manifest, log, self.heed, is_spent)
                is_done = played.all()
        except BoardLost as reason:
            if self.at is None:
                raise _no_board(self._boards, reason, "; --resume goes on") from None
            _note_loss(log, Trial(**self.at), str(reason))
            return None
        return "done" if is_done else "stopped" if self._stopped.is_set() else "budget"


def card_of(boards: Tracker) -> Card:
    """The GPU of a board that is free; XpucError if there is none."""
    try:
        with _connected(boards) as (_, card):
            return card
    except BoardLost as reason:
        raise _no_board(boards, reason) from None


@contextmanager
def _connected(boards: Tracker) -> Iterator[tuple[GpuBoard, Card]]:
    """A board of the tracker, and its GPU."""
    board = GpuBoard(boards.request())
    try:
        card = board.card()
        if card is None:
            raise ArtifactError(
                f"{boards.name}: TVM finds no GPU there",
                "its server needs NVIDIA's driver, and libcudart.so.13 in LD_LIBRARY_PATH:"
                ' python -c "import tvm; print(tvm.cuda().exist)" says True then',
            )
        yield board, card
    finally:
        board.close()


def _no_board(boards: Tracker, reason: BoardLost, more: str = "") -> XpucError:
    return XpucError(f"{boards.name}: no board is free ({reason})", f"{boards.start_one}{more}")


def _note_loss(log: TrialLog, at: Trial, reason: str) -> None:
    """What a board was lost at once is lost too; what it is lost at twice has crashed it."""
    key = (at.task, at.kernel, LOST)
    again = any((t.task, t.kernel, t.outcome) == key for t in log.read())
    log.append(dataclasses.replace(at, outcome=CRASHED if again else LOST, detail=reason))
