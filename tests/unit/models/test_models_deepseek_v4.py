"""What the DeepSeek-V4 family declares: the release, Pro, the preview, FP8 experts; and what it refuses."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dsv4_files import TinyV4, make_tensors, write_v4

from hotset.checkpoint.checkpoint import Checkpoint, open_checkpoint
from hotset.checkpoint.formats import FORMATS
from hotset.checkpoint.manifest import Account, account, declared_formats, formats_of
from hotset.errors import CheckpointError, RequestError
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.program import program as p
from hotset.program.cache import block_bytes, frontier_bytes
from hotset.program.reference import reference_weights

FOLDER = Path(__file__).parent / "deepseek_v4"
FLASH: dict[str, Any] = json.loads((FOLDER / "flash_0731.json").read_text())
PRO: dict[str, Any] = json.loads((FOLDER / "pro.json").read_text())
TINY = TinyV4(formats="official")
ONE_MILLION = 1 << 20


def declared(config: dict[str, Any], **changes: Any) -> ModelSpec:
    """Describe a config.json without files; a value of None is JSON's null."""
    return describe(Checkpoint("safetensors", Path("model"), [], config | changes, {}))


@pytest.fixture(scope="module")
def flash() -> ModelSpec:
    return declared(FLASH)


@pytest.fixture(scope="module")
def pro() -> ModelSpec:
    return declared(PRO)


def ops(spec: ModelSpec, kind: type) -> list[Any]:
    return [op for op in spec.program.ops if isinstance(op, kind)]


def opened(folder: Path, m: TinyV4) -> tuple[ModelSpec, Account, dict[str, str]]:
    with open_checkpoint(write_v4(folder, m)) as checkpoint:
        spec = describe(checkpoint)
        found = account(checkpoint, spec.tensors)
        return spec, found, formats_of(spec.tensors, found)


# ---- the release ---------------------------------------------------------------------------------------------


def test_every_tensor_of_the_release_is_declared(flash: ModelSpec) -> None:
    """72,317 tensors: 67,612 of the trunk and 4,705 of the draft head, in the dtypes that the files' headers have."""
    assert len(flash.tensors) == len({d.name for d in flash.tensors}) == len({d.key for d in flash.tensors}) == 72_317
    spare = [d for d in flash.tensors if d.need == "spare"]
    assert len(spare) == 4_705 and all(d.reason and d.name.startswith("mtp.") for d in spare)
    assert sum(d.need == "must" for d in flash.tensors) == 67_612
    dtypes = Counter(d.formats[0] for d in spare)
    assert dtypes == {"I8": 2304, "F8_E8M0": 2329, "F8_E4M3": 25, "BF16": 20, "F32": 27}


def test_the_declared_bytes_are_those_of_the_files(flash: ModelSpec) -> None:
    """155.42 GiB in all, 10.863 GB of them the draft head: shapes and formats, not only names."""
    sizes = {d.name: FORMATS[d.formats[0]].nbytes(d.shape) for d in flash.tensors}
    assert round(sum(sizes.values()) / 2**30, 2) == 155.42
    assert round(sum(size for name, size in sizes.items() if name.startswith("mtp.")) / 1e9, 3) == 10.863


@pytest.mark.parametrize(
    ("name", "shape", "formats"),
    [
        ("layers.0.attn.wq_b.weight", (32768, 1024), ("F8_E4M3",)),
        ("layers.0.attn.wq_b.scale", (256, 8), ("F8_E8M0",)),
        ("layers.42.attn.wo_a.weight", (8192, 4096), ("F8_E4M3",)),
        ("layers.2.attn.compressor.ape", (4, 1024), ("F32",)),
        ("layers.3.attn.compressor.ape", (128, 512), ("F32",)),
        ("layers.3.attn.compressor.wkv.weight", (512, 4096), ("BF16", "F32", "F16")),
        ("layers.2.attn.indexer.compressor.wgate.weight", (256, 4096), ("BF16", "F32", "F16")),
        ("layers.2.attn.indexer.wq_b.scale", (64, 8), ("F8_E8M0",)),
        ("layers.2.ffn.gate.tid2eid", (129280, 6), ("I64", "I32")),
        ("layers.3.ffn.gate.bias", (256,), ("F32",)),
        ("layers.5.ffn.experts.255.w2.weight", (4096, 1024), ("I8",)),
        ("layers.5.ffn.experts.255.w2.scale", (4096, 64), ("F8_E8M0",)),
        ("layers.5.ffn.shared_experts.w2.scale", (32, 16), ("F8_E8M0",)),
        ("hc_head_fn", (4, 16384), ("F32",)),
        ("mtp.0.main_proj.scale", (32, 96), ("F8_E8M0",)),
        ("mtp.2.confidence_head.proj.weight", (1, 4352), ("BF16", "F32", "F16")),
        ("mtp.2.ffn.shared_experts.w1.weight", (2048, 4096), ("F8_E4M3",)),
    ],
)
def test_shapes_of_the_release(flash: ModelSpec, name: str, shape: tuple[int, ...], formats: tuple[str, ...]) -> None:
    """specs/deepseek_v4.md section 3, line by line."""
    (decl,) = [d for d in flash.tensors if d.name == name]
    assert (decl.shape, decl.formats) == (shape, formats)


