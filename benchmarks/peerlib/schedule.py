"""What is measured in which order.

Every repeat starts fresh workers, so that load time and peak memory have as many samples as the rest. Within a repeat
the engines alternate item by item, so that a change in the machine's load meets all of them; where the engines
together do not fit in memory they take turns instead, each alone with the machine, and the report says so.
The engine that begins changes from repeat to repeat.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from peerlib import machine
from peerlib.ceiling import measure_ceilings
from peerlib.client import Worker, WorkerError, busy_cores
from peerlib.environments import Engine
from peerlib.models import Model, WeightFacts, weight_facts

NUM_SEQUENCES = 8
CARD_ENGINES = ("hotset", "llama.cpp")
BATCH_PROMPT_TOKENS = 16
LONG_CONTEXT = 4096
BUSY_NEW_TOKENS = 64
# Ids that every vocabulary of the benchmark has and that are ordinary words in it.
PROMPT_IDS = range(300, 49000)
# Peak memory while loading, in file sizes: measured, rounded up (OpenVINO keeps the file mapped and converts it).
MEMORY_FACTORS = {"hotset": 1.3, "llama.cpp": 2.1, "openvino": 3.1}


@dataclass(frozen=True)
class Sample:
    """One measured number and the cores that other processes used meanwhile."""

    value: float
    others_cores: float


@dataclass
class ModelResult:
    """All samples of one model: ``samples[engine][metric]``; ``failures[engine]`` is the first reason."""

    model: Model
    facts: WeightFacts
    num_repeats: int
    is_interleaved: bool
    settings: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    ceilings: list[dict[str, float]] = field(default_factory=list)

    def add(self, engine: Engine, metric: str, value: float, others_cores: float) -> None:
        self.samples.setdefault(engine.name, {}).setdefault(metric, []).append(Sample(value, others_cores))


@dataclass(frozen=True)
class Plan:
    """What the command line asked for."""

    engines: tuple[Engine, ...]
    repeats: int | None  # None: each model's own
    threads: int
    has_priority: bool

    def repeats_of(self, model: Model) -> int:
        return self.repeats or model.repeats

    def only(self, engines: tuple[Engine, ...]) -> Plan:
        return replace(self, engines=engines)


Item = Callable[[Worker, ModelResult, random.Random], None]


def random_prompt(source: random.Random, num_tokens: int) -> list[int]:
    return source.choices(PROMPT_IDS, k=num_tokens)


def context_item(num_tokens: int, new_tokens: int) -> Item:
    """Read a prompt, then decode from there; without new tokens only the prompt counts."""

    def measure(worker: Worker, result: ModelResult, source: random.Random) -> None:
        answer = worker.ask("run", prompt=random_prompt(source, num_tokens), new_tokens=new_tokens)
        if num_tokens >= 512:
            rate = num_tokens / answer.fields["prefill_s"]
            result.add(worker.engine, f"prefill_{num_tokens}", rate, answer.others_cores)
        if new_tokens:
            rate = answer.fields["num_new"] / answer.fields["decode_s"]
            result.add(worker.engine, f"decode_{num_tokens}", rate, answer.others_cores)

    return measure


def batch_item(new_tokens: int) -> Item:
    """Decode eight sequences together; the rate is the sum over all."""

    def measure(worker: Worker, result: ModelResult, source: random.Random) -> None:
        prompts = [random_prompt(source, BATCH_PROMPT_TOKENS) for _ in range(NUM_SEQUENCES)]
        answer = worker.ask("batch", prompts=prompts, new_tokens=new_tokens)
        rate = answer.fields["num_new"] / answer.fields["decode_s"]
        result.add(worker.engine, "batch_8", rate, answer.others_cores)

    return measure


def cache_tokens(model: Model) -> int:
    """A cache for the longest item, in whole blocks of 256 tokens."""
    return LONG_CONTEXT + 256


def load_item(model: Model, threads: int) -> Item:
    def measure(worker: Worker, result: ModelResult, source: random.Random) -> None:
        path = str(model.path_for(worker.engine.name))
        answer = worker.ask("load", path=path, threads=threads, context=cache_tokens(model))
        result.settings[worker.engine.name] = answer.fields["settings"]
        result.versions[worker.engine.name] = answer.fields["version"]
        load_s, first_token_s = answer.fields["load_s"], answer.fields["first_token_s"]
        result.add(worker.engine, "load_s", load_s, answer.others_cores)
        result.add(worker.engine, "load_to_first_token_s", load_s + first_token_s, answer.others_cores)

    return measure


def peak_item(worker: Worker, result: ModelResult, source: random.Random) -> None:
    """Peak memory so far; it comes before the batch, for which some engines need a second context."""
    result.add(worker.engine, "peak_rss_bytes", worker.peak_rss_bytes(), 0.0)


def items_of(model: Model, plan: Plan, repeat: int) -> list[tuple[str, Item]]:
    """Return the items of one repeat in order, with names for the log.

    The long context takes minutes on a model of billions of parameters: such a model has it in its first repeat only.
    """
    long = (f"prefill of {LONG_CONTEXT}, decode there", context_item(LONG_CONTEXT, model.new_tokens))
    return [
        ("load", load_item(model, plan.threads)),
        ("decode at 128", context_item(128, model.new_tokens)),
        ("prefill of 512", context_item(512, 0)),
        *([long] if repeat < model.long_repeats else []),
        ("peak memory", peak_item),
        ("eight sequences", batch_item(model.new_tokens)),
    ]


def fit_together(model: Model, engines: tuple[Engine, ...]) -> bool:
    """Say whether all engines may hold the model at once, with a fifth of the free memory to spare."""
    need = sum(MEMORY_FACTORS[engine.name] for engine in engines) * model.path.stat().st_size
    return need < 0.8 * machine.memory_bytes("MemAvailable")


class Pool:
    """The workers of one repeat. A failed engine is left out for the rest of the model and its reason kept."""

    def __init__(self, result: ModelResult, plan: Plan) -> None:
        self.result = result
        self.plan = plan
        self.workers: dict[str, Worker] = {}

    def run(self, engine: Engine, name: str, item: Item, seed: str) -> None:
        """Run one item on one engine; ``seed`` makes its prompts, new in each repeat and equal for all engines."""
        if engine.name in self.result.failures:
            return
        if engine.name not in self.workers:
            self.workers[engine.name] = Worker(engine, self.plan.has_priority)
        print(f"  {seed:40} {engine.name:10} {name}", file=sys.stderr)
        try:
            item(self.workers[engine.name], self.result, random.Random(seed))
        except WorkerError as error:
            print(f"  {engine.name} failed: {error}", file=sys.stderr)
            self.result.failures[engine.name] = f"{name}: {error}"
            self.close(engine)

    def close(self, engine: Engine) -> None:
        worker = self.workers.pop(engine.name, None)
        if worker:
            worker.close()

    def close_all(self) -> None:
        for engine in self.plan.engines:
            self.close(engine)


def turns(
    engines: tuple[Engine, ...], items: list[tuple[str, Item]], is_interleaved: bool
) -> Iterator[tuple[Engine, str, Item]]:
    """Yield the order of one repeat."""
    if is_interleaved:
        yield from ((engine, name, item) for name, item in items for engine in engines)
    else:
        yield from ((engine, name, item) for engine in engines for name, item in items)


def measure_model(model: Model, plan: Plan, nonce: str) -> ModelResult:
    """Measure one model on all engines, and the machine's ceilings before each repeat, while every worker is gone.

    The probe is hotset's, so a run of peers only has no ceilings.
    """
    if model.card:  # no other engine reads this family
        plan = plan.only(tuple(engine for engine in plan.engines if engine.name in CARD_ENGINES))
    result = ModelResult(model, weight_facts(model), plan.repeats_of(model), fit_together(model, plan.engines))
    for repeat in range(plan.repeats_of(model)):
        if any(engine.name == "hotset" for engine in plan.engines):
            result.ceilings.append(measure_ceilings(plan.threads, plan.has_priority))
        first = repeat % len(plan.engines)
        engines = plan.engines[first:] + plan.engines[:first]
        pool = Pool(result, plan)
        previous: Engine | None = None
        try:
            for engine, name, item in turns(engines, items_of(model, plan, repeat), result.is_interleaved):
                if previous and not result.is_interleaved and previous is not engine:
                    pool.close(previous)
                previous = engine
                pool.run(engine, name, item, f"{nonce}/{model.key}/{repeat}/{name}")
        finally:
            pool.close_all()
    return result


def measure_manners(model: Model, plan: Plan, nonce: str) -> ModelResult:
    """Decode at 128 tokens alone (``quiet``) and with one busy process per core (``busy``), in turn."""
    result = ModelResult(model, weight_facts(model), plan.repeats_of(model), is_interleaved=True)
    pool = Pool(result, plan)
    try:
        for engine in plan.engines:
            pool.run(engine, "load", load_item(model, plan.threads), f"{nonce}/manners/load")
        for repeat in range(plan.repeats_of(model)):
            for engine in plan.engines:
                item = context_item(128, BUSY_NEW_TOKENS)
                pool.run(engine, "decode, quiet", renamed(item, "quiet"), f"{nonce}/manners/{repeat}/quiet")
                with busy_cores(plan.threads, plan.has_priority):
                    pool.run(engine, "decode, busy", renamed(item, "busy"), f"{nonce}/manners/{repeat}/busy")
    finally:
        pool.close_all()
    return result


def renamed(item: Item, name: str) -> Item:
    """Return ``item`` with its decode samples under another name."""

    def measure(worker: Worker, result: ModelResult, source: random.Random) -> None:
        item(worker, result, source)
        metrics = result.samples[worker.engine.name]
        metrics.setdefault(name, []).append(metrics["decode_128"].pop())

    return measure
