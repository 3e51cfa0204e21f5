"""config.json of GLM-5, 5.1, 5.2 and 5.3 (``glm_moe_dsa``), typed once and refused where it is another model.

Source: specs/glm_5_2.md sections 1 and 3. ``head_dim`` is not read: it says 192, and no width of the model is that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.errors import CheckpointError
from hotset.models.llama import base_frequencies
from hotset.models.spec import Fields, eos_ids_of
from hotset.program.rows import FP4_GROUP, FP8_F32_GROUP

LANES = 16
"""Widths must be multiples of this: the vector width that every kernel set uses."""
PACK_GROUP = 32
"""Weights of a row that share a scale in "pack-quantized" files."""
PACK_WORD = 8
"""Weights of 4 bits in one I32, and rows whose zero points share one."""
BLOCK = 128
"""Rows and columns that share an FP8 scale."""
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1_000
MAX_EXPERTS, MAX_TOP_K = 4_096, 64

# What hotset computes is fixed to these; any other value is another model.
FIXED: dict[str, object] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "indexer_rope_interleave": True,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
# Of a "pack-quantized" group of weights; "symmetric" may be either.
PACKED: dict[str, object] = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": PACK_GROUP,
}
KIND_OF_LETTER = {"F": "full", "S": "shared"}

Storage = Literal["float", "FP8_F32", "INT4", "INT4_SYM"]


@dataclass(frozen=True)
class GlmConfig:
    """Everything the program and the declarations depend on.

    ``owns_indexer`` says of every trunk layer whether it has an indexer or uses the choice of the nearest one before
    it. ``storage`` is the form of quantised matrices, as config.json states it; each tensor's own header decides.
    """

    name: str
    num_layers: int
    num_draft_layers: int
    num_dense_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    norm_eps: float
    eos_ids: tuple[int, ...]
    num_heads: int
    q_rank: int
    kv_rank: int
    plain: int
    rotary_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_top_k: int
    owns_indexer: tuple[bool, ...]
    frequencies: tuple[float, ...]
    ffn_size: int
    num_experts: int
    num_groups: int
    top_groups: int
    top_k: int
    expert_size: int
    routed_scale: float
    storage: Storage

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Trunk layers with an indexer of their own."""
        return tuple(layer for layer, owns in enumerate(self.owns_indexer) if owns)


