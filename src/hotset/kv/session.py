"""Sessions: the cached rows of one sequence as a file, so that another process goes on where this one stopped.

One file, little-endian, readable by its owner only, because it holds the conversation:

    16 B   "hotset-session\\n\\0"
     4 B   version, 4 B: length of the header, 32 B: SHA-256 of the header
           header: JSON, see _Header
           blocks of the positions 0 .. num_rows - 1, whole; in the last one, rows from num_rows on mean nothing
           snapshots of the frontier at the block borders that the header lists, rising
           the frontier at num_rows, for a model that has one
    32 B   SHA-256 of everything before

A file is written beside its place and then renamed, so a name never holds half a session. It is read twice: once to
find it whole before anything in the engine is touched, once into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np

from hotset import __version__
from hotset.checkpoint.strict_json import parse_json
from hotset.checkpoint.tensor import shown
from hotset.errors import CheckpointError, InternalError, MachineError, RequestError
from hotset.kv.identity import Identity
from hotset.kv.memory import BlockTable, CacheMemory, Tokens
from hotset.kv.restore import restore
from hotset.kv.store import CacheStore
from hotset.units import MIB, format_bytes

SESSION_VERSION = 1
"""To be raised when the file changes, and when the arithmetic that makes rows changes."""
_MAGIC = b"hotset-session\n\0"
_PREFIX = struct.Struct("<16sII32s")
_DIGEST_BYTES = 32
_MAX_HEADER_BYTES = 64 * MIB
_PIECE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Session:
    """What was saved or restored.

    Attributes:
        token_ids: the sequence, its last token included, whose row is not in the cache yet.
        cached_tokens: tokens that a prompt beginning with ``token_ids`` will not compute in this engine.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True)
