"""The GLM-5 family (``glm_moe_dsa``): GLM-5, 5.1, 5.2 and 5.3, in BF16, FP8 or packed 4-bit weights.

Multi-head latent attention in its absorbed form over one cache row per token, the rows being those that an indexer
chooses; layers without an indexer use the choice of the nearest one before them. Experts are chosen by sigmoid scores
with a bias; one shared expert, dense first layers. Source: specs/glm_5_2.md section 2.

Declared as far as tensors, cache and program go: checked and planned, and refused by the executors
(:mod:`hotset.program.pending`).
"""

from __future__ import annotations

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.errors import CheckpointError, InternalError
from hotset.models.glm_moe_dsa_config import GlmConfig, read_config
from hotset.models.glm_moe_dsa_tensors import declare_tensors
from hotset.models.spec import CacheForm, ModelSpec
from hotset.program.builder import Builder
from hotset.program.cache import CacheGroup
from hotset.program.program import Buffer, Program
from hotset.program.rows import index_row, kv_row

INDEX_NORM_EPS = 1e-6
"""Of the indexer's key norm, whatever ``rms_norm_eps`` says (specs/glm_5_2.md section 2.1)."""

# Name of a cache form, format of its latent rows, format of its index rows; the default first.
FORMS = (
    ("FP8", "FP8-F32", "FP8"),
    ("BF16+FP8", "BF16-exact", "FP8"),
    ("BF16", "BF16-exact", "BF16-exact"),
)


def _forms(c: GlmConfig) -> tuple[CacheForm, ...]:
    out = []
    for name, latent_format, index_format in FORMS:
        latent = kv_row(latent_format, c.kv_rank + c.rotary_dim, c.kv_rank).row_bytes
        index = index_row(index_format, c.index_dim).row_bytes
        out.append(CacheForm(name, {"latent": (latent_format, latent), "index": (index_format, index)}))
    return tuple(out)


def _groups(c: GlmConfig, form: CacheForm) -> tuple[CacheGroup, ...]:
    """A latent row in every layer, a key of the indexer in those that own one."""
    layers = {"latent": tuple(range(c.num_layers)), "index": c.full_layers}
    return tuple(CacheGroup(name, layers[name], num_bytes, 1, fmt) for name, (fmt, num_bytes) in form.rows.items())


def _choose(b: Builder, c: GlmConfig, y: Buffer, qr: Buffer, angles: Buffer, key: str, layer: int) -> Buffer:
    """The lightning indexer: which positions each token reads. Rotary channels come first here."""
    k = b.layer_norm(b.linear(y, f"{key}.index.k", c.index_dim), f"{key}.index.norm", INDEX_NORM_EPS)
    b.rope(k, angles, 1, c.index_dim, "adjacent")
    b.store_rows(k, "index", layer, c.index_dim, hadamard=True)
    q = b.linear(qr, f"{key}.index.q", c.index_heads * c.index_dim)
    b.rope(q, angles, c.index_heads, c.index_dim, "adjacent")
    weights = b.linear(y, f"{key}.index.weights", c.index_heads)
    scale = c.index_heads**-0.5 * c.index_dim**-0.5
    return b.index_rows(q, weights, "index", layer, c.index_heads, c.index_dim, 1, c.index_top_k, scale)


def _attention(
    b: Builder, c: GlmConfig, x: Buffer, angles: Buffer, chosen: Buffer | None, key: str, layer: int
) -> Buffer:
    """Add the layer's attention to the residual; return the choice of rows that later layers may share."""
    y = b.rms_norm(x, f"{key}.attn_norm", c.norm_eps)
    qr = b.rms_norm(b.linear(y, f"{key}.q_a", c.q_rank), f"{key}.q_norm", c.norm_eps)
    head_dim = c.plain + c.rotary_dim
    q = b.linear(qr, f"{key}.q_b", c.num_heads * head_dim)
    b.rope(q, angles, c.num_heads, head_dim, "adjacent", first=c.plain)
    row = b.linear(y, f"{key}.kv_a", c.kv_rank + c.rotary_dim)
    row = b.latent_norm(row, f"{key}.kv_norm", c.kv_rank, c.norm_eps)
    b.rope(row, angles, 1, row.width, "adjacent", first=c.kv_rank)
    b.store_rows(row, "latent", layer, c.kv_rank)
    if c.owns_indexer[layer]:
        chosen = _choose(b, c, y, qr, angles, key, layer)
    if chosen is None:
        raise InternalError(f"layer {layer} shares an indexer's choice, and none was made")
    latent_query = b.latent_query(q, f"{key}.kv_b", c.num_heads, c.plain, c.value_dim, c.kv_rank)
    mixed = b.attend_latent(latent_query, chosen, "latent", layer, c.num_heads, c.kv_rank, head_dim**-0.5)
    values = b.latent_value(mixed, f"{key}.kv_b", c.num_heads, c.plain, c.value_dim)
    b.linear(values, f"{key}.o", c.hidden_size, add_to=x)
    return chosen


def _mlp(b: Builder, c: GlmConfig, x: Buffer, y: Buffer, key: str, size: int) -> None:
    b.linear(b.gated_linear(y, f"{key}.gate", f"{key}.up", size), f"{key}.down", c.hidden_size, add_to=x)


def _experts(b: Builder, c: GlmConfig, x: Buffer, y: Buffer, key: str) -> None:
    """Routed experts and the shared one, added to the residual."""
    scores = b.linear(y, f"{key}.router", c.num_experts)
    route = b.route(
        scores, c.top_k, c.routed_scale, bias=f"{key}.router_bias", gate="sigmoid", num_groups=c.num_groups,
        top_groups=c.top_groups,
    )  # fmt: skip
    pairs = b.expert_gated(y, route, f"{key}.experts.gate", f"{key}.experts.up", c.num_experts, c.expert_size)
    b.expert_down(pairs, route, f"{key}.experts.down", c.num_experts, c.hidden_size, add_to=x)
    _mlp(b, c, x, y, f"{key}.shared", c.expert_size)


def _program(c: GlmConfig, groups: tuple[CacheGroup, ...]) -> Program:
    b = Builder(groups)
    x = b.embed("embed", c.vocab_size, c.hidden_size)
    angles = b.rope_angles(c.frequencies)
    chosen: Buffer | None = None
    for layer in range(c.num_layers):
        key = f"layers.{layer}"
        chosen = _attention(b, c, x, angles, chosen, key, layer)
        y = b.rms_norm(x, f"{key}.ffn_norm", c.norm_eps)
        if layer < c.num_dense_layers:
            _mlp(b, c, x, y, f"{key}.mlp", c.ffn_size)
        else:
            _experts(b, c, x, y, key)
    h = b.rms_norm(b.select_outputs(x), "norm", c.norm_eps)
    return b.finish(b.linear(h, "head", c.vocab_size))


def describe(checkpoint: Checkpoint) -> ModelSpec:
    """Declare a checkpoint of this family. Raises CheckpointError where its configuration is another model's."""
    if checkpoint.kind == "gguf":
        raise CheckpointError(
            f"{checkpoint.path}: GGUF conversions of this family (glm-dsa) are not read",
            "the safetensors release, in FP8 or BF16",
        )
    c = read_config(checkpoint)
    forms = _forms(c)
    groups = _groups(c, forms[0])
    return ModelSpec(
        "glm_moe_dsa", c.name, c.num_layers, c.hidden_size, c.vocab_size, c.max_context, c.eos_ids,
        declare_tensors(c, checkpoint.tensors), groups, _program(c, groups), forms,
    )  # fmt: skip
