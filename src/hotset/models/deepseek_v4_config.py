"""config.json of the DeepSeek-V4 family, typed once and refused where it is not a model that hotset runs.

Source: specs/deepseek_v4.md section 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.errors import CheckpointError
from hotset.models.llama import base_frequencies
from hotset.models.spec import Fields, eos_ids_of
from hotset.program.rows import FP4_GROUP, FP8_GROUP

LANES = 16
"""Widths must be multiples of this: the vector width that every kernel set uses."""
MAX_HEAD_DIM = 512
MAX_LAYERS = 1_000
MAX_EXPERTS = 4_096
CSA_RATIO, HCA_RATIO = 4, 128
NUM_STAGES = 3
"""Stages of a DSpark decoder that states no number of its own."""

# What hotset computes is fixed to these; any other value is another model.
FIXED: dict[str, object] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}


@dataclass(frozen=True)
class Draft:
    """The ``mtp.*`` tensors: a DSpark decoder of several stages, or the plain MTP layers of the April preview."""

    kind: Literal["none", "dspark", "mtp"]
    num_stages: int = 0
    num_taps: int = 0
    markov_rank: int = 0


@dataclass(frozen=True)
class DeepSeekV4Config:
    """Everything the program and the declarations depend on. ``ratios`` is per trunk layer: 0, 4 or 128."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    norm_eps: float
    eos_ids: tuple[int, ...]
    num_heads: int
    head_dim: int
    rotary_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    ratios: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_top_k: int
    frequencies: tuple[float, ...]
    compress_frequencies: tuple[float, ...]
    num_streams: int
    sinkhorn_iterations: int
    mix_eps: float
    num_experts: int
    top_k: int
    expert_size: int
    num_hash_layers: int
    routed_scale: float
    limit: float
    expert_format: Literal["MXFP4", "FP8"]
    draft: Draft

    @property
    def plain(self) -> int:
        """Channels of a head before the rotary ones."""
        return self.head_dim - self.rotary_dim

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Layers of that compression ratio."""
        return tuple(layer for layer, r in enumerate(self.ratios) if r == ratio)


def yarn_frequencies(
    theta: float, rotary_dim: int, factor: float, beta_fast: float, beta_slow: float, original: int, source: str
) -> list[float]:
    """YaRN: slow waves divided by ``factor``, fast ones kept, a linear blend over the pairs between.

    The bounds are the pairs that turn ``beta_fast`` and ``beta_slow`` times over the original context. Neither cosines
    nor the softmax are scaled. Source: specs/deepseek_v4.md section 2.1. CheckpointError, in the name of ``source``,
    where there are no such bounds.
    """
    if original < 1 or theta <= 1:
        raise CheckpointError(f"{source}: rope base {theta} over {original} positions, expected more than 1 and 0")

    def pair_of(rotations: float) -> float:
        return rotary_dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high: float = min(math.ceil(pair_of(beta_slow)), rotary_dim - 1)
    if low == high:
        high += 0.001
    out = []
    for i, f in enumerate(base_frequencies(theta, rotary_dim)):
        slow = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(f * (1 - slow) + f / factor * slow)
    return out


def _compress_frequencies(f: Fields, source: str, rotary_dim: int) -> list[float]:
    theta = f.positive("compress_rope_theta")
    if not f.has("rope_scaling"):
        if f.has("rope_parameters"):
            raise CheckpointError(
                f"{source}: rotary settings in rope_parameters, as transformers saves them; expected rope_scaling",
                "the config.json of the released checkpoint",
            )
        return base_frequencies(theta, rotary_dim)
    rope = f.section("rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return base_frequencies(theta, rotary_dim)
    if kind != "yarn":
        raise CheckpointError(f"{source}: rope scaling {kind!r} is not one that this family has", "yarn or default")
    original = rope.integer("original_max_position_embeddings")
    fast, slow = rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0)
    return yarn_frequencies(theta, rotary_dim, rope.positive("factor"), fast, slow, original, source)


def _ratios(f: Fields, source: str, num_layers: int) -> list[int]:
    """compress_ratios: one entry per trunk layer, then one per draft stage, which has none."""
    ratios = f.raw("compress_ratios")
    is_list = isinstance(ratios, list) and all(isinstance(r, int) and not isinstance(r, bool) for r in ratios)
    if not is_list or len(ratios) < num_layers:
        found = f"{len(ratios)} entries" if is_list else "missing or not a list of integers"
        raise CheckpointError(f"{source}: compress_ratios is {found}, expected one per layer ({num_layers})")
    for layer, ratio in enumerate(ratios):
        allowed = (0, CSA_RATIO, HCA_RATIO) if layer < num_layers else (0,)
        if ratio not in allowed:
            raise CheckpointError(
                f"{source}: compress_ratios[{layer}] is {ratio}, expected one of {', '.join(map(str, allowed))}"
            )
    return list(ratios)


def _draft(f: Fields, source: str, num_extra: int) -> Draft:
    """With DSpark ``num_nextn_predict_layers`` is 1 but there are more stages (specs/deepseek_v4.md section 1.1)."""
    if f.has("dspark_block_size"):
        stages = f.integer("n_mtp_layers") if f.has("n_mtp_layers") else num_extra or NUM_STAGES
        taps = f.raw("dspark_target_layer_ids")
        if not isinstance(taps, list) or not taps:
            raise CheckpointError(f"{source}: dspark_target_layer_ids is {taps!r}, expected a list of layers")
        return Draft("dspark", stages, len(taps), f.integer("dspark_markov_rank"))
    layers = f.integer("num_nextn_predict_layers", 0)
    return Draft("mtp" if layers else "none", layers)


def _expert_format(f: Fields, source: str, checkpoint: Checkpoint) -> Literal["MXFP4", "FP8"]:
    """``expert_dtype``; the April preview does not state it and has packed FP4, the Base files may not and have FP8."""
    kind = f.text("expert_dtype", "")
    if kind not in ("", "fp4", "fp8"):
        raise CheckpointError(f"{source}: expert_dtype is {kind!r}, expected 'fp4' or 'fp8'")
    first = checkpoint.tensors.get("layers.0.ffn.experts.0.w1.weight")
    is_packed = first is not None and first.format.name == "I8"
    return "MXFP4" if kind == "fp4" or (not kind and is_packed) else "FP8"


def read_config(checkpoint: Checkpoint) -> DeepSeekV4Config:
    """The configuration of a released checkpoint. Raises CheckpointError where it is not one that can be run."""
    source = str(checkpoint.path)
    f = Fields(checkpoint.metadata, source)
    name = f.text("_name_or_path", "") or checkpoint.path.name
    return config_of(f, source, name, _expert_format(f, source, checkpoint))


def config_of(f: Fields, source: str, name: str, expert_format: Literal["MXFP4", "FP8"]) -> DeepSeekV4Config:
    """The same from fields in the names of config.json, however they came."""
    for key, expected in FIXED.items():
        if f.has(key) and f.raw(key) != expected:
            raise CheckpointError(f"{source}: {f.name(key)} is {f.raw(key)!r}, expected {expected!r}")
    num_layers, rotary = f.integer("num_hidden_layers"), f.integer("qk_rope_head_dim")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise CheckpointError(f"{source}: {num_layers} layers, expected 1 to {MAX_LAYERS}")
    if not 2 <= rotary <= MAX_HEAD_DIM or rotary % 2:
        raise CheckpointError(f"{source}: {rotary} rotary channels, expected an even number up to {MAX_HEAD_DIM}")
    ratios = _ratios(f, source, num_layers)
    c = DeepSeekV4Config(
        name=name,
        num_layers=num_layers,
        hidden_size=f.integer("hidden_size"),
        vocab_size=f.integer("vocab_size"),
        max_context=f.integer("max_position_embeddings"),
        norm_eps=f.positive("rms_norm_eps"),
        eos_ids=eos_ids_of(f.raw("eos_token_id"), source),
        num_heads=f.integer("num_attention_heads"),
        head_dim=f.integer("head_dim"),
        rotary_dim=rotary,
        q_rank=f.integer("q_lora_rank"),
        o_groups=f.integer("o_groups"),
        o_rank=f.integer("o_lora_rank"),
        window=f.integer("sliding_window"),
        ratios=tuple(ratios[:num_layers]),
        index_heads=f.integer("index_n_heads"),
        index_dim=f.integer("index_head_dim"),
        index_top_k=f.integer("index_topk"),
        frequencies=tuple(base_frequencies(f.positive("rope_theta"), rotary)),
        compress_frequencies=tuple(_compress_frequencies(f, source, rotary)),
        num_streams=f.integer("hc_mult"),
        sinkhorn_iterations=f.integer("hc_sinkhorn_iters"),
        mix_eps=f.positive("hc_eps"),
        num_experts=f.integer("n_routed_experts"),
        top_k=f.integer("num_experts_per_tok"),
        expert_size=f.integer("moe_intermediate_size"),
        num_hash_layers=f.integer("num_hash_layers"),
        routed_scale=f.positive("routed_scaling_factor"),
        limit=f.positive("swiglu_limit"),
        expert_format=expert_format,
        draft=_draft(f, source, len(ratios) - num_layers),
    )
    _check(c, source)
    return c


def _check(c: DeepSeekV4Config, source: str) -> None:
    counts = ("vocab_size", "max_context", "window", "sinkhorn_iterations", "index_top_k", "num_streams", "o_groups")
    for field in counts:
        if getattr(c, field) < 1:
            raise CheckpointError(f"{source}: {field} is {getattr(c, field)}, expected at least 1")
    widths = ("hidden_size", "q_rank", "o_rank", "expert_size", "head_dim", "rotary_dim", "index_heads", "num_heads")
    for field in widths:
        step = 1 if field.endswith("heads") else LANES
        if getattr(c, field) < 1 or getattr(c, field) % step:
            expected = f"a multiple of {step}" if step > 1 else "at least 1"
            raise CheckpointError(f"{source}: {field} is {getattr(c, field)}, expected {expected}")
    if c.head_dim > MAX_HEAD_DIM or c.plain < FP8_GROUP or c.plain % FP8_GROUP:
        raise CheckpointError(
            f"{source}: heads of {c.head_dim} with {c.rotary_dim} rotary channels, expected at most {MAX_HEAD_DIM} and "
            f"a multiple of {FP8_GROUP} before the rotary ones"
        )
    is_power = c.index_dim >= FP4_GROUP and c.index_dim & (c.index_dim - 1) == 0
    if not is_power or not c.rotary_dim <= c.index_dim <= MAX_HEAD_DIM:
        raise CheckpointError(
            f"{source}: index_head_dim is {c.index_dim}, expected a power of two from {max(c.rotary_dim, FP4_GROUP)}"
        )
    if c.num_heads % c.o_groups or c.num_heads * c.head_dim // c.o_groups % LANES:
        raise CheckpointError(f"{source}: {c.num_heads} heads do not divide into {c.o_groups} output groups")
    if not 2 <= c.num_experts <= MAX_EXPERTS or not 1 <= c.top_k <= c.num_experts:
        raise CheckpointError(
            f"{source}: {c.top_k} of {c.num_experts} experts, expected at least 1 of 2 to {MAX_EXPERTS}"
        )
    stages, rank = c.draft.num_stages, c.draft.markov_rank
    if stages > MAX_LAYERS or (c.draft.kind == "dspark" and min(stages, rank) < 1):
        raise CheckpointError(f"{source}: a draft head of {stages} stages, rank {rank}")
