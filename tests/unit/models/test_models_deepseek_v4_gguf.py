"""GGUF files of the DeepSeek-V4 family: the same model as the released layout, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from dsv4_files import TinyV4, make_tensors, write_v4
from dsv4_gguf import gguf_name, gguf_tensors, metadata, write_gguf, write_v4_gguf
from dsv4_reference import run_chunks

from hotset.checkpoint.checkpoint import Checkpoint, open_checkpoint
from hotset.checkpoint.formats import FORMATS
from hotset.checkpoint.manifest import account, formats_of
from hotset.checkpoint.scaled import check_values
from hotset.checkpoint.tensor import TensorInfo
from hotset.errors import CheckpointError
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.program.cache import num_blocks
from hotset.program.reference import ReferenceExecutor, reference_weights

OFFICIAL = TinyV4(formats="official")
NUM_TOKENS = 150  # a row of ratio 128 among them
TOKENS = np.random.default_rng(7).integers(0, OFFICIAL.vocab, NUM_TOKENS).astype(np.int32)
FLASH = json.loads((Path(__file__).parent / "deepseek_v4" / "flash_0731.json").read_text())

Weights = dict[str, np.ndarray]


def opened(path: Path) -> tuple[ModelSpec, dict[str, str], Weights]:
    with open_checkpoint(path) as checkpoint:
        spec = describe(checkpoint)
        found = account(checkpoint, spec.tensors)
        return spec, formats_of(spec.tensors, found), reference_weights(checkpoint, found)


def logits(path: Path, *, rounding: bool, cache_format: str | None = None) -> np.ndarray:
    spec, formats, weights = opened(path)
    executor = ReferenceExecutor(
        with_cache_format(spec, formats, cache_format), weights, formats, num_blocks=num_blocks(NUM_TOKENS),
        num_frontiers=1, max_tokens=NUM_TOKENS, max_outputs=NUM_TOKENS, rounding=rounding,
    )  # fmt: skip
    return run_chunks(executor, TOKENS)


# ---- the same model ------------------------------------------------------------------------------------------


def test_float_twin_gives_the_same_logits(tmp_path: Path) -> None:
    """Every name, shape and setting: with the same BF16 and F32 numbers nothing but the file kind is left to differ."""
    m = TinyV4()
    want = logits(write_v4(tmp_path / "released", m), rounding=True)
    found = logits(write_v4_gguf(tmp_path / "m.gguf", m), rounding=True)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    assert np.abs(want).max() > 1


def test_exact_values_of_official_formats_give_the_same_logits(tmp_path: Path) -> None:
    """MXFP4 as released, FP8 written out as F32, in exact arithmetic: one answer."""
    want = logits(write_v4(tmp_path / "released", OFFICIAL), rounding=False, cache_format="BF16-exact")
    path = write_v4_gguf(tmp_path / "m.gguf", OFFICIAL, dense="F32")
    np.testing.assert_allclose(logits(path, rounding=False, cache_format="BF16-exact"), want, rtol=0, atol=1e-5)


def test_weights_as_converted(tmp_path: Path) -> None:
    """Experts keep every bit; what was FP8 is what the gguf package makes of its values; the rest is as released."""
    _, formats, weights = opened(write_v4_gguf(tmp_path / "m.gguf", OFFICIAL))
    _, released_formats, released = opened(write_v4(tmp_path / "released", OFFICIAL))
    assert weights.keys() == released.keys()
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for key, want in released.items():
        if released_formats[key] == "FP8":
            assert formats[key] == "Q8_0"
            want = gguf.quants.dequantize(gguf.quants.quantize(want, q8_0), q8_0)
        np.testing.assert_array_equal(weights[key], want, err_msg=key)
    for key in ("layers.0.experts.w1", "layers.3.experts.w2"):
        assert formats[key] == released_formats[key] == "MXFP4"


def test_program_and_groups_are_those_of_the_release(tmp_path: Path) -> None:
    """One description: the file kind changes names alone. (Settings that are no binary fractions pass through F32.)"""
    m = replace(OFFICIAL, limit=0.75)
    spec, _, _ = opened(write_v4_gguf(tmp_path / "m.gguf", m))
    with open_checkpoint(write_v4(tmp_path / "released", m)) as checkpoint:
        released = describe(checkpoint)
    eps = float(np.float32(1e-6))
    assert repr(spec.program).replace(repr(eps), "1e-06") == repr(released.program)
    for field in ("family", "groups", "frontier", "cache_forms", "num_layers", "vocab_size", "max_context", "eos_ids"):
        assert getattr(spec, field) == getattr(released, field)


def test_formats_of_other_tools(tmp_path: Path) -> None:
    """F16 mixing matrices and position tables, Q4_0 experts: what ds4's files and requantised ones hold."""
    m = TinyV4()
    path = write_v4_gguf(tmp_path / "m.gguf", m, floats="F16", experts="Q4_0")
    _, formats, weights = opened(path)
    assert formats["layers.1.hc_attn.fn"] == formats["layers.1.comp.ape"] == formats["embed"] == "F16"
    assert formats["layers.1.experts.w3"] == "Q4_0"
    name = "layers.1.ffn.experts.5.w3.weight"
    released = make_tensors(m)[name].value
    assert np.abs(weights["layers.1.experts.w3.5"] - released).max() < np.abs(released).max() / 8
    assert np.isfinite(logits(path, rounding=True)).all()


