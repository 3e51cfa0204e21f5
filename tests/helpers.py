"""Tiny random Llama checkpoints, made at run time in every format, and executors over them.

Weights are drawn so that every part of a model matters: products keep unit variance, queries and keys are drawn
1.5 times wider so that attention is peaked and a wrong rotary angle shows, norms are near 1 but all different.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from hotset.api import Described, describe_model
from hotset.checkpoint.checkpoint import Checkpoint, open_checkpoint
from hotset.checkpoint.formats import FORMATS as FORMAT_TABLE
from hotset.checkpoint.manifest import TensorDecl, account, formats_of
from hotset.checkpoint.tensor import TensorInfo
from hotset.engine.batch import Executor, Segment, StepBatch
from hotset.engine.native import NativeExecutor
from hotset.machine.native import available_isas
from hotset.machine.teams import NodeTeam, Seats
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec
from hotset.plan.budget import Plan, Wish, make_plan
from hotset.program.builder import Builder
from hotset.program.cache import BLOCK_TOKENS, CacheGroup, num_blocks
from hotset.program.program import Buffer
from hotset.program.reference import ReferenceExecutor

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4")
FLOAT_FORMATS = ("F32", "F16", "BF16")
K_FORMATS = ("Q4_K", "Q6_K")
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>")
EOS_ID = 1
CACHE_FORMATS = ("F16", "BF16")


@dataclass(frozen=True)
class Tiny:
    """The shape of a tiny Llama. ``vocab`` 259 is two control tokens, the bytes and one merge: not whole tiles."""

    format: str = "F32"
    hidden: int = 64
    ffn: int = 160
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 259
    max_context: int = 4096
    is_tied: bool = True
    embed_format: str | None = None
    head_format: str | None = None
    vector_format: str = "F32"
    eps: float = 1e-5
    theta: float = 10000.0
    divisors: tuple[float, ...] = ()
    seed: int = 1

    def format_of(self, name: str) -> str:
        """Format of a tensor by its GGUF name."""
        if name.endswith("norm.weight"):
            return self.vector_format
        own = {"token_embd.weight": self.embed_format, "output.weight": self.head_format}
        return own.get(name) or self.format


def tiny(format: str, **fields: object) -> Tiny:
    """The default shape in that format; formats of 256-weight blocks get rows of 256."""
    if format in K_FORMATS:
        fields = {"hidden": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 1} | fields
    return Tiny(format=format, **fields)  # type: ignore[arg-type]


def shapes(m: Tiny) -> dict[str, tuple[int, ...]]:
    """Row-major shapes by GGUF tensor name."""
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (m.vocab, m.hidden)}
    for layer in range(m.layers):
        out |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (m.hidden,), "attn_q": (q, m.hidden), "attn_k": (kv, m.hidden), "attn_v": (kv, m.hidden),
                "attn_output": (m.hidden, q), "ffn_norm": (m.hidden,), "ffn_gate": (m.ffn, m.hidden),
                "ffn_up": (m.ffn, m.hidden), "ffn_down": (m.hidden, m.ffn),
            }.items()
        }  # fmt: skip
    out["output_norm.weight"] = (m.hidden,)
    if not m.is_tied:
        out["output.weight"] = (m.vocab, m.hidden)
    return out


def gain_of(name: str) -> float:
    """Standard deviation of a matrix's entries times the square root of its row length."""
    return 1.5 if "attn_q" in name or "attn_k" in name else 1.0


def random_weights(m: Tiny) -> dict[str, Floats]:
    """Float32 weights by GGUF tensor name."""
    rng = np.random.default_rng(m.seed)
    out: dict[str, Floats] = {}
    for name, shape in shapes(m).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            out[name] = 1 + np.float32(0.1) * values
        elif name == "token_embd.weight":
            out[name] = np.float32(0.5) * values
        else:
            out[name] = values * np.float32(gain_of(name) / np.sqrt(shape[-1]))
    return out


# ---- formats -------------------------------------------------------------------------------------------------


def _halves(values: Floats) -> NDArray[np.uint8]:
    return values.astype(np.float16)[:, None].view(np.uint8)


