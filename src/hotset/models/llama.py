"""The Llama family: SmolLM2, Llama 2, 3, 3.1 and everything else that calls itself ``llama``.

RMSNorm before each sublayer, grouped-query attention with rotary positions, SiLU-gated MLP. The two file kinds
differ in three ways that this file knows: tensor names, metadata keys, and the rotary layout (GGUF converters permute
the rows of q and k so that pairs are adjacent; Hugging Face files pair channel i with i + half).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.manifest import TensorDecl
from hotset.errors import CheckpointError
from hotset.models.spec import CacheForm, Fields, ModelSpec, eos_ids_of
from hotset.program.builder import Builder
from hotset.program.cache import CacheGroup

LINEAR_FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4")
VECTOR_FORMATS = ("F32", "F16", "BF16")
MAX_HEAD_DIM = 512
MAX_LAYERS = 10_000
LANES = 16
"""Hidden size and head size must be multiples of this: the vector width that every kernel set uses."""


@dataclass(frozen=True)
class LlamaConfig:
    """Everything the program depends on, typed once."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_context: int
    norm_eps: float
    frequencies: tuple[float, ...]
    rope_pairs: Literal["adjacent", "halves"]
    is_tied: bool
    eos_ids: tuple[int, ...]


def base_frequencies(theta: float, rotary_dim: int) -> list[float]:
    """``theta^(-2i/rotary)`` for i in 0 .. rotary/2 - 1."""
    return [theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]


def llama3_frequencies(
    base: list[float], factor: float, low_factor: float, high_factor: float, original: int
) -> list[float]:
    """Llama 3.1's scaling: long waves divided by ``factor``, short ones kept, a linear blend between.

    Source: transformers ``modeling_rope_utils._compute_llama3_parameters``.
    """
    out = []
    for f in base:
        wave = 2 * math.pi / f
        if wave > original / low_factor:
            out.append(f / factor)
        elif wave < original / high_factor:
            out.append(f)
        else:
            smooth = (original / wave - low_factor) / (high_factor - low_factor)
            out.append((1 - smooth) * f / factor + smooth * f)
    return out


def _hf_frequencies(fields: Fields, source: str, head_dim: int) -> list[float]:
    # transformers 5 writes one rope_parameters object that may also hold rope_theta; older files rope_scaling.
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = fields.section(key) if fields.has(key) else None
    has_theta = rope is not None and rope.has("rope_theta")
    theta = rope.positive("rope_theta") if rope and has_theta else fields.positive("rope_theta", 10000.0)
    base = base_frequencies(theta, head_dim)
    if rope is None:
        return base
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return base
    if kind == "linear":
        factor = rope.positive("factor")
        return [f / factor for f in base]
    if kind == "llama3":
        return llama3_frequencies(
            base,
            rope.positive("factor"),
            rope.positive("low_freq_factor"),
            rope.positive("high_freq_factor"),
            rope.integer("original_max_position_embeddings"),
        )
    raise CheckpointError(f"{source}: rope type {kind!r} is not one that hotset runs", "default, linear or llama3")


