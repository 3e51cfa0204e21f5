"""The DeepSeek-V4 family: Flash and Pro, with DSpark tensors or the preview's MTP layer, FP4 or FP8 experts.

Four residual streams with learnt mixing around each sublayer, attention over a sliding window and compressed rows (all
of them, or those that an indexer chooses), experts chosen by token or by score. Source: specs/deepseek_v4.md section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.errors import InternalError
from hotset.models import deepseek_v4_gguf as gguf
from hotset.models.deepseek_v4_config import CSA_RATIO, HCA_RATIO, DeepSeekV4Config, read_config
from hotset.models.deepseek_v4_tensors import declare_tensors
from hotset.models.spec import CacheForm, ModelSpec
from hotset.program.builder import Builder
from hotset.program.cache import CacheGroup, FrontierGroup
from hotset.program.program import Buffer, Program
from hotset.program.rows import index_row, kv_row, state_row_bytes

# Name of a cache form, format of its kv rows, format of its index rows; the default first.
FORMS = (
    ("FP8", "FP8", "MXFP4"),
    ("FP8+FP8", "FP8", "FP8"),
    ("BF16", "BF16", "MXFP4"),
    ("BF16+FP8", "BF16", "FP8"),
    ("FP4", "FP4", "MXFP4"),
    ("FP4+FP8", "FP4", "FP8"),
    ("BF16-exact", "BF16-exact", "BF16-exact"),
)


def _forms(c: DeepSeekV4Config) -> tuple[CacheForm, ...]:
    out = []
    for name, kv_format, index_format in FORMS:
        kv = kv_format, kv_row(kv_format, c.head_dim, c.plain).row_bytes
        index = index_format, index_row(index_format, c.index_dim).row_bytes
        out.append(CacheForm(name, {"csa": kv, "hca": kv, "window": kv, "index": index}))
    return tuple(out)


def _groups(c: DeepSeekV4Config, form: CacheForm) -> tuple[CacheGroup, ...]:
    """Compressed rows of the two kinds of layers, and the indexer's. A kind that no layer has is left out."""
    out = []
    for name, ratio in (("csa", CSA_RATIO), ("index", CSA_RATIO), ("hca", HCA_RATIO)):
        row_format, row_bytes = form.rows[name]
        out.append(CacheGroup(name, c.layers_of(ratio), row_bytes, ratio, row_format))
    return tuple(group for group in out if group.layers)


def _frontier(c: DeepSeekV4Config, form: CacheForm) -> tuple[FrontierGroup, ...]:
    """The window of every layer, and what the compressors read again: the last two groups, or the one under way."""
    window_format, window_bytes = form.rows["window"]
    csa, hca = c.layers_of(CSA_RATIO), c.layers_of(HCA_RATIO)
    out = (
        FrontierGroup("window", tuple(range(c.num_layers)), c.window, window_bytes, window_format),
        FrontierGroup("csa_state", csa, 2 * CSA_RATIO, state_row_bytes(2 * c.head_dim), "F32"),
        FrontierGroup("index_state", csa, 2 * CSA_RATIO, state_row_bytes(2 * c.index_dim), "F32"),
        FrontierGroup("hca_state", hca, HCA_RATIO, state_row_bytes(c.head_dim), "F32"),
    )
    return tuple(group for group in out if group.layers)


@dataclass(frozen=True)
class _Angles:
    """Rotary angles of the layers without compression (base 10,000, no YaRN) and of those with it."""

    plain: Buffer | None
    compressed: Buffer | None

    def of(self, ratio: int) -> Buffer:
        angles = self.compressed if ratio else self.plain
        if angles is None:
            raise InternalError(f"no rotary angles for a layer of ratio {ratio}")
        return angles


def _compress(b: Builder, c: DeepSeekV4Config, y: Buffer, key: str, group: str, state: str, layer: int) -> None:
    ratio = c.ratios[layer]
    width = c.index_dim if group == "index" else c.head_dim
    overlap = ratio == CSA_RATIO
    columns = width * (2 if overlap else 1)
    k, g = (b.linear(y, f"{key}.{part}", columns) for part in ("wkv", "wgate"))
    b.compress(
        k, g, key, c.norm_eps, c.compress_frequencies, ratio, group, state, layer,
        overlap=overlap, hadamard=group == "index",
    )  # fmt: skip


def _choose(b: Builder, c: DeepSeekV4Config, y: Buffer, qr: Buffer, angles: Buffer, key: str, layer: int) -> Buffer:
    """The lightning indexer: which compressed rows each token reads."""
    _compress(b, c, y, f"{key}.index.comp", "index", "index_state", layer)
    q = b.linear(qr, f"{key}.index.wq_b", c.index_heads * c.index_dim)
    b.rope(q, angles, c.index_heads, c.index_dim, "adjacent", first=c.index_dim - c.rotary_dim)
    weights = b.linear(y, f"{key}.index.weights", c.index_heads)
    scale = c.index_heads**-0.5 * c.index_dim**-0.5
    return b.index_rows(q, weights, "index", layer, c.index_heads, c.index_dim, CSA_RATIO, c.index_top_k, scale)


