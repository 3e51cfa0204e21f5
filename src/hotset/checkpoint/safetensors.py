"""Reads safetensors headers, one file or several with an index.

The format is small (https://github.com/huggingface/safetensors#format): 8 bytes of header length, a JSON object
``{name: {dtype, shape, data_offsets}}``, then the data without holes. Own reader, so that every defect is named and
headers of 100,000 tensors take a fraction of a second.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hotset.checkpoint.formats import BY_SAFETENSORS_DTYPE
from hotset.checkpoint.layout import by_name, check_layout
from hotset.checkpoint.mapped import MappedFile, map_file, read_small
from hotset.checkpoint.strict_json import parse_json
from hotset.checkpoint.tensor import TensorInfo, shown, shown_list
from hotset.errors import CheckpointError
from hotset.units import MIB

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"

# The same bound as in the reference implementation.
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1 << 20
MAX_DIMS = 8
MAX_SHARDS = 4096
_MAX_CONFIG_BYTES = 16 * MIB

_SHARD_NAME = re.compile(r".+-\d{5}-of-\d{5}\.safetensors", re.DOTALL)
_FIELDS = {"dtype", "shape", "data_offsets"}


def is_shard_name(path: Path) -> bool:
    """Whether a file is named as one of several: ``NAME-00001-of-0000N.safetensors``."""
    return _SHARD_NAME.fullmatch(path.name) is not None


def read_header(file: MappedFile, file_id: int) -> list[TensorInfo]:
    """Read and check the header of one safetensors file; CheckpointError that names the file and what is wrong."""
    what = str(file.path)
    length = int.from_bytes(file.data[:8], "little")
    most = min(MAX_HEADER_BYTES, file.size - 8)
    if length > most:
        raise CheckpointError(
            f"{what}: header of {length} bytes, expected at most {max(most, 0)}: not a safetensors file, or truncated",
            "download it again",
        )
    raw = file.data[8 : 8 + length]
    if raw[:1] != b"{":
        raise CheckpointError(f"{what}: the header starts with {raw[:1]!r}, expected b'{{': not a safetensors file")
    # Every tensor is one JSON object: counted before the parser builds them.
    if raw.count(b"{") > MAX_TENSORS + 2:
        raise CheckpointError(f"{what}: more than {MAX_TENSORS} tensors in the header")
    header = parse_json(raw, f"{what}: header")
    _check_extra(header.pop("__metadata__", {}), what)
    data_start = 8 + length
    infos = [_tensor_info(name, entry, what, file_id, data_start, file.size) for name, entry in header.items()]
    if not infos and file.size > data_start:
        raise CheckpointError(f"{what}: {file.size - data_start} bytes of data and no tensor")
    check_layout(infos, what, data_start=data_start, data_end=file.size, has_holes=False)
    return infos


def _check_extra(extra: Any, what: str) -> None:
    if not isinstance(extra, dict) or not all(isinstance(value, str) for value in extra.values()):
        raise CheckpointError(f"{what}: __metadata__ must be an object of strings")


def _tensor_info(name: str, entry: Any, what: str, file_id: int, data_start: int, file_size: int) -> TensorInfo:
    if type(entry) is not dict or entry.keys() != _FIELDS:
        raise CheckpointError(f"{what}: tensor {shown(name)} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    format = BY_SAFETENSORS_DTYPE.get(dtype) if type(dtype) is str else None
    if format is None:
        raise CheckpointError(f"{what}: tensor {shown(name)} has the unknown dtype {str(dtype)[:40]!r}")
    num_weights = 1
    if type(shape) is not list or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{what}: tensor {shown(name)} needs a shape of at most {MAX_DIMS} dimensions")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim < 1 << 48:
            raise CheckpointError(f"{what}: tensor {shown(name)} has the dimension {str(dim)[:40]}")
        num_weights *= dim
    if type(offsets) is not list or len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        raise CheckpointError(f"{what}: data_offsets of tensor {shown(name)} must be two integers")
    start, end = offsets
    if not 0 <= start <= end <= file_size - data_start:
        raise CheckpointError(
            f"{what}: tensor {shown(name)} covers data bytes {str(start)[:24]} to {str(end)[:24]},"
            f" expected within 0 to {file_size - data_start}",
            "the file is truncated or damaged: download it again",
        )
    if num_weights % format.block_weights:
        raise CheckpointError(f"{what}: tensor {shown(name)} of shape {shape} does not fill whole bytes in {dtype}")
    num_bytes = num_weights // format.block_weights * format.block_bytes
    if num_bytes != end - start:
        raise CheckpointError(
            f"{what}: tensor {shown(name)} of shape {shape} and dtype {dtype}"
            f" takes {num_bytes} bytes, data_offsets give {end - start}"
        )
    return TensorInfo(name, tuple(shape), format, file_id, data_start + start, end - start)


def read_safetensors(
    folder: Path, names: list[str], index: Path | None
) -> tuple[list[MappedFile], dict[str, Any], dict[str, TensorInfo]]:
    """Read config.json and the headers of the named files of a folder, and hold them against the index if there is one.

    Returns the mapped files, the parsed config.json, and the tensors of all files.
    """
    config = read_config(folder / CONFIG_NAME)
    weight_map = read_index(index) if index else None
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"{index}: lists files that are not there: {shown_list(missing)}", "the download is not complete"
            )
    files = [map_file(folder / name) for name in names]
    infos = [info for file_id, file in enumerate(files) for info in read_header(file, file_id)]
    tensors = by_name(infos, str(folder))
    if not tensors:
        raise CheckpointError(f"{folder} holds no tensors")
    if weight_map is not None:
        _check_index(weight_map, tensors, names, str(index))
    return files, config, tensors


def read_config(path: Path) -> dict[str, Any]:
    """Return the parsed config.json; what it must hold is for the model family to say."""
    if not path.exists() and not path.is_symlink():
        raise CheckpointError(
            f"no {path.name} in {path.parent}", "a safetensors model needs the config.json that it was published with"
        )
    config = parse_json(read_small(path, _MAX_CONFIG_BYTES), str(path))
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return config


def read_index(path: Path) -> dict[str, str]:
    """Return the weight map, tensor name to file name, of an index."""
    index = parse_json(read_small(path, MAX_HEADER_BYTES), str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a JSON object with a weight_map that names tensors")
    file_names = set()
    for name, file_name in weight_map.items():
        if type(file_name) is not str:
            raise CheckpointError(f"{path}: the file of tensor {shown(name)} is not a string")
        file_names.add(file_name)
    for file_name in sorted(file_names):
        if not is_plain_name(file_name) or not file_name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {shown(file_name)} is not the name of a safetensors file in this folder")
    if len(file_names) > MAX_SHARDS:
        raise CheckpointError(f"{path}: {len(file_names)} files, expected at most {MAX_SHARDS}")
    return weight_map


def is_plain_name(name: str) -> bool:
    """Whether ``name`` can only mean a file in the folder itself: no path, no parent, nothing unprintable."""
    return name.isprintable() and name not in ("", ".", "..") and not any(sign in name for sign in "/\\\0")


def _check_index(weight_map: dict[str, str], tensors: dict[str, TensorInfo], names: list[str], what: str) -> None:
    lost = [name for name, file in weight_map.items() if name not in tensors or names[tensors[name].file_id] != file]
    if lost:
        name = lost[0]
        raise CheckpointError(
            f"{what}: {len(lost)} tensors are not in the file that the index names,"
            f" first {shown(name)} in {weight_map[name]}"
        )
    if len(tensors) != len(weight_map):
        extra = [name for name in tensors if name not in weight_map]
        raise CheckpointError(f"{what}: tensors in the files but not in the index: {shown_list(extra)}")
