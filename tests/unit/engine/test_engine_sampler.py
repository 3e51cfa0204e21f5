"""Choosing a token: the reference against known values, the native sampler against the reference."""

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies

from hotset.engine.native_sampler import NativeSampler
from hotset.engine.reference_sampler import ReferenceSampler, apply_penalties, kept_tokens, philox4x32_10, uniform
from hotset.engine.sampling import Sampling

EMPTY = np.array([], np.int32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The vectors of Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds."""
    assert philox4x32_10(counter, key) == expected


def test_uniform_uses_every_bit_of_seed_and_position():
    """Bug class: seeds above 32 bits, or positions, fold onto each other."""
    draws = {uniform(seed, position) for seed in (0, 1, 2**32, 2**63) for position in (0, 1, 2**32)}
    assert len(draws) == 12 and all(0 <= draw < 1 for draw in draws)


def choosers(sampling, vocab, seed=0, num_prompt=0):
    return [sampler.start(sampling, seed, num_prompt) for sampler in (NativeSampler(vocab), ReferenceSampler())]


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 5000])
def test_greedy_takes_the_lower_of_equals(vocab):
    """Bug class: ties broken by vector lane or block."""
    generator = np.random.default_rng(vocab)
    for _ in range(20):
        logits = generator.integers(-2, 2, vocab).astype(np.float32)
        for choose in choosers(Sampling(), vocab):
            assert choose(logits, EMPTY, 0) == int(np.argmax(logits))
    for choose in choosers(Sampling(), vocab):
        logits = np.full(vocab, -3e38, np.float32)
        logits[vocab - 1] = -2e38
        assert choose(logits, EMPTY, 0) == vocab - 1


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("vocab", [3, 300, 1000])
def test_rows_that_are_not_numbers_give_no_token(vocab, temperature):
    """Bug class: NaN compares false with everything, so token 0 comes out."""
    sampling = Sampling(temperature=temperature)
    for bad in (np.nan, np.inf):
        for place in (0, vocab // 2, vocab - 1):
            logits = np.zeros(vocab, np.float32)
            logits[place] = bad
            assert [choose(logits, EMPTY, 0) for choose in choosers(sampling, vocab)] == [-1, -1]
    nothing = np.full(vocab, -np.inf, np.float32)
    assert [choose(nothing, EMPTY, 0) for choose in choosers(sampling, vocab)] == [-1, -1]


def test_masked_tokens_are_never_drawn():
    logits = np.full(1000, -np.inf, np.float32)
    logits[[17, 900]] = 0
    for sampling in (Sampling(temperature=5), Sampling(temperature=5, top_k=500, top_p=0.99)):
        for choose in choosers(sampling, 1000):
            assert {choose(logits, EMPTY, position) for position in range(60)} == {17, 900}


def test_top_k_breaks_ties_by_index():
    logits = np.zeros(700, np.float32)
    logits[650] = 1
    for choose in choosers(Sampling(temperature=50, top_k=3), 700):
        assert {choose(logits, EMPTY, position) for position in range(200)} == {0, 1, 650}


def test_penalties_known_values():
    """Bug class: presence or frequency counted over the prompt; a repetition penalty that favours negative logits."""
    logits = np.array([2, -2, 2, 2, 2], np.float32)
    history = np.array([0, 1, 2, 2, 3], np.int32)  # prompt: 0, 1, 2; output: 2, 3
    sampling = Sampling(repetition_penalty=2, presence_penalty=0.25, frequency_penalty=0.5)
    expected = [1, -4, 1 - 0.75, 1 - 0.75, 2]
    assert apply_penalties(logits, sampling, history, 3).tolist() == expected


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.8, top_p=0.7), Sampling(temperature=1.5, min_p=0.3)])
def test_draws_follow_the_distribution(sampling):
    """Bug class: the draw is biased, e.g. by an off-by-one in the cumulative sum."""
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03], np.float32))
    tokens, weights = kept_tokens(logits, sampling)
    for choose in choosers(sampling, 5, seed=11):
        counts = np.bincount([choose(logits, EMPTY, position) for position in range(6000)], minlength=5)
        assert set(np.flatnonzero(counts)) == set(tokens.tolist())
        np.testing.assert_allclose(counts[tokens] / 6000, weights / weights.sum(), atol=0.025)


def test_uniform_agrees_bit_for_bit_in_its_upper_bits():
    """A flat row of 2**18 tokens shows the first 18 bits of the draw."""
    logits = np.zeros(2**18, np.float32)
    native, _ = choosers(Sampling(temperature=1), 2**18, seed=2**40 + 3)
    for position in (0, 1, 2**33 + 5):
        assert native(logits, EMPTY, position) == int(uniform(2**40 + 3, position) * 2**18)


def is_close_call(logits, sampling, seed, position):
    """The draw, or the border of top-p or min-p, falls where float32 and float64 may differ."""
    weights = kept_tokens(logits, sampling)[1]
    cumulative = np.cumsum(weights)
    gaps = [np.abs(cumulative / cumulative[-1] - uniform(seed, position)).min()]
    wide = Sampling(temperature=sampling.temperature, top_k=sampling.top_k)
    all_weights = -np.sort(-kept_tokens(logits, wide)[1])
    if sampling.top_p < 1:
        gaps.append(np.abs(np.cumsum(all_weights) / all_weights.sum() - sampling.top_p).min())
    if sampling.min_p > 0:
        gaps.append(np.abs(all_weights - sampling.min_p).min())
    return min(gaps) < 2e-6


@settings(max_examples=300, deadline=None)
@given(
    vocab=strategies.integers(1, 3000),
    spread=strategies.sampled_from([0.0, 0.3, 1.0, 4.0, 30.0]),
    rounding=strategies.booleans(),
    temperature=strategies.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=strategies.sampled_from([0, 1, 2, 40, 300, 2000]),
    top_p=strategies.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=strategies.sampled_from([0.0, 0.02, 0.5, 1.0]),
    penalties=strategies.sampled_from([{}, {"repetition_penalty": 1.3, "presence_penalty": 0.2}]),
    seed=strategies.integers(0, 2**64 - 1),
)
@example(1000, 0.0, False, 1.0, 300, 0.5, 0.0, {}, 5)
def test_native_agrees_with_reference(vocab, spread, rounding, temperature, top_k, top_p, min_p, penalties, seed):
    """Bug class: a filter that keeps one token too many or too few, in one of two implementations."""
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal(vocab) * spread).astype(np.float32)
    if rounding:  # many ties
        logits = np.round(logits)
    history = generator.integers(0, vocab, 50).astype(np.int32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **penalties)
    native, reference = choosers(sampling, vocab, seed, num_prompt=20)
    before = logits.copy()
    penalised = apply_penalties(logits, sampling, history, 20)
    for position in (50, 51):
        got, expected = native(logits, history, position), reference(logits, history, position)
        assert got == expected or is_close_call(penalised, sampling, seed, position)
    assert (logits == before).all()
