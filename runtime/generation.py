"""One request from its first step to its result: text, stops, log probabilities and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from xpuc.runtime.logprobs import TokenLogprob
from xpuc.runtime.sampler import Chain
from xpuc.runtime.sequence import FinishReason, Request, SamplingParams, Sequence
from xpuc.runtime.stop_strings import StopStrings


class TextStream(Protocol):
    """Ids to text, one at a time; never half a character."""

    def push(self, token_id: int, /) -> str: ...
    def finish(self) -> str: ...


class Codec(Protocol):
    """What the engine needs of a tokenizer; runtime.tokenizer.Tokenizer is one."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def eog_ids(self) -> Collection[int]: ...

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]: ...
    def pieces(self, ids: Iterable[int]) -> list[str]: ...
    def stream(self, *, skip_special: bool = False, continued: bool = False) -> TextStream: ...


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds and rates of one request.

    first_token_ms  from the request to its first token: waiting and prompt
    prompt_ms       from its first step to its first token
    decode_ms       from its first token to its last
    """

    n_prompt: int
    n_generated: int
    first_token_ms: float
    prompt_ms: float
    decode_ms: float

    @property
    def prompt_tokens_per_s(self) -> float:
        return 1000 * self.n_prompt / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first, which belongs to the prompt's time."""
        return 1000 * (self.n_generated - 1) / self.decode_ms if self.decode_ms else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step adds to a request. The last one has a finish_reason, and no id if the request
    ended without a token (cancelled, error)."""

    text: str
    id: int | None
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request.

    `ids` holds an end-of-generation or stop token that ended it; `text` does not show it, nor the
    stop string (`stop`). `seed` repeats a sampled result. `error` says what failed when
    finish_reason is "error".
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: FinishReason
    timings: Timings
    seed: int
    logprobs: list[TokenLogprob] | None = None
    stop: str | None = None
    error: str | None = None


class Generation:
    """The engine's side of one request; the scheduler's side is `sequence`."""

    def __init__(
        self, request: Request, chain: Chain, seed: int, *, codec: Codec | None, max_context: int
    ) -> None:
        params = request.params
        self.request = request
        self.sequence = Sequence(request)
        self.chain = chain
        self.is_cancelled = False
        self.error: str | None = None
        self._seed = seed
        self._max_context = max_context
        self._ends = _ends(params, codec)
        self._stream = codec.stream(skip_special=True, continued=True) if codec else None
        self._stops = StopStrings(params.stop_strings)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._times = _Times()

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that must not be chosen now."""
        return self._ends if self.sequence.n_generated < self.params.min_tokens else ()

    @property
    def needs_logits(self) -> bool:
        """Whether the next token takes more than the likeliest id."""
        return self.chain.needs_logits or self.params.logprobs is not None or bool(self.banned)

    def begin_step(self) -> None:
        self._times.begin()

    def accept(self, id_: int, logprob: TokenLogprob | None) -> Chunk:
        """Take the next token in; the sequence has room for it."""
        self._times.token()
        sequence = self.sequence
        sequence.tokens.append(id_)
        if logprob is not None:
            self._logprobs.append(logprob)
        reason: FinishReason | None = None
        may_stop = sequence.n_generated >= self.params.min_tokens
        if may_stop and id_ in self._ends:
            reason, text = "stop", self._flush()
        else:
            text = self._show(id_, may_stop)
            if self._stops.matched is not None:
                reason = "stop"
            elif self._is_full():
                text += self._flush()
                reason = "length" if self._stops.matched is None else "stop"
        self._text.append(text)
        return Chunk(text, id_, reason, logprob)

    def end(self, error: str | None = None) -> Chunk:
        """End without another token: cancelled, or failed with `error`."""
        self.error = error
        text = self._flush()
        self._text.append(text)
        return Chunk(text, None, "error" if error is not None else "cancelled")

    def result(self) -> Result:
        sequence = self.sequence
        assert sequence.finish_reason is not None, "the request has not finished"
        return Result(
            prompt_ids=list(self.request.prompt_ids),
            ids=sequence.generated_ids,
            text="".join(self._text),
            finish_reason=sequence.finish_reason,
            timings=self._times.timings(sequence.n_prompt, sequence.n_generated),
            seed=self._seed,
            logprobs=None if self.params.logprobs is None else self._logprobs,
            stop=self._stops.matched,
            error=self.error,
        )

    def _is_full(self) -> bool:
        sequence = self.sequence
        return (
            sequence.n_generated == self.params.max_tokens
            or len(sequence.tokens) >= self._max_context
        )

    def _show(self, id_: int, may_stop: bool) -> str:
        text = self._stream.push(id_) if self._stream else ""
        return self._stops.push(text) if may_stop else text

    def _flush(self) -> str:
        rest = self._stream.finish() if self._stream else ""
        text = self._stops.push(rest)
        return text if self._stops.matched is not None else text + self._stops.flush()


class _Times:
    """When things happened, in ns."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._asked = clock()
        self._begun: int | None = None
        self._first: int | None = None
        self._last = self._asked

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._clock()

    def token(self) -> None:
        self._last = self._clock()
        if self._first is None:
            self._first = self._last

    def timings(self, n_prompt: int, n_generated: int) -> Timings:
        first = self._last if self._first is None else self._first
        begun = first if self._begun is None else self._begun
        return Timings(
            n_prompt=n_prompt,
            n_generated=n_generated,
            first_token_ms=(first - self._asked) / 1e6,
            prompt_ms=max(first - begun, 0) / 1e6,
            decode_ms=(self._last - first) / 1e6,
        )


def _ends(params: SamplingParams, codec: Codec | None) -> tuple[int, ...]:
    eog = () if codec is None or params.ignore_eos else codec.eog_ids
    return tuple(sorted({*eog, *params.stop_ids}))
