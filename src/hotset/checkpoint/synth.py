"""Writes random checkpoints in a model's own layout: its declared tensors, its names and formats, its config.json.

Values are drawn as bytes of their final format, so that files of many gigabytes are written at the speed of the disk.
Every tensor has a generator of its own, seeded by the seed and its name: a tensor has the same bytes whatever the
number of layers around it. Magnitudes keep activations near one through any depth.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, BinaryIO

import numpy as np

from hotset.checkpoint.formats import E4M3, FORMATS, Bytes, Format
from hotset.checkpoint.manifest import TensorDecl
from hotset.checkpoint.progress import Progress
from hotset.checkpoint.safetensors import CONFIG_NAME, INDEX_NAME
from hotset.checkpoint.scaled import PACK_WORD
from hotset.checkpoint.store import RECORD_NAME, Record, StoredFile, put_in_place, read_record, write_record
from hotset.errors import InternalError, MachineError, RequestError
from hotset.units import GIB, MIB, align_up, format_bytes

LARGEST_FILE_BYTES = 4 * GIB
"""A checkpoint above this is written as one file per layer."""
SOURCE = "hotset synth"
_CHUNK_BYTES = 4 * MIB
_QUANTILES = 4096
_SPARE_DISK_BYTES = 64 * MIB
# Root mean square of the sixteen e2m1 values, all equally likely.
_E2M1_SIZE = 2.9
# The same of the numbers -8 .. 7.
_INT4_SIZE = 4.6

# What a tensor is drawn from, by the end of its name: a standard deviation, or a value for all of it. Anything else of
# two dimensions is normal with the deviation in^-1/2, which keeps the size of what it multiplies.
_DEVIATIONS = {
    "embed.weight": 1.0,
    "hc_attn_fn": 0.01,
    "hc_ffn_fn": 0.01,
    "hc_head_fn": 0.01,
    "hc_attn_base": 0.1,
    "hc_ffn_base": 0.1,
    ".ape": 0.02,
    "gate.bias": 0.05,
    "embed_tokens.weight": 1.0,
    "e_score_correction_bias": 0.05,
}
_CONSTANTS = {
    "norm.weight": 1.0,
    "norm.bias": 0.0,
    "attn_sink": 0.0,
    "hc_head_base": 0.0,
    "hc_head_scale": 1.0,
    "hc_attn_scale": 0.5,
    "hc_ffn_scale": 0.5,
}


@dataclass(frozen=True)
class _Tensor:
    """One tensor to write. ``law`` is (kind, numbers), see :func:`_draw`."""

    name: str
    format: Format
    shape: tuple[int, ...]
    law: tuple[str, float, float]

    @property
    def num_bytes(self) -> int:
        return self.format.nbytes(self.shape)


def write_checkpoint(
    folder: Path,
    name: str,
    config: Mapping[str, Any],
    declarations: Sequence[TensorDecl],
    seed: int,
    progress: Progress,
    *,
    headers_only: bool = False,
    files: Mapping[str, str] | None = None,
    force: bool = False,
) -> Record:
    """Write a random checkpoint into ``folder``, which appears only when it is complete.

    Args:
        declarations: the tensors; of each, the first format that its declaration accepts is written.
        headers_only: data are holes in sparse files that read as zeros.
        files: more text files by name, such as tokenizer.json.
        force: replace a folder that an earlier call wrote.

    Raises:
        RequestError: the folder is there already.
        MachineError: the disk is too small, or writing failed.
    """
    _check_target(folder, force)
    shards = list(_shards(_tensors(declarations, config)))
    headers = [_header(shard) for shard in shards]
    sizes = [len(head) + sum(t.num_bytes for t in shard) for head, shard in zip(headers, shards, strict=True)]
    total = sum(sizes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(folder.parent, sum(map(len, headers)) if headers_only else total)
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        staging.mkdir()
        names = _file_names(len(shards))
        if len(shards) > 1:
            _write_json(staging / INDEX_NAME, _index(names, shards))
        _write_json(staging / CONFIG_NAME, config)
        for file_name, text in (files or {}).items():
            (staging / file_name).write_text(text, encoding="utf-8")
        progress.start(total, 0)
        for file_name, head, size, shard in zip(names, headers, sizes, shards, strict=True):
            with (staging / file_name).open("wb") as file:
                file.write(head)
                progress.advance(len(head))
                if headers_only:
                    file.truncate(size)
                    progress.advance(size - len(head))
                else:
                    _write_tensors(file, shard, seed, progress)
        record = _record(staging, name, seed, headers_only)
        write_record(staging, record)
        put_in_place(staging, folder)
    except OSError as error:
        raise MachineError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return record


def _check_target(folder: Path, force: bool) -> None:
    if not folder.exists():
        return
    record = read_record(folder) if folder.is_dir() else None
    is_ours = record is not None and record.source.startswith(SOURCE)
    if not is_ours:
        raise RequestError(f"{folder} is there and was not written by hotset synth", "give another folder with --out")
    if not force:
        raise RequestError(f"{folder} is there already", "--force writes it again")


def _check_disk(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed_bytes + _SPARE_DISK_BYTES > free:
        raise MachineError(
            f"{format_bytes(needed_bytes)} to write, {format_bytes(free)} free in {folder}",
            "fewer --layers, or --headers-only, or --out on a larger disk",
        )


def _record(folder: Path, name: str, seed: int, headers_only: bool) -> Record:
    paths = sorted(path for path in folder.iterdir() if path.name != RECORD_NAME)
    stored = tuple(StoredFile(path.name, path.stat().st_size) for path in paths)
    commit = f"{'headers only' if headers_only else 'random'}, seed {seed}"
    return Record(name, f"{SOURCE} {name}", "random", commit, "safetensors", (".",), stored)


# What is drawn


def _tensors(declarations: Sequence[TensorDecl], config: Mapping[str, Any]) -> list[_Tensor]:
    weights: dict[str, TensorDecl] = {}
    for decl in (decl for decl in declarations if decl.scale):
        weights |= dict.fromkeys((decl.scale, f"{decl.key}.zero", f"{decl.key}.shape"), decl)
    kept = [decl for decl in declarations if decl.need in ("must", "spare")]
    return [_Tensor(d.name, FORMATS[d.formats[0]], d.shape, _law(d, weights.get(d.key), config)) for d in kept]


def _law(decl: TensorDecl, weight: TensorDecl | None, config: Mapping[str, Any]) -> tuple[str, float, float]:
    if decl.stored_as in ("MXFP4", "INT4", "INT4_SYM"):
        return "bytes", 0, 256
    if decl.role == "zero":
        return "bytes", 0x88, 0x89  # twice the 8 that stands for 0
    if weight is not None and decl.role == "shape":
        return "shape", weight.shape[0], weight.shape[1] * PACK_WORD
    if weight is not None and decl.formats[0] != "F8_E8M0":
        is_fp8 = weight.stored_as == "FP8_F32"
        width = weight.shape[1] * (1 if is_fp8 else PACK_WORD)
        return "constant", width**-0.5 / (1 if is_fp8 else _INT4_SIZE), 0
    if weight is not None:
        # Powers of two around the deviation that the matrix as a whole should have.
        is_fp8 = weight.stored_as == "FP8"
        width = weight.shape[1] * (1 if is_fp8 else 2)
        code = 127 + round(math.log2(width**-0.5 / (1 if is_fp8 else _E2M1_SIZE)))
        return ("bytes", code, code + 1) if is_fp8 else ("bytes", code - 1, code + 1)
    if decl.stored_as in ("FP8", "FP8_F32"):
        return "normal", 1.0, 0
    if decl.name.endswith("tid2eid"):
        return "ids", config["n_routed_experts"], 0
    for end, value in _CONSTANTS.items():
        if decl.name.endswith(end):
            return "constant", value, 0
    for end, deviation in _DEVIATIONS.items():
        if decl.name.endswith(end):
            return "normal", deviation, 0
    if len(decl.shape) != 2:
        raise InternalError(f"no rule for random values of {decl.name}")
    return "normal", decl.shape[1] ** -0.5, 0


@cache
def _normal_values(format: str, deviation: float) -> np.ndarray:
    """Equally likely values of a normal distribution, the outermost near 3.7 deviations, in a format's own integers."""
    unit = NormalDist()
    values = np.array([unit.inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)], np.float32)
    values *= np.float32(deviation)
    match format:
        case "F32":
            return values
        case "BF16":
            bits = values.view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        case "F8_E4M3":
            nearest = np.abs(E4M3[None, :127] - np.abs(values)[:, None]).argmin(1).astype(np.uint8)
            return nearest | np.where(values < 0, np.uint8(128), np.uint8(0))
    raise InternalError(f"no random normal numbers in {format}")


