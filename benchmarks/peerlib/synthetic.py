"""Write a Llama of about 3 B parameters with random weights as GGUF: big enough to stream from DRAM.

No published model of this size can be fetched on an isolated machine, and speed does not depend on what
the weights say. Blocks are drawn directly in the file's own format (no float is ever quantised), so that
a file takes seconds. Scales are chosen such that every matrix has a deviation of about 1 / sqrt(inputs):
activations stay finite and of ordinary size through all layers.

    python benchmarks/peerlib/synthetic.py --like .models/SmolLM2-135M-Instruct.Q4_1.gguf --format Q4_1 OUT.gguf

The tokenizer is copied from ``--like``. Needs the ``gguf`` package and numpy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

CHUNK_BYTES = 64 << 20
Q4_1_CODE_DEVIATION = 4.61  # of a uniform integer in 0..15
Q8_0_CODE_DEVIATION = 73.9  # of a uniform integer in -128..127


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama; the default is the one that the benchmark uses (3.32 B parameters, untied head)."""

    num_layers: int = 30
    hidden_size: int = 3072
    num_heads: int = 24
    num_kv_heads: int = 8
    ffn_size: int = 8192
    vocab_size: int = 49152
    max_context: int = 8192
    rope_base: float = 100000.0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and row-major shape (outputs, inputs) of every tensor, in file order."""
        kv_size = self.hidden_size // self.num_heads * self.num_kv_heads
        yield "token_embd.weight", (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            prefix = f"blk.{layer}."
            yield prefix + "attn_norm.weight", (self.hidden_size,)
            yield prefix + "attn_q.weight", (self.hidden_size, self.hidden_size)
            yield prefix + "attn_k.weight", (kv_size, self.hidden_size)
            yield prefix + "attn_v.weight", (kv_size, self.hidden_size)
            yield prefix + "attn_output.weight", (self.hidden_size, self.hidden_size)
            yield prefix + "ffn_norm.weight", (self.hidden_size,)
            yield prefix + "ffn_gate.weight", (self.ffn_size, self.hidden_size)
            yield prefix + "ffn_up.weight", (self.ffn_size, self.hidden_size)
            yield prefix + "ffn_down.weight", (self.hidden_size, self.ffn_size)
        yield "output_norm.weight", (self.hidden_size,)
        yield "output.weight", (self.vocab_size, self.hidden_size)


def random_q4_1(num_weights: int, deviation: float, rng: np.random.Generator) -> np.ndarray:
    """Return Q4_1 blocks (uint8 [blocks, 20]): half-precision step and minimum, then 16 bytes of two codes each."""
    num_blocks = num_weights // 32
    step = (deviation / Q4_1_CODE_DEVIATION * rng.uniform(0.75, 1.25, num_blocks)).astype(np.float16)
    blocks = np.empty((num_blocks, 20), dtype=np.uint8)
    blocks[:, 0:2] = step[:, None].view(np.uint8)
    blocks[:, 2:4] = (step * np.float16(-7.5))[:, None].view(np.uint8)
    blocks[:, 4:] = rng.integers(0, 256, (num_blocks, 16), dtype=np.uint8)
    return blocks


def random_q8_0(num_weights: int, deviation: float, rng: np.random.Generator) -> np.ndarray:
    """Return Q8_0 blocks (uint8 [blocks, 34]): half-precision step, then 32 signed bytes."""
    num_blocks = num_weights // 32
    step = (deviation / Q8_0_CODE_DEVIATION * rng.uniform(0.75, 1.25, num_blocks)).astype(np.float16)
    blocks = np.empty((num_blocks, 34), dtype=np.uint8)
    blocks[:, 0:2] = step[:, None].view(np.uint8)
    blocks[:, 2:] = rng.integers(0, 256, (num_blocks, 32), dtype=np.uint8)
    return blocks


def random_f16(num_weights: int, deviation: float, rng: np.random.Generator) -> np.ndarray:
    """Return half-precision bits (uint16): random sign and fraction, exponent uniform over four binades.

    Their deviation is 7.04 times the lowest binade, so the nearest power of two is within sqrt(2) of the wish.
    """
    lowest = round(float(np.log2(deviation / 7.04))) + 15
    bits = rng.integers(0, 1 << 16, num_weights, dtype=np.uint16)
    exponent = ((bits >> 10) & 3) + np.uint16(lowest)
    return (bits & 0x83FF) | (exponent << 10)


FORMATS = {
    "Q4_1": (gguf.GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1, random_q4_1),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0, random_q8_0),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16, random_f16),
}


def tensor_pieces(shape: tuple[int, ...], format_name: str, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the bytes of one tensor in pieces of about 64 MiB, whole rows each."""
    if len(shape) == 1:
        yield rng.uniform(0.8, 1.2, shape).astype(np.float32)
        return
    num_rows, num_inputs = shape
    draw = FORMATS[format_name][2]
    step = max(1, CHUNK_BYTES // (num_inputs * 2))
    for first in range(0, num_rows, step):
        yield draw(min(step, num_rows - first) * num_inputs, num_inputs**-0.5, rng)


def tensor_bytes(shape: tuple[int, ...], format_name: str) -> int:
    """Return the bytes of one tensor; vectors (norms) are always F32."""
    if len(shape) == 1:
        return 4 * shape[0]
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[FORMATS[format_name][0]]
    return shape[0] * shape[1] // block_weights * block_bytes


def copy_tokenizer(source: Path, writer: gguf.GGUFWriter) -> None:
    """Copy every ``tokenizer.*`` key of ``source``."""
    for name, entry in gguf.GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            sub_type = entry.types[1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type)


def write_header(writer: gguf.GGUFWriter, shape: Shape, format_name: str, tokenizer: Path) -> None:
    """Write metadata and the list of tensors."""
    file_type = FORMATS[format_name][1]
    writer.add_name(f"hotset synthetic Llama, random weights, {format_name}")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.hidden_size // shape.num_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    copy_tokenizer(tokenizer, writer)
    for name, dims in shape.tensors():
        kind = gguf.GGMLQuantizationType.F32 if len(dims) == 1 else FORMATS[format_name][0]
        writer.add_tensor_info(name, dims, np.dtype(np.float32), tensor_bytes(dims, format_name), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def write_model(path: Path, shape: Shape, format_name: str, tokenizer: Path, seed: int) -> None:
    """Write one file; it appears under its name only when complete."""
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    write_header(writer, shape, format_name, tokenizer)
    rng = np.random.Generator(np.random.SFC64(seed))
    stream = writer.fout[0]
    writer.write_padding(stream, stream.tell())
    for _, dims in shape.tensors():
        start = stream.tell()
        for piece in tensor_pieces(dims, format_name, rng):
            piece.tofile(stream)
        writer.write_padding(stream, stream.tell() - start)
    writer.close()
    partial.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=sorted(FORMATS), required=True)
    parser.add_argument("--like", type=Path, required=True, help="GGUF whose tokenizer is copied")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_model(options.out, Shape(), options.format, options.like, options.seed)
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
