"""SmolLM2-135M-Instruct against transformers: answers stored by ``make_smollm2_oracle.py``, from float32 arithmetic.

hotset multiplies four-bit weights by eight-bit activations, so it cannot be equal. The limits are what
llama.cpp, which rounds alike, needs with a little room: on this text its perplexity is 0.35 % off and its
best token agrees at 96.9 % of the first 256 positions, every disagreement within 0.37 of a log-probability.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotset

HERE = Path(__file__).parent
NUM_COMPARED = 256
LEAST_AGREEMENT = 0.95
WIDEST_DISAGREEMENT = 0.5  # log-probability by which the oracle's best token leads
PERPLEXITY_TOLERANCE = 0.005
MEAN_LOG_PROBABILITY_TOLERANCE = 0.12  # over the oracle's eight best tokens; llama.cpp: 0.083


@pytest.fixture(scope="module")
def oracle() -> dict[str, np.ndarray]:
    with np.load(HERE / "smollm2_oracle.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((HERE / "smollm2_oracle.json").read_text())


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[hotset.Engine]:
    with hotset.load(smollm2_path, context=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def log_probabilities(engine: hotset.Engine, oracle: dict[str, np.ndarray]) -> np.ndarray:
    """hotset's log-probabilities after every token of the text, float64 [n, vocab]."""
    logits = engine.logits(oracle["text_ids"], positions="all").astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_text_becomes_the_same_tokens(engine: hotset.Engine, oracle: dict[str, np.ndarray]) -> None:
    """Guards the tokenizer read from GGUF: pre-splitting, merges, no beginning-of-text token."""
    text = (HERE / "perplexity_text.txt").read_text()
    *_, last = engine.generate(text, hotset.Sampling(max_tokens=1))
    assert last.num_prompt_tokens == len(oracle["text_ids"])


@pytest.mark.parametrize("name", ["chat", "counting"])
def test_greedy_continuation_is_the_stored_one(engine: hotset.Engine, record: dict[str, Any], name: str) -> None:
    """Guards the way from a prompt to text: template, tokens, steps, end-of-text, decoding."""
    expected = record["prompts"][name]
    num_new = len(expected["continuation_ids"])
    *pieces, last = engine.generate(expected["prompt"], hotset.Sampling(max_tokens=num_new))
    assert last.num_prompt_tokens == len(expected["prompt_ids"])
    assert list(last.token_ids) == expected["continuation_ids"]
    assert "".join(piece.text for piece in pieces) == expected["continuation_text"]


def test_best_token_agrees(log_probabilities: np.ndarray, oracle: dict[str, np.ndarray]) -> None:
    """Guards the arithmetic: a wrong kernel turns many best tokens, rounding turns only close calls."""
    differs = log_probabilities.argmax(axis=1) != oracle["argmax"]
    agreement = 1.0 - differs[:NUM_COMPARED].mean()
    assert agreement >= LEAST_AGREEMENT
    assert oracle["margin"][differs].max(initial=0.0) <= WIDEST_DISAGREEMENT


def test_best_log_probabilities_agree(log_probabilities: np.ndarray, oracle: dict[str, np.ndarray]) -> None:
    """Guards against an error that keeps the order of tokens but flattens or sharpens the distribution."""
    ours = np.take_along_axis(log_probabilities, oracle["top_ids"].astype(np.int64), axis=1)
    assert np.abs(ours - oracle["top_log_probabilities"]).mean() <= MEAN_LOG_PROBABILITY_TOLERANCE


def test_perplexity_agrees(
    log_probabilities: np.ndarray, oracle: dict[str, np.ndarray], record: dict[str, Any]
) -> None:
    """Guards the quality over five cache blocks: a slow drift with the position shows here first."""
    targets = oracle["text_ids"][1:]
    losses = -log_probabilities[np.arange(len(targets)), targets]
    perplexity = float(np.exp(losses.mean()))
    assert perplexity == pytest.approx(record["perplexity"], rel=PERPLEXITY_TOLERANCE)
