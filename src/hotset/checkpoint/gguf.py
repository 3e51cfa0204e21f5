"""Reads GGUF headers, versions 2 and 3, little-endian, in one file or split over several.

A header is read as if it came from an enemy: every count and length is held against the bytes that are left
before anything of that size is made. Source of the layout: ggml's ``docs/gguf.md``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from hotset.checkpoint.formats import BY_GGML_TYPE, REMOVED_GGML_TYPES
from hotset.checkpoint.layout import by_name, check_layout
from hotset.checkpoint.mapped import MappedFile, map_file
from hotset.checkpoint.tensor import TensorInfo, shown, shown_list
from hotset.errors import CheckpointError
from hotset.units import MIB, align_up

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# No real header comes near these; they bound the time and the memory that a damaged one can take.
MAX_HEADER_BYTES = 256 * MIB
MAX_STRING_BYTES = 16 * MIB
MAX_NAME_BYTES = 1024
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ARRAY_DEPTH = 4
MAX_INNER_ARRAYS = 1 << 16

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_HEAD = struct.Struct("<4sIQQ")
_ARRAY_HEAD = struct.Struct("<IQ")
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Scalar value types by id: how to unpack one, and the NumPy type of an array of them.
_SCALARS: dict[int, tuple[struct.Struct, np.dtype[Any]]] = {
    type_id: (struct.Struct("<" + code), np.dtype("<" + dtype))
    for type_id, code, dtype in (
        (0, "B", "u1"),
        (1, "b", "i1"),
        (2, "H", "u2"),
        (3, "h", "i2"),
        (4, "I", "u4"),
        (5, "i", "i4"),
        (6, "f", "f4"),
        (_BOOL, "B", "u1"),
        (10, "Q", "u8"),
        (11, "q", "i8"),
        (12, "d", "f8"),
    )
}
# One tensor after its name and n_dims: dims, type id, offset; by number of dims.
_TENSOR_TAILS = {num_dims: struct.Struct(f"<{num_dims}QIQ") for num_dims in (1, 2, 3, 4)}


class StringArray(Sequence[str]):
    """An array of strings from a GGUF header, decoded when it is first looked into.

    A vocabulary has hundreds of thousands of entries that planning and checking never read.
    CheckpointError at the first use when an entry is not UTF-8.
    """

    def __init__(self, raw: bytes, count: int, what: str) -> None:
        self._raw = raw
        self._count = count
        self._what = what
        self._items: list[str] | None = None

    def _decoded(self) -> list[str]:
        if self._items is None:
            raw, items, position = self._raw, [], 0
            try:
                for _ in range(self._count):
                    start = position + 8
                    position = start + _U64.unpack_from(raw, position)[0]
                    items.append(raw[start:position].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self._what}: entry {len(items)} is not UTF-8 text") from error
            self._items = items
            self._raw = b""
        return self._items

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded()[index]

    def __repr__(self) -> str:
        return f"StringArray({self._count} strings)"


@dataclass(frozen=True)
class GgufHeader:
    """What one GGUF file says about itself."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]


