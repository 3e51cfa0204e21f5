"""Opens a model's files and serves their tensors without copying them."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self

import numpy as np

from hotset.checkpoint import gguf, safetensors
from hotset.checkpoint.formats import Bytes, Floats, dequantize, refusal
from hotset.checkpoint.mapped import MappedFile, cannot_read, map_file
from hotset.checkpoint.tensor import TensorInfo, shown, shown_list
from hotset.errors import CheckpointError, InternalError

Kind = Literal["gguf", "safetensors"]

# Formats that are Python pickles: reading one can run any code, so hotset never does.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """The files of one model, mapped read-only, with their tensors by name.

    Opening reads headers only. Closing, or leaving the ``with`` block, ends the access through this object; pages
    stay mapped as long as an array from :meth:`raw` is alive. Files must not be shortened while they are open.

    ``metadata`` holds all keys of a GGUF file (arrays of numbers as NumPy arrays, arrays of strings as sequences that
    are decoded on first use), or the parsed config.json of a safetensors model. ``notes`` are remarks for the user.
    """

    def __init__(
        self,
        kind: Kind,
        path: Path,
        files: list[MappedFile],
        metadata: dict[str, Any],
        tensors: dict[str, TensorInfo],
        notes: tuple[str, ...] = (),
    ) -> None:
        self.kind = kind
        self.path = path
        self.files: tuple[Path, ...] = tuple(file.path for file in files)
        self.total_bytes = sum(file.size for file in files)
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.notes = notes
        self._maps: tuple[mmap.mmap, ...] = tuple(file.data for file in files)

    def raw(self, name: str) -> Bytes:
        """Return the bytes of a tensor: uint8 [nbytes], read-only, a view of the file."""
        return self.view(self._info(name))

    def array(self, name: str) -> Floats:
        """Return a tensor as a new float32 array of its shape; CheckpointError when its format is not runnable."""
        return self.values(self._info(name))

    def view(self, info: TensorInfo) -> Bytes:
        """Return the bytes that ``info``, a tensor or a part of one, names: as :meth:`raw`."""
        if not self._maps:
            raise InternalError(f"{self.path} was closed before tensor {shown(info.name)} was read")
        return np.frombuffer(self._maps[info.file_id], np.uint8, info.nbytes, info.offset)

    def values(self, info: TensorInfo) -> Floats:
        """Return what ``info``, a tensor or a part of one, names as float32: as :meth:`array`."""
        if not info.format.is_runnable:
            raise CheckpointError(refusal(shown(info.name), info.format))
        return dequantize(info.format, self.view(info), info.shape)

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} holds no tensor {shown(name)}")
        return info

    def close(self) -> None:
        """Give the files back. Arrays from :meth:`raw` stay valid; a file is unmapped with the last of them."""
        self._maps = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model: a GGUF file (any one of a split model), a safetensors file or its index, or a folder.

    Reads and checks headers, never weights. CheckpointError names the file and what is wrong with it. Pickles
    (pytorch_model.bin) are refused unread.
    """
    with collector_paused():
        return _open(Path(path))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector out while a header is read, or its tensors are declared.

    A header of 100,000 tensors makes a million objects and no cycles; looking for cycles among them again and again
    takes longer than the reading itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        return _open_safetensors(path, path.parent, [], path)
    if path.suffix.lower() in _PICKLES:
        raise _pickle_error(path, [path.name])
    # The content decides, not the name: blobs of a hub cache have no suffix.
    file = map_file(path)
    if file.data[:4] == gguf.MAGIC or path.suffix.lower() == ".gguf":
        return Checkpoint("gguf", path, *gguf.read_gguf(path))
    if path.suffix.lower() == ".safetensors":
        index = path.with_name(safetensors.INDEX_NAME)
        if safetensors.is_shard_name(path):
            if not index.exists():
                raise CheckpointError(
                    f"{path} is one of several files, and there is no {index.name} beside it",
                    "download the whole model into one folder and give the folder",
                )
            return _open_safetensors(path, path.parent, [], index)
        return _open_safetensors(path, path.parent, [path.name], None)
    raise CheckpointError(f"{path} is neither a GGUF nor a safetensors file", "give the model's file or folder")


def _open_safetensors(path: Path, folder: Path, names: list[str], index: Path | None) -> Checkpoint:
    files, config, tensors = safetensors.read_safetensors(folder, names, index)
    unread = sorted({entry.name for entry in folder.glob("*.safetensors")} - {file.path.name for file in files})
    notes = (f"not part of this model, not read: {shown_list(unread)}",) if unread else ()
    return Checkpoint("safetensors", path, files, config, tensors, notes)


def _open_folder(folder: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise cannot_read(folder, error) from error
    index = folder / safetensors.INDEX_NAME
    weights = [name for name in names if name.endswith(".safetensors")]
    ggufs = _gguf_models(names)
    has_safetensors = index.name in names or bool(weights)
    if has_safetensors and ggufs:
        raise CheckpointError(
            f"{folder} holds a safetensors model and GGUF files: {shown_list(ggufs)}",
            f"give the file you want: {folder / ggufs[0]}",
        )
    if index.name in names:
        return _open_safetensors(folder, folder, [], index)
    if len(weights) == 1:
        if safetensors.is_shard_name(folder / weights[0]):
            raise CheckpointError(
                f"{folder} holds {weights[0]} and no {index.name}", "download the whole model into one folder"
            )
        return _open_safetensors(folder, folder, weights, None)
    if weights:
        raise CheckpointError(
            f"{folder} holds {len(weights)} safetensors files and no {index.name}: {shown_list(weights)}",
            "give one of the files, or download the index as well",
        )
    if len(ggufs) == 1:
        return Checkpoint("gguf", folder, *gguf.read_gguf(folder / ggufs[0]))
    if ggufs:
        raise CheckpointError(
            f"{folder} holds {len(ggufs)} GGUF models: {shown_list(ggufs)}", f"give one: {folder / ggufs[0]}"
        )
    pickles = [name for name in names if name.lower().endswith(_PICKLES)]
    if pickles:
        raise _pickle_error(folder, pickles)
    raise CheckpointError(f"{folder} holds no model", "expected *.gguf, or *.safetensors with config.json")


def _gguf_models(names: list[str]) -> list[str]:
    """Return one file name for every GGUF model in a folder: of a split model only the first that is there."""
    models: dict[object, str] = {}
    for name in names:
        if name.lower().endswith(".gguf"):
            split = gguf.split_name(name)
            models.setdefault((split[0], split[2]) if split else name, name)
    return list(models.values())


def _pickle_error(path: Path, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{path}: {shown_list(names)} is a Python pickle, which can run code when it is read; hotset never reads one",
        "get the model in safetensors or GGUF",
    )
