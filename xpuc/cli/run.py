"""`xpuc run`: text in, text out."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from xpuc.cli import failures, quantities, sampling, sources
from xpuc.errors import RequestError

if TYPE_CHECKING:
    from xpuc.runtime.engine import Engine, Result
    from xpuc.runtime.model import Model


@click.command()
@click.argument("model", type=click.Path(path_type=Path), metavar="ARTIFACT|MODEL")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "-f", "--file", type=click.Path(path_type=Path), help="Read the prompt from a file; - is stdin."
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
    type=int,
    default=-1,
    show_default=True,
    metavar="N",
    help="Most tokens to generate; -1: to the end of the answer or context.",
)
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@sampling.options
@sources.loading
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
    prints prompt_ids, ids, text, finish_reason and timings. Ctrl-C ends the answer.
    """
    _check_stdin(prompt, file, rest["json_schema"], rest["grammar"])
    ctx, threads, verbose, as_json = (rest.pop(n) for n in ("ctx", "threads", "verbose", "as_json"))
    params = sampling.params(rest)
    text = sources.text(prompt, file)
    if prompt is None:
        text = text.removesuffix("\n").removesuffix("\r")
    artifact = sources.artifact(model, ctx)
    _log(verbose)
    from xpuc.runtime.engine import load

    engine = load(artifact, threads=threads, ctx=ctx, n_sequences=1, warm_rows=1)
    if verbose:
        click.echo("\n".join(cast("Model", engine.model).memory.lines()), err=True)
    asked = _prompt(artifact, text, chat, system)
    result = _generate(engine, asked, params, (lambda piece: None) if as_json else _show)
    if as_json:
        click.echo(json.dumps(_facts(result), ensure_ascii=False))
    else:
        click.echo("" if result.text.endswith("\n") else "\n", nl=False)
        click.echo(_closing(result), err=True)
    if result.error is not None:
        raise RuntimeError(result.error)
    if result.finish_reason == "cancelled":
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


def _generate(engine: Engine, prompt: Any, params: Any, show: Callable[[str], None]) -> Result:
    """Drive the engine until the answer ends, or Ctrl-C ends it."""
    with _interrupts() as interrupted:
        request = engine.add_request(prompt, params)
        while True:
            if interrupted():
                engine.cancel(request)
            for event in engine.step():
                show(event.chunk.text)
                if event.result is not None:
                    return event.result


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; the second time it interrupts at once."""
    pressed = False

    def press(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


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
    return "; ".join(
        (
            f"prompt {prompt}, {quantities.rate(t.prompt_tokens_per_s)}",
            f"first token after {quantities.duration(t.first_token_ms / 1000)}",
            f"answer {answer}, {quantities.rate(t.tokens_per_s)}"
            if t.decode_ms
            else f"answer {answer}",
            result.finish_reason,
        )
    )