def random_q4_k(shape: tuple[int, ...], scale: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Valid Q4_K rows whose weights have about mean 0 and standard deviation ``scale``: all bits are used."""
    count = int(np.prod(shape)) // 256
    scales = rng.integers(1, 64, (count, 8))
    # With dmin = 7.5 d and minima equal to the scales, the mean of a run is 0.
    minima = np.clip(scales + rng.integers(-2, 3, (count, 8)), 0, 63)
    d = np.full(count, scale / (36 * 4.6), np.float32) * rng.uniform(0.7, 1.3, count).astype(np.float32)
    packed = np.empty((count, 12), np.uint8)
    packed[:, 0:4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    packed[:, 8:12] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    nibbles = rng.integers(0, 256, (count, 128), np.uint8)
    blocks = np.concatenate([_halves(d), _halves(7.5 * d), packed, nibbles], axis=1)
    return blocks.reshape(*shape[:-1], -1)


def random_q6_k(shape: tuple[int, ...], scale: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Valid Q6_K rows whose weights have about mean 0 and standard deviation ``scale``: all bits are used."""
    count = int(np.prod(shape)) // 256
    scales = (rng.integers(32, 128, (count, 16)) * rng.choice([-1, 1], (count, 16))).astype(np.int8)
    d = np.full(count, scale / (80 * 18.5), np.float32) * rng.uniform(0.7, 1.3, count).astype(np.float32)
    blocks = [rng.integers(0, 256, (count, 192), np.uint8), scales.view(np.uint8), _halves(d)]
    return np.concatenate(blocks, axis=1).reshape(*shape[:-1], -1)


def encode(values: Floats, format: str, seed: int = 0) -> NDArray[np.generic]:
    """Rows in a GGUF format. The gguf package cannot quantise to Q4_K and Q6_K: those are random, of equal spread."""
    if format == "F32":
        return values.astype(np.float32)
    if format in K_FORMATS:
        make = random_q4_k if format == "Q4_K" else random_q6_k
        return make(values.shape, float(values.std()), np.random.default_rng(seed))
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[format])


# ---- files ---------------------------------------------------------------------------------------------------


def byte_letters() -> list[str]:
    """The character that byte-level vocabularies spell each byte with."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def add_byte_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Two control tokens, one token per byte, one merge (a byte-level vocabulary must have one), then unused ones."""
    tokens = [*CONTROL_TOKENS, *byte_letters(), "th"]
    num_unused = vocab - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"<unused{i}>" for i in range(num_unused)])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL] * 2 + [kinds.NORMAL] * 257 + [kinds.UNUSED] * num_unused)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def add_llama_keys(writer: gguf.GGUFWriter, m: Tiny) -> None:
    """The metadata of a Llama, as converters write it."""
    writer.add_context_length(m.max_context)
    writer.add_embedding_length(m.hidden)
    writer.add_block_count(m.layers)
    writer.add_feed_forward_length(m.ffn)
    writer.add_head_count(m.heads)
    writer.add_head_count_kv(m.kv_heads)
    writer.add_key_length(m.head_dim)
    writer.add_value_length(m.head_dim)
    writer.add_rope_dimension_count(m.head_dim)
    writer.add_rope_freq_base(m.theta)
    writer.add_layer_norm_rms_eps(m.eps)
    writer.add_vocab_size(m.vocab)


