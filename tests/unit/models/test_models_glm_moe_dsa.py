"""What the GLM-5 family declares: the FP8, BF16 and 4-bit releases of GLM-5.2 to the byte, and the program."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from glm_files import declared

from hotset.checkpoint.formats import FORMATS
from hotset.checkpoint.manifest import TensorDecl, declared_formats
from hotset.errors import RequestError
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.plan.cards import read_card
from hotset.program import program as p
from hotset.program.cache import block_bytes, num_blocks
from hotset.units import GIB

CARD: dict[str, Any] = read_card("glm-5.2").config
FULL = (0, 1, 2, *range(6, 78, 4))


@cache
def release(name: str) -> ModelSpec:
    """FP8 and 4 bits by card; BF16 is the same configuration without quantisation."""
    if name == "bf16":
        return declared({key: value for key, value in CARD.items() if key != "quantization_config"})
    return declared(read_card(name).config)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return release("glm-5.2")


def ops(spec: ModelSpec, kind: type) -> list[Any]:
    return [op for op in spec.program.ops if isinstance(op, kind)]


def size(decl: TensorDecl) -> int:
    return FORMATS[decl.formats[0]].nbytes(decl.shape)


def is_routed(decl: TensorDecl) -> bool:
    return ".experts." in decl.name


# ---- tensors and bytes ---------------------------------------------------------------------------------------


def test_the_fp8_release_to_the_byte(spec: ModelSpec) -> None:
    """118,629 tensors, 59,044 of them scales, 755,617,140,416 B: the figures of the official index."""
    assert len(spec.tensors) == len({d.name for d in spec.tensors}) == len({d.key for d in spec.tensors}) == 118_629
    scales = [d for d in spec.tensors if d.role == "scale"]
    assert len(scales) == 59_044 and all(d.name.endswith(".weight_scale_inv") for d in scales)
    assert sum(map(size, spec.tensors)) == 755_617_140_416
    assert {d.formats for d in scales} == {("F32",)}


def test_the_bf16_release_to_the_byte() -> None:
    """59,585 tensors, 1,506,659,919,872 B; 743,377,019,904 and 9,952,920,576 parameters."""
    spec = release("bf16")
    assert len(spec.tensors) == 59_585
    assert sum(map(size, spec.tensors)) == 1_506_659_919_872
    for need, count in (("must", 743_377_019_904), ("spare", 9_952_920_576)):
        assert sum(math.prod(d.shape) for d in spec.tensors if d.need == need) == count
    assert round(sum(size(d) for d in spec.tensors if d.need == "spare") / 1e9, 3) == 19.906


def test_the_draft_layer_is_accounted_for_and_not_loaded(spec: ModelSpec) -> None:
    """1,569 tensors of layer 78, 10,032,632,960 B, 0.34 GiB of them no routed experts; no embedding or head of its own.

    Guards against dropping them silently, which costs users of other engines their drafts.
    """
    draft = [d for d in spec.tensors if d.name.startswith("model.layers.78.")]
    assert len(draft) == 1_569 and sum(map(size, draft)) == 10_032_632_960
    assert {d.need for d in draft} == {"spare"} and all(d.reason for d in draft)
    assert round(sum(size(d) for d in draft if not is_routed(d)) / GIB, 2) == 0.34
    assert not any("embed_tokens" in d.name or "shared_head.head" in d.name for d in draft)


def test_the_4_bit_release() -> None:
    """456.21 GB: experts in twelve tensors and 20.8125 MiB each (without their stated shapes), all else BF16."""
    spec = release("glm-5.2-int4")
    assert round(sum(map(size, spec.tensors)) / 1e9, 2) == 456.21
    one = [d for d in spec.tensors if ".mlp.experts.255." in d.name and d.name.startswith("model.layers.77.")]
    assert len(one) == 12
    assert sum(size(d) for d in one if d.role != "shape") == 20.8125 * 2**20
    others = {d.formats[0] for d in spec.tensors if not is_routed(d)}
    assert others == {"BF16", "F32"} and not any(d.name.startswith("model.layers.78.") for d in spec.tensors)


@pytest.mark.parametrize(
    ("name", "part", "shape", "dtype"),
    [
        ("glm-5.2", "model.embed_tokens.weight", (154880, 6144), "BF16"),
        ("glm-5.2", "lm_head.weight", (154880, 6144), "BF16"),
        ("glm-5.2", "model.norm.weight", (6144,), "BF16"),
        ("glm-5.2", "model.layers.0.self_attn.q_a_proj.weight", (2048, 6144), "F8_E4M3"),
        ("glm-5.2", "model.layers.0.self_attn.q_a_proj.weight_scale_inv", (16, 48), "F32"),
        ("glm-5.2", "model.layers.77.self_attn.q_b_proj.weight", (16384, 2048), "F8_E4M3"),
        ("glm-5.2", "model.layers.77.self_attn.q_b_proj.weight_scale_inv", (128, 16), "F32"),
        ("glm-5.2", "model.layers.3.self_attn.kv_a_proj_with_mqa.weight", (576, 6144), "F8_E4M3"),
        ("glm-5.2", "model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv", (5, 48), "F32"),
        ("glm-5.2", "model.layers.3.self_attn.kv_b_proj.weight", (28672, 512), "F8_E4M3"),
        ("glm-5.2", "model.layers.3.self_attn.kv_b_proj.weight_scale_inv", (224, 4), "F32"),
        ("glm-5.2", "model.layers.3.self_attn.o_proj.weight", (6144, 16384), "F8_E4M3"),
        ("glm-5.2", "model.layers.3.self_attn.o_proj.weight_scale_inv", (48, 128), "F32"),
        ("glm-5.2", "model.layers.6.self_attn.indexer.wq_b.weight_scale_inv", (32, 16), "F32"),
        ("glm-5.2", "model.layers.6.self_attn.indexer.wk.weight", (128, 6144), "F8_E4M3"),
        ("glm-5.2", "model.layers.6.self_attn.indexer.wk.weight_scale_inv", (1, 48), "F32"),
        ("glm-5.2", "model.layers.6.self_attn.indexer.weights_proj.weight", (32, 6144), "BF16"),
        ("glm-5.2", "model.layers.6.self_attn.indexer.k_norm.bias", (128,), "BF16"),
        ("glm-5.2", "model.layers.2.mlp.down_proj.weight", (6144, 12288), "F8_E4M3"),
        ("glm-5.2", "model.layers.2.mlp.gate_proj.weight_scale_inv", (96, 48), "F32"),
        ("glm-5.2", "model.layers.3.mlp.gate.weight", (256, 6144), "BF16"),
        ("glm-5.2", "model.layers.3.mlp.gate.e_score_correction_bias", (256,), "F32"),
        ("glm-5.2", "model.layers.3.mlp.experts.255.up_proj.weight_scale_inv", (16, 48), "F32"),
        ("glm-5.2", "model.layers.3.mlp.experts.255.down_proj.weight", (6144, 2048), "F8_E4M3"),
        ("glm-5.2", "model.layers.3.mlp.shared_experts.down_proj.weight_scale_inv", (48, 16), "F32"),
        ("glm-5.2", "model.layers.78.eh_proj.weight", (6144, 12288), "BF16"),
        ("glm-5.2", "model.layers.78.shared_head.norm.weight", (6144,), "BF16"),
        ("glm-5.2", "model.layers.78.self_attn.indexer.wq_b.weight", (4096, 2048), "F8_E4M3"),
        ("bf16", "model.layers.3.mlp.experts.255.down_proj.weight", (6144, 2048), "BF16"),
        ("bf16", "model.layers.3.mlp.gate.e_score_correction_bias", (256,), "F32"),
        ("glm-5.2-int4", "model.layers.3.mlp.experts.0.gate_proj.weight_packed", (2048, 768), "I32"),
        ("glm-5.2-int4", "model.layers.3.mlp.experts.0.gate_proj.weight_scale", (2048, 192), "BF16"),
        ("glm-5.2-int4", "model.layers.3.mlp.experts.0.gate_proj.weight_zero_point", (256, 192), "I32"),
        ("glm-5.2-int4", "model.layers.3.mlp.experts.0.down_proj.weight_packed", (6144, 256), "I32"),
        ("glm-5.2-int4", "model.layers.3.mlp.experts.0.down_proj.weight_scale", (6144, 64), "BF16"),
        ("glm-5.2-int4", "model.layers.3.mlp.experts.0.down_proj.weight_zero_point", (768, 64), "I32"),
        ("glm-5.2-int4", "model.layers.3.mlp.experts.0.down_proj.weight_shape", (2,), "I64"),
        ("glm-5.2-int4", "model.layers.3.self_attn.o_proj.weight", (6144, 16384), "BF16"),
    ],
)
def test_shapes_of_the_releases(name: str, part: str, shape: tuple[int, ...], dtype: str) -> None:
    """specs/glm_5_2.md sections 3.1 and 3.3, line by line."""
    (decl,) = [d for d in release(name).tensors if d.name == part]
    assert (decl.shape, decl.formats[0]) == (shape, dtype)


def test_layers_that_share_an_indexer_store_none(spec: ModelSpec) -> None:
    """Guards against the fault of several engines: an indexer expected in every layer."""
    names = {d.name.split(".")[2] for d in spec.tensors if ".indexer." in d.name}
    assert names == {*map(str, FULL), "78"}
    for absent in ("model.layers.3.self_attn.indexer.wk.weight", "model.layers.3.mlp.gate_proj.weight",
                   "model.layers.0.mlp.gate.weight", "model.layers.79.input_layernorm.weight",
                   "model.layers.6.self_attn.indexer.weights_proj.weight_scale_inv"):  # fmt: skip
        assert absent not in {d.name for d in spec.tensors}


@pytest.mark.parametrize(
    ("name", "expert_mib", "layers_gib", "token_gib", "others_gib", "resident_gib"),
    [
        ("bf16", 72.0, 1350.0, 42.19, 32.87, 34.65),
        ("glm-5.2", 36.009, 675.2, 21.10, 17.44, 19.21),
        ("glm-5.2-int4", 20.8125, 390.2, 12.195, 32.87, 34.65),
    ],
)
def test_bytes_of_a_token_in_the_files(
    name: str, expert_mib: float, layers_gib: float, token_gib: float, others_gib: float, resident_gib: float
) -> None:
    """specs/glm_5_2.md section 6, per release: one expert, all of them, those of a token, and everything else."""
    must = [d for d in release(name).tensors if d.need == "must" and d.role != "shape"]
    routed = sum(size(d) for d in must if is_routed(d))
    others = sum(size(d) for d in must if not is_routed(d))
    assert routed / (75 * 256) / 2**20 == pytest.approx(expert_mib, abs=5e-4)
    assert round(routed / GIB, 1) == layers_gib
    assert routed * 8 / 256 / GIB == pytest.approx(token_gib, abs=5e-3)
    assert round(others / GIB, 2) == resident_gib
    # Norms, some megabytes, are not in the published sum; of the embedding a token reads one row.
    read = sum(size(d) for d in must if not is_routed(d) and d.role not in ("embedding", "norm"))
    assert round(read / GIB, 2) == others_gib


def test_weights_of_a_token() -> None:
    """40.298e9 of 743e9, by part: what the sum of section 6 is made of."""
    count: dict[str, int] = {}
    for d in release("bf16").tensors:
        if d.need != "must" or d.role == "embedding":
            continue
        word = d.key.split(".")
        part = word[2] if word[0] == "layers" else word[0]
        count[part] = count.get(part, 0) + math.prod(d.shape)
    assert count["experts"] // 256 * 8 == 75 * 8 * 37_748_736
    assert count["shared"] == 75 * 37_748_736 and count["mlp"] == 3 * 3 * 12288 * 6144
    assert sum(count[part] for part in ("q_a", "q_b", "kv_a", "kv_b", "o")) == 78 * 165_019_648
    assert count["index"] == 21 * 9_371_904 and count["router"] == 75 * 256 * 6144
    small = ("attn_norm", "ffn_norm", "norm", "router_bias")
    active = sum(n for part, n in count.items() if part not in ("experts", *small)) + count["experts"] // 32
    assert round(active / 1e9, 3) == 40.298


# ---- cache ---------------------------------------------------------------------------------------------------

CACHES = [("BF16+FP8", 92_628, 93_912), ("BF16", 95_232, 96_640), ("FP8", 53_940, 54_728)]


def per_token(spec: ModelSpec, form: str, *, with_draft: bool = False) -> float:
    groups = with_cache_format(spec, declared_formats(spec.tensors), form).groups
    if with_draft:
        groups = tuple(replace(group, layers=(*group.layers, spec.num_layers)) for group in groups)
    return block_bytes(groups) / 256


@pytest.mark.parametrize(("form", "main", "with_draft"), CACHES)
def test_bytes_of_a_cached_token(spec: ModelSpec, form: str, main: int, with_draft: int) -> None:
    """specs/glm_5_2.md section 4: 78 latent rows and 21 index keys, with the draft layer 79 and 22."""
    assert {group.name: len(group.layers) for group in spec.groups} == {"latent": 78, "index": 21}
    assert per_token(spec, form) == main
    assert per_token(spec, form, with_draft=True) == with_draft


def test_glm_5_has_index_keys_in_every_layer() -> None:
    """Without a schedule all layers own an indexer: 61,464 B of a token, 62,252 B with the draft layer."""
    keys = ("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration")
    old = declared({key: value for key, value in CARD.items() if key not in keys}, max_position_embeddings=202_752)
    assert per_token(old, "FP8") == 61_464 and per_token(old, "FP8", with_draft=True) == 62_252
    assert len(ops(old, p.IndexRows)) == 78


@pytest.mark.parametrize(
    ("tokens", "form", "with_draft", "gib"),
    [
        (131_072, "BF16+FP8", False, 11.31),
        (131_072, "FP8", True, 6.68),
        (635_904, "BF16+FP8", False, 54.86),
        (635_904, "FP8", False, 31.94),
        (635_904, "FP8", True, 32.41),
        (1_048_576, "BF16+FP8", False, 90.46),
        (1_048_576, "FP8", False, 52.68),
    ],
)
def test_caches_that_were_measured(spec: ModelSpec, tokens: int, form: str, with_draft: bool, gib: float) -> None:
    """The draft's rows with 635,904 tokens are 32.41 GiB, where an engine's log says 32.42."""
    assert tokens % 256 == 0
    found = num_blocks(tokens) * 256 * per_token(spec, form, with_draft=with_draft) / GIB
    assert round(found, 2) == gib


def test_cache_forms_are_the_familys(spec: ModelSpec) -> None:
    formats = declared_formats(spec.tensors)
    assert with_cache_format(spec, formats).groups == spec.groups
    assert spec.frontier == ()
    with pytest.raises(RequestError, match=r"cache format 'F16', expected one of FP8, BF16\+FP8, BF16"):
        with_cache_format(spec, formats, "F16")


# ---- the program ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["glm-5.2", "bf16", "glm-5.2-int4"])
def test_every_weight_of_the_program_is_declared(name: str) -> None:
    """Guards against a program that names a weight which no file has, and against a declared one that nothing reads."""
    spec = release(name)
    by_key = {d.key: d for d in spec.tensors if d.need == "must" and d.role not in ("scale", "zero", "shape")}
    parts = {weight.part(e): weight for weight in spec.program.weights.values() for e in range(weight.count)}
    assert set(parts) == set(by_key)
    for key, weight in parts.items():
        decl = by_key[key]
        if weight.in_width == 1:
            assert decl.shape == (weight.out_width,), key
        else:
            columns = decl.shape[1] * (8 if decl.stored_as.startswith("INT4") else 1)
            assert (decl.shape[0], columns) == (weight.out_width, weight.in_width), key
    assert spec.program.weights.keys() <= declared_formats(spec.tensors).keys()


def test_buffers_are_written_before_they_are_read(spec: ModelSpec) -> None:
    written: set[p.Buffer] = set()
    read: set[p.Buffer] = set()
    for op in spec.program.ops:
        assert set(p.reads(op)) <= written, op
        read |= set(p.reads(op))
        written |= set(p.writes(op))
    assert written - read == {spec.program.logits}


def test_shared_layers_read_the_nearest_choice_before_them(spec: ModelSpec) -> None:
    """21 choices for 78 layers; a layer never reads rows, or a choice, that are not made yet."""
    indexers = {op.layer: op.out for op in ops(spec, p.IndexRows)}
    assert tuple(indexers) == FULL
    attends = ops(spec, p.AttendLatent)
    assert [op.layer for op in attends] == list(range(78))
    for op in attends:
        assert op.chosen == indexers[max(layer for layer in FULL if layer <= op.layer)]
        assert (op.num_heads, op.key_dim, op.latent, op.scale) == (64, 576, 512, 1 / 16)
    made: set[tuple[str, int]] = set()
    for op in spec.program.ops:
        if isinstance(op, p.StoreRows):
            made.add((op.group, op.layer))
        if isinstance(op, p.IndexRows | p.AttendLatent):
            assert (op.group, op.layer) in made


def test_rotary_channels(spec: ModelSpec) -> None:
    """64 everywhere, base 8e6: last in queries and rows, first in the indexer; ``head_dim`` is not their number."""
    (angles,) = ops(spec, p.RopeAngles)
    np.testing.assert_allclose(angles.frequencies, 8e6 ** (-np.arange(32) / 32), rtol=1e-12)
    seen = {(op.num_heads, op.head_dim, op.first, op.rotary_dim, op.pairs) for op in ops(spec, p.Rope)}
    assert seen == {
        (64, 256, 192, 64, "adjacent"),
        (1, 576, 512, 64, "adjacent"),
        (1, 128, 0, 64, "adjacent"),
        (32, 128, 0, 64, "adjacent"),
    }
    (one,) = {op.frequencies for op in ops(declared(CARD, head_dim=64), p.RopeAngles)}
    assert one == angles.frequencies


def test_norms(spec: ModelSpec) -> None:
    """1e-5 everywhere, and 1e-6 with a mean and a bias in the indexer alone."""
    assert {op.eps for op in (*ops(spec, p.RmsNorm), *ops(spec, p.LatentNorm))} == {1e-5}
    assert {(op.eps, op.weight.key[-6:], op.bias.key[-4:]) for op in ops(spec, p.LayerNorm)} == {
        (1e-6, "weight", "bias")
    }


def test_the_parts_of_the_indexer_and_the_mixture(spec: ModelSpec) -> None:
    assert {(op.num_heads, op.head_dim, op.ratio, op.top_k, op.scale) for op in ops(spec, p.IndexRows)} == {
        (32, 128, 1, 2048, 32**-0.5 * 128**-0.5)
    }
    assert {(op.group, op.plain, op.hadamard) for op in ops(spec, p.StoreRows)} == {
        ("latent", 512, False),
        ("index", 128, True),
    }
    routes = ops(spec, p.Route)
    assert len(routes) == len(ops(spec, p.ExpertGated)) == len(ops(spec, p.ExpertDown)) == 75
    for op in routes:
        assert op.bias is not None and op.table is None
        found = op.gate, op.num_experts, op.top_k, op.scaling, op.num_groups, op.top_groups
        assert found == ("sigmoid", 256, 8, 2.5, 1, 1)
    assert {op.limit for op in ops(spec, p.ExpertGated)} == {op.limit for op in ops(spec, p.GatedLinear)} == {None}
    dense = [op for op in ops(spec, p.GatedLinear) if op.out.width == 12288]
    assert len(dense) == 3 and len(ops(spec, p.GatedLinear)) == 3 + 75


def test_everything_is_added_to_the_residual(spec: ModelSpec) -> None:
    """78 attentions, 3 dense products, 75 shared and 75 routed ones, all into the row that the embedding began."""
    (embed,) = ops(spec, p.Embed)
    added = [op for op in spec.program.ops if embed.out in p.writes(op)]
    assert added[0] is embed and all(op.add for op in added[1:])
    assert len(added) == 1 + 78 + 3 + 75 + 75


def test_both_halves_of_kv_b_are_one_weight(spec: ModelSpec) -> None:
    """Stored once, read by the query and by the value half: 64 heads of 192 rows of W_UK, then 256 of W_UV."""
    queries, values = ops(spec, p.LatentQuery), ops(spec, p.LatentValue)
    assert [op.weight for op in queries] == [op.weight for op in values]
    for query, value in zip(queries, values, strict=True):
        assert (query.num_heads, query.plain, query.value_dim) == (value.num_heads, value.plain, value.value_dim)
        assert (query.plain, query.value_dim, query.weight.out_width, query.weight.in_width) == (192, 256, 28672, 512)
        assert (query.out.width, value.x.width, value.out.width) == (64 * 576, 64 * 512, 64 * 256)
