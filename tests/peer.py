"""llama.cpp as an optional second opinion, through `llama_cpp` (llama-cpp-python) or `xllamacpp`.

Both answer one question: which ids does llama.cpp expect at each position, and with what logprobs.
The K/V cache is float32, so that on an F32 model only the order of summation is left to differ, and
gelu: llama.cpp looks it up in a table of float16.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MISSING = "optional peer: neither llama_cpp (llama-cpp-python) nor xllamacpp is installed"
THREADS = 2


def available() -> str | None:
    """The package that will answer, or None."""
    return next((name for name in ("llama_cpp", "xllamacpp") if find_spec(name)), None)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def logprobs(
    path: Path, ids: Sequence[int], *, vocab: int, flash: bool = False
) -> NDArray[np.float64]:
    """Row i holds the logprobs of what follows ids[i]: (n, vocab). Raises ValueError if llama.cpp
    refuses the file."""
    if available() == "llama_cpp":
        return log_softmax(from_llama_cpp(path, ids, flash=flash))
    found = from_xllamacpp(path, ids, vocab, flash=flash)
    assert found.shape == (len(ids), vocab)
    return found


def top_logprobs(
    path: Path, ids: Sequence[int], k: int, *, flash: bool = False
) -> list[list[tuple[int, float]]]:
    """The k likeliest (id, logprob) after each of ids, likeliest first."""
    if available() == "llama_cpp":
        every = log_softmax(from_llama_cpp(path, ids, flash=flash))
        best = np.argsort(-every, axis=-1)[:, :k]
        return [[(int(j), float(row[j])) for j in js] for row, js in zip(every, best, strict=True)]
    return [answer[:k] for answer in answers(path, ids, k, flash=flash)]


def from_llama_cpp(path: Path, ids: Sequence[int], *, flash: bool) -> NDArray[np.float32]:
    """Logits (n, vocab) of one prefill."""
    import llama_cpp

    n = max(64, -(-len(ids) // 64) * 64)
    model = llama_cpp.Llama(
        str(path),
        n_ctx=n,
        n_batch=n,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        n_gpu_layers=0,
        logits_all=True,
        flash_attn=flash,
        swa_full=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    try:
        model.eval(list(ids))
        return np.array(model.scores[: len(ids)])
    finally:
        model.close()


def from_xllamacpp(
    path: Path, ids: Sequence[int], vocab: int, *, flash: bool
) -> NDArray[np.float64]:
    rows = np.full((len(ids), vocab), -np.inf)
    for row, answer in zip(rows, answers(path, ids, vocab, flash=flash), strict=True):
        for token, logprob in answer:
            row[token] = logprob
    return rows


def answers(
    path: Path, ids: Sequence[int], k: int, *, flash: bool
) -> list[list[tuple[int, float]]]:
    """What xllamacpp's server expects after every prefix; it keeps the prefix in its cache."""
    server = xllamacpp_server(path, len(ids), flash=flash)
    found = []
    for end in range(1, len(ids) + 1):
        # The server keeps back the logprobs of text that ends inside a character: ask for a letter.
        # They are those before sampling, so the grammar does not touch them.
        reply: Any = server.handle_completions(
            {
                "prompt": list(ids[:end]),
                "n_predict": 1,
                "n_probs": k,
                "cache_prompt": True,
                "grammar": "root ::= [a-z]",
            }
        )
        reply = json.loads(reply) if isinstance(reply, str) else reply
        content = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found.append([(int(each["id"]), float(each["logprob"])) for each in content])
    del server
    gc.collect()  # its threads end with it, not with the process
    return found


def xllamacpp_server(path: Path, n: int, *, flash: bool) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = max(64, n + 8)
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.verbosity = -1
    params.warmup = False
    params.swa_full = True
    params.cpuparams.n_threads = THREADS
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = (
        kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise ValueError(f"llama.cpp refuses {path.name}: {error}") from error