def write_tensors(
    path: Path, tensors: Mapping[str, tuple[NDArray[np.generic], str]], model: Tiny | None = None
) -> Path:
    """A GGUF file of encoded rows and their format names; with ``model`` also its keys and a byte tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    if model is not None:
        add_llama_keys(writer, model)
        if model.vocab >= 259:
            add_byte_tokenizer(writer, model.vocab)
    for name, (rows, format) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf(path: Path, m: Tiny, weights: Mapping[str, Floats] | None = None) -> Path:
    """A complete GGUF checkpoint; ``weights`` in place of random ones."""
    tensors: dict[str, tuple[NDArray[np.generic], str]] = {}
    for index, (name, values) in enumerate((weights or random_weights(m)).items()):
        tensors[name] = encode(values, m.format_of(name), m.seed * 1000 + index), m.format_of(name)
    if m.divisors:
        tensors["rope_freqs.weight"] = np.array(m.divisors, np.float32), "F32"
    return write_tensors(path, tensors, m)


HF_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens", "output_norm": "norm",
}  # fmt: skip


def hf_rows(name: str, rows: Floats, m: Tiny) -> Floats:
    """Rows of q and k in Hugging Face's rotary order: GGUF pairs rows 2i and 2i+1 of a head, HF i and i + half."""
    if "attn_q" not in name and "attn_k" not in name:
        return rows
    return rows.reshape(-1, m.head_dim // 2, 2, m.hidden).swapaxes(1, 2).reshape(rows.shape)


def write_hf_folder(folder: Path, m: Tiny, config: Mapping[str, object] | None = None) -> Path:
    """The same model as :func:`write_gguf` in F32 safetensors with Hugging Face names and rotary order."""
    folder.mkdir(exist_ok=True)
    header: dict[str, object] = {}
    data = b""
    for name, rows in random_weights(m).items():
        *block, short, _ = name.split(".")
        new = (
            "lm_head"
            if short == "output"
            else ".".join(["model", *["layers" if b == "blk" else b for b in block], HF_NAMES[short]])
        )
        raw = hf_rows(name, rows, m).astype("<f4").tobytes()
        header[f"{new}.weight"] = {
            "dtype": "F32",
            "shape": list(rows.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(hf_config(m) | dict(config or {})))
    return folder


def hf_config(m: Tiny) -> dict[str, object]:
    """config.json of that model."""
    return {
        "model_type": "llama", "hidden_size": m.hidden, "intermediate_size": m.ffn, "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads, "num_key_value_heads": m.kv_heads, "head_dim": m.head_dim,
        "vocab_size": m.vocab, "max_position_embeddings": m.max_context, "rms_norm_eps": m.eps,
        "rope_theta": m.theta, "tie_word_embeddings": m.is_tied, "hidden_act": "silu", "eos_token_id": EOS_ID,
    }  # fmt: skip


def gguf_metadata(m: Tiny) -> dict[str, object]:
    """The keys that :func:`add_llama_keys` writes, as a checkpoint shows them."""
    return {
        "general.architecture": "llama", "llama.context_length": m.max_context, "llama.embedding_length": m.hidden,
        "llama.block_count": m.layers, "llama.feed_forward_length": m.ffn, "llama.attention.head_count": m.heads,
        "llama.attention.head_count_kv": m.kv_heads, "llama.attention.key_length": m.head_dim,
        "llama.attention.value_length": m.head_dim, "llama.rope.dimension_count": m.head_dim,
        "llama.rope.freq_base": m.theta, "llama.attention.layer_norm_rms_epsilon": m.eps, "llama.vocab_size": m.vocab,
    }  # fmt: skip


def declared(m: Tiny, metadata: Mapping[str, object] | None = None) -> Checkpoint:
    """A GGUF checkpoint of headers alone: no file, any size. ``metadata`` replaces keys, None removes one."""
    keys = {key: value for key, value in (gguf_metadata(m) | dict(metadata or {})).items() if value is not None}
    tensors = {
        name: TensorInfo(
            name, shape, FORMAT_TABLE[m.format_of(name)], 0, 0, FORMAT_TABLE[m.format_of(name)].nbytes(shape)
        )
        for name, shape in shapes(m).items()
    }
    return Checkpoint("gguf", Path("tiny.gguf"), [], keys, tensors)


def spec_and_formats(m: Tiny) -> tuple[ModelSpec, dict[str, str]]:
    """What a family declares for that shape, and the format of every program key; from headers alone."""
    checkpoint = declared(m)
    spec = describe(checkpoint)
    loaded = account(checkpoint, spec.tensors).loaded
    return spec, {key: info.format.name for key, info in loaded.items()}


# ---- executors -----------------------------------------------------------------------------------------------


def team(num_threads: int, num_nodes: int = 1) -> Seats:
    """Seats for that many threads, as if they were on ``num_nodes`` nodes.

    More threads than CPUs share them, which changes times and nothing else; nodes that are not there change the layout
    of memory, and nothing binds it.
    """
    cpus = sorted(os.sched_getaffinity(0))
    places = [cpus[i % len(cpus)] for i in range(num_threads)]
    each = num_threads // num_nodes
    return Seats(tuple(NodeTeam(node, tuple(places[node * each : (node + 1) * each])) for node in range(num_nodes)))


def plan_of(d: Described, threads: int = 1, **wish: int) -> Plan:
    """A plan on a machine with 1 TiB."""
    return make_plan(d.spec, d.formats, Wish(**wish), threads, 1 << 40, "test")


def native(
    d: Described, threads: int = 1, isa: str | None = None, *, context: int = 512, sequences: int = 1, chunk: int = 512,
    outputs: int | None = None, partials: int | None = None, nodes: int = 1,
) -> NativeExecutor:  # fmt: skip
    """A loaded native executor; ``outputs`` (by default every token of a step) and ``partials`` replace the plan's."""
    plan = plan_of(d, threads, context=context, max_sequences=sequences, prefill_chunk=chunk)
    plan = replace(plan, max_outputs=outputs or plan.prefill_chunk)
    if partials is not None:
        plan = replace(plan, partial_floats=partials)
    executor = NativeExecutor(d.spec, d.formats, plan, team(threads, nodes), isa or available_isas()[0])
    executor.load(d.checkpoint, d.account)
    return executor


def reference(d: Described, *, rounding: bool = True, context: int = 512, sequences: int = 1) -> ReferenceExecutor:
    """The reference executor over the same files."""
    weights = {key: d.checkpoint.array(info.name) for key, info in d.account.loaded.items()}
    blocks = sequences * num_blocks(context)
    executor = ReferenceExecutor(
        d.spec, weights, d.formats, num_blocks=blocks, max_tokens=context, max_outputs=context, rounding=rounding
    )
    # Its rows begin as NaN, the native ones as zeros, which prompts that start at a later position read.
    for block in range(blocks):
        executor.restore_block(block, np.zeros(executor.block_bytes, np.uint8))
    return executor


def run(
    executor: Executor, tokens: Ints, cuts: Sequence[int] = (), blocks: Ints | None = None, start: int = 0
) -> Floats:
    """Logits after every token of one sequence, float32 [n, vocab], in chunks that end before each of ``cuts``.

    ``start`` is the position of the first token; ``blocks`` defaults to 0, 1, 2, ...
    """
    table = np.arange(executor.num_blocks, dtype=np.int32) if blocks is None else blocks
    borders = [0, *cuts, len(tokens)]
    out = []
    for begin, end in pairwise(borders):
        if begin == end:
            continue
        segment = Segment(0, end - begin, start + begin, table[: -(-(start + end) // BLOCK_TOKENS)])
        out.append(
            executor.step(StepBatch(tokens[begin:end], [segment], np.arange(end - begin, dtype=np.int32))).copy()
        )
    return np.concatenate(out)


def random_tokens(count: int, vocab: int = 259, seed: int = 7) -> Ints:
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def described(folder: Path, m: Tiny, cache_format: str | None = None) -> Described:
    """Write the model into ``folder`` and open it."""
    return describe_model(write_gguf(folder / "tiny.gguf", m), cache_format)


def same_bits(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


# ---- programs of a few ops -----------------------------------------------------------------------------------

Tables = Mapping[str, tuple[Floats, str]]


def program(
    path: Path, tables: Tables, build: Callable[[Builder], Buffer], groups: tuple[CacheGroup, ...] = ()
) -> Described:
    """A model of the ops that ``build`` adds, over matrices and vectors with their formats by key.

    Ops read embedding rows, so their inputs are exact and a difference is the op's own.
    """
    encoded = {key: (encode(values, format), format) for key, (values, format) in tables.items()}
    checkpoint = open_checkpoint(write_tensors(path, encoded))
    decls = tuple(TensorDecl(key, key, values.shape, "any", FORMATS) for key, (values, _) in tables.items())
    builder = Builder(groups)
    logits = build(builder)
    made = builder.finish(logits)
    spec = ModelSpec("test", "ops", 1, logits.width, logits.width, 4096, (), decls, groups, made)
    found = account(checkpoint, decls)
    return Described(checkpoint, spec, found, formats_of(decls, found))