def test_what_a_layer_does_not_have_is_not_declared(flash: ModelSpec) -> None:
    names = {d.name for d in flash.tensors}
    for absent in ("layers.1.attn.compressor.ape", "layers.3.attn.indexer.wq_b.weight", "layers.2.ffn.gate.bias",
                   "layers.3.ffn.gate.tid2eid", "mtp.0.ffn.gate.tid2eid", "mtp.1.main_proj.weight",
                   "mtp.0.norm.weight", "mtp.0.attn.compressor.ape", "layers.43.attn.wq_a.weight",
                   "mtp.0.embed.weight"):  # fmt: skip
        assert absent not in names


def test_bytes_of_a_block_and_of_a_frontier(flash: ModelSpec) -> None:
    """899,648 bytes per 256 tokens; windows and compressor state under 16 MB per sequence."""
    assert block_bytes(flash.groups) == 899_648
    state = 21 * 8 * (8192 + 2048) + 20 * 128 * 4096
    assert frontier_bytes(flash.frontier) == 43 * 128 * 584 + state == 15_420_416


@pytest.mark.parametrize(
    ("form", "per_token"),
    [
        ("FP8", 3514.25),
        ("FP8+FP8", 3850.25),
        ("BF16-exact", 6880),
        ("FP4", 2346.5),
        ("BF16", 5893),
        ("FP4+FP8", 2682.5),
    ],
)
def test_bytes_per_token_of_every_form(flash: ModelSpec, form: str, per_token: float) -> None:
    """specs/deepseek_v4.md section 4.3: 21 (row + index row) / 4 + 20 row / 128."""
    spec = with_cache_format(flash, declared_formats(flash.tensors), form)
    assert block_bytes(spec.groups) / 256 == per_token
    assert spec.groups == spec.program.groups
    kv = form.split("+")[0]
    assert {g.format for g in (*spec.groups, *spec.frontier) if g.name in ("csa", "hca", "window")} == {kv}
    assert {g.format for g in spec.frontier if g.name.endswith("state")} == {"F32"}


def test_forms_of_cache_rows_are_the_familys(flash: ModelSpec) -> None:
    formats = declared_formats(flash.tensors)
    assert with_cache_format(flash, formats).groups == flash.groups
    with pytest.raises(RequestError, match=r"cache format 'F16', expected one of FP8, FP8\+FP8, BF16"):
        with_cache_format(flash, formats, "F16")


def test_pro_at_one_million_tokens(pro: ModelSpec) -> None:
    """9.62 GiB with BF16 rows, the figure of vLLM's announcement; 30 CSA and 31 HCA layers, no plain one."""
    assert {g.name: len(g.layers) for g in pro.groups} == {"csa": 30, "index": 30, "hca": 31}
    spec = with_cache_format(pro, declared_formats(pro.tensors), "BF16-exact")
    assert round(block_bytes(spec.groups) / 256 * ONE_MILLION / 2**30, 2) == 9.62
    assert len(ops(pro, p.RopeAngles)) == 1
    names = {d.name for d in pro.tensors if d.need == "spare"}
    assert {"mtp.0.e_proj.scale", "mtp.0.enorm.weight", "mtp.0.hc_head_fn", "mtp.0.norm.weight"} <= names
    assert not any("markov" in name or "main_proj" in name for name in names)


# ---- the program ---------------------------------------------------------------------------------------------


