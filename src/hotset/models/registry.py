"""Which family file reads a checkpoint."""

from __future__ import annotations

import importlib

from hotset.checkpoint.checkpoint import Checkpoint, collector_paused
from hotset.errors import CheckpointError
from hotset.models.spec import ModelSpec

# GGUF `general.architecture` or config.json `model_type` -> module under hotset.models.
FAMILIES = {
    "llama": "llama",
    "deepseek_v4": "deepseek_v4",
    "deepseek4": "deepseek_v4",
    "glm_moe_dsa": "glm_moe_dsa",
    "glm-dsa": "glm_moe_dsa",
}


def architecture_of(checkpoint: Checkpoint) -> str:
    """The architecture name that the checkpoint states about itself; CheckpointError when it states none."""
    key = "general.architecture" if checkpoint.kind == "gguf" else "model_type"
    name = checkpoint.metadata.get(key)
    if not isinstance(name, str):
        raise CheckpointError(f"{checkpoint.path}: {key} is {name!r}, expected the name of an architecture")
    return name


def describe(checkpoint: Checkpoint) -> ModelSpec:
    """Declare the model of this checkpoint from its headers; reads no weight.

    Raises:
        CheckpointError: unknown architecture, or a configuration that the family cannot run.
    """
    name = architecture_of(checkpoint)
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"{checkpoint.path}: architecture {name!r} is not one that hotset runs", f"one of {known}"
        )
    module = importlib.import_module(f"hotset.models.{FAMILIES[name]}")
    with collector_paused():
        spec: ModelSpec = module.describe(checkpoint)
    return spec