def test_number_of_tensors_of_the_real_conversion() -> None:
    """1,328 tensors in a conversion of Flash: 1,199 and 129 stacks of experts, as its model cards count them."""
    m = TinyV4(ratios=tuple(FLASH["compress_ratios"][:43]), hash_layers=3, experts=FLASH["n_routed_experts"])
    embedding = TensorInfo("token_embd.weight", (m.vocab, m.hidden), FORMATS["BF16"], 0, 0, 2 * m.vocab * m.hidden)
    keys = {f"deepseek4.{k}": np.array(v) if isinstance(v, list) else v for k, v in metadata(m).items()}
    keys["general.architecture"] = "deepseek4"
    tensors = describe(Checkpoint("gguf", Path("m"), [], keys, {embedding.name: embedding})).tensors
    assert len(tensors) == len({decl.name for decl in tensors}) == len({decl.key for decl in tensors}) == 1_328
    stacks = [decl for decl in tensors if decl.parts > 1]
    assert len(stacks) == 129 and all(decl.shape[0] == decl.parts == 256 for decl in stacks)


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 2}, "deepseek4.expert_gating_func is 2, expected 'sqrtsoftplus'"),
        ({"expert_weights_norm": False}, "deepseek4.expert_weights_norm is False, expected True"),
        ({"expert_shared_count": 2}, "deepseek4.expert_shared_count is 2, expected 1"),
        ({"expert_group_count": 8}, "deepseek4.expert_group_count is 8, expected 0"),
        ({"attention.head_count_kv": 2}, "deepseek4.attention.head_count_kv is 2, expected 1"),
        ({"attention.head_count_kv": [1, 1, 2, 1]}, "head_count_kv has 2 different values, expected one for all"),
        ({"attention.value_length": 64}, "key and value heads of different size"),
        ({"swiglu_clamp_exp": [0.5, 0.5, 1.0, 0.5]}, "swiglu_clamp_exp has 2 different values, expected one"),
        ({"swiglu_clamp_shexp": [9.0] * 4}, "routed and shared experts are clamped at different values"),
        ({"swiglu_clamp_exp": None, "swiglu_clamp_shexp": None}, "deepseek4.swiglu_clamp_exp is missing"),
        ({"attention.compress_ratios": [0, 4]}, "compress_ratios is 2 entries, expected one per layer"),
        ({"attention.compress_ratios": None}, "compress_ratios is missing or not a list of integers"),
        ({"attention.q_lora_rank": None}, "deepseek4.attention.q_lora_rank is missing"),
        ({"hyper_connection.count": "four"}, "deepseek4.hyper_connection.count is 'four', expected a non-negative"),
        ({"rope.scaling.type": "linear"}, "rope scaling 'linear' is not one that this family has"),
        ({"rope.scaling.factor": None}, "rope_scaling: factor is missing"),
    ],
)
def test_settings_of_another_model_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A setting that hotset does not compute is named, not passed over."""
    keys = {key: value for key, value in (metadata(OFFICIAL) | changes).items() if value is not None}
    path = write_gguf(tmp_path / "m.gguf", keys, gguf_tensors(OFFICIAL))
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError) as caught:
        describe(checkpoint)
    assert message in caught.value.message


def test_every_defect_is_named(tmp_path: Path) -> None:
    """A missing tensor, one too many, an expert less in a stack, ids as floats, experts in a format without kernels."""
    tensors = gguf_tensors(OFFICIAL)
    del tensors["blk.2.attn_sinks.weight"]
    tensors["blk.9.attn_norm.weight"] = tensors["blk.0.attn_norm.weight"]
    blocks, kind = tensors["blk.1.ffn_up_exps.weight"]
    tensors["blk.1.ffn_up_exps.weight"] = blocks[:7], kind
    ids, _ = tensors["blk.0.ffn_gate_tid2eid.weight"]
    tensors["blk.0.ffn_gate_tid2eid.weight"] = ids.astype(np.float32), gguf.GGMLQuantizationType.F32
    tensors["blk.3.ffn_down_exps.weight"] = (
        np.zeros((8, 32, 24), np.uint8), gguf.GGMLQuantizationType.Q5_1
    )  # fmt: skip
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata(OFFICIAL), tensors)) as checkpoint:
        spec = describe(checkpoint)
        with pytest.raises(CheckpointError) as caught:
            account(checkpoint, spec.tensors)
    for problem in (
        "1 missing: blk.2.attn_sinks.weight", "1 not expected: blk.9.attn_norm.weight",
        "blk.1.ffn_up_exps.weight is 7x32x32, expected 8x32x32",
        "blk.0.ffn_gate_tid2eid.weight is F32, expected I32 or I64",
        "tensor blk.3.ffn_down_exps.weight is Q5_1; hotset runs",
    ):  # fmt: skip
        assert problem in caught.value.message


@pytest.mark.parametrize("scale", [255, 200])
def test_scales_inside_blocks_are_checked(scale: int, tmp_path: Path) -> None:
    """One wild e8m0 byte in the last expert of a stack: infinite products, found before any is made."""
    tensors = gguf_tensors(OFFICIAL)
    tensors["blk.1.ffn_down_exps.weight"][0][7, 31, 0] = scale
    path = write_gguf(tmp_path / "m.gguf", metadata(OFFICIAL), tensors)
    with open_checkpoint(path) as checkpoint:
        found = account(checkpoint, describe(checkpoint).tensors)
        for check in (check_values, reference_weights):
            with pytest.raises(CheckpointError, match=r"1 of the \d+ scales in blk\.1\.ffn_down_exps\.weight"):
                check(checkpoint, found)


def test_blocks_of_zeros_may_have_any_small_scale(tmp_path: Path) -> None:
    """llama.cpp's quantiser gives them the scale 2^-127; an expert that was never trained is no damage."""
    tensors = gguf_tensors(OFFICIAL)
    tensors["blk.1.ffn_down_exps.weight"][0][7, 31] = [0, *[0x08, 0x80] * 8]
    _, _, weights = opened(write_gguf(tmp_path / "m.gguf", metadata(OFFICIAL), tensors))
    assert not weights["layers.1.experts.w2.7"][31].any()