def test_every_weight_of_the_program_is_declared(flash: ModelSpec) -> None:
    """Guards against a program that names a weight which no file has, and against a declared one that nothing reads."""
    weights = flash.program.weights
    by_key = {d.key: d for d in flash.tensors if d.need == "must" and d.role != "scale"}
    parts = {weight.part(e): weight for weight in weights.values() for e in range(weight.count)}
    assert set(parts) == set(by_key)
    for key, weight in parts.items():
        decl = by_key[key]
        columns = decl.shape[-1] * (2 if decl.stored_as == "MXFP4" else 1)
        if weight.in_width == 1:
            assert math.prod(decl.shape) == weight.out_width, key
        else:
            assert (decl.shape[0], columns) == (weight.out_width, weight.in_width), key


def test_buffers_are_written_before_they_are_read(flash: ModelSpec) -> None:
    written: set[p.Buffer] = set()
    read: set[p.Buffer] = set()
    for op in flash.program.ops:
        assert set(p.reads(op)) <= written, op
        read |= set(p.reads(op))
        written |= set(p.writes(op))
    assert written - read == {flash.program.logits}


def test_rotary_bases(flash: ModelSpec) -> None:
    """Base 10,000 without YaRN in layers 0 and 1, base 160,000 with YaRN everywhere else and in every compressor.

    Guards against the most common mistake of engines, which shows only past 2,000 tokens.
    """
    plain, compressed = ops(flash, p.RopeAngles)
    np.testing.assert_allclose(plain.frequencies, 10000.0 ** (-np.arange(32) / 32), rtol=1e-12)
    g = 160000.0 ** (-np.arange(32) / 32)
    w = np.clip((np.arange(32) - 15) / (25 - 15), 0, 1)
    np.testing.assert_allclose(compressed.frequencies, g * (1 - w) + g / 16 * w, rtol=1e-12)
    layer = -1
    for op in flash.program.ops:
        if isinstance(op, p.Linear) and op.weight.key.endswith("wq_a"):
            layer += 1
        if isinstance(op, p.Rope):
            assert op.angles == (plain.out if layer < 2 else compressed.out)
            assert op.pairs == "adjacent" and op.rotary_dim == 64
            assert op.first + 64 == op.head_dim and op.head_dim in (512, 128)
    assert {c.frequencies for c in ops(flash, p.Compress)} == {compressed.frequencies}


def test_the_parts_of_attention(flash: ModelSpec) -> None:
    """Plain softmax scale, ratios, windows; the output of every layer is turned back before its projection."""
    attends = ops(flash, p.AttendRows)
    assert len(attends) == 43
    for layer, op in enumerate(attends):
        ratio = FLASH["compress_ratios"][layer]
        assert (op.layer, op.ratio, op.window_tokens, op.scale) == (layer, ratio, 128, 512**-0.5)
        assert op.group == {0: None, 4: "csa", 128: "hca"}[ratio]
        assert (op.chosen is not None) == (ratio == 4)
    for before, after in pairwise(flash.program.ops):
        if isinstance(before, p.AttendRows):
            assert isinstance(after, p.Rope) and after.is_inverse and after.x == before.out
    assert sum(op.is_inverse for op in ops(flash, p.Rope)) == 43
    assert {(op.top_k, op.scale) for op in ops(flash, p.IndexRows)} == {(512, 64**-0.5 * 128**-0.5)}
    grouped = [op for op in ops(flash, p.Linear) if op.groups > 1]
    assert {(op.groups, op.weight.in_width, op.weight.out_width) for op in grouped} == {(8, 4096, 8192)}
    compressors = Counter(
        (op.ratio, op.overlap, op.width, op.hadamard, op.group, op.state) for op in ops(flash, p.Compress)
    )
    assert compressors == {
        (4, True, 512, False, "csa", "csa_state"): 21,
        (4, True, 128, True, "index", "index_state"): 21,
        (128, False, 512, False, "hca", "hca_state"): 20,
    }


def test_rows_are_made_before_they_are_attended(flash: ModelSpec) -> None:
    """An entry is visible to the token that completes it, so it is written first; its index row too."""
    made: set[tuple[str, int]] = set()
    for op in flash.program.ops:
        if isinstance(op, p.Compress | p.WindowRows):
            made.add((op.group, op.layer))
        if isinstance(op, p.IndexRows):
            assert (op.group, op.layer) in made
        if isinstance(op, p.AttendRows):
            assert (op.window, op.layer) in made and (op.group is None or (op.group, op.layer) in made)


