"""Stop strings in streamed text: found however it is cut, held back no longer than needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xpuc.runtime.stop_strings import StopStrings

ALPHABET = "abc"
texts = st.text(ALPHABET, max_size=30)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3)


@given(texts, stops, st.data())
def test_stop_strings_do_not_depend_on_the_cuts(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher, shown, n_arrived = StopStrings(stops), "", 0
    for piece in pieces:
        shown += matcher.push(piece)
        n_arrived += len(piece)
        if matcher.matched is not None:
            break
        held = text[len(shown) : n_arrived]
        assert shown + held == text[:n_arrived]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        found = [s for s in stops if text[: min(ends)].endswith(s)]
        assert matcher.matched == max(found, key=len)
        assert shown == text[: min(ends)].removesuffix(matcher.matched)
    else:
        assert matcher.matched is None
        assert shown + matcher.flush() == text


def test_text_is_held_back_only_while_a_stop_string_may_be_coming() -> None:
    matcher = StopStrings(["###", "\n\n"])
    assert matcher.push("one #") == "one "
    assert matcher.push("#") == ""
    assert matcher.push("2\n") == "##2"
    assert matcher.push("x") == "\nx"
    assert matcher.push("##") == ""
    assert matcher.push("# more") == ""
    assert matcher.matched == "###"
