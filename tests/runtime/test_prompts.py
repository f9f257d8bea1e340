"""Prompts to ids: texts, chats, and the first token that must not come twice."""

from __future__ import annotations

from typing import Any

import pytest
from fake_model import FakeCodec

from xpuc.errors import RequestError
from xpuc.runtime.prompts import PromptReader, is_prompt

CHAT = [{"role": "user", "content": "hi"}]


class BosCodec(FakeCodec):
    """Token 1, "b", begins every text, unless told not to."""

    bos_id = 1

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [1] * (add_bos is not False) + [2 + ord(c) % 50 for c in text]


def test_a_template_that_writes_the_first_token_gets_it_once() -> None:
    codec = BosCodec()
    (bos,) = codec.pieces([1])
    content = codec.encode("hi", add_bos=False)
    with_bos = PromptReader(
        codec, n_vocab=97, chat_template="{{ bos_token }}{{ messages[0].content }}"
    )
    assert with_bos.read(CHAT) == codec.encode(bos, add_bos=False) + content
    without = PromptReader(codec, n_vocab=97, chat_template="{{ messages[0].content }}")
    assert without.read(CHAT) == [1, *content]


def test_a_template_is_given_what_it_asks_for() -> None:
    template = "{{ bos_token }}|{{ messages[0].role }}|{{ add_generation_prompt }}|{{ eos_token }}"
    reader = PromptReader(BosCodec(), n_vocab=97, chat_template=template)
    assert reader.render(CHAT) == "b|user|True|"


@pytest.mark.parametrize("one", ["text", "", [1, 2], [], CHAT])
def test_one_prompt_is_told_from_a_list_of_them(one: Any) -> None:
    assert is_prompt(one)
    assert not is_prompt([one])
    assert not is_prompt([one, one])


def test_what_is_no_prompt_is_refused() -> None:
    reader = PromptReader(None, n_vocab=4)
    with pytest.raises(RequestError, match="None at place 0 is no token id"):
        reader.read([None])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the prompt is of type dict"):
        reader.read(CHAT[0])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"token 4 at place 1 .*\nids go from 0 to 3"):
        reader.read([3, 4])


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        PromptReader(FakeCodec(), n_vocab=97).read(CHAT)
