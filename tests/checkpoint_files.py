"""Writes small GGUF and safetensors files byte by byte, so that tests can also write wrong ones."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
GGML_F32, GGML_Q4_0, GGML_Q8_0, GGML_Q5_K = 0, 2, 8, 13


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, type_id: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_id) + value


def array(type_id: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", type_id, count) + values


@dataclass
class Tensor:
    """A tensor table entry; ``dims`` in file order, fastest first."""

    name: str | bytes
    dims: tuple[int, ...]
    type_id: int
    offset: int
    num_dims: int | None = None

    def entry(self) -> bytes:
        count = len(self.dims) if self.num_dims is None else self.num_dims
        dims = struct.pack(f"<{len(self.dims)}Q", *self.dims)
        return string(self.name) + struct.pack("<I", count) + dims + struct.pack("<IQ", self.type_id, self.offset)


ARCHITECTURE = key("general.architecture", STRING, string("llama"))
TOKENS = key("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, string("a") + string("bc") + string("")))
SCORES = key("tokenizer.ggml.scores", ARRAY, array(F32, 3, struct.pack("<3f", 0, 1, 2)))
KEYS = (ARCHITECTURE, TOKENS, SCORES)
TENSORS = (
    Tensor("norm", (8,), GGML_F32, 0),
    Tensor("wq", (32, 4), GGML_Q8_0, 32),
    Tensor("wk", (32, 2), GGML_Q4_0, 192),
)
# 192 + 2 blocks of 18 bytes.
DATA_BYTES = 228


def gguf_bytes(
    keys: tuple[bytes, ...] = KEYS,
    tensors: tuple[Tensor, ...] = TENSORS,
    *,
    data: bytes | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Return a GGUF file; by default a valid one of three tensors."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = struct.pack("<4sIQQ", magic, version, *counts) + b"".join(keys) + b"".join(t.entry() for t in tensors)
    header += b"\0" * (-len(header) % alignment)
    return header + (bytes(i % 251 for i in range(DATA_BYTES)) if data is None else data)


def safetensors_bytes(header: Any = None, data: bytes = b"", *, length: int | None = None, raw: bytes = b"") -> bytes:
    """Return a safetensors file; ``raw`` is a header that is not JSON, ``length`` a wrong length of it."""
    text = raw or json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# Two tensors that fill 24 bytes.
HEADER = {"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 2], 0, 16), "b": entry("BF16", [4], 16, 24)}
VALUES = struct.pack("<4f4H", 1, 2, 3, 4, 0x3F80, 0x4000, 0xC000, 0)


def safetensors_folder(folder: Path, content: bytes | None = None, config: str = '{"model_type": "llama"}') -> Path:
    """Write a folder with one safetensors file and config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(HEADER, VALUES) if content is None else content)
    (folder / "config.json").write_text(config)
    return folder
