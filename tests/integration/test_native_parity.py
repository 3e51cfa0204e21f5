"""Native and reference executor end to end, over tiny random models in every format and shape.

Both round inputs of products and cache rows, each from sums in its own order, so a value at the border of two roundings
goes either way: once in a few tokens. A difference of one int8 step then spreads through the cache to all later tokens.
So short prompts are held against each other closely, by the median over many (most have no such value), and long ones
by the root mean square, in units of what that rounding itself costs (reference with and without it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    CACHE_FORMATS,
    FORMATS,
    Floats,
    Ints,
    Tiny,
    described,
    native,
    random_tokens,
    reference,
    run,
    shapes,
    tiny,
    write_gguf,
    write_hf_folder,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.api import Described, describe_model
from hotset.machine.native import available_isas
from hotset.models.llama import base_frequencies, llama3_frequencies

SHAPES = {
    "one kv head per head": {"heads": 4, "kv_heads": 4, "head_dim": 16},
    "groups of 3, head of 32": {"heads": 6, "kv_heads": 2, "head_dim": 32, "hidden": 96},
    "groups of 8, head of 16": {"heads": 8, "kv_heads": 1, "head_dim": 16},
    "groups of 3, head of 80": {"heads": 6, "kv_heads": 2, "head_dim": 80},
    "head of 128": {"heads": 2, "kv_heads": 1, "head_dim": 128},
    "untied": {"is_tied": False, "vocab": 300},
}


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))


START = (0, 0, 3, 14, 100, 253, 254, 300)
CUTS: tuple[tuple[int, ...], ...] = ((), (1,), (2,), (1, 2, 3))
NUM_PROMPTS = 12


class Case:
    """A model and what the reference says about it, which is the same for every kernel set."""

    def __init__(self, model: Described) -> None:
        self.model = model
        self.tokens = random_tokens(280, model.spec.vocab_size)

    @cached_property
    def short(self) -> list[Floats]:
        executor = reference(self.model, sequences=NUM_PROMPTS)
        return [run(executor, *short_prompt(self.model, i)) for i in range(NUM_PROMPTS)]

    @cached_property
    def long(self) -> Floats:
        return run(reference(self.model), self.tokens)

    @cached_property
    def exact(self) -> Floats:
        return run(reference(self.model, rounding=False), self.tokens)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Case]]:
    """Makes each model once."""
    made: dict[tuple[Tiny, str | None], Case] = {}

    def make(m: Tiny, cache_format: str | None = None) -> Case:
        if (m, cache_format) not in made:
            made[m, cache_format] = Case(described(tmp_path_factory.mktemp("model"), m, cache_format))
        return made[m, cache_format]

    yield make
    for entry in made.values():
        entry.model.checkpoint.close()


def short_prompt(d: Described, i: int) -> tuple[Ints, Sequence[int], Ints, int]:
    """Tokens, cuts, blocks of its own and first position of prompt ``i``; rows before it are zeros."""
    return random_tokens(4, d.spec.vocab_size, i), CUTS[i % 4], np.array([2 * i, 2 * i + 1], np.int32), START[i % 8]


def check_short(c: Case, isa: str, threads: int = 2, share: float = 0.5) -> None:
    """The largest difference in that share of the prompts is that of float sums alone: 1e-5 of the logits' deviation,
    measured at most 1e-6."""
    fast = native(c.model, threads, isa, sequences=NUM_PROMPTS, chunk=16)
    short = [run(fast, *short_prompt(c.model, i)) for i in range(NUM_PROMPTS)]
    worst = [np.abs(got - want).max() / want.std() for got, want in zip(short, c.short, strict=True)]
    assert np.quantile(worst, share) <= 1e-5


def check_long(c: Case, isa: str) -> None:
    """Uneven chunks: 0.6 of what rounding costs, measured 0.01 to 0.42."""
    got = run(native(c.model, 2, isa), c.tokens, [100, 101, 103, 257])
    assert rms(got - c.long) <= 0.6 * rms(c.long - c.exact)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format: str, isa: str, case: Callable[..., Case]) -> None:
    """Guards against anything in a format's path that its ops alone do not show: formats of inputs, order, slots."""
    c = case(tiny(format))
    check_short(c, isa)
    check_long(c, isa)


@pytest.mark.parametrize("format", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape: str, format: str, isa: str, case: Callable[..., Case]) -> None:
    """Head sizes, shared kv heads, an output matrix of its own, vocabularies that fill no tile."""
    check_short(case(tiny(format, layers=1, **SHAPES[shape])), isa)


