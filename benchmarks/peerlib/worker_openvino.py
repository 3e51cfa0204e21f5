"""Worker for OpenVINO GenAI: its continuous batching pipeline reads the GGUF itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

sys.path.insert(0, str(Path(__file__).parent.parent))
from peerlib.protocol import FIRST_TOKEN_PROMPT, serve

BATCH_TOKENS = 512
CACHE_BLOCK_TOKENS = 32
SPARE_BLOCKS = 8


class OpenVino:
    """One pipeline for single requests and for batches; its prefix cache is off."""

    def __init__(self) -> None:
        self.pipeline: Any = None
        self.next_request_id = 0

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        start = time.perf_counter()
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.num_kv_blocks = context // CACHE_BLOCK_TOKENS + SPARE_BLOCKS
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        load_s = time.perf_counter() - start
        first = self.run(FIRST_TOKEN_PROMPT, 0)
        return {
            "version": f"openvino-genai {openvino_genai.__version__}",
            "settings": f"ContinuousBatchingPipeline on the GGUF, prefix cache off, {BATCH_TOKENS} tokens a step, "
            f"INFERENCE_NUM_THREADS = {threads}, all else default (8-bit cache, BF16 arithmetic where the CPU has it)",
            "load_s": load_s,
            "first_token_s": first["prefill_s"],
        }

    def run(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        prefill_s, decode_s, num_new = self._generate([prompt], new_tokens)
        return {"prefill_s": prefill_s, "decode_s": decode_s, "num_new": num_new}

    def batch(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        _, decode_s, num_new = self._generate(prompts, new_tokens)
        return {"decode_s": decode_s, "num_new": num_new}

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, int]:
        """Step the pipeline; return seconds until every request has a token, seconds from there on, tokens in these.

        A step either reads a part of the prompts or gives one token to every running request, so the tokens
        can be counted by steps once all prompts are in.
        """
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens + 1
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        start = time.perf_counter()
        handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self.pipeline.add_request(self.next_request_id, ids, config))
            self.next_request_id += 1
        for _ in range(-(-sum(map(len, prompts)) // BATCH_TOKENS)):
            self.pipeline.step()
        first_token = time.perf_counter()
        num_steps = 0
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            num_steps += 1
        end = time.perf_counter()
        if num_steps != new_tokens:
            raise RuntimeError(f"expected {new_tokens} steps after the prompts, found {num_steps}")
        for handle in handles:
            num_tokens = len(handle.read_all()[0].generated_ids)
            if num_tokens != new_tokens + 1:
                raise RuntimeError(f"expected {new_tokens + 1} tokens, found {num_tokens}")
        return first_token - start, end - first_token, num_steps * len(prompts)


if __name__ == "__main__":
    serve(OpenVino())