# ---- draft heads ---------------------------------------------------------------------------------------------


def with_draft(num_layers: int) -> dict[str, Any]:
    """The tensors with one block more, as an MTP head beside its trunk would lie."""
    tensors = gguf_tensors(OFFICIAL)
    for name in [n for n in tensors if n.startswith("blk.0.")]:
        tensors[name.replace("blk.0.", f"blk.{num_layers}.")] = tensors[name]
    tensors[f"blk.{num_layers}.nextn.eh_proj.weight"] = np.zeros((32, 64), np.float32), gguf.GGMLQuantizationType.F32
    return tensors


def test_draft_block_is_ignored_with_its_reason(tmp_path: Path) -> None:
    """block_count counts it: a reader that does not know would run it as one more layer."""
    keys = metadata(OFFICIAL)
    keys |= {"block_count": 5, "nextn_predict_layers": 1, "attention.compress_ratios": [*OFFICIAL.ratios, 0]}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", keys, with_draft(4))) as checkpoint:
        spec = describe(checkpoint)
        found = account(checkpoint, spec.tensors)
    assert spec.num_layers == 4
    assert {info.name.split(".")[1] for info, _ in found.ignored} == {"4"}
    assert {reason for _, reason in found.ignored} == {"the draft layer of the preview, which is not used yet"}


def test_draft_that_is_stated_and_absent(tmp_path: Path) -> None:
    """Published files say nextn_predict_layers 1 and hold the trunk alone."""
    keys = metadata(OFFICIAL) | {"nextn_predict_layers": 1}
    spec, _, _ = opened(write_gguf(tmp_path / "m.gguf", keys, gguf_tensors(OFFICIAL)))
    assert spec.num_layers == 4


def test_draft_alone_is_not_a_model(tmp_path: Path) -> None:
    keys = metadata(OFFICIAL) | {"block_count": 5, "nextn_predict_layers": 1}
    tensors = {
        name: t for name, t in with_draft(4).items() if not name.startswith(("blk.0", "blk.1", "blk.2", "blk.3"))
    }
    with (
        open_checkpoint(write_gguf(tmp_path / "m.gguf", keys, tensors)) as checkpoint,
        pytest.raises(CheckpointError, match="holds the draft head alone"),
    ):
        describe(checkpoint)


def test_names_have_no_second_meaning() -> None:
    """Every released tensor of the trunk has a name of its own in the file, stacks apart."""
    names = [n for n, t in make_tensors(OFFICIAL).items() if t.value is not None and ".experts." not in n]
    assert len({gguf_name(name) for name in names}) == len(names)