def _draw(tensor: _Tensor, rng: np.random.Generator, count: int) -> Bytes:
    """Draw ``count`` numbers of a tensor, and return them as bytes of its format.

    Laws: ("normal", deviation), ("constant", value), ("bytes", low, high) for whole bytes in low .. high - 1,
    ("shape", rows, columns) for these two numbers, and ("ids", n) for rows of different numbers below n.
    """
    kind, low, high = tensor.law
    if kind == "shape":
        return np.array((low, high), "<i8").view(np.uint8)
    if kind == "bytes":
        count *= tensor.format.block_bytes
        if high - low == 256:
            return rng.integers(0, 1 << 64, -(-count // 8), np.uint64).view(np.uint8)[:count]
        return rng.integers(int(low), int(high), count, np.uint8)
    if kind == "normal":
        # Twelve of every sixteen random bits choose a value.
        words = rng.integers(0, 1 << 64, -(-count // 4), np.uint64).view("<u2")[:count]
        return _normal_values(tensor.format.name, low)[words >> 4].view(np.uint8)
    if kind == "constant":
        values = np.full(count, low, np.float32)
        return (values if tensor.format.name == "F32" else (values.view(np.uint32) >> 16).astype("<u2")).view(np.uint8)
    # The smallest of one random key per expert; the expert in its last bits makes every key different.
    width, experts = tensor.shape[1], int(low)
    keys = rng.integers(0, 1 << 48, (count // width, experts), np.uint64) << np.uint64(16) | np.arange(
        experts, dtype=np.uint64
    )
    chosen = np.sort(np.partition(keys, width - 1, axis=1)[:, :width], axis=1)
    return (chosen & np.uint64(0xFFFF)).astype("<i8").reshape(-1).view(np.uint8)


def _write_tensors(file: BinaryIO, shard: Sequence[_Tensor], seed: int, progress: Progress) -> None:
    for tensor in shard:
        rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(tensor.name.encode())]))
        # Whole rows, so that a row of ids is drawn at once; ids take a random number for every expert.
        width = tensor.shape[-1]
        count = math.prod(tensor.shape)
        row_bytes = 16 * int(tensor.law[1]) if tensor.law[0] == "ids" else width * tensor.format.block_bytes
        step = max(1, _CHUNK_BYTES // row_bytes) * width
        for first in range(0, count, step):
            data = _draw(tensor, rng, min(step, count - first))
            file.write(data.data)
            progress.advance(data.nbytes)


# How it is laid out in files


def _shards(tensors: Sequence[_Tensor]) -> Iterator[list[_Tensor]]:
    """One file, or, when large, one for the embedding, every layer, the head, and every stage of a draft head."""
    if sum(tensor.num_bytes for tensor in tensors) <= LARGEST_FILE_BYTES:
        parts = {"": list(tensors)}
    else:
        parts = {}
        for tensor in tensors:
            first, second, *_ = (*tensor.name.removeprefix("model.").split("."), "")
            is_layer = first in ("layers", "mtp")
            part = f"{first}.{second}" if is_layer else "embed" if first.startswith("embed") else "head"
            parts.setdefault(part, []).append(tensor)
    for shard in parts.values():
        # Wide numbers first: every number then starts at a multiple of its size.
        yield sorted(shard, key=lambda tensor: -tensor.format.block_bytes)


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _header(shard: Sequence[_Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in shard:
        end = at + tensor.num_bytes
        dtype = tensor.format.safetensors_dtype
        entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (align_up(len(text), 8) - len(text))
    return struct.pack("<Q", len(text)) + text


def _index(names: Sequence[str], shards: Sequence[Sequence[_Tensor]]) -> dict[str, Any]:
    size = sum(tensor.num_bytes for shard in shards for tensor in shard)
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    return {"metadata": {"total_size": size}, "weight_map": weight_map}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
