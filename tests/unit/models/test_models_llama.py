"""What the Llama family declares, from headers alone: configurations, tensors, frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Tiny, declared, hf_config, shapes, spec_and_formats, tiny, write_gguf, write_hf_folder

from hotset.checkpoint.checkpoint import Checkpoint, open_checkpoint
from hotset.checkpoint.manifest import account
from hotset.errors import CheckpointError, RequestError
from hotset.models.llama import base_frequencies, llama3_frequencies
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.program import program as p

M = Tiny("Q8_0", heads=4, kv_heads=2, head_dim=32)


def hf(**config: Any) -> ModelSpec:
    """Describe config.json; a value of None is JSON's null."""
    return describe(Checkpoint("safetensors", Path("model"), [], hf_config(M) | config, {}))


def gguf(metadata: Mapping[str, object] | None = None, m: Tiny = M) -> ModelSpec:
    """Describe a GGUF header; a value of None removes the key."""
    return describe(declared(m, metadata))


def frequencies(spec: ModelSpec) -> tuple[float, ...]:
    return next(op.frequencies for op in spec.program.ops if isinstance(op, p.RopeAngles))


# ---- declarations --------------------------------------------------------------------------------------------


def test_the_declared_model() -> None:
    """Sizes, cache rows and the order of ops of one layer."""
    spec = gguf()
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.vocab_size, spec.max_context) == (
        "llama",
        2,
        64,
        259,
        4096,
    )
    (group,) = spec.groups
    # Keys and values of two heads of 32 halves.
    assert (group.layers, group.row_bytes, group.tokens_per_row) == ((0, 1), 2 * 2 * 32 * 2, 1)
    names = [type(op).__name__ for op in spec.program.ops]
    layer = [
        "RmsNorm",
        "Linear",
        "Linear",
        "Linear",
        "Rope",
        "Rope",
        "StoreKV",
        "Attend",
        "Linear",
        "RmsNorm",
        "GatedLinear",
        "Linear",
    ]
    assert names == ["Embed", "RopeAngles", *layer, *layer, "SelectOutputs", "RmsNorm", "Linear"]
    attend = next(op for op in spec.program.ops if isinstance(op, p.Attend))
    assert attend.scale == 32**-0.5 and (attend.num_heads, attend.num_kv_heads) == (4, 2)


@pytest.mark.parametrize("is_tied", [True, False])
def test_every_weight_of_the_program_is_declared_and_loaded(is_tied: bool) -> None:
    """Guards against a program that names a weight which no file has, and against a tied head read from one."""
    spec, formats = spec_and_formats(replace(M, is_tied=is_tied))
    assert set(spec.program.weights) == set(formats)
    assert ("head" in formats) is not is_tied
    for decl in spec.tensors:
        if decl.key in spec.program.weights:
            weight = spec.program.weights[decl.key]
            assert decl.shape == ((weight.out_width,) if weight.in_width == 1 else (weight.out_width, weight.in_width))


def test_rotary_pairs_follow_the_kind_of_file(tmp_path: Path) -> None:
    """GGUF converters permute q and k so that pairs are neighbours; Hugging Face files pair halves."""
    for spec, pairs in ((gguf(), "adjacent"), (hf(), "halves")):
        assert {op.pairs for op in spec.program.ops if isinstance(op, p.Rope)} == {pairs}


def test_head_size_need_not_be_hidden_size_over_heads() -> None:
    """Several real models state a head size of their own; without one it follows from the hidden size."""
    assert next(op for op in hf(head_dim=48).program.ops if isinstance(op, p.Attend)).head_dim == 48
    assert next(op for op in hf(head_dim=None).program.ops if isinstance(op, p.Attend)).head_dim == 16
    without = {
        "llama.attention.key_length": None,
        "llama.attention.value_length": None,
        "llama.rope.dimension_count": None,
    }
    assert next(op for op in gguf(without).program.ops if isinstance(op, p.Attend)).head_dim == 16