def indexer_layers(f: Fields, source: str, num_layers: int) -> tuple[bool, ...]:
    """Which layers own an indexer: by list, else by pattern, else by frequency (specs/glm_5_2.md section 1.2).

    GLM-5 and 5.1 state none of the three and have one in every layer. CheckpointError for a list or pattern that does
    not fit, and for a first layer that has nothing to share.
    """
    kinds: Any
    if f.has("indexer_types"):
        key, kinds = "indexer_types", f.raw("indexer_types")
    elif f.has("index_topk_pattern"):
        key, kinds = "index_topk_pattern", [KIND_OF_LETTER.get(sign, sign) for sign in f.text("index_topk_pattern")]
    else:
        key, frequency = "index_topk_freq", f.integer("index_topk_freq", 1)
        if frequency < 1:
            raise CheckpointError(f"{source}: index_topk_freq is {frequency}, expected at least 1")
        offset = f.integer("index_skip_topk_offset") if frequency > 1 else 1
        kinds = ["shared" if max(i - offset + 1, 0) % frequency else "full" for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        found = f"{len(kinds)} entries" if isinstance(kinds, list) else "no list"
        raise CheckpointError(f"{source}: {key} is {found}, expected one per layer ({num_layers})")
    for layer, kind in enumerate(kinds):
        if kind not in ("full", "shared"):
            raise CheckpointError(f"{source}: {key}[{layer}] is {kind!r}, expected 'full' or 'shared'")
    if kinds[0] != "full":
        raise CheckpointError(f"{source}: layer 0 shares an indexer, and there is none before it")
    return tuple(kind == "full" for kind in kinds)


def _storage(f: Fields, source: str) -> Storage:
    """The form of the quantised matrices; CheckpointError names what hotset has no declaration for."""
    if not f.has("quantization_config"):
        return "float"
    q = f.section("quantization_config")
    method = q.text("quant_method")
    if method == "fp8":
        for key, value in (("fmt", "e4m3"), ("weight_block_size", [BLOCK, BLOCK])):
            if q.raw(key) != value:
                raise CheckpointError(f"{source}: quantization_config.{key} is {q.raw(key)!r}, expected {value!r}")
        return "FP8_F32"
    if method == "compressed-tensors":
        return _pack_storage(q, source)
    if method == "awq":
        raise CheckpointError(
            f"{source}: AutoAWQ files (qweight, qzeros) are not read",
            "a release in FP8 or BF16, or one by compressed-tensors in the format pack-quantized",
        )
    raise CheckpointError(
        f"{source}: quantization_config.quant_method is {method!r}, which is not read; expected 'fp8' or "
        "'compressed-tensors'",
        "a release in FP8 or BF16",
    )


def _pack_storage(q: Fields, source: str) -> Storage:
    form = q.text("format", "missing")
    if form != "pack-quantized":
        raise CheckpointError(f"{source}: compressed-tensors in the format {form!r}, expected 'pack-quantized'")
    groups = q.raw("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{source}: config_groups is {type(groups).__name__}, expected an object of groups")
    kinds = set()
    for name in groups:
        weights = Fields(groups, f"{source}: config_groups").section(name).section("weights")
        for key, value in PACKED.items():
            if weights.raw(key) != value:
                raise CheckpointError(
                    f"{source}: config_groups.{name}.weights.{key} is {weights.raw(key)!r}, expected {value!r}",
                    "a release with 4-bit weights in groups of 32",
                )
        kinds.add(weights.flag("symmetric", True))
    if len(kinds) > 1:
        raise CheckpointError(f"{source}: groups of weights with and without zero points, expected one form")
    return "INT4_SYM" if kinds.pop() else "INT4"


def _theta(f: Fields, source: str) -> float:
    if not f.has("rope_parameters"):
        if f.has("rope_scaling"):
            raise CheckpointError(f"{source}: rope_scaling is {f.raw('rope_scaling')!r}, this family has none")
        return f.positive("rope_theta")
    rope = f.section("rope_parameters")
    kind = rope.text("rope_type", "default")
    if kind != "default":
        raise CheckpointError(f"{source}: rope_type is {kind!r}, expected 'default'")
    return rope.positive("rope_theta")


def read_config(checkpoint: Checkpoint) -> GlmConfig:
    """The configuration of a checkpoint. Raises CheckpointError where it is not one of this family."""
    source = str(checkpoint.path)
    f = Fields(checkpoint.metadata, source)
    for key, expected in FIXED.items():
        if f.has(key) and f.raw(key) != expected:
            raise CheckpointError(f"{source}: {key} is {f.raw(key)!r}, expected {expected!r}")
    num_layers, rotary = f.integer("num_hidden_layers"), f.integer("qk_rope_head_dim")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise CheckpointError(f"{source}: {num_layers} layers, expected 1 to {MAX_LAYERS}")
    c = GlmConfig(
        name=f.text("_name_or_path", "") or checkpoint.path.name,
        num_layers=num_layers,
        num_draft_layers=f.integer("num_nextn_predict_layers", 0),
        num_dense_layers=f.integer("first_k_dense_replace"),
        hidden_size=f.integer("hidden_size"),
        vocab_size=f.integer("vocab_size"),
        max_context=f.integer("max_position_embeddings"),
        norm_eps=f.positive("rms_norm_eps"),
        eos_ids=eos_ids_of(f.raw("eos_token_id"), source),
        num_heads=f.integer("num_attention_heads"),
        q_rank=f.integer("q_lora_rank"),
        kv_rank=f.integer("kv_lora_rank"),
        plain=f.integer("qk_nope_head_dim"),
        rotary_dim=rotary,
        value_dim=f.integer("v_head_dim"),
        index_heads=f.integer("index_n_heads"),
        index_dim=f.integer("index_head_dim"),
        index_top_k=f.integer("index_topk"),
        owns_indexer=indexer_layers(f, source, num_layers),
        frequencies=tuple(base_frequencies(_theta(f, source), rotary)),
        ffn_size=f.integer("intermediate_size"),
        num_experts=f.integer("n_routed_experts"),
        num_groups=f.integer("n_group", 1),
        top_groups=f.integer("topk_group", 1),
        top_k=f.integer("num_experts_per_tok"),
        expert_size=f.integer("moe_intermediate_size"),
        routed_scale=f.positive("routed_scaling_factor"),
        storage=_storage(f, source),
    )
    _check(c, f, source)
    return c


def _check(c: GlmConfig, f: Fields, source: str) -> None:
    counts = ("vocab_size", "max_context", "num_heads", "index_heads", "index_top_k", "rotary_dim")
    widths = ("hidden_size", "q_rank", "kv_rank", "plain", "value_dim", "ffn_size", "expert_size", "index_dim")
    for field in (*counts, *widths):
        value, step = getattr(c, field), LANES if field in widths else 1
        if not 1 <= value <= MAX_WIDTH or value % step:
            wanted = f"a multiple of {step}" if step > 1 else "at least 1"
            raise CheckpointError(f"{source}: {field} is {value}, expected {wanted}, at most {MAX_WIDTH}")
    stated = {"num_key_value_heads": c.num_heads, "qk_head_dim": c.plain + c.rotary_dim}
    for key, expected in stated.items():
        if f.has(key) and f.raw(key) != expected:
            raise CheckpointError(f"{source}: {key} is {f.raw(key)!r}, expected {expected}")
    kinds = ["dense" if layer < c.num_dense_layers else "sparse" for layer in range(c.num_layers)]
    if f.has("mlp_layer_types") and f.raw("mlp_layer_types") != kinds:
        raise CheckpointError(
            f"{source}: mlp_layer_types does not say what first_k_dense_replace does: {c.num_dense_layers} dense "
            "layers, then sparse ones"
        )
    is_power = c.index_dim >= FP4_GROUP and c.index_dim & (c.index_dim - 1) == 0
    if c.rotary_dim % 2 or not is_power or c.rotary_dim > c.index_dim:
        raise CheckpointError(
            f"{source}: index_head_dim is {c.index_dim} with {c.rotary_dim} rotary channels, expected a power of two "
            f"from {FP4_GROUP} and an even number up to it"
        )
    if c.kv_rank % FP8_F32_GROUP:
        raise CheckpointError(f"{source}: kv_lora_rank is {c.kv_rank}, expected a multiple of {FP8_F32_GROUP}")
    if not 2 <= c.num_experts <= MAX_EXPERTS or not 1 <= c.num_groups <= c.num_experts or c.num_experts % c.num_groups:
        raise CheckpointError(
            f"{source}: {c.num_experts} experts in {c.num_groups} groups, expected 2 to {MAX_EXPERTS} in equal groups"
        )
    eligible = c.num_experts // c.num_groups * c.top_groups
    if not 1 <= c.top_groups <= c.num_groups or not 1 <= c.top_k <= min(eligible, MAX_TOP_K):
        raise CheckpointError(
            f"{source}: {c.top_k} of {c.num_experts} experts from {c.top_groups} of {c.num_groups} groups"
        )
    if c.num_draft_layers > 1:
        raise CheckpointError(f"{source}: num_nextn_predict_layers is {c.num_draft_layers}, expected 0 or 1")
