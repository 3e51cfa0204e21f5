"""DeepSeek-V4's long context on this machine.

``run`` reads a prompt of real (random) tokens up to the whole context on a narrow model of the architecture, answers
one token, and holds the peak of the process's own memory against the plan:

    .venv/bin/python benchmarks/long_context.py run [--model synth/deepseek-v4-narrow-s1] [--tokens 1048576]

``decode`` measures decoding at several contexts, round about, on a model of full width. Cache rows beyond the first 512
tokens are copies of one computed block: right in size, format and place, and enough for a measurement of speed:

    .venv/bin/python benchmarks/long_context.py decode [--model synth/deepseek-v4-flash-l4-s1] [--contexts 4096,1048320]

The models come from ``hotset synth deepseek-v4-narrow`` and ``hotset synth deepseek-v4-flash --layers 4``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

import hotset
from hotset.api import describe_model, find_seats, plan_model
from hotset.engine.batch import Segment, StepBatch
from hotset.engine.native import NativeExecutor
from hotset.machine.native import isa_in_use
from hotset.machine.topology import read_topology
from hotset.plan.budget import Wish, require_fit
from hotset.program.cache import BLOCK_TOKENS, num_blocks
from hotset.program.cost import decode_bytes

REPORT_TOKENS = 65536
WARM_TOKENS = 512
ROUND_STEPS = 16
NUM_ROUNDS = 9
NUM_OPS = 6


def own_memory() -> int:
    """Bytes of this process's anonymous memory (RssAnon)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("error: /proc/self/status has no RssAnon")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Read ``options.tokens - 1`` tokens and answer one."""
    described = describe_model(options.model)
    with described.checkpoint:
        vocab_size = described.spec.vocab_size
    prompt = np.random.default_rng(1).integers(3, vocab_size, options.tokens - 1, dtype=np.int32)
    before = own_memory()
    engine = hotset.load(options.model, threads=options.threads, context=options.tokens)
    with engine:
        plan = engine.plan
        request = engine.submit(prompt, hotset.Sampling(max_tokens=1, ignore_eos=True))
        started = reported = time.perf_counter()
        peak, done, shown, rates = own_memory(), 0, 0, []
        while engine.step():
            done = min(done + plan.prefill_chunk, len(prompt))
            peak = max(peak, own_memory())
            if done - shown >= REPORT_TOKENS or done == len(prompt) != shown:
                now = time.perf_counter()
                rates.append((done - shown) / (now - reported))
                print(f"{done:,} tokens, {now - started:.0f} s, {rates[-1]:,.0f} tok/s", file=sys.stderr)
                shown, reported = done, now
        seconds = time.perf_counter() - started
        *_, last = request
    if last.finish_reason != "length" or last.num_prompt_tokens != len(prompt):
        raise SystemExit(f"error: the run ended with {last}")
    used = peak - before
    return {
        "model": options.model, "tokens": options.tokens, "seconds": round(seconds, 1),
        "first_tokens_per_s": round(rates[0]), "last_tokens_per_s": round(rates[-1]),
        "planned_bytes": plan.resident_bytes, "peak_bytes": used,
        "peak_over_plan": round(used / plan.resident_bytes, 4),
    }  # fmt: skip


class Bench:
    """An executor with one sequence per context, its cache filled."""

    def __init__(self, model: str, contexts: list[int], threads: int | None) -> None:
        topology = read_topology()
        described = describe_model(model)
        with described.checkpoint:
            longest = max(contexts) + (NUM_ROUNDS + 2) * ROUND_STEPS
            wish = Wish(longest, len(contexts), WARM_TOKENS, threads, snapshots=0)
            seats = find_seats(topology, described.spec, described.formats, wish)
            plan = plan_model(described, wish)
            require_fit(plan)
            self.executor = NativeExecutor(described.spec, described.formats, plan, seats, isa_in_use())
            self.executor.load(described.checkpoint, described.account)
        self.read = {c: decode_bytes(described.spec.program, described.formats, c) for c in contexts}
        self.vocab_size = described.spec.vocab_size
        self.random = np.random.default_rng(0)
        share = num_blocks(longest)
        self.blocks = [np.arange(i * share, (i + 1) * share, dtype=np.int32) for i in range(len(contexts))]
        self.position = list(contexts)
        self._fill(contexts)

    def step(self, sequence: int, count: int, position: int) -> None:
        tokens = self.random.integers(0, self.vocab_size, count).astype(np.int32)
        blocks = self.blocks[sequence][: num_blocks(position + count)]
        self.executor.step(
            StepBatch(tokens, [Segment(0, count, position, blocks, sequence)], np.array([count - 1], np.int32))
        )

    def _fill(self, contexts: list[int]) -> None:
        self.step(0, WARM_TOKENS, 0)
        block = np.empty(self.executor.block_bytes, np.uint8)
        self.executor.copy_block(WARM_TOKENS // BLOCK_TOKENS - 1, block)
        for sequence, context in enumerate(contexts):
            for block_id in self.blocks[sequence]:
                self.executor.restore_block(int(block_id), block)
            self.step(sequence, WARM_TOKENS, context - WARM_TOKENS)

    def round(self, sequence: int) -> float:
        """Seconds a token, the median of a few."""
        times = []
        for _ in range(ROUND_STEPS):
            started = time.perf_counter()
            self.step(sequence, 1, self.position[sequence])
            times.append(time.perf_counter() - started)
            self.position[sequence] += 1
        return statistics.median(times)

    def ops(self, sequence: int) -> dict[str, float]:
        """Milliseconds a token by kind of op, of thread 0 without its waits; the longest few."""
        self.executor.profile(True)
        self.round(sequence)
        spent: Counter[str] = Counter()
        for kind, ns, _ in self.executor.op_times():
            spent[kind] += ns
        self.executor.profile(False)
        return {kind: round(ns / ROUND_STEPS / 1e6, 2) for kind, ns in spent.most_common(NUM_OPS)}


def decode(options: argparse.Namespace) -> dict[str, object]:
    """Tokens per second at each context; rounds alternate, so that the machine's load meets all of them."""
    bench = Bench(options.model, options.contexts, options.threads)
    seconds: list[list[float]] = [[] for _ in options.contexts]
    for _ in range(NUM_ROUNDS):
        for i in range(len(options.contexts)):
            seconds[i].append(bench.round(i))
    ratios = [statistics.median(a / b for a, b in zip(seconds[0], s, strict=True)) for s in seconds]
    spent = [bench.ops(i) for i in range(len(options.contexts))]
    rows = [
        {
            "context": context, "tokens_per_s": round(1 / statistics.median(s), 2),
            "slowest": round(1 / max(s), 2), "fastest": round(1 / min(s), 2), "read_bytes": bench.read[context],
            "gb_per_s": round(bench.read[context] / statistics.median(s) / 1e9, 1),
            "of_first": round(ratio, 3), "ms_of_ops": ops,
        }
        for context, s, ratio, ops in zip(options.contexts, seconds, ratios, spent, strict=True)
    ]  # fmt: skip
    return {"model": options.model, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, model in (("run", "synth/deepseek-v4-narrow-s1"), ("decode", "synth/deepseek-v4-flash-l4-s1")):
        command = commands.add_parser(name)
        command.add_argument("--model", default=model)
        command.add_argument("--threads", type=int)
        if name == "run":
            command.add_argument("--tokens", type=int, default=1 << 20)
        else:
            command.add_argument(
                "--contexts", type=lambda text: [int(c) for c in text.split(",")], default=[4096, (1 << 20) - 256]
            )
    options = parser.parse_args()
    print(json.dumps(run(options) if options.command == "run" else decode(options), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