def _from_hf(checkpoint: Checkpoint) -> LlamaConfig:
    source = str(checkpoint.path)
    f = Fields(checkpoint.metadata, source)
    for key, expected in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if f.has(key) and f.raw(key) != expected:
            raise CheckpointError(f"{source}: {key} is {f.raw(key)!r}, expected {expected!r}")
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    head_dim = f.integer("head_dim", hidden // max(heads, 1))
    _check_head(head_dim, head_dim, source)
    return LlamaConfig(
        name=f.text("_name_or_path", "") or checkpoint.path.name,
        num_layers=f.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=f.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn_size=f.integer("intermediate_size"),
        vocab_size=f.integer("vocab_size"),
        max_context=f.integer("max_position_embeddings"),
        norm_eps=f.number("rms_norm_eps"),
        frequencies=tuple(_hf_frequencies(f, source, head_dim)),
        rope_pairs="halves",
        is_tied=f.flag("tie_word_embeddings", False),
        eos_ids=eos_ids_of(f.raw("eos_token_id"), source),
    )


def _from_gguf(checkpoint: Checkpoint) -> LlamaConfig:
    source = str(checkpoint.path)
    f = Fields(checkpoint.metadata, source, "llama.")
    general = Fields(checkpoint.metadata, source)
    if f.has("expert_count") and f.integer("expert_count") > 0:
        raise CheckpointError(
            f"{source}: llama.expert_count is {f.integer('expert_count')}; mixture files of this family are not run"
        )
    hidden, heads = f.integer("embedding_length"), f.integer("attention.head_count")
    head_dim = f.integer("attention.key_length", hidden // max(heads, 1))
    if f.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{source}: key and value heads of different size")
    rotary = f.integer("rope.dimension_count", head_dim)
    _check_head(head_dim, rotary, source)
    frequencies = base_frequencies(f.positive("rope.freq_base", 10000.0), rotary)
    # Older converters wrote scale_linear, or a factor alone: both mean linear scaling.
    factor = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if f.has(key)), None)
    kind = f.text("rope.scaling.type", "linear" if factor else "none")
    if kind == "linear":
        divisor = f.positive(factor or "rope.scaling.factor")
        frequencies = [x / divisor for x in frequencies]
    elif kind != "none":
        raise CheckpointError(
            f"{source}: rope scaling {kind!r} is not one that hotset runs", "none or linear, or rope_freqs"
        )
    if "rope_freqs.weight" in checkpoint.tensors:
        # Llama 3.1 converters store the scaling as one divisor per frequency.
        divisors = checkpoint.array("rope_freqs.weight").reshape(-1)
        if len(divisors) != len(frequencies):
            raise CheckpointError(
                f"{source}: rope_freqs.weight has {len(divisors)} values, expected {len(frequencies)}"
            )
        if not all(d > 0 and math.isfinite(d) for d in divisors):
            raise CheckpointError(f"{source}: rope_freqs.weight holds values that are not positive numbers")
        frequencies = [x / float(d) for x, d in zip(frequencies, divisors, strict=True)]
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{source}: tensor token_embd.weight is missing")
    eos = [general.raw(k) for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")]
    return LlamaConfig(
        name=general.text("general.name", checkpoint.path.stem),
        num_layers=f.integer("block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=f.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=f.integer("feed_forward_length"),
        vocab_size=f.integer("vocab_size", embedding.shape[0]),
        max_context=f.integer("context_length"),
        norm_eps=f.number("attention.layer_norm_rms_epsilon"),
        frequencies=tuple(frequencies),
        rope_pairs="adjacent",
        is_tied="output.weight" not in checkpoint.tensors,
        eos_ids=eos_ids_of([i for i in dict.fromkeys(eos) if i is not None], source),
    )


def _check_head(head_dim: int, rotary_dim: int, source: str) -> None:
    """Before frequencies are computed: a damaged header may name any size."""
    if not LANES <= head_dim <= MAX_HEAD_DIM or head_dim % LANES:
        raise CheckpointError(
            f"{source}: head_dim is {head_dim}, expected a multiple of {LANES} from {LANES} to {MAX_HEAD_DIM}"
        )
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise CheckpointError(f"{source}: {rotary_dim} rotary channels, expected an even number up to {head_dim}")


def _check(c: LlamaConfig, source: str) -> None:
    counts = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "max_context")
    for field in counts:
        if getattr(c, field) < 1:
            raise CheckpointError(f"{source}: {field} is {getattr(c, field)}, expected at least 1")
    if c.num_layers > MAX_LAYERS:
        raise CheckpointError(f"{source}: {c.num_layers} layers, expected at most {MAX_LAYERS}")
    if c.num_heads % c.num_kv_heads:
        raise CheckpointError(f"{source}: {c.num_heads} heads do not divide over {c.num_kv_heads} kv heads")
    for field in ("hidden_size", "ffn_size"):
        if getattr(c, field) % LANES:
            raise CheckpointError(f"{source}: {field} is {getattr(c, field)}, expected a multiple of {LANES}")


HF_NAMES = {
    "attn_norm": "input_layernorm", "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip
GGUF_NAMES = {
    "attn_norm": "attn_norm", "wq": "attn_q", "wk": "attn_k", "wv": "attn_v", "wo": "attn_output",
    "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


def _tensors(c: LlamaConfig, kind: str) -> tuple[TensorDecl, ...]:
    is_gguf = kind == "gguf"
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {
        "attn_norm": (c.hidden_size,), "wq": (q, c.hidden_size), "wk": (kv, c.hidden_size), "wv": (kv, c.hidden_size),
        "wo": (c.hidden_size, q), "ffn_norm": (c.hidden_size,), "gate": (c.ffn_size, c.hidden_size),
        "up": (c.ffn_size, c.hidden_size), "down": (c.hidden_size, c.ffn_size),
    }  # fmt: skip
    names = {"embed": "token_embd", "norm": "output_norm", "head": "output"} if is_gguf else {
        "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}  # fmt: skip

    def declare(key: str, name: str, shape: tuple[int, ...], role: str) -> TensorDecl:
        return TensorDecl(key, f"{name}.weight", shape, role, VECTOR_FORMATS if role == "norm" else LINEAR_FORMATS)

    out = [declare("embed", names["embed"], (c.vocab_size, c.hidden_size), "embedding")]
    for layer in range(c.num_layers):
        for key, name in (GGUF_NAMES if is_gguf else HF_NAMES).items():
            prefix = f"blk.{layer}" if is_gguf else f"model.layers.{layer}"
            role = "norm" if key.endswith("norm") else "linear"
            out.append(declare(f"layers.{layer}.{key}", f"{prefix}.{name}", shapes[key], role))
        if not is_gguf:
            name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
            reason = "computed from the configuration"
            out.append(
                TensorDecl(f"inv_freq.{layer}", name, (c.head_dim // 2,), "table", VECTOR_FORMATS, "ignored", reason)
            )
    out.append(declare("norm", names["norm"], (c.hidden_size,), "norm"))
    head = f"{names['head']}.weight"
    shape = (c.vocab_size, c.hidden_size)
    if not c.is_tied:
        out.append(TensorDecl("head", head, shape, "linear", LINEAR_FORMATS))
    elif not is_gguf:
        out.append(TensorDecl("head", head, shape, "linear", LINEAR_FORMATS, "ignored", "tied to the embedding"))
    if is_gguf:
        reason = "read while the model is declared: divisors of the rotary frequencies"
        out.append(
            TensorDecl("rope_freqs", "rope_freqs.weight", (len(c.frequencies),), "table", ("F32",), "ignored", reason)
        )
    return tuple(out)


def describe(checkpoint: Checkpoint) -> ModelSpec:
    """Declare a Llama checkpoint. Raises CheckpointError where the configuration is not one that can be run."""
    c = _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_hf(checkpoint)
    _check(c, str(checkpoint.path))
    kv_width = c.num_kv_heads * c.head_dim
    row_bytes = 2 * kv_width * 2
    groups = (CacheGroup("kv", tuple(range(c.num_layers)), row_bytes),)
    # BF16 rows are multiplied with BF16 queries and weights, which is what the models' own code does and is quickest.
    # F16 rows keep three more bits and are multiplied as floats: the default where every product takes float inputs, so
    # that attention is not the coarsest step of the model.
    forms = tuple(CacheForm(name, {"kv": (name, row_bytes)}) for name in ("BF16", "F16"))
    b = Builder(groups)
    x = b.embed("embed", c.vocab_size, c.hidden_size)
    angles = b.rope_angles(c.frequencies)
    for layer in range(c.num_layers):
        key = f"layers.{layer}."
        y = b.rms_norm(x, key + "attn_norm", c.norm_eps)
        q = b.linear(y, key + "wq", c.num_heads * c.head_dim)
        k = b.linear(y, key + "wk", kv_width)
        v = b.linear(y, key + "wv", kv_width)
        b.rope(q, angles, c.num_heads, c.head_dim, c.rope_pairs)
        b.rope(k, angles, c.num_kv_heads, c.head_dim, c.rope_pairs)
        b.store_kv(k, v, "kv", layer, c.num_kv_heads, c.head_dim)
        o = b.attend(q, "kv", layer, c.num_heads, c.num_kv_heads, c.head_dim, c.head_dim**-0.5)
        b.linear(o, key + "wo", c.hidden_size, add_to=x)
        y = b.rms_norm(x, key + "ffn_norm", c.norm_eps)
        h = b.gated_linear(y, key + "gate", key + "up", c.ffn_size)
        b.linear(h, key + "down", c.hidden_size, add_to=x)
    y = b.rms_norm(b.select_outputs(x), "norm", c.norm_eps)
    logits = b.linear(y, "embed" if c.is_tied else "head", c.vocab_size)
    return ModelSpec(
        "llama", c.name, c.num_layers, c.hidden_size, c.vocab_size, c.max_context, c.eos_ids,
        _tensors(c, checkpoint.kind), groups, b.finish(logits), forms, "F16",
    )  # fmt: skip