class _MetadataReader:
    """Walks the keys and values of one header."""

    def __init__(self, file: MappedFile, position: int) -> None:
        self.data = file.data
        self.position = position
        self.end = min(file.size, MAX_HEADER_BYTES)
        self.key = ""
        self.num_inner_arrays = 0

    def error(self, message: str) -> CheckpointError:
        where = f"key {shown(self.key)}: " if self.key else ""
        return CheckpointError(f"{where}{message}", "the file is damaged: download it again")

    def take(self, num_bytes: int, max_bytes: int, what: str) -> bytes:
        left = self.end - self.position
        if num_bytes > min(left, max_bytes):
            raise self.error(f"{what} of {num_bytes} bytes, expected at most {min(left, max_bytes)}")
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def unpack(self, layout: struct.Struct) -> Any:
        values = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return values if len(values) > 1 else values[0]

    def string(self, max_bytes: int, what: str) -> str:
        raw = self.take(self.unpack(_U64), max_bytes, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 text at byte {error.start}") from error

    def read(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            self.key = ""
            self.key = self.string(MAX_NAME_BYTES, f"name of key {len(metadata)}")
            if self.key in metadata:
                raise self.error("appears twice")
            metadata[self.key] = self.value(self.unpack(_U32), depth=0)
            if self.position > self.end:
                raise self.error(f"the header goes on after byte {self.end}")
        self.key = ""
        return metadata

    def value(self, type_id: int, depth: int) -> Any:
        if type_id == _STRING:
            return self.string(MAX_STRING_BYTES, "string")
        if type_id == _ARRAY:
            return self.array(depth)
        if type_id not in _SCALARS:
            raise self.error(f"value type {type_id}, expected 0 to 12")
        value = self.unpack(_SCALARS[type_id][0])
        if type_id == _BOOL:
            if value > 1:
                raise self.error(f"bool with the value {value}, expected 0 or 1")
            return bool(value)
        return value

    def array(self, depth: int) -> Any:
        """Numbers become a read-only NumPy array, strings a StringArray, arrays a tuple."""
        type_id, count = self.unpack(_ARRAY_HEAD)
        smallest = 8 if type_id == _STRING else _ARRAY_HEAD.size if type_id == _ARRAY else 1
        if count * smallest > self.end - self.position:
            raise self.error(f"array of {count} values, expected at most {(self.end - self.position) // smallest}")
        if type_id == _STRING:
            return self.strings(count)
        if type_id == _ARRAY:
            if depth + 1 >= MAX_ARRAY_DEPTH:
                raise self.error(f"arrays nested more than {MAX_ARRAY_DEPTH} deep")
            self.num_inner_arrays += count
            if self.num_inner_arrays > MAX_INNER_ARRAYS:
                raise self.error(f"more than {MAX_INNER_ARRAYS} arrays within arrays")
            return tuple(self.array(depth + 1) for _ in range(count))
        if type_id not in _SCALARS:
            raise self.error(f"array of value type {type_id}, expected 0 to 12")
        dtype = _SCALARS[type_id][1]
        values = np.frombuffer(self.take(count * dtype.itemsize, self.end, "array"), dtype)
        if type_id == _BOOL:
            if values.size and values.max() > 1:
                raise self.error("array of bools with a value above 1")
            return values.view(np.bool_)
        return values

    def strings(self, count: int) -> StringArray:
        data, position, unpack = self.data, self.position, _U64.unpack_from
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        return StringArray(self.take(position - self.position, self.end, "array"), count, f"key {shown(self.key)}")


def read_header(file: MappedFile, file_id: int) -> GgufHeader:
    """Read and check the header of one GGUF file; CheckpointError that names the file and what is wrong."""
    what = str(file.path)
    try:
        num_tensors, num_keys = _read_head(file)
        reader = _MetadataReader(file, _HEAD.size)
        metadata = reader.read(num_keys)
        alignment = _alignment(metadata)
        tensors = _read_tensors(reader, file, num_tensors, alignment, file_id)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error.message}", error.hint) from error
    except (struct.error, OverflowError) as error:
        # unpack_from went past the end: of the file, or, for a length near 2**64, of the address space.
        raise CheckpointError(
            f"{what}: the file ends inside its header ({file.size} bytes)", "it is truncated: download it again"
        ) from error
    by_name(tensors, what)
    data_start = align_up(reader.position, alignment)
    check_layout(tensors, what, data_start=data_start, data_end=file.size, has_holes=True)
    return GgufHeader(metadata, tensors)


def _read_head(file: MappedFile) -> tuple[int, int]:
    magic, version, num_tensors, num_keys = _HEAD.unpack_from(file.data, 0)
    if magic != MAGIC:
        raise CheckpointError(f"starts with {magic!r}, expected {MAGIC!r}: not a GGUF file")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise CheckpointError("is a big-endian GGUF file; hotset reads little-endian ones")
        raise CheckpointError(
            f"is GGUF version {version}; hotset reads versions 2 and 3", "convert it again with a current llama.cpp"
        )
    # A tensor takes at least 32 bytes of header (name length, n_dims, one dim, type, offset), a key at least 13.
    for count, limit, size, noun in ((num_tensors, MAX_TENSORS, 32, "tensors"), (num_keys, MAX_KEYS, 13, "keys")):
        most = min(limit, file.size // size)
        if count > most:
            raise CheckpointError(f"says it has {count} {noun}, expected at most {most} in {file.size} bytes")
    return num_tensors, num_keys


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"general.alignment is {alignment!r}, expected a power of two")
    return alignment


def _read_tensors(
    reader: _MetadataReader, file: MappedFile, num_tensors: int, alignment: int, file_id: int
) -> list[TensorInfo]:
    """Read the tensor table. One pass, kept tight: a large model has more than 100,000 entries."""
    data, position, size = file.data, reader.position, file.size
    unpack_u64, unpack_u32 = _U64.unpack_from, _U32.unpack_from
    entries: list[tuple[str, tuple[int, ...], int, int, int]] = []
    for _ in range(num_tensors):
        length = unpack_u64(data, position)[0]
        if length > MAX_NAME_BYTES:
            raise CheckpointError(
                f"name of tensor {len(entries)} has {length} bytes, expected at most {MAX_NAME_BYTES}"
            )
        start = position + 8
        position = start + length
        name = _tensor_name(data[start:position], len(entries))
        num_dims = unpack_u32(data, position)[0]
        if num_dims not in _TENSOR_TAILS:
            raise CheckpointError(f"tensor {shown(name)} has {num_dims} dimensions, expected 1 to 4")
        tail = _TENSOR_TAILS[num_dims]
        fields = tail.unpack_from(data, position + 4)
        position += 4 + tail.size
        dims, type_id, offset = fields[:num_dims], fields[num_dims], fields[num_dims + 1]
        if offset % alignment or offset > size:
            raise _bad_offset(name, offset, alignment, size)
        entries.append((name, dims[::-1], type_id, offset, _tensor_bytes(name, dims, type_id, size)))
    reader.position = position
    if position > reader.end:
        raise CheckpointError(f"the header goes on after byte {reader.end}", "the file is damaged: download it again")
    data_start = align_up(position, alignment)
    formats = BY_GGML_TYPE
    return [
        TensorInfo(name, shape, formats[type_id], file_id, data_start + offset, nbytes)
        for name, shape, type_id, offset, nbytes in entries
    ]


def _tensor_name(raw: bytes, index: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"name of tensor {index} is not UTF-8 text") from error


def _bad_offset(name: str, offset: int, alignment: int, size: int) -> CheckpointError:
    if offset > size:
        return CheckpointError(f"tensor {shown(name)} starts at data byte {offset}, the file has {size} bytes")
    return CheckpointError(f"tensor {shown(name)} starts at data byte {offset}, expected a multiple of {alignment}")


def _tensor_bytes(name: str, dims: tuple[int, ...], type_id: int, size: int) -> int:
    """Return the bytes of a tensor; ``dims`` as in the file, fastest first. CheckpointError when it cannot be."""
    format = BY_GGML_TYPE.get(type_id)
    if format is None:
        old = REMOVED_GGML_TYPES.get(type_id)
        known = f"{old}, which ggml has removed" if old else f"type {type_id}, which this hotset does not know"
        raise CheckpointError(f"tensor {shown(name)} is {known}")
    num_weights = 1
    for dim in dims:
        num_weights *= dim
    if num_weights == 0:
        raise CheckpointError(f"tensor {shown(name)} has a dimension of 0: {list(dims)}")
    if dims[0] % format.block_weights:
        raise CheckpointError(
            f"tensor {shown(name)} has rows of {dims[0]} weights,"
            f" expected a multiple of {format.block_weights} for {format.name}"
        )
    nbytes = num_weights // format.block_weights * format.block_bytes
    if nbytes > size:
        raise CheckpointError(
            f"tensor {shown(name)} of dimensions {list(dims)} takes {nbytes} bytes, the file has {size}",
            "the file is truncated or damaged: download it again",
        )
    return nbytes


def split_name(name: str) -> tuple[str, int, int] | None:
    """Return (stem, number from 1, count) when a file name is ``STEM-00001-of-0000N.gguf``, else None."""
    match = _SPLIT_NAME.fullmatch(name)
    return (match["stem"], int(match["no"]), int(match["count"])) if match else None


def shard_paths(path: Path) -> list[Path]:
    """Return the paths of all files of a split model, in order; ``[path]`` when the name is not that of a shard."""
    split = split_name(path.name)
    if split is None:
        return [path]
    stem, number, count = split
    if not 1 <= number <= count:
        raise CheckpointError(f"{path} is named as file {number} of {count}")
    return [path.with_name(f"{stem}-{no:05d}-of-{count:05d}.gguf") for no in range(1, count + 1)]


def read_gguf(path: Path) -> tuple[list[MappedFile], dict[str, Any], dict[str, TensorInfo]]:
    """Read the headers of a GGUF model, given any one of its files.

    Returns the mapped files, the metadata of the first, and the tensors of all. CheckpointError when a file is
    missing or damaged, or when the files do not belong together.
    """
    paths = shard_paths(path)
    missing = [shard.name for shard in paths if not shard.exists()]
    if missing and len(paths) > 1:
        raise CheckpointError(
            f"{path.name} is one of {len(paths)} files; not found beside it: {shown_list(missing)}",
            "all files of a split model must be in one folder, under their own names",
        )
    files = [map_file(shard) for shard in paths]
    headers = [read_header(file, file_id) for file_id, file in enumerate(files)]
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        _check_split_keys(file.path, header.metadata, number, len(files))
    tensors = [info for header in headers for info in header.tensors]
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors")
    if len(files) > 1:
        expected = headers[0].metadata.get("split.tensors.count")
        if expected is not None and expected != len(tensors):
            raise CheckpointError(
                f"{path.name}: the {len(files)} files hold {len(tensors)} tensors, split.tensors.count says {expected}"
            )
    return files, headers[0].metadata, by_name(tensors, str(path))


def _check_split_keys(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    says_count = metadata.get("split.count", 1)
    if says_count == 0:  # written by some tools into files that were never split
        says_count = 1
    if says_count != count:
        raise CheckpointError(
            f"{path}: split.count says {says_count} files, the name says {count}",
            "a split model keeps its names: MODEL-00001-of-0000N.gguf",
        )
    says_number = metadata.get("split.no", 0)
    if count > 1 and says_number != number:
        raise CheckpointError(f"{path}: split.no says file {says_number} (from 0), the name says {number}")
