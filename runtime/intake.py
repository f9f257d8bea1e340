"""A prompt and its options on their way in: what can be refused is refused before anything runs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from xpuc.errors import FieldError
from xpuc.runtime.candidates import Candidates
from xpuc.runtime.dry import Breakers, find_breakers, has_dry
from xpuc.runtime.generation import Codec, Generation
from xpuc.runtime.grammar import Grammars
from xpuc.runtime.prompts import Prompt, PromptReader, check_ids
from xpuc.runtime.sampler import Chain
from xpuc.runtime.sampling_params import SamplingParams
from xpuc.runtime.scheduler import Scheduler
from xpuc.runtime.sequence import Request, Sequence

log = logging.getLogger(__name__)


class Intake:
    """Makes requests ready to be queued, and numbers them."""

    def __init__(
        self, prompts: PromptReader, codec: Codec | None, scheduler: Scheduler, *, n_vocab: int
    ) -> None:
        self._prompts = prompts
        self._codec = codec
        self._scheduler = scheduler
        self._n_vocab = n_vocab
        self._n_ids = 0
        self._breakers: dict[tuple[str, ...], Breakers] = {}
        self._grammars = Grammars(codec)
        self._candidates = Candidates()

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes = b"",
        on_bad_logits: Callable[[Sequence], str] | None = None,
    ) -> Generation:
        """The first completion of a request, with the others as its forks; RequestError.

        The i-th has the request's id + i and the seed + i.
        """
        if type(priority) is not int:
            raise FieldError(["priority"], f" is {priority!r}", "give a whole number")
        if not isinstance(salt, bytes):
            raise FieldError(["salt"], f" is {salt!r}", "give bytes")
        ids = self._prompts.read(prompt)
        self._scheduler.check(len(ids))
        self._check(params)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        request = Request(self._n_ids + 1, tuple(ids), params, priority, salt)
        self._n_ids += params.n
        completions = [
            Generation(
                request,
                Chain(
                    params,
                    seed=seed + index,
                    breakers=self._breakers_of(params),
                    candidates=self._candidates,
                ),
                seed + index,
                index=index,
                codec=self._codec,
                max_context=self._scheduler.max_tokens,
                grammar=self._grammars.start(params),
                on_bad_logits=on_bad_logits,
            )
            for index in range(params.n)
        ]
        first, *first.forks = completions
        log.info("request %d: sampler chain: %s", request.id, first.chain.describe())
        return first

    def _check(self, params: SamplingParams) -> None:
        check_ids(list(params.logit_bias), self._n_vocab, "logit_bias")
        check_ids(params.stop_ids, self._n_vocab, "stop_ids")
        if params.stop_strings:
            self._prompts.codec("a stop string")
        most = self._scheduler.queue_bound
        if params.n > most:
            raise FieldError(
                ["n"], f" is {params.n}; at most {most} can wait", "ask for fewer, more than once"
            )

    def _breakers_of(self, params: SamplingParams) -> Breakers:
        codec, texts = self._codec, tuple(params.dry_breakers)
        if codec is None or not has_dry(params):
            return {}
        if texts not in self._breakers:
            self._breakers[texts] = find_breakers(
                texts,
                codec.pieces(range(codec.n_vocab)),
                lambda text: codec.encode(text, add_bos=False),
            )
        return self._breakers[texts]