def test_the_parts_of_a_mixture(flash: ModelSpec) -> None:
    """Layers 0 to 2 route by token, the others by score; the clamp holds for routed and shared experts alike."""
    for layer, op in enumerate(ops(flash, p.Route)):
        assert (op.table is not None) == (layer < 3) and (op.bias is None) == (layer < 3)
        assert (op.num_experts, op.top_k, op.scaling) == (256, 6, 1.5)
    assert {op.limit for op in ops(flash, p.ExpertGated)} == {op.limit for op in ops(flash, p.GatedLinear)} == {10.0}
    assert len(ops(flash, p.ExpertGated)) == len(ops(flash, p.GatedLinear)) == 43
    mixes = ops(flash, p.HyperMix)
    assert len(mixes) == 87 and mixes[-1].coefficients is None and all(m.coefficients for m in mixes[:-1])
    assert {(m.iterations, m.eps, m.norm_eps) for m in mixes[:-1]} == {(20, 1e-6, 1e-6)}


# ---- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", ["official", "fp8", "float"])
@pytest.mark.parametrize("draft", ["none", "dspark", "mtp"])
@pytest.mark.parametrize("states_expert_dtype", [True, False])
def test_all_kinds_of_checkpoints_are_accounted_for(
    formats: str, draft: str, states_expert_dtype: bool, tmp_path: Path
) -> None:
    """Released FP4 experts (the preview does not state them), FP8 experts (Base), floats; with either draft head."""
    m = TinyV4(formats=formats, draft=draft, states_expert_dtype=states_expert_dtype)
    spec, found, named = opened(tmp_path, m)
    want = {"official": ("FP8", "MXFP4"), "fp8": ("FP8", "FP8"), "float": ("BF16", "BF16")}[formats]
    assert (named["layers.0.wq_a"], named["layers.0.experts.w1"]) == want
    assert named["layers.0.shared.w1"] == want[0] and named["hc_head.fn"] == "F32"
    num_spare = sum(d.need == "spare" for d in spec.tensors)
    assert (num_spare > 0) == (draft != "none") and len(found.ignored) == num_spare
    assert not any(key.startswith("mtp.") for key in found.loaded)
    assert len(make_tensors(m)) == len(found.loaded) + num_spare


def test_weights_are_expanded_as_the_writer_meant_them(tmp_path: Path) -> None:
    """FP8 tiles, FP4 nibbles and their scales, against the second opinion of the file that wrote them."""
    m = replace(TINY, hidden=64, heads=6, head_dim=144, rotary=16, q_rank=160)
    written = make_tensors(m)
    with open_checkpoint(write_v4(tmp_path, m)) as checkpoint:
        found = account(checkpoint, describe(checkpoint).tensors)
        weights = reference_weights(checkpoint, found)
    assert len(weights) == sum(t.value is not None for t in written.values())
    for key, values in weights.items():
        np.testing.assert_array_equal(values, written[found.loaded[key].name].value, err_msg=key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.ffn.experts.3.w2.scale"), "1 missing: layers.1.ffn.experts.3.w2.scale"),
        (lambda t: t.pop("mtp.1.ffn.shared_experts.w1.weight"), "1 missing: mtp.1.ffn.shared_experts.w1.weight"),
        (lambda t: t.update({"layers.0.ffn.gate.bias": t["layers.2.ffn.gate.bias"]}), "1 not expected"),
        (lambda t: t.update({"layers.0.attn.wq_a.weight": t["layers.0.ffn.experts.0.w1.weight"]}), "F8_E4M3"),
        (lambda t: t.update({"layers.0.ffn.experts.0.w1.weight": t["layers.0.attn.wq_a.weight"]}), "is F8_E4M3"),
        (lambda t: t.update({"layers.0.attn.attn_sink": t["norm.weight"]}), "wrong shape"),
    ],
)
def test_defects_are_named(change: Any, message: str, tmp_path: Path) -> None:
    """A missing scale, a lost shared expert of the draft head, a bias in a hash layer, an FP4 tensor for an FP8 one."""
    with open_checkpoint(write_v4(tmp_path, replace(TINY, draft="dspark"))) as checkpoint:
        tensors = {name: replace(info) for name, info in checkpoint.tensors.items()}
        change(tensors)
        tensors = {name: replace(info, name=name) for name, info in tensors.items()}
        broken = Checkpoint("safetensors", tmp_path, [], checkpoint.metadata, tensors)
        with pytest.raises(CheckpointError, match=message):
            account(broken, describe(broken).tensors)


# ---- configurations ------------------------------------------------------------------------------------------


