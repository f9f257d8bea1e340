"""One completion from its first step to its result: text, stops, log probabilities and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from xpuc.artifact import BANNED, Tail
from xpuc.runtime.grammar import GrammarState, Vocabulary
from xpuc.runtime.logprobs import TokenLogprob, token_logprob
from xpuc.runtime.sampler import DAMAGED, Chain, DeadEndError, LogitsError
from xpuc.runtime.sequence import FinishReason, Request, SamplingParams, Sequence
from xpuc.runtime.stop_strings import StopStrings

_ALLOW = "let these options leave a token"
_LOOSEN = "let the grammar go on or end there"


class TextStream(Protocol):
    """Ids to text, one at a time; never half a character."""

    def push(self, token_id: int, /) -> str: ...
    def finish(self) -> str: ...


class Codec(Vocabulary, Protocol):
    """What the engine needs of a tokenizer; runtime.tokenizer.Tokenizer is one."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...

    def pieces(self, ids: Iterable[int]) -> list[str]: ...
    def stream(self, *, skip_special: bool = False, continued: bool = False) -> TextStream: ...


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds and rates of one request.

    first_token_ms  from the request to its first token: waiting and prompt
    prompt_ms       from its first step to its first token
    decode_ms       from its first token to its last
    n_drafted       tokens computed ahead (llama.cpp's draft_n); n_accepted: those of them that came
    """

    n_prompt: int
    n_generated: int
    first_token_ms: float
    prompt_ms: float
    decode_ms: float
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def prompt_tokens_per_s(self) -> float:
        return 1000 * self.n_prompt / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first, which belongs to the prompt's time."""
        return 1000 * (self.n_generated - 1) / self.decode_ms if self.decode_ms else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one token adds to a request. The last one has a finish_reason, and no id if the request
    ended without a token (cancelled, error)."""

    text: str
    id: int | None
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request: its answer, and with n > 1 the `others` in the order of their seeds.

    `ids` holds an end-of-generation or stop token that ended it; `text` does not show it, nor the
    stop string (`stop`). `seed` repeats a sampled result. `error` says what failed when
    finish_reason is "error", `hint` what to do about it; None if the fault is not the request's.
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
    hint: str | None = None
    others: tuple[Result, ...] = ()


class Generation:
    """The engine's side of one completion; the scheduler's side is `sequence`.

    The request's first completion has the others as its `forks`: they go on from its first result,
    and until then no scheduler knows of them. Each has an id of its own, the request's + `index`.

    `on_bad_logits` may look into the model when the logits are no numbers, and say where the first
    bad value came from; what it says goes into the request's error.
    """

    def __init__(
        self,
        request: Request,
        chain: Chain,
        seed: int,
        *,
        index: int = 0,
        codec: Codec | None,
        max_context: int,
        grammar: GrammarState | None = None,
        on_bad_logits: Callable[[Sequence], str] | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.sequence = Sequence(replace(request, id=request.id + index))
        self.forks: list[Generation] = []
        self.chain = chain
        self.is_cancelled = False
        self.error: str | None = None
        self.hint: str | None = None
        self._seed = seed
        self._max_context = max_context
        self._grammar = grammar
        self._on_bad_logits = on_bad_logits
        eog_ids = () if codec is None else codec.eog_ids
        self._ends = tuple(sorted({*eog_ids, *params.stop_ids}))
        self._always_banned = tuple(sorted(eog_ids)) if params.ignore_eos else ()
        self._stream = codec.stream(skip_special=True, continued=True) if codec else None
        self._stops = StopStrings(params.stop_strings)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._times = _Times()

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def id(self) -> int:
        return self.sequence.request.id

    @property
    def completions(self) -> list[Generation]:
        """Of a request's first: it and the others."""
        return [self, *self.forks]

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that must not be chosen now."""
        return self.banned_after(0)

    def banned_after(self, n: int) -> tuple[int, ...]:
        """Tokens that must not be chosen after `n` more."""
        is_young = self.sequence.n_generated + n < self.params.min_tokens
        return self._ends if is_young else self._always_banned

    @property
    def tail(self) -> Tail:
        """What a step has to give at least for its next token to be chosen."""
        tail, n_banned = self.chain.tail, len(self.banned)
        if self.params.logprobs is not None or self._grammar is not None or n_banned > BANNED:
            return "logits"
        if tail == "greedy" and n_banned:
            return "sampled"
        if tail == "sampled" and self.forks and not self.sequence.n_generated:
            return "logits"  # each of its completions draws a token of its own
        return tail

    @property
    def goes_on_plainly(self) -> bool:
        """Whether its next token takes no logits and is, unless it says so itself, not its last; of
        a request whose completions have all begun."""
        sequence = self.sequence
        n = sequence.n_generated
        return (
            self.tail != "logits"
            and n + 1 != self.params.max_tokens
            and len(sequence.tokens) + 1 < self._max_context
            and (n > 0 or not self.forks)
        )

    def begin_step(self) -> None:
        for each in self.completions:
            each._times.begin()

    def choose(self, row: Any, tail: Tail) -> tuple[int, TokenLogprob | None]:
        """The next token and, if wanted, its log probability; `accept` takes it in.

        row: what a step with this tail gives: the model's logits (n_vocab,) float32, or an id,
        negative if the logits are no numbers. SamplingError, which names the position, if there is
        none.
        """
        if tail != "logits":
            if row < 0:
                raise self._unfit("none is the largest")
            self.chain.drawn()
            return int(row), None
        allowed = None if self._grammar is None else self._grammar.allowed
        try:
            id_ = self.chain.sample(row, self.sequence.tokens, self.banned, allowed)
        except LogitsError as error:
            raise self._unfit(error.message) from None
        except DeadEndError:
            raise self._dead_end() from None
        return id_, self._logprob(row, id_)

    def _logprob(self, logits: Any, id_: int) -> TokenLogprob | None:
        n_top = self.params.logprobs
        if n_top is None:
            return None
        return token_logprob(self.chain.candidates, logits, id_, n_top)

    def accept(self, id_: int, logprob: TokenLogprob | None) -> Chunk:
        """Take the next token in; the sequence has room for it."""
        self._times.token()
        self.sequence.tokens.append(id_)
        if logprob is not None:
            self._logprobs.append(logprob)
        reason: FinishReason | None = None
        may_stop = self._may_stop
        if may_stop and id_ in self._ends:
            reason, text = "stop", self._flush()
        else:
            text = self._show(id_, may_stop)
            if self._stops.matched is None and (reason := self._end_after(id_)) is not None:
                text += self._flush()
            if self._stops.matched is not None:
                reason = "stop"
        self._text.append(text)
        return Chunk(text, id_, reason, logprob)

    def end(self, error: str | None = None, hint: str | None = None) -> Chunk:
        """End without another token: cancelled, or failed with `error`."""
        self.error, self.hint = error, hint
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
            timings=self._times.timings(sequence),
            seed=self._seed,
            logprobs=None if self.params.logprobs is None else self._logprobs,
            stop=self._stops.matched,
            error=self.error,
            hint=self.hint,
        )

    @property
    def _may_stop(self) -> bool:
        return self.sequence.n_generated >= self.params.min_tokens

    def _end_after(self, id_: int) -> FinishReason | None:
        """Why nothing can follow this token of the text; None if something can."""
        if self._grammar is not None:
            if not self._grammar.accept(id_):
                self.error = f"token {id_} breaks the grammar: {self._grammar.problem}"
                self.hint = _LOOSEN
                return "error"
            if self._grammar.is_complete:
                return "stop"
        sequence = self.sequence
        is_full = (
            sequence.n_generated == self.params.max_tokens
            or len(sequence.tokens) >= self._max_context
        )
        return "length" if is_full else None

    def _unfit(self, what: str) -> LogitsError:
        text = f"the logits after {len(self.sequence.tokens)} tokens are unfit: {what}"
        if self._on_bad_logits is not None:
            try:
                text += f"; {self._on_bad_logits(self.sequence)}"
            except Exception as error:  # that must not end what the others have
                text += f"; where they come from is not known ({str(error) or repr(error)})"
        return LogitsError(text, DAMAGED)

    def _dead_end(self) -> DeadEndError:
        text = f"no token can follow the {len(self.sequence.tokens)} there are: "
        if self._grammar is None:
            what = "logit_bias, min_tokens and ignore_eos forbid all"
            return DeadEndError(text + what, _ALLOW)
        if not self._grammar.allowed.any():
            return DeadEndError(f"{text}the grammar's dead end ({self._grammar.problem})", _LOOSEN)
        what = "of those the grammar allows, the other options forbid all"
        return DeadEndError(text + what, f"{_ALLOW}, or {_LOOSEN}")

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

    def timings(self, sequence: Sequence) -> Timings:
        first = self._last if self._first is None else self._first
        begun = first if self._begun is None else self._begun
        return Timings(
            n_prompt=sequence.n_prompt,
            n_generated=sequence.n_generated,
            first_token_ms=(first - self._asked) / 1e6,
            prompt_ms=max(first - begun, 0) / 1e6,
            decode_ms=(self._last - first) / 1e6,
            n_drafted=sequence.n_drafted,
            n_accepted=sequence.n_accepted,
        )
