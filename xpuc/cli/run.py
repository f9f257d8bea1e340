"""`xpuc run`: text in, text out."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from xpuc import interrupts
from xpuc.cli import (
    engine_options,
    failures,
    parameter_types,
    quantities,
    sampling,
    shared_options,
    sources,
)
from xpuc.errors import RequestError

if TYPE_CHECKING:
    from xpuc.runtime.engine import Engine, Result
    from xpuc.runtime.model import Model
    from xpuc.runtime.sampling_params import SamplingParams


@click.command()
@click.argument("model", type=parameter_types.PATH, metavar="ARTIFACT|MODEL")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "-f", "--file", type=parameter_types.PATH, help="Read the prompt from a file; - is stdin."
)
@click.option(
    "--chat/--raw",
    "chat",
    default=None,
    help="Put the prompt into the model's chat template, or send it as it is. Default: --chat where"
    " the checkpoint brings a template (as instruct models do), else --raw.",
)
@click.option(
    "-n",
    "--n-predict",
    "max_tokens",
    type=click.IntRange(min=-1),
    default=-1,
    show_default=True,
    metavar="N",
    help="Most tokens to generate; -1: to the end of the answer or context.",
)
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option(
    "--completions",
    "n",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Answers to the prompt, with the seed and those after it; printed at their end, with a"
    " line --- between.",
)
@sampling.options
@shared_options.loading
@engine_options.options
@click.option(
    "--find-bad-layer",
    is_flag=True,
    help="If the model gives logits that are no numbers, say in which layer the first of them is.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Say what is loaded, and the sampler chain, on stderr."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text."
)
def command(
    model: Path,
    prompt: str | None,
    file: Path | None,
    chat: bool | None,
    system: str | None,
    **rest: Any,
) -> None:
    """Generate text.

    An ARTIFACT runs as it is; a MODEL (GGUF) is compiled into the cache first. The prompt is that
    of -p or -f, else stdin; one newline at the end of a file or of stdin is left out. --json
    prints prompt_ids, ids, text, finish_reason and timings, and under "others" the same of further
    completions. Ctrl-C ends the answer.
    """
    _check_stdin(prompt, file, rest["json_schema"], rest["grammar"])
    ctx, threads, verbose, as_json = (rest.pop(n) for n in ("ctx", "threads", "verbose", "as_json"))
    asked_of_engine = engine_options.arguments(rest)
    asked_of_engine["find_bad_layer"] = rest.pop("find_bad_layer")
    params = sampling.params(rest)
    text = sources.text(prompt, file)
    if prompt is None:
        text = text.removesuffix("\n").removesuffix("\r")
    artifact = sources.artifact(model, ctx)
    _log(verbose)
    asked = _prompt(artifact, text, chat, system)
    from xpuc.runtime.engine import load

    with load(
        artifact, threads=threads, ctx=ctx, n_sequences=_side_by_side(artifact, params.n),
        warm_rows=1, **asked_of_engine,
    ) as engine:  # fmt: skip
        if verbose:
            click.echo("\n".join(cast("Model", engine.model).memory.lines()), err=True)
        shows_at_once = params.n == 1 and not as_json
        results = _generate(engine, asked, params, _show if shows_at_once else lambda piece: None)
        _print(results, as_json=as_json, is_shown=shows_at_once)
    _end(results)


def _side_by_side(artifact: Path, n: int) -> int:
    """For how many of `n` completions the K/V pool is made."""
    from xpuc.artifact import read_manifest

    return min(n, read_manifest(artifact).max_batch)


def _print(results: list[Result], *, as_json: bool, is_shown: bool) -> None:
    if as_json:
        first, *others = map(_facts, results)
        click.echo(json.dumps(first | {"others": others}, ensure_ascii=False))
        return
    for place, result in enumerate(results):
        if place:
            click.echo("---")
        text = "" if is_shown else result.text
        click.echo(text + ("" if result.text.endswith("\n") else "\n"), nl=False)
        click.echo(_closing(result), err=True)


def _end(results: list[Result]) -> None:
    """As the answers ended."""
    for result in results:
        if result.error is not None:
            if result.hint is None:
                raise RuntimeError(result.error)
            raise RequestError(result.error, result.hint)
    if any(result.finish_reason == "cancelled" for result in results):
        raise click.exceptions.Exit(failures.INTERRUPTED)


def _check_stdin(prompt: str | None, file: Path | None, *others: Path | None) -> None:
    is_prompt = prompt is None and (file is None or str(file) == "-")
    if is_prompt + [str(each) for each in others].count("-") > 1:
        raise RequestError("stdin is asked for twice", "give one of the two as a file, or with -p")


def _log(verbose: bool) -> None:
    """The engine's log lines go to stderr, or nowhere."""
    import logging
    import sys

    log = logging.getLogger("xpuc")
    log.handlers = [logging.StreamHandler(sys.stderr) if verbose else logging.NullHandler()]
    log.setLevel(logging.INFO)
    log.propagate = False


def _prompt(artifact: Path, text: str, chat: bool | None, system: str | None) -> Any:
    """The text, or the messages of a chat."""
    from xpuc.artifact import read_manifest

    template = read_manifest(artifact).tokenizer.get("chat_template")
    if chat is None:
        # A template that only the vocabulary suggests says nothing about how the model was trained.
        chat = template == "gguf" or system is not None
    if not chat:
        if system is not None:
            raise RequestError(
                "--system: goes into a chat template, and --raw uses none",
                "leave one of the two out",
            )
        return text
    if template is None:
        raise RequestError(
            f"{artifact}: the model has no chat template", "use --raw, and leave --system out"
        )
    messages = [{"role": "user", "content": text}]
    return [{"role": "system", "content": system}, *messages] if system is not None else messages


def _generate(
    engine: Engine, prompt: Any, params: SamplingParams, show: Callable[[str], None]
) -> list[Result]:
    """Drive the engine until the answers end, or Ctrl-C ends them."""
    results: dict[int, Result] = {}
    pressed = threading.Event()
    with interrupts.noted(pressed):
        request = engine.add_request(prompt, params)
        while len(results) < params.n:
            if pressed.is_set():
                engine.cancel(request)
            for event in engine.step():
                show(event.chunk.text)
                if event.result is not None:
                    results[event.index] = event.result
    return [results[index] for index in range(params.n)]


def _show(piece: str) -> None:
    if piece:
        click.echo(piece, nl=False)


def _facts(result: Result) -> dict[str, Any]:
    timings = result.timings
    return {
        "prompt_ids": result.prompt_ids,
        "ids": result.ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "seed": result.seed,
        "timings": dataclasses.asdict(timings)
        | {
            "prompt_tokens_per_s": timings.prompt_tokens_per_s,
            "tokens_per_s": timings.tokens_per_s,
        },
    }


def _closing(result: Result) -> str:
    t = result.timings
    prompt, answer = (quantities.count(n, "token") for n in (t.n_prompt, t.n_generated))
    parts = [
        f"prompt {prompt}, {quantities.rate(t.prompt_tokens_per_s)}",
        f"first token after {quantities.duration(t.first_token_ms / 1000)}",
        f"answer {answer}, {quantities.rate(t.tokens_per_s)}"
        if t.decode_ms
        else f"answer {answer}",
    ]
    if t.n_drafted:
        parts.append(f"{t.n_accepted} of {quantities.count(t.n_drafted, 'draft token')} accepted")
    return "; ".join([*parts, result.finish_reason])
