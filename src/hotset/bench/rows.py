"""The rows of a benchmark: decode at a depth, and prefill, each with its ceiling measured in between.

Prompts are random tokens, so nothing can be reused from one row or repeat to the next; the count of cached
tokens is kept and a row with any is refused. Memory bandwidth of a shared machine changes from minute to
minute, so the ceiling is measured directly before and after every sample, and shares are taken in pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hotset.bench.costs import ModelCosts
from hotset.engine.engine import Engine
from hotset.engine.events import Finished
from hotset.engine.request import Request
from hotset.engine.sampling import Sampling
from hotset.errors import InternalError
from hotset.machine.samples import Samples

#: Steps of one decode sample, and steps before the first: the same for every row, so that rows compare.
DECODE_STEPS = 32
WARM_UP_STEPS = 2
#: How long each measurement of a ceiling takes.
CEILING_SECONDS = 0.1
#: A larger share of the ceiling says that it was none.
MOST_SHARE = 1.05


class Meter(Protocol):
    """What the rows need of :class:`hotset.machine.probe.CeilingMeter`."""

    def measure_read(self, seconds: float) -> Samples: ...

    def measure_compute(self, kind: str, seconds: float) -> Samples: ...

    def compute_kinds(self) -> list[tuple[str, str]]: ...


@dataclass(frozen=True)
class Sample:
    """One timed stretch and the ceilings around it (medians, before and after)."""

    num_tokens: int
    seconds: float
    num_bytes: int
    num_ops: int
    read_ceilings: tuple[float, ...]
    compute_ceilings: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def read_share(self) -> float:
        """Bytes read per second, as a share of the read bandwidth around the sample."""
        return self.bytes_per_s / statistics.mean(self.read_ceilings)

    @property
    def compute_share(self) -> float | None:
        """Operations per second, as a share of the arithmetic rate around the sample; ``None`` for decode."""
        if not self.compute_ceilings:
            return None
        return self.num_ops / self.seconds / statistics.mean(self.compute_ceilings)


@dataclass(frozen=True)
class Row:
    """One line of the benchmark."""

    kind: str  # "decode" or "prefill"
    num_tokens: int  # tokens in the cache at the start of decoding, or tokens of the prompt
    num_sequences: int
    compute_kind: str | None
    cached_tokens: int
    samples: tuple[Sample, ...]

    @property
    def is_refused(self) -> bool:
        return self.cached_tokens != 0

    @property
    def tokens_per_s(self) -> Samples:
        return Samples(tuple(sample.tokens_per_s for sample in self.samples))

    @property
    def bytes_per_token(self) -> float:
        return statistics.median(sample.num_bytes / sample.num_tokens for sample in self.samples)

    @property
    def bytes_per_s(self) -> float:
        return statistics.median(sample.bytes_per_s for sample in self.samples)

    @property
    def read_share(self) -> float:
        return statistics.median(sample.read_share for sample in self.samples)

    @property
    def exceeds_ceiling(self) -> bool:
        """Whether more was read than the memory is said to give: the weights fit the caches, or something else held up
        the measurement of the ceiling."""
        return not self.is_refused and self.read_share > MOST_SHARE

    @property
    def read_ceiling(self) -> float:
        """Bytes per second, over all measurements of this row."""
        return statistics.median(value for sample in self.samples for value in sample.read_ceilings)

    @property
    def compute_share(self) -> float | None:
        shares = [sample.compute_share for sample in self.samples if sample.compute_share is not None]
        return statistics.median(shares) if shares else None

    def to_json(self) -> dict[str, Any]:
        """Everything, with raw samples. A refused row has no headline, a ceiling that was passed no share."""
        row: dict[str, Any] = {
            "kind": self.kind,
            "num_tokens": self.num_tokens,
            "num_sequences": self.num_sequences,
            "cached_tokens": self.cached_tokens,
            "is_refused": self.is_refused,
        }
        if not self.is_refused:
            row |= {
                "tokens_per_s": self.tokens_per_s.to_json(),
                "bytes_per_token": self.bytes_per_token,
                "bytes_per_s": self.bytes_per_s,
                "read_ceiling_bytes_per_s": self.read_ceiling,
                "read_share": None if self.exceeds_ceiling else self.read_share,
                "exceeds_ceiling": self.exceeds_ceiling,
                "compute_kind": self.compute_kind,
                "compute_share": self.compute_share,
            }
        row["samples"] = [
            {
                "num_tokens": sample.num_tokens,
                "seconds": sample.seconds,
                "num_bytes": sample.num_bytes,
                "num_ops": sample.num_ops,
                "read_ceilings_bytes_per_s": list(sample.read_ceilings),
                "compute_ceilings_ops_per_s": list(sample.compute_ceilings),
            }
            for sample in self.samples
        ]
        return row


@dataclass(frozen=True)
class Bench:
    """What all rows of one run share."""

    engine: Engine
    costs: ModelCosts
    meter: Meter
    prefill_chunk: int
    repeats: int
    rng: np.random.Generator
    clock: Callable[[], float] = time.perf_counter

    def random_prompt(self, num_tokens: int) -> list[int]:
        """Tokens that no other prompt begins with."""
        return self.rng.integers(0, self.engine.vocab_size, num_tokens).tolist()

    def decode_row(self, context: int, num_sequences: int) -> Row:
        """Decode ``num_sequences`` sequences together, beginning when each has ``context`` tokens in the cache."""
        handles = fill_context(self.engine, [self.random_prompt(context) for _ in range(num_sequences)])
        for _ in range(WARM_UP_STEPS):
            self.engine.step()
        seconds, ceilings = [], [self._read_ceiling()]
        for _ in range(self.repeats):
            begin = self.clock()
            for _ in range(DECODE_STEPS):
                self.engine.step()
            seconds.append(self.clock() - begin)
            ceilings.append(self._read_ceiling())
        if any(handle.is_finished for handle in handles):
            raise InternalError("a sequence of the benchmark ended before its samples were taken")
        ended = [end(handle) for handle in handles]
        samples = tuple(
            Sample(
                num_tokens=DECODE_STEPS * num_sequences,
                seconds=seconds[index],
                num_bytes=DECODE_STEPS * self.costs.decode_bytes(self._contexts(ended, index)),
                num_ops=0,
                read_ceilings=(ceilings[index], ceilings[index + 1]),
                compute_ceilings=(),
            )
            for index in range(self.repeats)
        )
        return Row("decode", context, num_sequences, None, sum(one.cached_tokens for one in ended), samples)

    def prefill_row(self, num_tokens: int) -> Row:
        """Read prompts of ``num_tokens``, one after the other, from an empty cache to the first token."""
        kind = self.costs.compute_kind([name for name, _ in self.meter.compute_kinds()])
        num_bytes, num_ops = self.costs.prefill(num_tokens, self.prefill_chunk)
        samples, cached_tokens = [], 0
        before = self._read_ceiling(), self._compute_ceiling(kind)
        for _ in range(self.repeats):
            ended = end(self.engine.submit(self.random_prompt(num_tokens), Sampling(max_tokens=1)), is_cancelled=False)
            after = self._read_ceiling(), self._compute_ceiling(kind)
            cached_tokens += ended.cached_tokens
            seconds = ended.timings.prefill_s
            samples.append(
                Sample(num_tokens, seconds, num_bytes, num_ops, (before[0], after[0]), (before[1], after[1]))
            )
            before = after
        return Row("prefill", num_tokens, 1, kind, cached_tokens, tuple(samples))

    def _contexts(self, ended: Sequence[Finished], index: int) -> list[int]:
        """Tokens in the cache of each sequence in the middle of sample ``index``: each step added one to each."""
        steps_to_end = (self.repeats - index) * DECODE_STEPS - DECODE_STEPS // 2
        return [one.num_prompt_tokens + len(one.token_ids) - 1 - steps_to_end for one in ended]

    def _read_ceiling(self) -> float:
        return self.meter.measure_read(CEILING_SECONDS).median

    def _compute_ceiling(self, kind: str) -> float:
        return self.meter.measure_compute(kind, CEILING_SECONDS).median


def fill_context(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Request]:
    """Put prompts into the cache and return their requests, all of them decoding."""
    handles = [engine.submit(prompt, Sampling(ignore_eos=True)) for prompt in prompts]
    for handle in handles:
        # Not until its first text: random bytes may be no whole character for a long time.
        while not handle.sequence.output and not handle.is_finished:
            engine.step()
        if handle.is_finished:
            raise InternalError(f"a sequence of the benchmark ended at once: {end(handle).finish_reason}")
    return handles


def end(handle: Request, *, is_cancelled: bool = True) -> Finished:
    """Cancel a request (or let it end) and return its terminal event; raises its error."""
    if is_cancelled:
        handle.cancel()
    for event in handle:
        if isinstance(event, Finished):
            if event.error is not None:
                raise event.error
            return event
    raise InternalError("a request ended without its terminal event")


def context_needed(contexts: Sequence[int], sequences: Sequence[int], repeats: int, prefill_chunk: int) -> int:
    """Tokens of context that the decode rows need: prompt, samples, and what early sequences decode while the
    prompts of later ones are read."""
    longest, most = max(contexts), max(sequences)
    fill_steps = (most - 1) * (-(-longest // prefill_chunk) + 2)
    return longest + fill_steps + WARM_UP_STEPS + repeats * DECODE_STEPS + 64
