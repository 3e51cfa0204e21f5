"""GLM-5 checkpoints of all kinds and mixtures: how each is read, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from glm_files import FP8, TINY, declared, headers, opened, packed
from helpers import team

import hotset
from hotset.checkpoint.checkpoint import Checkpoint, open_checkpoint
from hotset.checkpoint.formats import FORMATS
from hotset.checkpoint.manifest import Account, account, declared_formats, formats_of
from hotset.checkpoint.progress import LineProgress
from hotset.checkpoint.scaled import check_values
from hotset.checkpoint.synth import write_checkpoint
from hotset.checkpoint.tensor import TensorInfo
from hotset.engine.native import NativeExecutor
from hotset.errors import CheckpointError, RequestError
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec
from hotset.plan.budget import Wish, make_plan
from hotset.program import program as p
from hotset.program.reference import ReferenceExecutor

Headers = dict[str, TensorInfo]
EXPERT = "model.layers.1.mlp.experts.3.down_proj"
O_PROJ = "model.layers.2.self_attn.o_proj"
WEIGHTS = "model.layers.0.self_attn.indexer.weights_proj.weight"
DRAFT = "model.layers.4."


def config(quantization: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return TINY | changes | ({"quantization_config": quantization} if quantization else {})


def fits(config: dict[str, Any], tensors: Headers) -> tuple[ModelSpec, Account, dict[str, str]]:
    checkpoint = opened(config, tensors)
    spec = describe(checkpoint)
    found = account(checkpoint, spec.tensors)
    return spec, found, formats_of(spec.tensors, found)


def released(config: dict[str, Any]) -> Headers:
    return headers(declared(config).tensors)


# ---- how a matrix is stored is read from its header ----------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "experts", "others"),
    [
        (None, "BF16", "BF16"),
        (FP8, "FP8_F32", "FP8_F32"),
        (packed(), "INT4", "BF16"),
        (packed(symmetric=True), "INT4_SYM", "BF16"),
    ],
)
def test_all_releases_are_accounted_for(quantization: dict[str, Any] | None, experts: str, others: str) -> None:
    own = config(quantization)
    spec, found, formats = fits(own, released(own))
    assert formats["layers.1.experts.down"] == experts and formats["layers.2.o"] == others
    assert formats["head"] == formats["layers.1.router"] == formats["layers.0.index.weights"] == "BF16"
    num_draft = sum(info.name.startswith(DRAFT) for info, _ in found.ignored)
    assert num_draft == len(found.ignored) > 30
    assert len(found.loaded) + num_draft == len(spec.tensors)
    assert spec.program.weights.keys() <= formats.keys()
    assert set(found.weights()) <= set(formats)
    assert not any(key.endswith((".scale", ".zero", ".shape")) for key in formats)


def test_config_does_not_decide(tmp_path: Path) -> None:
    """BF16 tensors under a config that says FP8, and the other way round: each by its own header.

    Guards against bytes of one format read through the config of another, which no error shows.
    """
    plain, fp8 = released(config()), released(config(FP8))
    assert fits(config(FP8), plain)[2]["layers.2.o"] == "BF16"
    assert fits(config(), fp8)[2]["layers.2.o"] == "FP8_F32"
    mixed = {name: info for name, info in plain.items() if not name.startswith(O_PROJ)}
    mixed |= {name: info for name, info in fp8.items() if name.startswith(O_PROJ)}
    formats = fits(config(), mixed)[2]
    assert (formats["layers.2.o"], formats["layers.1.o"]) == ("FP8_F32", "BF16")


def test_an_fp8_draft_layer_on_a_4_bit_base() -> None:
    """The graft of specs/glm_5_2.md section 3.4, whatever the config says about a draft layer."""
    base = {name: info for name, info in released(config(packed())).items() if not name.startswith(DRAFT)}
    graft = base | {name: info for name, info in released(config(FP8)).items() if name.startswith(DRAFT)}
    for layers in (0, 1):
        own = config(packed(), num_nextn_predict_layers=layers, mtp_quantization_config=FP8)
        _, found, formats = fits(own, graft)
        assert formats["layers.1.experts.up"] == "INT4"
        dtypes = {info.name: info.format.name for info, _ in found.ignored}
        assert dtypes[f"{DRAFT}mlp.experts.0.up_proj.weight"] == "F8_E4M3"
    # Half a draft layer is a defect; none at all is an optional part that is absent, with the reason.
    graft.pop(f"{DRAFT}mlp.experts.0.up_proj.weight_scale_inv")
    with pytest.raises(CheckpointError, match=r"1 missing: model.layers.4.mlp.experts.0.up_proj.weight_scale_inv"):
        fits(config(packed()), graft)
    _, found, _ = fits(config(packed()), base)
    assert found.absent and {decl.reason for decl in found.absent} == {
        "config.json names a draft (MTP) layer that these files do not hold"
    }
    assert not fits(config(packed(), num_nextn_predict_layers=0), base)[1].absent


def test_4_bit_files_may_pack_other_matrices_too() -> None:
    """Revisions differ in what else is packed: the head and the router as well as attention, by their own tensors."""
    own = config(packed(), num_nextn_predict_layers=0)
    tensors = released(own)
    for name, out, width in ((O_PROJ, 64, 192), ("lm_head", 304, 64), ("model.layers.1.mlp.gate", 8, 64)):
        del tensors[f"{name}.weight"]
        shapes = {"weight_packed": ((out, width // 8), "I32"), "weight_scale": ((out, width // 32), "BF16"),
                  "weight_zero_point": ((out // 8, width // 32), "I32"), "weight_shape": ((2,), "I64")}  # fmt: skip
        for part, (shape, dtype) in shapes.items():
            fmt = FORMATS[dtype]
            tensors[f"{name}.{part}"] = TensorInfo(f"{name}.{part}", shape, fmt, 0, 0, fmt.nbytes(shape))
    tensors["model.embed_tokens.weight"] = replace(tensors["model.embed_tokens.weight"], shape=(304, 64))
    formats = fits(own | {"vocab_size": 304}, tensors)[2]
    assert formats["layers.2.o"] == formats["head"] == formats["layers.1.router"] == "INT4"
    assert formats["layers.1.o"] == formats["embed"] == "BF16"


@pytest.mark.parametrize(
    ("quantization", "change", "message"),
    [
        (FP8, lambda t: t.pop(f"{EXPERT}.weight_scale_inv"), f"1 missing: {EXPERT}.weight_scale_inv"),
        (packed(), lambda t: t.pop(f"{EXPERT}.weight_zero_point"), f"1 missing: {EXPERT}.weight_zero_point"),
        (packed(), lambda t: t.pop(f"{EXPERT}.weight_shape"), f"1 missing: {EXPERT}.weight_shape"),
        (
            FP8,
            lambda t: t.update({f"{EXPERT}.weight_scale_inv": t[f"{EXPERT}.weight"]}),
            "1 wrong format: .* is F8_E4M3, expected F32",
        ),
        (
            FP8,
            lambda t: t.update({"model.layers.3.self_attn.indexer.wk.weight": t["model.norm.weight"]}),
            "1 not expected: model.layers.3.self_attn.indexer.wk.weight",
        ),
        (
            FP8,
            lambda t: t.update({WEIGHTS: replace(t[WEIGHTS], format=FORMATS["F8_E4M3"])}),
            "1 wrong format: tensor model.layers.0.self_attn.indexer.weights_proj.weight is F8_E4M3",
        ),
        (None, lambda t: t.pop("model.layers.4.enorm.weight"), "1 missing: model.layers.4.enorm.weight"),
    ],
)
def test_defects_are_named(
    quantization: dict[str, Any] | None, change: Callable[[Headers], object], message: str
) -> None:
    """A lost scale, zero point or shape; scales of another format; an indexer in a layer that shares one."""
    own = config(quantization)
    tensors = released(own)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        fits(own, {name: replace(info, name=name) for name, info in tensors.items()})


# ---- the schedule --------------------------------------------------------------------------------------------


def owners(**changes: Any) -> tuple[int, ...]:
    return tuple(op.layer for op in declared(TINY, **changes).program.ops if isinstance(op, p.IndexRows))


def test_the_schedule_of_the_indexers() -> None:
    """List before pattern before frequency; none of them: every layer. 4 and 3 are those of the release."""
    assert owners(index_topk_freq=None) == (0, 1, 2, 3)
    assert owners() == (0, 2)
    assert owners(index_topk_pattern="FSSF") == (0, 3)
    assert owners(index_topk_pattern="FSSF", indexer_types=["full", "full", "shared", "shared"]) == (0, 1)
    assert owners(num_hidden_layers=13, index_topk_freq=4, index_skip_topk_offset=3) == (0, 1, 2, 6, 10)


# ---- configurations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["full"] * 3}, r"indexer_types is 3 entries, expected one per layer \(4\)"),
        ({"indexer_types": ["full", "half", "full", "full"]}, r"indexer_types\[1\] is 'half', expected 'full'"),
        ({"indexer_types": ["shared", *["full"] * 3]}, "layer 0 shares an indexer, and there is none before it"),
        ({"index_topk_pattern": "FXFF"}, r"index_topk_pattern\[1\] is 'X'"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0"),
        ({"index_skip_topk_offset": None}, "index_skip_topk_offset is missing"),
        ({"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types does not say what first_k_dense_replace does: 1 dense"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        ({"rope_interleave": False}, "rope_interleave is False, expected True"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, expected 4"),
        ({"qk_head_dim": 64}, "qk_head_dim is 64, expected 48"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"kv_lora_rank": 96}, "kv_lora_rank is 96, expected a multiple of 128"),
        ({"index_head_dim": 96}, "index_head_dim is 96 with 16 rotary channels, expected a power of two"),
        ({"index_head_dim": 16}, "index_head_dim is 16"),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"n_group": 4, "topk_group": 5}, "2 of 8 experts from 5 of 4 groups"),
        ({"n_group": 8, "topk_group": 1}, "2 of 8 experts from 1 of 8 groups"),
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, expected 0 or 1"),
        ({"num_hidden_layers": 0}, "0 layers, expected 1 to 1000"),
        ({"hidden_size": 72}, "hidden_size is 72, expected a multiple of 16"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn', expected 'default'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": None, "rope_scaling": {"factor": 2}}, "rope_scaling is .*, this family has none"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"AutoAWQ files \(qweight, qzeros\) are not"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quant_method is 'modelopt', which is not read"),
        ({"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, r"weight_block_size is \[64, 64\]"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt is 'e5m2', expected 'e4m3'"),
        ({"quantization_config": packed() | {"format": "float-quantized"}}, "in the format 'float-quantized'"),
        ({"quantization_config": packed(num_bits=8)}, "group_0.weights.num_bits is 8, expected 4"),
        ({"quantization_config": packed(group_size=64)}, "group_0.weights.group_size is 64, expected 32"),
        ({"quantization_config": packed() | {"config_groups": {}}}, "expected an object of groups"),
    ],
)
def test_configurations_that_are_another_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        declared(TINY, **changes)


def test_theta_may_stand_outside() -> None:
    """Older files; an integer counts as a number, where one parser silently fell back to a default."""

    def frequencies(spec: ModelSpec) -> tuple[float, ...]:
        return next(op.frequencies for op in spec.program.ops if isinstance(op, p.RopeAngles))

    old = declared(TINY, rope_parameters=None, rope_theta=10000)
    assert frequencies(old) == frequencies(declared(TINY))
    np.testing.assert_allclose(frequencies(old), 1e4 ** (-np.arange(8) / 8), rtol=1e-12)


def test_groups_of_experts_reach_the_router() -> None:
    spec = declared(TINY, n_group=4, topk_group=2)
    routes = [op for op in spec.program.ops if isinstance(op, p.Route)]
    assert len(routes) == 3 and {(op.num_groups, op.top_groups) for op in routes} == {(4, 2)}


def test_gguf_files_are_refused_by_name() -> None:
    file = Checkpoint("gguf", Path("glm.gguf"), [], {"general.architecture": "glm-dsa"}, {})
    with pytest.raises(CheckpointError, match=r"GGUF conversions of this family \(glm-dsa\) are not read"):
        describe(file)


# ---- files ---------------------------------------------------------------------------------------------------


def written(folder: Path, quantization: dict[str, Any] | None, **changes: Any) -> Path:
    own = config(quantization, **changes)
    tensors = declared(own).tensors
    with (folder.with_suffix(".log")).open("w") as log:
        write_checkpoint(folder, "tiny", own, tensors, 1, LineProgress(log, "write"))
    return folder


@pytest.mark.parametrize("quantization", [None, FP8, packed(), packed(symmetric=True)])
def test_random_checkpoints_are_whole(quantization: dict[str, Any] | None, tmp_path: Path) -> None:
    """What synth writes is what the declarations say, and every scale and stated shape in it is in order."""
    with open_checkpoint(written(tmp_path / "m", quantization)) as checkpoint:
        found = account(checkpoint, describe(checkpoint).tensors)
        assert (check_values(checkpoint, found) > 0) == (quantization is not None)
        scales = [info for key, info in found.loaded.items() if found.declared[key].role == "scale"]
        for info in scales:
            values = checkpoint.array(info.name)
            assert (values > 0).all() and (values < 1).all()


@pytest.mark.parametrize(
    ("quantization", "part", "data", "message"),
    [
        (FP8, "weight_scale_inv", np.array([np.nan], "<f4"), "1 of the 1 scales in .* are nan or the like"),
        (FP8, "weight_scale_inv", np.array([2.0**61], "<f4"), "1 of the 1 scales"),
        (packed(), "weight_scale", np.array([0x7F80], "<u2"), "1 of the 128 scales in .* are inf"),
        (
            packed(),
            "weight_shape",
            np.array([64, 128], "<i8"),
            r"says \(64, 128\), the weights beside it are \(64, 64\)",
        ),
    ],
)
def test_values_that_no_product_can_take(
    quantization: dict[str, Any], part: str, data: np.ndarray, message: str, tmp_path: Path
) -> None:
    """``hotset check --weights``: NaN, infinite and huge scales, and a stated shape that is not the shape."""
    folder = written(tmp_path / "m", quantization)
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.tensors[f"{EXPERT}.{part}"]
        path = checkpoint.files[info.file_id]
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(data.tobytes())
    with open_checkpoint(folder) as checkpoint:
        found = account(checkpoint, describe(checkpoint).tensors)
        with pytest.raises(CheckpointError, match=message):
            check_values(checkpoint, found)


@pytest.mark.parametrize("quantization", [None, FP8, packed()])
def test_executors_refuse_before_a_weight_is_read(
    quantization: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that says what is missing; guards against a crash, or an answer, half-way into a load."""

    def no_reading(*arguments: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "view", no_reading)
    monkeypatch.setattr(NativeExecutor, "load", no_reading)
    message = r"is checked and planned here, and runs in a later release; missing: .*attention over a latent cache"
    with pytest.raises(RequestError, match=message) as caught:
        hotset.load(written(tmp_path / "m", quantization))
    assert ("float scales" in str(caught.value)) == (quantization is FP8)
    assert caught.value.hint is not None and "hotset plan" in caught.value.hint
    spec = declared(config(quantization))
    formats = declared_formats(spec.tensors)
    plan = make_plan(spec, formats, Wish(), 2, 1 << 50, "test limit")
    with pytest.raises(RequestError, match=message):
        ReferenceExecutor(spec, {}, formats)
    with pytest.raises(RequestError, match=message):
        NativeExecutor(spec, formats, plan, team(1), "avx2")
