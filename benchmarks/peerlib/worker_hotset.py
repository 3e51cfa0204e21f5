"""Worker for hotset through its Python API, tokenizer and text included."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from pathlib import Path
from typing import Any

import hotset

sys.path.insert(0, str(Path(__file__).parent.parent))
from peerlib.protocol import FIRST_TOKEN_PROMPT, serve


class Hotset:
    """One engine with its defaults; it must report that no prompt token came from its cache."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.path = ""
        self.threads = 0

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        self.path, self.threads = path, threads
        start = time.perf_counter()
        self.engine = hotset.load(path, threads=threads, context=context, max_sequences=1)
        load_s = time.perf_counter() - start
        first = self.run(FIRST_TOKEN_PROMPT, 0)
        return {
            "version": f"hotset {importlib.metadata.version('hotset')}",
            "settings": f"hotset.load(path, threads={threads}, context={context}, max_sequences=1), "
            "all else default; text decoding is part of the times",
            "load_s": load_s,
            "first_token_s": first["prefill_s"],
        }

    def run(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        sampling = hotset.Sampling(max_tokens=new_tokens + 1, ignore_eos=True)
        *_, last = self.engine.generate(prompt, sampling)
        self._check(last, new_tokens)
        return {"prefill_s": last.timings.prefill_s, "decode_s": last.timings.decode_s, "num_new": new_tokens}

    def batch(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        # The cache is reserved at load, so room for many sequences is another engine.
        self.engine.close()
        room = -(-(len(prompts[0]) + new_tokens + 1) // 256) * 256
        self.engine = hotset.load(self.path, threads=self.threads, context=room, max_sequences=len(prompts))
        sampling = hotset.Sampling(max_tokens=new_tokens + 1, ignore_eos=True)
        requests = [self.engine.submit(prompt, sampling) for prompt in prompts]
        # The prompts together are shorter than a prefill chunk, so one step gives every request its first token.
        self.engine.step()
        start = time.perf_counter()
        for _ in range(new_tokens):
            self.engine.step()
        decode_s = time.perf_counter() - start
        if not all(request.is_finished for request in requests):
            raise RuntimeError(f"{new_tokens} steps after the first did not end all {len(prompts)} requests")
        for request in requests:
            *_, last = request
            self._check(last, new_tokens)
        return {"decode_s": decode_s, "num_new": new_tokens * len(prompts)}

    @staticmethod
    def _check(last: Any, new_tokens: int) -> None:
        if last.finish_reason != "length" or len(last.token_ids) != new_tokens + 1:
            raise RuntimeError(f"{len(last.token_ids)} tokens, {last.finish_reason}; expected {new_tokens + 1}")
        if last.cached_tokens:
            raise RuntimeError(f"{last.cached_tokens} prompt tokens came from the cache, expected none")


if __name__ == "__main__":
    serve(Hotset())
