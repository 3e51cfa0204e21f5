"""Models without files: what the cards declare, and slices of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hotset.checkpoint.manifest import declared_formats
from hotset.errors import RequestError
from hotset.plan.cards import card_names, cut_layers, describe_config, is_card, read_card
from hotset.plan.devices import declared_bytes
from hotset.units import GIB

FLASH, PRO = "deepseek-v4-flash", "deepseek-v4-pro"
RELEASED = Path(__file__).parents[1] / "models" / "deepseek_v4" / "flash_0731.json"


def test_names() -> None:
    v4 = tuple(f"deepseek-v4-{name}" for name in ("flash", "mid", "mini", "narrow", "pro"))
    assert card_names() == (*v4, "glm-5.2", "glm-5.2-int4")
    assert is_card(FLASH) and not is_card("deepseek-v4")
    with pytest.raises(RequestError, match="no model card is named nonsense"):
        read_card("nonsense")


def test_flash_is_the_release() -> None:
    """72,317 tensors of 155.42 GiB, 4,705 of them (10.863 GB) the draft head: read from the real headers (S8, S12)."""
    card = read_card(FLASH)
    assert card.config == json.loads(RELEASED.read_text())
    spec = describe_config(FLASH, card.config)
    weights = declared_bytes(spec.tensors)
    assert (weights.num_tensors, weights.num_spare) == (67_612, 4_705)
    assert round((weights.num_bytes + weights.spare_bytes) / GIB, 2) == 155.42
    assert round(weights.spare_bytes / 1e9, 3) == 10.863
    spare = Counter(decl.formats[0] for decl in spec.tensors if decl.need == "spare")
    assert spare == {"I8": 2304, "F8_E8M0": 2329, "F8_E4M3": 25, "BF16": 20, "F32": 27}


def test_formats_of_a_model_without_files() -> None:
    """Experts as a stack, projections in FP8, the router and the head as they are released."""
    spec = describe_config(FLASH, read_card(FLASH).config)
    formats = declared_formats(spec.tensors)
    assert {key: formats[key] for key in ("embed", "layers.0.wq_a", "layers.42.experts.w2", "layers.3.gate_bias")} == {
        "embed": "BF16", "layers.0.wq_a": "FP8", "layers.42.experts.w2": "MXFP4", "layers.3.gate_bias": "F32",
    }  # fmt: skip
    assert spec.program.weights.keys() <= formats.keys()


def test_pro() -> None:
    """61 layers, none of them without compression; 384 experts."""
    spec = describe_config(PRO, read_card(PRO).config)
    groups = {group.name: len(group.layers) for group in spec.groups}
    assert groups == {"csa": 30, "index": 30, "hca": 31}
    assert spec.program.weights["layers.60.experts.w1"].count == 384


@pytest.mark.parametrize("name", card_names())
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_slices_keep_the_layers_they_have(name: str, layers: int) -> None:
    """Shapes of the first layers are those of the whole model; the draft head is left out."""
    config = read_card(name).config
    whole = {decl.name: decl.shape for decl in describe_config(name, config).tensors}
    spec = describe_config(name, cut_layers(config, layers))
    assert spec.num_layers == layers
    assert {decl.name for decl in spec.tensors} <= whole.keys()
    assert all(whole[decl.name] == decl.shape and decl.need == "must" for decl in spec.tensors)
    last = f"layers.{layers - 1}."
    assert any(decl.name.removeprefix("model.").startswith(last) for decl in spec.tensors)
    assert {group.layers[-1] for group in spec.groups} <= set(range(layers))


def test_more_layers_than_there_are() -> None:
    with pytest.raises(RequestError, match="44 layers, expected 1 to 43"):
        cut_layers(read_card(FLASH).config, 44)