class _Header:
    """``num_rows`` positions of ``token_ids`` are in the file; ``snapshots`` are positions, multiples of a block."""

    hotset: str
    identity: Identity
    block_tokens: int
    block_bytes: int
    frontier_bytes: int
    num_rows: int
    snapshots: tuple[int, ...]
    token_ids: tuple[int, ...]

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @property
    def payload_bytes(self) -> int:
        num_frontiers = len(self.snapshots) + 1
        return -(-self.num_rows // self.block_tokens) * self.block_bytes + num_frontiers * self.frontier_bytes


class _Writer:
    """Writes a file and hashes what passes."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)

    def finish(self) -> None:
        """Write the digest."""
        self._file.write(self._hash.digest())


class _Reader:
    """Reads a file from its beginning and hashes what passes."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self._path = path
        self._file = file
        self._hash = hashlib.sha256()
        file.seek(0)

    def read(self, buffer: memoryview) -> None:
        """Fill ``buffer``."""
        if self._file.readinto(buffer) != len(buffer):
            raise _damaged(self._path, "it ends early")
        self._hash.update(buffer)

    def skip(self, count: int) -> None:
        """Read ``count`` bytes for the hash only."""
        piece = memoryview(bytearray(min(count, _PIECE_BYTES)))
        for start in range(0, count, _PIECE_BYTES):
            self.read(piece[: min(_PIECE_BYTES, count - start)])

    def check(self) -> None:
        """Read the digest and hold it against what was read."""
        if self._file.read(_DIGEST_BYTES) != self._hash.digest():
            raise _damaged(self._path, "its checksum is not that of its content")


def _damaged(path: Path, reason: str) -> MachineError:
    return MachineError(f"{path} is damaged: {reason}", "remove it, and save the session again")


# Writing


def save_session(path: Path, memory: CacheMemory, identity: Identity, table: BlockTable, token_ids: Tokens) -> Session:
    """Write the rows of ``table``, and the tokens that they belong to, to ``path``; an older file there is replaced.

    ``token_ids``, int32, may be longer than the rows of the table. MachineError when the file cannot be written.
    """
    store = _store(memory)
    frontiers = memory.frontiers
    borders = [(depth * memory.block_tokens, node) for depth, node in enumerate(table.path(), 1)]
    snapshots = {rows: node.snapshot.index for rows, node in borders if node.snapshot and rows < table.num_rows}
    header = _Header(
        __version__,
        identity,
        memory.block_tokens,
        store.block_bytes,
        frontiers.frontier_bytes,
        table.num_rows,
        tuple(snapshots),
        tuple(token_ids.tolist()),
    )
    encoded = header.encode()
    with _private_file(path, _PREFIX.size + len(encoded) + header.payload_bytes + _DIGEST_BYTES) as file:
        out = _Writer(file)
        out.write(_PREFIX.pack(_MAGIC, SESSION_VERSION, len(encoded), hashlib.sha256(encoded).digest()))
        out.write(encoded)
        block = np.empty(store.block_bytes, np.uint8)
        for block_id in table.blocks[: memory.num_blocks(table.num_rows)].tolist():
            store.copy_block(block_id, block)
            out.write(block.data)
        for index in snapshots.values():
            out.write(frontiers.data(index).data)
        if frontiers.is_needed:
            frontier = np.empty(frontiers.frontier_bytes, np.uint8)
            store.copy_frontier(table.frontier.slot, frontier)
            out.write(frontier.data)
        out.finish()
    return Session(header.token_ids, table.num_rows)


@contextmanager
def _private_file(path: Path, num_bytes: int) -> Iterator[BufferedWriter]:
    """Open a new file, readable by its owner only, that appears at ``path`` when the block ends without an error."""
    temporary = path.with_name(f".session-{secrets.token_hex(8)}.part")
    try:
        free = shutil.disk_usage(path.parent).free
        if num_bytes > free:
            raise MachineError(
                f"this session takes {format_bytes(num_bytes)}, {format_bytes(free)} are free in {path.parent}",
                "choose a folder on a larger disk",
            )
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


class SessionFile:
    """A session file that was opened and belongs to this engine. :meth:`verify` it before :meth:`restore`."""

    def __init__(self, path: Path, file: BufferedReader, header: _Header, payload_at: int) -> None:
        self._path = path
        self._file = file
        self._header = header
        self._payload_at = payload_at

    def verify(self) -> None:
        """Read the whole file. MachineError when a byte of it is not what was written."""
        reader = _Reader(self._path, self._file)
        reader.skip(self._payload_at + self._header.payload_bytes)
        reader.check()

    def restore(self, memory: CacheMemory) -> Session:
        """Make the session's tokens findable in ``memory``, and return what can be reused of them.

        Nothing is pinned: later requests may push the session out like any cached prefix. RequestError when running
        requests have reserved the blocks for it; whatever is raised, the cache serves what it served before.
        """
        header = self._header
        reader = _Reader(self._path, self._file)
        reader.skip(self._payload_at)
        tokens = np.array(header.token_ids, np.int32)
        with restore(memory, _store(memory), tokens, header.num_rows, header.snapshots) as target:
            for buffer in target.buffers():
                reader.read(buffer.data)
            reader.check()
            target.publish()
        return Session(header.token_ids, memory.find(tokens, len(tokens) - 1).num_rows)


@contextmanager
def open_session(
    path: Path, memory: CacheMemory, identity: Identity, vocab_size: int, max_tokens: int
) -> Iterator[SessionFile]:
    """Open a session file and hold its header against this engine, which takes prompts of ``max_tokens`` tokens.

    Raises:
        MachineError: the file cannot be read, is damaged, or has another version.
        RequestError: it belongs to another model, other weights, another cache format or another kernel set, or holds
            more tokens than this engine takes.
    """
    try:
        with os.fdopen(_open_regular(path), "rb") as file:
            header, payload_at = _read_header(path, file, os.fstat(file.fileno()).st_size)
            _check_identity(path, header.identity, identity)
            _check_size(path, header, memory, vocab_size, max_tokens)
            yield SessionFile(path, file, header, payload_at)
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror or error}") from error


def _open_regular(path: Path) -> int:
    # Without O_NONBLOCK opening a named pipe would wait for a writer for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MachineError(f"{path} is not a regular file", "give a file that save_session wrote")
    return descriptor


