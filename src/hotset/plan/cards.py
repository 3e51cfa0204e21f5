"""Models that hotset knows without their files: the configuration that each was released with.

A card is enough for a plan, and for a random checkpoint in the model's layout (``hotset synth``).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.strict_json import parse_json
from hotset.errors import RequestError
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec

LAYER_LISTS = ("compress_ratios", "indexer_types", "mlp_layer_types")
"""Keys of config.json with an entry for every layer."""
LAYER_COUNTS = ("num_hash_layers", "first_k_dense_replace")
"""Keys that count first layers of a kind."""

_FOLDER = resources.files("hotset.plan") / "cards"


@dataclass(frozen=True)
class Card:
    """One model: ``config`` is its config.json, ``source`` says where that was read."""

    name: str
    about: str
    source: str
    config: dict[str, Any]


def card_names() -> tuple[str, ...]:
    """The names of all cards."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir()))


def is_card(name: str) -> bool:
    """Whether there is a card of that name."""
    return name in card_names()


def read_card(name: str) -> Card:
    """Return a card; RequestError when there is none of that name."""
    if not is_card(name):
        raise RequestError(f"no model card is named {name}", f"one of {', '.join(card_names())}")
    content = parse_json((_FOLDER / f"{name}.json").read_bytes(), f"card {name}")
    return Card(name, content["about"], content["source"], content["config"])


def cut_layers(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The configuration of a slice: the first ``num_layers`` layers at full width, without a draft head.

    RequestError when the model has fewer layers.
    """
    whole = config["num_hidden_layers"]
    if not 1 <= num_layers <= whole:
        raise RequestError(f"{num_layers} layers, expected 1 to {whole}")
    kept = {key: value for key, value in config.items() if not key.startswith("dspark_")}
    kept |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 0}
    kept |= {key: config[key][:num_layers] for key in LAYER_LISTS if key in config}
    return kept | {key: min(config[key], num_layers) for key in LAYER_COUNTS if key in config}


def describe_config(name: str, config: dict[str, Any]) -> ModelSpec:
    """Declare a model from its config.json alone: all tensors in the formats of the release."""
    return describe(Checkpoint("safetensors", Path(name), [], config, {}))