def test_optional_keys_have_the_defaults_of_the_format() -> None:
    """One kv head per head, theta 10,000, untied in config.json, eos absent."""
    spec = hf(num_key_value_heads=None, rope_theta=None, tie_word_embeddings=None, eos_token_id=None, hidden_act=None)
    assert next(op for op in spec.program.ops if isinstance(op, p.Attend)).num_kv_heads == 4
    assert frequencies(spec)[1] == pytest.approx(10000 ** (-2 / 32), rel=1e-15)
    assert spec.eos_ids == () and "head" in spec.program.weights
    spec = gguf({"llama.attention.head_count_kv": None, "llama.rope.freq_base": None, "llama.vocab_size": None})
    assert next(op for op in spec.program.ops if isinstance(op, p.Attend)).num_kv_heads == 4
    assert spec.vocab_size == 259


@pytest.mark.parametrize(("value", "ids"), [(2, (2,)), ([1, 2], (1, 2)), (None, ())])
def test_end_of_text_ids(value: object, ids: tuple[int, ...]) -> None:
    assert hf(eos_token_id=value).eos_ids == ids


def test_end_of_text_and_end_of_turn_of_a_gguf_file() -> None:
    """Both end an answer; the same id twice counts once."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    assert gguf(dict(zip(keys, (5, 9), strict=True))).eos_ids == (5, 9)
    assert gguf(dict(zip(keys, (5, 5), strict=True))).eos_ids == (5,)


def test_tensors_of_a_whole_file_are_accounted_for(tmp_path: Path) -> None:
    """Real files of both kinds: nothing missing, nothing extra; a head beside a tied embedding is ignored by name."""
    m = tiny("F32", divisors=(1.0,) * 8)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", m)) as checkpoint:
        found = account(checkpoint, describe(checkpoint).tensors)
        assert [info.name for info, _ in found.ignored] == ["rope_freqs.weight"]
        assert len(found.loaded) == len(shapes(m))
    folder = write_hf_folder(tmp_path / "hf", replace(m, is_tied=False), {"tie_word_embeddings": True})
    with open_checkpoint(folder) as checkpoint:
        found = account(checkpoint, describe(checkpoint).tensors)
        assert [(info.name, reason) for info, reason in found.ignored] == [("lm_head.weight", "tied to the embedding")]


@pytest.mark.parametrize(
    ("m", "format"),
    [
        (Tiny("F32"), "F16"),
        (Tiny("F16", vector_format="BF16"), "F16"),
        (Tiny("BF16"), "BF16"),
        (Tiny("Q8_0"), "BF16"),
        (Tiny("F16", embed_format="Q8_0"), "BF16"),
    ],
)
def test_cache_rows_suit_the_weights(m: Tiny, format: str) -> None:
    """F16 rows only where every product takes float inputs; a wish overrules, and another format is refused."""
    spec, formats = spec_and_formats(m)
    chosen = with_cache_format(spec, formats)
    assert chosen.groups[0].format == chosen.program.groups[0].format == format
    assert replace(chosen.groups[0], format=spec.groups[0].format) == spec.groups[0]
    for wish in ("F16", "BF16"):
        assert with_cache_format(spec, formats, wish).groups[0].format == wish
    with pytest.raises(RequestError, match="cache format 'Q8_0', expected one of BF16, F16"):
        with_cache_format(spec, formats, "Q8_0")


def test_bias_tensors_are_refused_by_name() -> None:
    """A file with biases would run without an error and give other text."""
    checkpoint = declared(M)
    extra = dict(checkpoint.tensors)
    extra["blk.0.attn_q.bias"] = extra["output_norm.weight"]
    biased = Checkpoint("gguf", Path("m.gguf"), [], dict(checkpoint.metadata), extra)
    with pytest.raises(CheckpointError, match=r"1 not expected: blk\.0\.attn_q\.bias"):
        account(biased, describe(biased).tensors)


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
     "max_position_embeddings", "rms_norm_eps"],
)  # fmt: skip
def test_missing_keys_of_a_configuration(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        hf(**{key: None})


@pytest.mark.parametrize(
    "key",
    ["embedding_length", "attention.head_count", "block_count", "feed_forward_length", "context_length",
     "attention.layer_norm_rms_epsilon"],
)  # fmt: skip
def test_missing_keys_of_a_gguf_file(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"llama\.{key} is missing"):
        gguf({f"llama.{key}": None})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"mlp_bias": True}, "mlp_bias is True, expected False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a non-negative integer"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', expected a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', expected a token id or a list of them"),
        ({"eos_token_id": [2, True]}, "expected a token id or a list of them"),
        ({"num_attention_heads": 0}, "num_heads is 0, expected at least 1"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0, expected at least 1"),
        ({"num_key_value_heads": 3}, "4 heads do not divide over 3 kv heads"),
        ({"head_dim": 20}, "head_dim is 20, expected a multiple of 16"),
        ({"head_dim": 528}, "head_dim is 528"),
        ({"intermediate_size": 100}, "ffn_size is 100, expected a multiple of 16"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not one that hotset runs"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type is 3, expected a string"),
        ({"model_type": "mixtral"}, "architecture 'mixtral' is not one that hotset runs"),
        ({"model_type": None}, "model_type is None, expected the name of an architecture"),
    ],
)
def test_configurations_that_are_refused(config: dict[str, object], message: str) -> None:
    """Each names the key, what was found and what was expected, in one line."""
    with pytest.raises(CheckpointError) as error:
        hf(**config)
    assert message in error.value.message and "\n" not in error.value.message


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.value_length": 16}, "key and value heads of different size"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not one that hotset runs"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.rope.dimension_count": 64}, "64 rotary channels, expected an even number up to 32"),
        ({"llama.block_count": "2"}, "llama.block_count is '2', expected a non-negative integer"),
        ({"llama.attention.head_count_kv": np.full(40, 2, np.int32)}, "llama.attention.head_count_kv is"),
        ({"general.architecture": "rwkv"}, "architecture 'rwkv' is not one that hotset runs"),
        ({"general.architecture": None}, "general.architecture is None"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, "expected a token id"),
    ],
)
def test_gguf_headers_that_are_refused(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        gguf(metadata)
    assert message in error.value.message and "\n" not in error.value.message


@pytest.mark.parametrize("scaling", ["linear", [{"rope_type": "linear"}], 4.0, True])
def test_rope_scaling_that_is_no_object(scaling: object) -> None:
    """Guards against a Python error out of a damaged configuration."""
    with pytest.raises(CheckpointError, match="rope_scaling"):
        hf(rope_scaling=scaling)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 0},
        {"rope_theta": -10000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 0, "low_freq_factor": 1, "high_freq_factor": 4,
                          "original_max_position_embeddings": 8192}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 0, "high_freq_factor": 4,
                          "original_max_position_embeddings": 8192}},
    ],
)  # fmt: skip
def test_rotary_numbers_that_cannot_be(config: dict[str, object]) -> None:
    """Zeros and negative numbers: an error about the file, not a division by zero and not complex frequencies."""
    with pytest.raises(CheckpointError):
        hf(**config)


def test_gguf_rotary_numbers_that_cannot_be(tmp_path: Path) -> None:
    for metadata in (
        {"llama.rope.freq_base": 0.0},
        {"llama.rope.freq_base": -1.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0},
    ):
        with pytest.raises(CheckpointError):
            gguf(metadata)
    for divisors in ((1.0,) * 7, (1.0,) * 7 + (0.0,), (1.0,) * 7 + (math.nan,)):
        path = write_gguf(tmp_path / "m.gguf", tiny("F32", divisors=divisors))
        with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match="rope_freqs"):
            describe(checkpoint)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.block_count": 4_000_000_000},
        {"llama.rope.dimension_count": 4_000_000_000},
        {"llama.attention.key_length": 4_000_000_000, "llama.attention.value_length": 4_000_000_000,
         "llama.rope.dimension_count": None},
    ],
)  # fmt: skip
def test_absurd_sizes_are_refused_before_anything_is_built(
    metadata: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged header must not hang: a file of 20 tensors has no four thousand million layers."""

    class TooLate(Exception):
        pass

    def small_range(*bounds: int) -> range:
        if max(bounds) > 1_000_000:
            raise TooLate
        return range(*bounds)

    monkeypatch.setattr("hotset.models.llama.range", small_range, raising=False)
    with pytest.raises(CheckpointError):
        gguf(metadata)