def test_the_number_of_draft_stages() -> None:
    """num_nextn_predict_layers says 1 in the release, which has three stages."""

    def stages(**changes: Any) -> int:
        dspark = {"dspark_block_size": 5, "dspark_target_layer_ids": [1, 2, 3], "dspark_markov_rank": 16}
        spec = declared(TINY.config() | dspark | {"num_nextn_predict_layers": 1} | changes)
        return len({d.name.split(".")[1] for d in spec.tensors if d.need == "spare"})

    ratios = TINY.config()["compress_ratios"]
    assert stages() == 3
    assert stages(compress_ratios=[*ratios, 0, 0]) == 2
    assert stages(compress_ratios=[*ratios, 0, 0], n_mtp_layers=4) == 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("compress_ratios", None, "compress_ratios is missing or not a list of integers, expected one per layer"),
        ("compress_ratios", [0, 4], r"compress_ratios is 2 entries, expected one per layer \(4\)"),
        ("compress_ratios", [0, 4, 64, 4], r"compress_ratios\[2\] is 64, expected one of 0, 4, 128"),
        ("compress_ratios", [0, 4, 128, 4, 128], r"compress_ratios\[4\] is 128, expected one of 0"),
        ("num_hidden_layers", 0, "0 layers, expected 1 to 1000"),
        ("num_key_value_heads", 8, "num_key_value_heads is 8, expected 1"),
        ("scoring_func", "softmax", "scoring_func is 'softmax', expected 'sqrtsoftplus'"),
        ("topk_method", "greedy", "topk_method is 'greedy'"),
        ("norm_topk_prob", False, "norm_topk_prob is False"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True"),
        ("attention_bias", True, "attention_bias is True"),
        ("n_shared_experts", 2, "n_shared_experts is 2, expected 1"),
        ("swiglu_limit", None, "swiglu_limit is missing"),
        ("swiglu_limit", 0, "swiglu_limit is 0.0, expected a number above 0"),
        ("expert_dtype", "int4", "expert_dtype is 'int4', expected 'fp4' or 'fp8'"),
        ("head_dim", 1024, "heads of 1024 with 16 rotary channels"),
        ("head_dim", 96, "expected at most 512 and a multiple of 64 before the rotary ones"),
        ("qk_rope_head_dim", 24, "rotary_dim is 24, expected a multiple of 16"),
        ("qk_rope_head_dim", 0, "0 rotary channels"),
        ("index_head_dim", 96, "index_head_dim is 96, expected a power of two from 32"),
        ("index_head_dim", 16, "index_head_dim is 16"),
        ("o_groups", 3, "4 heads do not divide into 3 output groups"),
        ("hidden_size", 40, "hidden_size is 40, expected a multiple of 16"),
        ("num_experts_per_tok", 9, "9 of 8 experts"),
        ("n_routed_experts", 1, "2 of 1 experts"),
        ("sliding_window", 0, "window is 0, expected at least 1"),
        ("index_topk", 0, "index_top_k is 0"),
        ("eos_token_id", "x", "eos_token_id is 'x'"),
        ("rope_scaling", {"type": "linear", "factor": 2}, "rope scaling 'linear' is not one that this family has"),
        ("rope_scaling", {"type": "yarn", "factor": 2}, "original_max_position_embeddings is missing"),
        ("compress_rope_theta", None, "compress_rope_theta is missing"),
        ("num_hash_layers", None, "num_hash_layers is missing"),
    ],
)
def test_configurations_that_are_not_run(field: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        declared(TINY.config(), **{field: value})


def test_settings_that_transformers_saved_are_not_taken_for_no_yarn() -> None:
    """Without rope_scaling the frequencies would silently be those of a model without YaRN."""
    with pytest.raises(CheckpointError, match="rotary settings in rope_parameters"):
        declared(TINY.config(), rope_scaling=None, rope_parameters={"main": {}, "compress": {}})
    plain = declared(TINY.config(), rope_scaling=None)
    assert ops(plain, p.RopeAngles)[1].frequencies == pytest.approx(1000.0 ** (-np.arange(8) / 8))


def test_a_draft_head_without_its_fields_is_refused() -> None:
    with pytest.raises(CheckpointError, match="dspark_target_layer_ids is None"):
        declared(TINY.config(), dspark_block_size=5)
    with pytest.raises(CheckpointError, match="draft head of 3 stages, rank 0"):
        declared(TINY.config(), dspark_block_size=5, dspark_target_layer_ids=[1], dspark_markov_rank=0)
