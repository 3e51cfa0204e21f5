"""SmolLM2-135M-Instruct against two stored oracles: transformers in float32, and llama.cpp.

hotset multiplies four-bit weights by activations rounded to eight bits, so it cannot equal the exact oracle; the
same arithmetic without that rounding does (perplexity ratio 1.0000002 in the reference executor). What the rounding
costs was measured on these texts (4,461 predictions): perplexity +0.3 to +0.6 % with a standard error of 0.18 %, and
another best token at 4 % of the positions, nearly all of them close calls. llama.cpp, which rounds alike, is 0.4 to
0.7 % off, depending on its settings. Hence the bar of 0.5 % is held against llama.cpp, and 1 % against float32.
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
LEAST_AGREEMENT = 0.945
TYPICAL_MARGIN = 0.5  # all but one in twenty disagreements are closer calls than this (in log-probability)
MEAN_LOG_PROBABILITY_TOLERANCE = 0.12  # over the oracle's eight best tokens; llama.cpp: 0.082

Arrays = dict[str, dict[str, np.ndarray]]  # by text, then by name


def read_arrays(path: Path) -> Arrays:
    """Read an oracle whose arrays are named ``<text>.<name>``."""
    arrays: Arrays = {}
    with np.load(path) as stored:
        for key in stored:
            text, name = key.split(".")
            arrays.setdefault(text, {})[name] = stored[key]
    return arrays


def joined(arrays: Arrays, name: str) -> np.ndarray:
    """Return one array of all texts, in the order of their names."""
    return np.concatenate([arrays[text][name] for text in sorted(arrays)])


def perplexity(arrays: Arrays) -> float:
    return float(np.exp(joined(arrays, "losses").astype(np.float64).mean()))


@pytest.fixture(scope="module")
def oracle() -> Arrays:
    """Exact answers: transformers, float32."""
    return read_arrays(HERE / "smollm2_oracle.npz")


@pytest.fixture(scope="module")
def llama_cpp() -> Arrays:
    """Answers of an engine that rounds activations to eight bits as well."""
    return read_arrays(HERE / "smollm2_llama_cpp.npz")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((HERE / "smollm2_oracle.json").read_text())


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[hotset.Engine]:
    with hotset.load(smollm2_path, context=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(engine: hotset.Engine, oracle: Arrays) -> Arrays:
    """hotset's answers to the same tokens: best token, loss, and log-probabilities of the oracle's best tokens."""
    found: Arrays = {}
    for text, expected in oracle.items():
        token_ids = expected["token_ids"]
        logits = engine.logits(token_ids, positions="all").astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        top_ids = expected["top_ids"].astype(np.int64)
        found[text] = {
            "argmax": logits.argmax(axis=1),
            "losses": -log_probabilities[np.arange(len(token_ids) - 1), token_ids[1:]],
            "top_log_probabilities": np.take_along_axis(log_probabilities, top_ids, axis=1),
        }
    return found


@pytest.mark.parametrize("path", sorted((HERE / "texts").glob("*.txt")), ids=lambda path: path.stem)
def test_text_becomes_the_same_tokens(engine: hotset.Engine, oracle: Arrays, path: Path) -> None:
    """Guards the tokenizer read from GGUF: pre-splitting, merges, no beginning-of-text token."""
    assert engine.codec is not None
    assert list(engine.codec.encode_prompt(path.read_text())) == oracle[path.stem]["token_ids"].tolist()


@pytest.mark.parametrize("name", ["chat", "counting"])
def test_greedy_continuation_is_the_stored_one(engine: hotset.Engine, record: dict[str, Any], name: str) -> None:
    """Guards the way from a prompt to text: template, tokens, steps, end-of-text, decoding."""
    expected = record["prompts"][name]
    num_new = len(expected["continuation_ids"])
    *pieces, last = engine.generate(expected["prompt"], hotset.Sampling(max_tokens=num_new))
    assert last.num_prompt_tokens == len(expected["prompt_ids"])
    assert list(last.token_ids) == expected["continuation_ids"]
    assert "".join(piece.text for piece in pieces) == expected["continuation_text"]


@pytest.mark.parametrize("other", ["oracle", "llama_cpp"])
def test_best_token_agrees(answers: Arrays, oracle: Arrays, other: str, request: pytest.FixtureRequest) -> None:
    """Guards the arithmetic: a wrong kernel turns many best tokens, rounding turns only close calls."""
    expected: Arrays = request.getfixturevalue(other)
    differs = joined(answers, "argmax") != joined(expected, "argmax")
    agreement = 1.0 - differs.mean()
    first = 1.0 - np.mean(answers["alice"]["argmax"][:NUM_COMPARED] != expected["alice"]["argmax"][:NUM_COMPARED])
    assert agreement >= LEAST_AGREEMENT, f"{other}: {agreement:.4f} over all texts"
    assert first >= LEAST_AGREEMENT, f"{other}: {first:.4f} over the first {NUM_COMPARED} positions"
    margins = joined(oracle, "margin")[differs]
    assert np.quantile(margins, 0.95) <= TYPICAL_MARGIN


def test_best_log_probabilities_agree(answers: Arrays, oracle: Arrays) -> None:
    """Guards against an error that keeps the order of tokens but flattens or sharpens the distribution."""
    difference = joined(answers, "top_log_probabilities") - joined(oracle, "top_log_probabilities")
    assert np.abs(difference).mean() <= MEAN_LOG_PROBABILITY_TOLERANCE


@pytest.mark.parametrize(("other", "tolerance"), [("llama_cpp", 0.005), ("oracle", 0.01)])
def test_perplexity_agrees(answers: Arrays, other: str, tolerance: float, request: pytest.FixtureRequest) -> None:
    """Guards the quality as a whole: a small error at every position shows here first."""
    assert perplexity(answers) == pytest.approx(perplexity(request.getfixturevalue(other)), rel=tolerance)