# ---- frequencies ---------------------------------------------------------------------------------------------


def test_base_frequencies() -> None:
    """theta^(-2i/d), by logarithms."""
    got = base_frequencies(500000.0, 128)
    assert len(got) == 64 and got[0] == 1.0
    np.testing.assert_allclose(got, [math.exp(-2 * i / 128 * math.log(500000.0)) for i in range(64)], rtol=1e-14)


# Llama 3.1 8B and Llama 3.2 1B, from the formula of meta-llama/llama-models (apply_scaling), in 50 decimal digits.
LLAMA_3_1 = {
    0: 1.0, 1: 0.814617233856545, 20: 0.0165604400809944, 28: 0.00321144599475259, 29: 0.00216657076350336,
    30: 0.00137189356776114, 31: 0.000856751412919632, 32: 0.000524846160992955, 33: 0.000312693750384065,
    34: 0.000178507812767996, 40: 3.42810219595259e-05, 63: 3.06892598891451e-07,
}  # fmt: skip
LLAMA_3_2 = {
    0: 1.0, 13: 0.00483942134571989, 14: 0.00321144599475259, 15: 0.00129054792820926, 16: 0.000429556796559368,
    17: 9.70828780262767e-05, 18: 1.94616381848311e-05, 31: 9.41830672543491e-08,
}  # fmt: skip


