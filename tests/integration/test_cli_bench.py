"""``hotset bench`` on an engine without a model: that its arithmetic is that of the steps which really ran."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from engine_fakes import make_engine

import hotset
from hotset.bench import rows as measuring
from hotset.bench.costs import ModelCosts
from hotset.bench.rows import DECODE_STEPS, Bench, Row, Sample, context_needed
from hotset.cli.main import cli
from hotset.machine.samples import Samples

REPEATS = 3


class FakeCosts:
    """A step reads 1000 bytes of weights and 1 byte for every token in the cache."""

    def decode_bytes(self, contexts: Sequence[int]) -> int:
        return 1000 + sum(contexts)

    def prefill(self, num_tokens: int, chunk: int) -> tuple[int, int]:
        return 1000 * -(-num_tokens // chunk), 2 * num_tokens

    def compute_kind(self, available: Sequence[str]) -> str:
        assert list(available) == ["int8", "f32"]
        return "int8"


made_for: list[tuple[int, ...]] = []
"""The CPUs that meters were asked to measure on."""


class FakeMeter:
    """Every measurement gives as much more than the one before."""

    isa = "avx2"
    unit = 100.0

    def __init__(self, cpus: Sequence[int] = ()) -> None:
        self.count = 0
        made_for.append(tuple(cpus))

    def __enter__(self) -> FakeMeter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure_read(self, seconds: float) -> Samples:
        self.count += 1
        return Samples((self.unit * self.count,))

    def measure_compute(self, kind: str, seconds: float) -> Samples:
        return Samples((50.0,))

    def compute_kinds(self) -> list[tuple[str, str]]:
        return [("int8", "a"), ("f32", "b")]


def make_bench(seed: int = 1, **options: Any) -> tuple[Bench, Any]:
    # As in a plan, the cache holds the whole context for each of four sequences.
    engine, executor = make_engine(256, **{"max_context": 256, **options})
    ticks = iter(range(1_000_000))
    bench = Bench(
        engine, FakeCosts(), FakeMeter(), 8, REPEATS, np.random.default_rng(seed), clock=lambda: float(next(ticks))
    )
    return bench, executor


@pytest.mark.parametrize(("context", "sequences"), [(5, 1), (40, 1), (21, 3), (30, 4)])
def test_bytes_are_those_of_the_contexts_that_ran(context: int, sequences: int) -> None:
    """With several sequences the first decode while the last prompt is read, so their contexts are not the row's."""
    bench, executor = make_bench()
    row = bench.decode_row(context, sequences)
    timed = executor.batches[-REPEATS * DECODE_STEPS :]
    assert all(len(batch) == sequences and {count for _, count in batch} == {1} for batch in timed)
    for index, sample in enumerate(row.samples):
        window = timed[index * DECODE_STEPS : (index + 1) * DECODE_STEPS]
        in_cache = sum(position for batch in window for position, _ in batch)
        truth = DECODE_STEPS * 1000 + in_cache
        # One context stands for the window: its middle, half a token off for each sequence and step.
        assert abs(sample.num_bytes - truth) <= DECODE_STEPS * sequences
        assert sample.num_tokens == DECODE_STEPS * sequences
    assert (row.kind, row.num_tokens, row.num_sequences, row.is_refused) == ("decode", context, sequences, False)


def test_every_sample_has_the_ceilings_around_it() -> None:
    """A ceiling measured once, minutes before, made shares above 100 % (or hid that the machine was busy)."""
    row = make_bench()[0].decode_row(5, 1)
    assert [sample.read_ceilings for sample in row.samples] == [(100, 200), (200, 300), (300, 400)]
    assert row.samples[0].read_share == row.samples[0].num_bytes / 150
    assert row.read_ceiling == 250


def test_benchmark_leaves_the_engine_clean() -> None:
    bench, _ = make_bench()
    bench.decode_row(20, 2)
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.finished == {"cancelled": 2}


