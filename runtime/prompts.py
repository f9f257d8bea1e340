"""What a caller may give as a prompt, and the ids it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from operator import index
from typing import Any, cast

from xpuc.errors import FieldError, RequestError
from xpuc.runtime.generation import Codec

Message = Mapping[str, Any]
Prompt = str | Many[int] | Many[Message]
"""Text, token ids, or the messages of a chat ({"role": ..., "content": ...})."""

_GIVE = "give text, token ids, or a list of messages with a role and a content"


def is_prompt(given: Any) -> bool:
    """Whether it is one prompt, not a list of them; RequestError if it is neither."""
    _check_list(given)
    return isinstance(given, str) or not len(given) or not _is_list(given[0])


def _is_list(item: Any) -> bool:
    """Whether an item of a list is itself a prompt: neither a token id nor a chat message."""
    return isinstance(item, str) or (hasattr(item, "__len__") and not isinstance(item, Mapping))


def _check_list(given: Any) -> None:
    if isinstance(given, Mapping) or not hasattr(given, "__getitem__"):
        raise RequestError(f"the prompt is of type {type(given).__name__}", _GIVE)


def check_ids(ids: Many[int], n_vocab: int, where: str) -> None:
    for place, id_ in enumerate(ids):
        if not 0 <= id_ < n_vocab:
            raise FieldError(
                [where],
                f": token {id_} at place {place} is not in the vocabulary",
                f"ids go from 0 to {n_vocab - 1}",
            )


class PromptReader:
    """Prompts to ids. `chat_template` is Jinja."""

    def __init__(
        self, codec: Codec | None, *, n_vocab: int, chat_template: str | None = None
    ) -> None:
        self._codec = codec
        self._n_vocab = n_vocab
        self._chat_template = chat_template

    def codec(self, purpose: str) -> Codec:
        """The tokenizer, or a refusal that says what it was wanted for."""
        if self._codec is None:
            raise RequestError(f"{purpose} needs a tokenizer", "give token ids: [1, 2, ...]")
        return self._codec

    def read(self, prompt: Prompt) -> list[int]:
        """RequestError if there is no tokenizer, no template or no such id."""
        _check_list(prompt)
        if isinstance(prompt, str):
            return self.codec("a text prompt").encode(prompt)
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self._read_chat(cast(Many[Message], prompt))
        ids = [_id_of(place, each) for place, each in enumerate(cast(Many[int], prompt))]
        check_ids(ids, self._n_vocab, "the prompt")
        return ids

    def render(self, messages: Many[Message]) -> str:
        """The text of a chat, up to where the answer begins."""
        from xpuc.runtime import chat  # jinja2, which only a chat needs

        codec = self.codec("a chat")
        if self._chat_template is None:
            raise RequestError("this model has no chat template", "give the prompt as text")
        return chat.render(
            self._chat_template,
            messages,
            bos_token=_text_of(codec, codec.bos_id),
            eos_token=_text_of(codec, codec.eos_id),
            add_generation_prompt=True,
        )

    def _read_chat(self, messages: Many[Message]) -> list[int]:
        text = self.render(messages)
        codec = self.codec("a chat")
        # A template that writes the first token itself must not get it twice.
        bos = _text_of(codec, codec.bos_id)
        return codec.encode(text, add_bos=False if bos and text.startswith(bos) else None)


def _id_of(place: int, item: Any) -> int:
    try:
        return index(item)  # not int(), which takes 1.5 for 1
    except TypeError:
        raise RequestError(f"the prompt: {item!r} at place {place} is no token id", _GIVE) from None


def _text_of(codec: Codec, id_: int | None) -> str:
    return "" if id_ is None else codec.pieces([id_])[0]