def _attention(b: Builder, c: DeepSeekV4Config, y: Buffer, angles: Buffer, key: str, layer: int) -> Buffer:
    ratio = c.ratios[layer]
    qr = b.rms_norm(b.linear(y, f"{key}.wq_a", c.q_rank), f"{key}.q_norm", c.norm_eps)
    q = b.linear(qr, f"{key}.wq_b", c.num_heads * c.head_dim)
    b.head_norm(q, c.num_heads, c.head_dim, c.norm_eps)
    b.rope(q, angles, c.num_heads, c.head_dim, "adjacent", first=c.plain)
    kv = b.rms_norm(b.linear(y, f"{key}.wkv", c.head_dim), f"{key}.kv_norm", c.norm_eps)
    b.rope(kv, angles, 1, c.head_dim, "adjacent", first=c.plain)
    b.window_rows(kv, "window", layer, c.plain)
    group: str | None = None
    chosen: Buffer | None = None
    if ratio:
        group = "csa" if ratio == CSA_RATIO else "hca"
        _compress(b, c, y, f"{key}.comp", group, f"{group}_state", layer)
    if ratio == CSA_RATIO:
        chosen = _choose(b, c, y, qr, angles, key, layer)
    o = b.attend_rows(
        q, "window", group, chosen, ratio, f"{key}.sink", layer, c.num_heads, c.head_dim, c.head_dim**-0.5
    )
    # Values are keys and carry their own rotation: turned back by the query's angle, only the distance is left.
    b.rope(o, angles, c.num_heads, c.head_dim, "adjacent", first=c.plain, is_inverse=True)
    u = b.linear(o, f"{key}.wo_a", c.o_groups * c.o_rank, groups=c.o_groups)
    return b.linear(u, f"{key}.wo_b", c.hidden_size)


def _experts(b: Builder, c: DeepSeekV4Config, y: Buffer, key: str, layer: int) -> Buffer:
    scores = b.linear(y, f"{key}.gate", c.num_experts)
    if layer < c.num_hash_layers:
        route = b.route(scores, c.top_k, c.routed_scale, table=f"{key}.tid2eid", vocab_size=c.vocab_size)
    else:
        route = b.route(scores, c.top_k, c.routed_scale, bias=f"{key}.gate_bias")
    pairs = b.expert_gated(y, route, f"{key}.experts.w1", f"{key}.experts.w3", c.num_experts, c.expert_size, c.limit)
    out = b.expert_down(pairs, route, f"{key}.experts.w2", c.num_experts, c.hidden_size)
    shared = b.gated_linear(y, f"{key}.shared.w1", f"{key}.shared.w3", c.expert_size, c.limit)
    return b.linear(shared, f"{key}.shared.w2", c.hidden_size, add_to=out)


def _program(c: DeepSeekV4Config, groups: tuple[CacheGroup, ...], frontier: tuple[FrontierGroup, ...]) -> Program:
    b = Builder(groups, frontier)
    streams = b.embed("embed", c.vocab_size, c.hidden_size, copies=c.num_streams)
    angles = _Angles(
        b.rope_angles(c.frequencies) if 0 in c.ratios else None,
        b.rope_angles(c.compress_frequencies) if any(c.ratios) else None,
    )
    for layer, ratio in enumerate(c.ratios):
        key = f"layers.{layer}"
        for part in ("attn", "ffn"):
            h, coefficients = b.hyper_mix(
                streams, f"{key}.hc_{part}", c.num_streams, c.sinkhorn_iterations, c.mix_eps, c.norm_eps
            )
            y = b.rms_norm(h, f"{key}.{part}_norm", c.norm_eps)
            out = _attention(b, c, y, angles.of(ratio), key, layer) if part == "attn" else _experts(b, c, y, key, layer)
            b.hyper_merge(streams, out, coefficients, c.num_streams)
    h = b.hyper_head(b.select_outputs(streams), "hc_head", c.num_streams, c.mix_eps, c.norm_eps)
    return b.finish(b.linear(b.rms_norm(h, "norm", c.norm_eps), "head", c.vocab_size))


def describe(checkpoint: Checkpoint) -> ModelSpec:
    """Declare a DeepSeek-V4 checkpoint. Raises CheckpointError where its configuration is not one that can be run."""
    if checkpoint.kind == "gguf":
        c = gguf.read_config(checkpoint)
        tensors = gguf.declare_tensors(c, checkpoint.tensors)
    else:
        c = read_config(checkpoint)
        tensors = declare_tensors(c, checkpoint.tensors)
    forms = _forms(c)
    groups, frontier = _groups(c, forms[0]), _frontier(c, forms[0])
    return ModelSpec(
        "deepseek_v4", c.name, c.num_layers, c.hidden_size, c.vocab_size, c.max_context, c.eos_ids,
        tensors, groups, _program(c, groups, frontier), forms,
    )  # fmt: skip