def test_prefill_counts_every_chunk_and_the_arithmetic() -> None:
    bench, executor = make_bench()
    row = bench.prefill_row(20)
    assert executor.batches == [[(0, 8)], [(8, 8)], [(16, 4)]] * REPEATS
    assert [(s.num_tokens, s.num_bytes, s.num_ops) for s in row.samples] == [(20, 3000, 40)] * REPEATS
    assert row.compute_kind == "int8"
    assert row.samples[0].compute_share == pytest.approx(40 / row.samples[0].seconds / 50)


def test_a_row_whose_prompt_was_cached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix reuse reported 20,701 tokens per second instead of 313 (D125)."""
    bench, _ = make_bench()
    monkeypatch.setattr(Bench, "random_prompt", lambda self, num_tokens: [7] * num_tokens)
    row = bench.prefill_row(20)
    assert row.is_refused and row.cached_tokens > 0
    assert "tokens_per_s" not in row.to_json() and len(row.to_json()["samples"]) == REPEATS


def test_prompts_differ_from_run_to_run() -> None:
    prompts = [make_bench(seed)[0].random_prompt(16) for seed in (1, 2)]
    assert prompts[0] != prompts[1]


def test_context_leaves_room_for_all_samples() -> None:
    """The longest row ran into the end of the context in its last sample."""
    bench, _ = make_bench(max_context=context_needed((30,), (4,), REPEATS, 8))
    assert len(bench.decode_row(30, 4).samples) == REPEATS


def test_costs_add_weights_once_and_caches_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotset.program.cost import Cost

    def step_cost(
        program: Any, formats: Any, num_tokens: int, num_outputs: int, context: int, num_sequences: int = 1
    ) -> dict[str, Cost]:
        linear = Cost(weight_bytes=999 + num_sequences + num_outputs, num_ops=10 * num_tokens)
        return {"linear": linear, "attention": Cost(cache_bytes=context)}

    monkeypatch.setattr("hotset.bench.costs.step_cost", step_cost)
    costs = ModelCosts(SimpleNamespace(program=None), {})  # type: ignore[arg-type]
    assert costs.decode_bytes([10, 20]) == 1002 + 30  # weights of two tokens, once
    assert costs.prefill(20, 8) == (1000 + (1000 + 8) + (1001 + 16), 200)


def test_compute_kind_follows_most_of_the_bytes() -> None:
    def weight(key: str, rows: int) -> SimpleNamespace:
        return SimpleNamespace(key=key, in_width=256, out_width=rows, count=1)

    program = SimpleNamespace(weights={"a": weight("a", 64), "b": weight("b", 16)})
    spec = SimpleNamespace(program=program)

    def kind(a: str, b: str, *available: str) -> str:
        return ModelCosts(spec, {"a": a, "b": b}).compute_kind(available)  # type: ignore[arg-type]

    assert kind("Q8_0", "F32", "int8", "bf16", "f32") == "int8"
    assert kind("Q8_0", "F32", "int8", "int8_matrix", "f32") == "int8_matrix"
    assert kind("BF16", "Q8_0", "int8", "bf16", "f32") == "bf16"
    assert kind("BF16", "Q8_0", "int8", "f32") == "f32"
    assert kind("FP8", "Q8_0", "int8", "bf16", "f32") == "bf16"
    assert kind("MXFP4", "Q8_0", "int8", "bf16", "f32") == "int8"


# The verb


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    asked: dict[str, Any] = {}

    def load(model: str, **options: Any) -> Any:
        asked.update(options)
        engine, _ = make_engine(512, max_context=1024)
        engine._plan = SimpleNamespace(num_threads=2, cpus=(6, 7), prefill_chunk=8, to_json=lambda: {"total_bytes": 1})
        return engine

    class Described:
        checkpoint = type("C", (), {"__enter__": lambda self: self, "__exit__": lambda self, *_: None})()
        spec, formats = None, None

    monkeypatch.setattr(hotset, "load", load)
    monkeypatch.setattr("hotset.api.describe_model", lambda model, cache_format: Described())
    monkeypatch.setattr("hotset.bench.costs.ModelCosts", lambda spec, formats: FakeCosts())
    monkeypatch.setattr("hotset.machine.probe.CeilingMeter", FakeMeter)
    monkeypatch.setattr(FakeMeter, "unit", 1e15)  # the clock of the verb is the real one
    return asked


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["bench", "m", *arguments])


def test_json_has_conditions_and_every_sample(verb: dict[str, Any]) -> None:
    result = run("--context", "5,9", "--prefill", "20", "--sequences", "1,2", "--repeats", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {"hotset", "commit", "command", "started", "load_average", "machine", "memory", "isa", "num_threads", "seed",
            "plan"} <= set(report)  # fmt: skip
    assert [(row["kind"], row["num_tokens"], row["num_sequences"]) for row in report["rows"]] == [
        ("decode", 5, 1), ("decode", 9, 1), ("decode", 5, 2), ("decode", 9, 2), ("prefill", 20, 1),
    ]  # fmt: skip
    assert all(len(row["samples"]) == 2 and row["tokens_per_s"]["median"] > 0 for row in report["rows"])
    assert verb["max_sequences"] == 2
    assert made_for[-1] == (6, 7), "the CPUs of the engine's team, not the first ones"


def test_table_has_a_line_for_every_row(verb: dict[str, Any]) -> None:
    result = run("--context", "5", "--prefill", "20", "--repeats", "1")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("m, 2 threads, avx2, hotset ")
    assert lines[3].split()[0] == "test" and "read ceiling" in lines[3]
    assert lines[4].startswith("decode @ 5") and lines[4].endswith("-")
    assert lines[5].startswith("prefill 20") and lines[5].endswith("of int8")
    assert result.stderr == "[1/2] decode at context 5, 1 together\n[2/2] prefill of 20 tokens\n"


def test_a_share_above_the_ceiling_is_not_given(verb: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A ceiling of 1.8 GB/s, measured while the machine gave the meter no memory, made a share of 2,399 %."""
    row = Row("decode", 5, 1, None, 0, (Sample(32, 1.0, 2 * 10**9, 0, (1.8e9, 2e9), ()),))
    monkeypatch.setattr(measuring.Bench, "decode_row", lambda self, context, num_sequences: row)
    result = run("--context", "5", "--prefill", "")
    assert result.stdout.splitlines()[-1].split()[-2:] == ["?", "-"]
    assert "warning: decode @ 5 read 2.0 GB/s where 1.9 GB/s were measured around it" in result.stderr
    assert (row.to_json()["exceeds_ceiling"], row.to_json()["read_share"]) == (True, None)
    held = Row("decode", 5, 1, None, 0, (Sample(32, 1.0, 1_900_000_000, 0, (1.8e9, 2e9), ()),))
    assert (held.to_json()["exceeds_ceiling"], held.to_json()["read_share"]) == (False, 1.0)


def test_refused_rows_make_the_run_fail(verb: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Row("decode", 5, 1, None, 4, (Sample(1, 1.0, 1, 0, (1.0,), ()),))
    monkeypatch.setattr(measuring.Bench, "decode_row", lambda self, context, num_sequences: refused)
    result = run("--context", "5", "--prefill", "")
    assert result.exit_code == 4
    assert "refused" in result.stdout.splitlines()[-1] and "4 cached tokens" in result.stdout
    assert result.stderr.endswith("error: 1 of 1 rows refused: part of a random prompt came from the cache\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "12,x"), "error: invalid value for '--context': '12,x' is not a list of positive numbers"),
        (("--sequences", "0"), "error: invalid value for '--sequences': '0' is not a list of positive numbers"),
        (
            ("--context", "", "--prefill", ""),
            "error: nothing to measure: give --context with --sequences, or --prefill",
        ),
    ],
)
def test_bad_lists_are_refused(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith(message)
