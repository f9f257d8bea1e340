"""The peer's process: llama.cpp through llama_cpp or xllamacpp, one case a line.

It imports nothing of xpuc, because its interpreter may be another one.

    argument  {"package", "model", "threads", "n_context", "n_sequences"}
    prints    {"description": "llama_cpp 0.3.16, ..."}
    reads     {"kind": "pp" | "tg", "n_tokens", "depth", "batch", "flash"}
    prints    {"seconds": 1.23} or {"error": "..."}
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from importlib.metadata import version
from typing import Any

BATCH, MICRO_BATCH = 2048, 512  # llama-bench's


class Native:
    """llama-cpp-python's binding of llama.h; runs what llama-bench runs."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self.c, self.settings = llama_cpp, settings
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), model_params)
        if not self.model:
            raise ValueError("cannot load the model")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.contexts = {flash: self.context(flash) for flash in (True, False)}
        self.states: dict[tuple[bool, int, int], Any] = {}

    def context(self, flash: bool) -> Any:
        params = self.c.llama_context_default_params()
        n_sequences = self.settings["n_sequences"]
        params.n_ctx = n_sequences * (-(-self.settings["n_context"] // 256) * 256)
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_seq_max = n_sequences
        params.n_threads = params.n_threads_batch = self.settings["threads"]
        params.flash_attn_type = int(flash)
        params.swa_full = n_sequences > 1  # as llama.h advises for several sequences
        params.no_perf = True
        made = self.c.llama_init_from_model(self.model, params)
        if not made:
            raise ValueError("cannot make a context")
        return made

    def decode(self, context: Any, rows: list[tuple[int, int, int]]) -> None:
        """(id, position, sequence) rows in one batch, logits of the last row of each sequence."""
        batch = self.c.llama_batch_init(len(rows), 0, 1)
        last = {sequence: row for row, (_, _, sequence) in enumerate(rows)}
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = last[sequence] == row
        batch.n_tokens = len(rows)
        code = self.c.llama_decode(context, batch)
        self.c.llama_synchronize(context)
        self.c.llama_batch_free(batch)
        if code:
            raise ValueError(f"llama_decode returned {code}")

    def prefill(self, context: Any, row: int, start: int, end: int) -> None:
        ids = self.ids(row)
        for first in range(start, end, BATCH):
            places = range(first, min(first + BATCH, end))
            self.decode(context, [(ids[i], i, row) for i in places])

    def ids(self, row: int) -> list[int]:
        draw = random.Random(f"1:{row}")
        return [draw.randrange(self.n_vocab) for _ in range(self.settings["n_context"])]

    def fill(self, flash: bool, row: int, depth: int) -> None:
        """The K/V of `depth` tokens: computed once, then kept aside as llama-bench does."""
        context, key = self.contexts[flash], (flash, row, depth)
        if key in self.states:
            state = self.states[key]
            self.c.llama_state_seq_set_data(context, state, len(state), row)
            return
        self.prefill(context, row, 0, depth)
        state = (ctypes.c_uint8 * self.c.llama_state_seq_get_size(context, row))()
        self.c.llama_state_seq_get_data(context, state, len(state), row)
        self.states[key] = state

    def run(self, case: dict[str, Any]) -> float:
        context, depth = self.contexts[case["flash"]], case["depth"]
        memory = self.c.llama_get_memory(context)
        # A throwaway token wakes the threads.
        self.c.llama_memory_clear(memory, False)
        self.decode(context, [(0, 0, 0)])
        self.c.llama_memory_clear(memory, False)
        rows = [self.ids(row) for row in range(case["batch"])]
        for row in range(case["batch"] if depth else 0):
            self.fill(case["flash"], row, depth)
        end = depth + case["n_tokens"]
        start = time.perf_counter()
        if case["kind"] == "pp":
            self.prefill(context, 0, depth, end)
        else:
            for i in range(depth, end):
                self.decode(context, [(ids[i], i, row) for row, ids in enumerate(rows)])
        return time.perf_counter() - start

    @property
    def description(self) -> str:
        system = (self.c.llama_print_system_info() or b"").decode()
        return f"llama-cpp-python {version('llama_cpp_python')} ({' '.join(system.split())})"


class Server:
    """xllamacpp's server object, which reports the times of each request."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import xllamacpp

        self.x, self.settings = xllamacpp, settings
        if settings["n_sequences"] > 1:
            raise ValueError("xllamacpp measures one sequence only; llama-cpp-python does batches")
        self.servers: dict[bool, Any] = {}

    def server(self, flash: bool) -> Any:
        params = self.x.CommonParams()
        params.model.path = self.settings["model"]
        params.n_ctx = self.settings["n_context"] + 64
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_parallel, params.n_gpu_layers, params.verbosity = 1, 0, -1
        params.cache_ram_mib = 0  # else a prompt that ran in an earlier round is not read again
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.settings["threads"]
        kinds = self.x.llama_flash_attn_type
        params.flash_attn_type = (
            kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        return self.x.Server(params)

    def ask(self, flash: bool, ids: list[int], n: int) -> dict[str, float]:
        if flash not in self.servers:
            self.servers[flash] = self.server(flash)
        request = {
            "prompt": ids, "n_predict": n, "ignore_eos": True, "cache_prompt": True,
            "temperature": 0, "top_k": 1, "samplers": ["top_k"],
        }  # fmt: skip
        reply = self.servers[flash].handle_completions(request)
        answer: dict[str, Any] = json.loads(reply) if isinstance(reply, str) else reply
        return {name: float(value) for name, value in answer["timings"].items()}

    def run(self, case: dict[str, Any]) -> float:
        """One request fills the context; the next finds it cached, and is timed."""
        draw = random.Random("1:0")
        ids = [draw.randrange(1000) for _ in range(case["depth"] + case["n_tokens"] + 1)]
        flash, depth, n = bool(case["flash"]), int(case["depth"]), int(case["n_tokens"])
        if case["kind"] == "pp":
            self.ask(flash, [1, *ids[1:depth]] if depth else [2], 1)
            timings = self.ask(flash, [1, *ids[1 : depth + n]], 1)
            return n / timings["prompt_per_second"]
        timings = self.ask(flash, [1, *ids[1 : max(depth, 1)]], n + 1)
        return n / timings["predicted_per_second"]

    @property
    def description(self) -> str:
        return (
            f"xllamacpp {version('xllamacpp')} ({' '.join(str(self.x.get_system_info()).split())})"
        )


def main() -> None:
    settings = json.loads(sys.argv[1])
    # llama.cpp logs to stdout and stderr as it likes; the answers keep a channel of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**facts: Any) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    try:
        native = settings["package"] == "llama_cpp"
        party: Native | Server = Native(settings) if native else Server(settings)
        answer(description=party.description)
        for line in sys.stdin:
            answer(seconds=party.run(json.loads(line)))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