def _read_header(path: Path, file: BufferedReader, num_bytes: int) -> tuple[_Header, int]:
    prefix = file.read(_PREFIX.size)
    if not prefix or prefix[: len(_MAGIC)] != _MAGIC[: len(prefix)]:
        raise MachineError(f"{path} is not a session of hotset", "give a file that save_session wrote")
    if len(prefix) < _PREFIX.size:
        raise _damaged(path, f"it ends after {num_bytes} bytes")
    _, version, length, digest = _PREFIX.unpack(prefix)
    if version != SESSION_VERSION:
        raise MachineError(
            f"{path} is a session of version {version}, this hotset ({__version__}) reads version {SESSION_VERSION}",
            "save the session again with this hotset",
        )
    if length > _MAX_HEADER_BYTES:
        raise _damaged(path, f"its header would have {length:,} bytes")
    encoded = file.read(length)
    if len(encoded) < length:
        raise _damaged(path, f"it ends after {num_bytes} bytes")
    if hashlib.sha256(encoded).digest() != digest:
        raise _damaged(path, "the checksum of its header is not that of the header")
    try:
        header = _parse_header(parse_json(encoded, str(path)))
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"its header is not one of version {SESSION_VERSION} ({error})") from error
    expected = _PREFIX.size + length + header.payload_bytes + _DIGEST_BYTES
    if num_bytes != expected:
        raise _damaged(path, f"it has {num_bytes:,} bytes, expected {expected:,}")
    return header, _PREFIX.size + length


def _parse_header(content: Any) -> _Header:
    fields = dict(content)
    identity = dict(fields.pop("identity"))
    cache = tuple(identity.pop("cache"))
    snapshots, token_ids = tuple(fields.pop("snapshots")), tuple(fields.pop("token_ids"))
    header = _Header(identity=Identity(cache=cache, **identity), snapshots=snapshots, token_ids=token_ids, **fields)
    own = header.identity
    words = (header.hotset, own.model, own.weights, own.program, own.kernels, *cache)
    if not all(isinstance(word, str) for word in words):
        raise TypeError("a text field is not text")
    sizes = (header.block_tokens, header.block_bytes, header.frontier_bytes, header.num_rows)
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in (*sizes, *snapshots, *token_ids)):
        raise TypeError("a number is not one")
    if not (header.block_tokens and 1 <= header.num_rows < len(token_ids)):
        raise ValueError(f"{header.num_rows} rows of {len(token_ids)} tokens")
    borders = range(header.block_tokens, header.num_rows, header.block_tokens)
    if list(snapshots) != sorted(set(snapshots)) or not all(rows in borders for rows in snapshots):
        raise ValueError("snapshots that are not at block borders")
    if snapshots and not header.frontier_bytes:
        raise ValueError("snapshots of nothing")
    return header


def _check_identity(path: Path, found: Identity, own: Identity) -> None:
    if found.weights != own.weights:
        same = " with other weights" if found.model == own.model else ""
        raise RequestError(
            f"{path} is a session of {shown(found.model)}{same}, this engine runs {shown(own.model)}",
            "load the model that the session was saved with",
        )
    if found.cache != own.cache:
        raise RequestError(
            f"{path} holds cache rows of another format ({_rows(found)}), this engine keeps {_rows(own)}",
            "load the model with the cache_format that the session was saved with",
        )
    if found.kernels != own.kernels:
        raise RequestError(
            f"{path} was computed with {shown(found.kernels)} kernels, this engine uses {shown(own.kernels)}, whose "
            "results differ in the last bit",
            f"HOTSET_ISA={shown(found.kernels)}, on a machine that has them",
        )
    if found.program != own.program:
        raise RequestError(
            f"{path} was computed by another version of this model's program", "save the session again with this hotset"
        )


def _rows(identity: Identity) -> str:
    return "; ".join(line if line.isprintable() and len(line) < 100 else shown(line) for line in identity.cache[:8])


def _check_size(path: Path, header: _Header, memory: CacheMemory, vocab_size: int, max_tokens: int) -> None:
    store, frontiers = _store(memory), memory.frontiers
    found = (header.block_tokens, header.block_bytes, header.frontier_bytes)
    own = (memory.block_tokens, store.block_bytes, frontiers.frontier_bytes)
    if found != own:
        raise RequestError(f"{path} has blocks and frontiers of {found} tokens and bytes, this engine has {own}")
    if max(header.token_ids) >= vocab_size:
        raise RequestError(f"{path} has token id {max(header.token_ids)}, the vocabulary has {vocab_size}")
    count = len(header.token_ids)
    if count > max_tokens:
        raise RequestError(
            f"{path} holds {count:,} tokens, this engine takes prompts of at most {max_tokens:,}",
            f"load the model with context={count + 1} or more",
        )
    if frontiers.is_needed and not frontiers.num_snapshots:
        raise RequestError(
            f"{path} needs a place for a snapshot of its frontier, this engine keeps none",
            "load the model with snapshots=2 or more",
        )


def _store(memory: CacheMemory) -> CacheStore:
    if memory.store is None:
        raise InternalError("a session needs the memory behind the blocks")
    return memory.store