@pytest.mark.parametrize(
    "mixed",
    [
        {"format": "Q4_1", "embed_format": "Q8_0"},
        {"format": "Q4_0", "embed_format": "F16", "head_format": "BF16", "is_tied": False},
        {"format": "Q8_0", "vector_format": "F16"},
        {"format": "F16", "head_format": "Q4_1", "is_tied": False},
    ],
)
def test_mixed_formats_in_one_file(mixed: dict[str, str], isa: str, case: Callable[..., Case]) -> None:
    """Guards against the packed form of one format being taken for another's."""
    c = case(tiny(**mixed))
    check_short(c, isa)
    check_long(c, isa)


def test_gate_and_up_of_different_formats(isa: str, case: Callable[..., Case]) -> None:
    """Such files exist (mixtures chosen per tensor); the two products then run apart."""

    class Mixed(Tiny):
        def format_of(self, name: str) -> str:
            return "Q4_0" if "ffn_up" in name else super().format_of(name)

    c = case(Mixed("Q8_0"))
    check_short(c, isa)
    check_long(c, isa)


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("format", ["F32", "Q8_0"])
def test_both_formats_of_cache_rows(format: str, cache_format: str, isa: str, case: Callable[..., Case]) -> None:
    """Not only the one that suits the weights."""
    c = case(tiny(format), cache_format)
    check_short(c, isa)
    check_long(c, isa)


@settings(max_examples=20)
@given(st.data())
def test_any_shape_in_any_mix_of_formats(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Shapes that nobody thought of, down to fewer rows than threads, and a format for every tensor. The more cache
    rows a model has, the more prompts have a value at the border of two roundings: a quarter of them is without."""
    draw, some = data.draw, st.sampled_from(("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"))
    kv_heads = draw(st.integers(1, 3))

    class Any(Tiny):
        def format_of(self, name: str) -> str:
            return super().format_of(name) if name.endswith("norm.weight") else formats[name]

    m = Any(
        layers=draw(st.integers(1, 2)), hidden=32 * draw(st.integers(1, 3)), ffn=32 * draw(st.integers(1, 5)),
        heads=kv_heads * draw(st.integers(1, 4)), kv_heads=kv_heads, head_dim=32 * draw(st.integers(1, 3)),
        vocab=draw(st.integers(2, 300)), is_tied=draw(st.booleans()),
        vector_format=draw(st.sampled_from(("F32", "F16", "BF16"))),
    )  # fmt: skip
    formats = {name: draw(some) for name in shapes(m)}
    c = Case(described(tmp_path_factory.mktemp("any"), m, draw(st.sampled_from(CACHE_FORMATS))))
    with c.model.checkpoint:
        check_short(c, draw(st.sampled_from(available_isas())), draw(st.integers(1, 3)), share=0.25)


@pytest.mark.parametrize("is_tied", [True, False])
def test_gguf_and_hugging_face_files_of_one_model_agree(is_tied: bool, tmp_path: Path) -> None:
    """The rotary order differs between the two kinds of file; the model is the same.

    Both F32 and without rounding, so only the order of sums differs: 1e-5 of the logits' deviation.
    """
    m = tiny("F32", heads=4, kv_heads=2, head_dim=32, is_tied=is_tied)
    tokens = random_tokens(80)
    logits = []
    for path in (write_gguf(tmp_path / "tiny.gguf", m), write_hf_folder(tmp_path / "hf", m)):
        d = describe_model(path)
        with d.checkpoint:
            logits.append(run(reference(d, rounding=False), tokens))
    assert np.abs(logits[0] - logits[1]).max() <= 1e-5 * logits[0].std()


def test_rope_divisors_equal_the_llama3_scaling_of_a_configuration(tmp_path: Path) -> None:
    """Converters store Llama 3.1's scaling as one divisor per frequency; config.json gives its parameters.

    Divisors are float32 in the file, so angles differ by 2^-24 of themselves: 1e-4 of the logits' deviation.
    """
    base = base_frequencies(10000.0, 32)
    scaled = llama3_frequencies(base, 8.0, 1.0, 4.0, 64)
    divisors = tuple(b / s for b, s in zip(base, scaled, strict=True))
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    m = tiny("F32", head_dim=32, divisors=divisors)
    tokens = random_tokens(200)
    logits = []
    for path in (
        write_gguf(tmp_path / "tiny.gguf", m),
        write_hf_folder(tmp_path / "hf", m, {"rope_scaling": scaling}),
        write_hf_folder(tmp_path / "plain", m),
    ):
        d = describe_model(path)
        with d.checkpoint:
            logits.append(run(reference(d, rounding=False), tokens))
    assert np.abs(logits[0] - logits[1]).max() <= 1e-4 * logits[0].std()
    assert np.abs(logits[1] - logits[2]).max() > 0.1 * logits[0].std()