@pytest.mark.parametrize(("dim", "factor", "known"), [(128, 8.0, LLAMA_3_1), (64, 32.0, LLAMA_3_2)])
def test_llama3_scaling_against_the_published_formula(dim: int, factor: float, known: dict[int, float]) -> None:
    """Kept, blended and divided frequencies of two published models."""
    got = llama3_frequencies(base_frequencies(500000.0, dim), factor, 1.0, 4.0, 8192)
    for index, value in known.items():
        assert got[index] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_is_read_from_both_generations_of_configuration(key: str) -> None:
    """transformers 4 wrote rope_scaling beside rope_theta, version 5 one rope_parameters with both."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    theta = {"rope_theta": 500000.0}
    spec = hf(
        head_dim=128, **({key: llama3} | theta if key == "rope_scaling" else {key: llama3 | theta, "rope_theta": None})
    )
    assert frequencies(spec)[30] == pytest.approx(LLAMA_3_1[30], rel=1e-12)
    linear = hf(**{key: {"type": "linear", "factor": 4.0}})
    np.testing.assert_allclose(frequencies(linear), np.array(base_frequencies(10000.0, 32)) / 4, rtol=1e-15)
    assert frequencies(hf(**{key: {"rope_type": "default"}})) == tuple(base_frequencies(10000.0, 32))


def test_gguf_scaling(tmp_path: Path) -> None:
    """Linear scaling by key, Llama 3.1's by one divisor per frequency."""
    linear = gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    np.testing.assert_allclose(frequencies(linear), np.array(base_frequencies(10000.0, 32)) / 4, rtol=1e-15)
    divisors = tuple(float(2**i) for i in range(8))
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny("F32", divisors=divisors))) as checkpoint:
        got = frequencies(describe(checkpoint))
    np.testing.assert_allclose(got, np.array(base_frequencies(10000.0, 16)) / divisors, rtol=1e-15)


@pytest.mark.parametrize(
    "metadata",
    [{"llama.rope.scale_linear": 4.0}, {"llama.rope.scaling.factor": 4.0}],
)
def test_a_scaling_factor_without_its_type_is_not_ignored(metadata: dict[str, object]) -> None:
    """Older converters wrote rope.scale_linear, or a factor alone; llama.cpp (llama-model.cpp, load_hparams) takes both
    for linear scaling. Either is fine here, honoured or refused by name; ignored it gives other text in silence."""
    try:
        got = frequencies(gguf(metadata))
    except CheckpointError as error:
        assert next(iter(metadata)) in error.message
    else:
        np.testing.assert_allclose(got, np.array(base_frequencies(10000.0, 32)) / 4, rtol=1e-15)
