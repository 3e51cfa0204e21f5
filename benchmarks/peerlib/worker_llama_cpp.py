"""Worker for llama.cpp through llama-cpp-python's low-level calls (no Python sampler, no text in the timed part)."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from peerlib.protocol import FIRST_TOKEN_PROMPT, serve

BATCH_TOKENS = 512


class LlamaCpp:
    """One model and one context; a second context, divided among the sequences, is made for ``batch`` only."""

    def __init__(self) -> None:
        llama_cpp.llama_backend_init()
        self.model: Any = None
        self.context: Any = None
        self.threads = 0
        self.vocab_size = 0
        self.batch_buffer = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        self.threads = threads
        start = time.perf_counter()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.context = self._new_context(context, 1)
        load_s = time.perf_counter() - start
        first = self.run(FIRST_TOKEN_PROMPT, 0)
        features = llama_cpp.llama_print_system_info().decode().strip(" |")
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "settings": f"native build ({features}); mmap, weight repacking on, flash attention on, F16 cache, "
            f"n_batch = n_ubatch = {BATCH_TOKENS}, n_threads = {threads}, greedy by argmax over the raw logits",
            "load_s": load_s,
            "first_token_s": first["prefill_s"],
        }

    def run(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        self._forget(self.context)
        start = time.perf_counter()
        for first in range(0, len(prompt), BATCH_TOKENS):
            tokens = prompt[first : first + BATCH_TOKENS]
            is_last = first + len(tokens) == len(prompt)
            rows = [(token, first + index, 0, False) for index, token in enumerate(tokens)]
            if is_last:
                rows[-1] = (*rows[-1][:3], True)
            self._decode(self.context, rows)
        token = self._best(self.context, -1)
        first_token = time.perf_counter()
        for position in range(len(prompt), len(prompt) + new_tokens):
            self._decode(self.context, [(token, position, 0, True)])
            token = self._best(self.context, 0)
        end = time.perf_counter()
        return {"prefill_s": first_token - start, "decode_s": end - first_token, "num_new": new_tokens}

    def batch(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        length = len(prompts[0])
        # The cache of this context is divided evenly, so that a sequence attends over its own rows only.
        rows_each = -(-(length + new_tokens + 1) // 256) * 256
        context = self._new_context(rows_each * len(prompts), len(prompts))
        try:
            rows, outputs = [], []
            for sequence, prompt in enumerate(prompts):
                rows += [(token, i, sequence, i == len(prompt) - 1) for i, token in enumerate(prompt)]
                outputs.append(len(rows) - 1)
            self._decode(context, rows)
            tokens = [self._best(context, output) for output in outputs]
            start = time.perf_counter()
            for position in range(length, length + new_tokens):
                self._decode(context, [(token, position, sequence, True) for sequence, token in enumerate(tokens)])
                tokens = [self._best(context, index) for index in range(len(tokens))]
            decode_s = time.perf_counter() - start
        finally:
            llama_cpp.llama_free(context)
        return {"decode_s": decode_s, "num_new": new_tokens * len(prompts)}

    def _new_context(self, num_tokens: int, num_sequences: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = num_sequences
        params.n_outputs_max = params.n_outputs_max_per_seq = 0
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context = llama_cpp.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {num_tokens} tokens")
        return context

    @staticmethod
    def _forget(context: Any) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run rows of (token, position, sequence, want logits)."""
        batch = self.batch_buffer
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, is_output) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = is_output
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, context: Any, index: int) -> int:
        """Return the best token of one output row; reading the logits waits for the step to finish."""
        pointer = llama_cpp.llama_get_logits_ith(context, index)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self.vocab_size,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp())
