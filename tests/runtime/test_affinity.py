"""The seed's four requests to llama-server's slots, number by number."""

from __future__ import annotations

from dataclasses import replace

from xpuc.runtime.affinity import Slot, choose_slot, common_prefix


def test_the_seeds_four_requests() -> None:
    system = [*range(1000, 1080)]
    turn = [*system, *range(5000, 5040)]
    slots = [
        Slot(0, [*system, *range(7000, 7300)], 10),
        Slot(1, turn, 30),
        Slot(2, [], 5),
    ]
    second_turn = choose_slot(slots, [*turn, *range(9000, 9020)])
    assert second_turn is not None
    assert f"{second_turn.id} {second_turn.similarity:.3f} {second_turn.keep:.3f}" == (
        "1 0.857 1.000"
    )
    assert not second_turn.saves_old
    new_chat = choose_slot(slots, [*system, *range(8000, 8010)])
    assert new_chat is not None
    assert f"{new_chat.id} {new_chat.similarity:.3f} {new_chat.keep:.3f}" == "0 0.889 0.211"
    assert new_chat.saves_old
    unrelated = choose_slot(slots, [*range(1, 51)])
    assert unrelated is not None
    assert (unrelated.id, unrelated.similarity, unrelated.saves_old) == (2, None, True)
    assert choose_slot([replace(each, is_busy=True) for each in slots], [*range(1, 51)]) is None


def test_a_tenth_of_the_prompt_is_not_enough() -> None:
    slots = [Slot(0, [1], 9), Slot(1, [5], 1)]
    tenth = choose_slot(slots, [1, *[7] * 9])
    assert tenth is not None
    assert tenth.id == 1, "the least recently used one"
    more = choose_slot(slots, [1, *[7] * 8])
    assert more is not None
    assert (more.id, more.keep) == (0, 1.0)


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
