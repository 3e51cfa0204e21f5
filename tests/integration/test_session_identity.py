"""Which engine a session belongs to, on real checkpoints, and sessions of a real model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Tiny, random_tokens, tiny, write_gguf

import hotset
from hotset import Finished, RequestError, Sampling
from hotset.api import describe_model
from hotset.kv.identity import Identity, identify

M = tiny("Q8_0", is_tied=False)
DRAW = Sampling(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)


def identity_of(path: Path, cache_format: str | None = None) -> Identity:
    described = describe_model(path, cache_format)
    with described.checkpoint as checkpoint:
        return identify(described.spec, checkpoint, described.account, "avx2")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", M)


def test_the_same_weights_under_another_name_are_the_same_model(path: Path, tmp_path: Path) -> None:
    """Bug class: moving a model, or downloading it again, makes all sessions foreign."""
    copy = tmp_path / "other.gguf"
    copy.write_bytes(path.read_bytes())
    os.utime(copy, (1, 1))
    assert identity_of(copy) == identity_of(path)


@pytest.mark.parametrize("other", [replace(M, seed=2), tiny("Q4_0", is_tied=False), replace(M, layers=3)])
def test_other_weights_are_another_model(path: Path, tmp_path: Path, other: Tiny) -> None:
    """Bug class: a fine-tune, whose tensors have the same names and shapes, takes the rows of its base."""
    assert identity_of(write_gguf(tmp_path / "other.gguf", other)).weights != identity_of(path).weights


def test_another_rotary_base_is_another_program(path: Path, tmp_path: Path) -> None:
    """Bug class: only the tensors are compared, and a setting that changes every row is not."""
    one, two = identity_of(path), identity_of(write_gguf(tmp_path / "other.gguf", replace(M, theta=5e5)))
    assert one.weights == two.weights and one.program != two.program


def test_another_cache_format_is_another_cache(path: Path) -> None:
    one, two = identity_of(path, "BF16"), identity_of(path, "F16")
    assert one.weights == two.weights and one.cache != two.cache
    assert one.cache == ("kv: 2 layers x BF16 row of 128 B per token",)


def last_of(engine: hotset.Engine, prompt: list[int]) -> Finished:
    *_, last = engine.generate(prompt, DRAW)
    assert isinstance(last, Finished)
    return last


@pytest.mark.parametrize("length", [2, 200, 256, 257, 258, 600])
def test_a_session_of_a_loaded_model_goes_on_with_the_same_bits(path: Path, tmp_path: Path, length: int) -> None:
    """Bug class: rows of a block that is not full do not survive the file (tiles of 16 and 64 rows)."""
    prompt = random_tokens(length).tolist()
    with hotset.load(path, context=700, threads=1) as engine:
        engine.save_session(tmp_path / "s", prompt)
        engine.clear_cache()
        expected = last_of(engine, prompt)
    with hotset.load(path, context=700, threads=2) as engine:
        assert engine.load_session(tmp_path / "s").cached_tokens == length - 1
        last = last_of(engine, prompt)
        assert (last.token_ids, last.cached_tokens) == (expected.token_ids, length - 1)


def test_a_session_of_another_cache_format_is_refused(path: Path, tmp_path: Path) -> None:
    with hotset.load(path, context=100, cache_format="F16") as engine:
        engine.save_session(tmp_path / "s", [1, 2, 3])
    with (
        hotset.load(path, context=100, cache_format="BF16") as engine,
        pytest.raises(RequestError, match=r"F16 row of 128 B per token.*this engine keeps.*BF16"),
    ):
        engine.load_session(tmp_path / "s")
