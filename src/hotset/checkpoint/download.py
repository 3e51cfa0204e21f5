"""Brings the chosen files of one commit of a hub repository into a folder: resumable, checked, several at a time.

huggingface_hub itself throws a partly fetched file away when a process ends. Files here are tens of gigabytes, so
``NAME.part`` is kept and the next attempt goes on where it ends; a finished file is held against the hub's checksum
before it gets its name.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

from hotset.checkpoint.progress import Progress
from hotset.checkpoint.tensor import shown
from hotset.errors import HotsetError, MachineError, RequestError
from hotset.units import MIB

_NUM_WORKERS = 4
_CHUNK_BYTES = MIB
_TIMEOUT_S = 30.0
# Attempts in a row that bring nothing; any progress starts the count again.
_NUM_RETRIES = 5
_RETRY_WAIT_S = 1.0
# The hub serves larger files only in its own chunk protocol (xet), which huggingface_hub speaks and resumes itself.
MAX_HTTP_BYTES = 50 * 10**9


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: size in bytes, and the SHA-256 (large files) or the git object id (small ones)."""

    path: str
    size_bytes: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class HubSource:
    """One commit of one repository on one hub. ``token`` None means the one that huggingface_hub has stored, if any."""

    endpoint: str
    repo: str
    commit: str
    token: str | None


class _StoppedError(Exception):
    """Another file failed, or the user pressed Ctrl-C."""


def fetch_files(source: HubSource, files: list[RemoteFile], folder: Path, progress: Progress) -> None:
    """Fetch what is not in ``folder`` yet. What arrived before a failure stays there for the next call.

    RequestError when the hub refuses, MachineError when the network, the disk or a checksum fails.
    """
    todo = [file for file in files if not (folder / file.path).exists()]
    done_bytes = sum(file.size_bytes for file in files if file not in todo)
    done_bytes += sum(min(_size(_part(folder, file)), file.size_bytes) for file in todo)
    progress.start(sum(file.size_bytes for file in files), done_bytes)
    stop = threading.Event()
    with ThreadPoolExecutor(_NUM_WORKERS) as workers:
        futures = [workers.submit(_fetch, source, file, folder, progress, stop) for file in todo]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            workers.shutdown(wait=True, cancel_futures=True)
    errors = [future.exception() for future in futures if future.done() and not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, _StoppedError):
            raise error


def _part(folder: Path, file: RemoteFile) -> Path:
    return folder / f"{file.path}.part"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fetch(source: HubSource, file: RemoteFile, folder: Path, progress: Progress, stop: threading.Event) -> None:
    if stop.is_set():
        raise _StoppedError
    target, part = folder / file.path, _part(folder, file)
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.size_bytes > MAX_HTTP_BYTES:
        _fetch_by_xet(source, file, folder, progress)
        part = target.rename(part)
    else:
        _fetch_by_http(source, file, part, progress, stop)
    _check(file, part)
    part.rename(target)


def _fetch_by_http(source: HubSource, file: RemoteFile, part: Path, progress: Progress, stop: threading.Event) -> None:
    """Append what is missing to ``part``; a connection that breaks is taken up again where it broke."""
    retries_left = _NUM_RETRIES
    while True:
        have = _size(part)
        try:
            _append(source, file, part, progress, stop)
            return
        except (OSError, ValueError, _http_error()) as error:
            wanted = hub_error(error, source.repo, f"fetching {shown(file.path)} of {source.repo}")
            retries_left = _NUM_RETRIES if _size(part) > have else retries_left - 1
            if retries_left < 0 or not _is_transient(error):
                raise wanted from error
        progress.say(f"{wanted.message}: trying again")
        stop.wait(_RETRY_WAIT_S)


def _append(source: HubSource, file: RemoteFile, part: Path, progress: Progress, stop: threading.Event) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]
    from huggingface_hub.utils import http_stream_backoff as stream  # type: ignore[attr-defined]

    url = hf_hub_url(source.repo, file.path, revision=source.commit, endpoint=source.endpoint)
    headers = build_hf_headers(token=source.token, library_name="hotset")
    # Compressed answers have no stable byte positions, so they could not be resumed.
    headers["Accept-Encoding"] = "identity"
    with part.open("ab") as sink:
        have = sink.tell()
        if have > file.size_bytes:
            have = _start_over(sink, file.size_bytes, progress)
        if have == file.size_bytes:
            return
        if have:
            headers["Range"] = f"bytes={have}-"
        with stream("GET", url, headers=headers, timeout=_TIMEOUT_S, retry_on_exceptions=()) as response:
            hf_raise_for_status(response)
            if have and response.status_code != HTTPStatus.PARTIAL_CONTENT:
                have = _start_over(sink, have, progress)
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                if stop.is_set():
                    raise _StoppedError
                have += len(chunk)
                if have > file.size_bytes:
                    raise OSError(f"the hub sends more than the {file.size_bytes} bytes that it announced")
                sink.write(chunk)
                progress.advance(len(chunk))
    if have < file.size_bytes:
        raise ConnectionError(f"the connection ended after {have} of {file.size_bytes} bytes")


def _start_over(sink: BinaryIO, counted_bytes: int, progress: Progress) -> int:
    """Drop what is in a partial file, and uncount it."""
    sink.truncate(0)
    progress.advance(-counted_bytes)
    return 0


def _is_transient(error: Exception) -> bool:
    """Whether the same request may work a moment later: the line broke, as opposed to the hub or the disk saying no."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return False
    return isinstance(error, (ConnectionError, _http_error()))


def _fetch_by_xet(source: HubSource, file: RemoteFile, folder: Path, progress: Progress) -> None:
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(
            source.repo,
            file.path,
            revision=source.commit,
            local_dir=folder,
            token=source.token,
            endpoint=source.endpoint,
            library_name="hotset",
            tqdm_class=_bar_class(progress),
        )
    except (OSError, ValueError, _http_error()) as error:
        raise hub_error(error, source.repo, f"fetching {shown(file.path)} of {source.repo}") from error


def _bar_class(progress: Progress) -> Any:
    """Return what huggingface_hub takes for a tqdm class; it hands the bytes on to ``progress``."""

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            progress.advance(initial)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def update(self, num_bytes: float | None = 1) -> None:
            progress.advance(int(num_bytes or 0))

        def close(self) -> None:
            pass

    return Bar


def _check(file: RemoteFile, path: Path) -> None:
    """Hold a fetched file against the hub's checksum; one that differs is removed."""
    size = path.stat().st_size
    if file.sha256 is not None:
        kind, expected, digest = "SHA-256", file.sha256, hashlib.sha256()
    elif file.git_sha1 is not None:
        # git's object id: SHA-1 of a small header and the content. It guards against damage, not against forgery.
        kind, expected, digest = "git id", file.git_sha1, hashlib.sha1(f"blob {size}\0".encode())
    else:
        raise MachineError(f"the hub gives no checksum for {shown(file.path)}")
    with path.open("rb") as content:
        while chunk := content.read(MIB):
            digest.update(chunk)
    if digest.hexdigest() != expected or size != file.size_bytes:
        path.unlink()
        raise MachineError(
            f"{shown(file.path)} arrived with the {kind} {digest.hexdigest()}, the hub says {expected}",
            "damaged on the way: run the same command again",
        )


def _http_error() -> type[Exception]:
    """Return the base of the errors of the HTTP library that huggingface_hub uses (httpx or httpx2)."""
    from huggingface_hub import errors

    base: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return base


def hub_error(error: Exception, repo: str, doing: str) -> HotsetError:
    """Return the error to raise for one of huggingface_hub: one line, with what the user can do about it."""
    from huggingface_hub import errors

    if isinstance(error, errors.RevisionNotFoundError):
        return RequestError(f"{repo} has no such revision", "see the branches and tags on its page on the hub")
    if isinstance(error, errors.GatedRepoError):
        return RequestError(
            f"{repo} is gated: its owner must let you in",
            "accept its licence on its page on the hub, and set HF_TOKEN to your access token",
        )
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return RequestError(
            f"{doing}: not found on the hub, or not open to you (status {status})",
            "check the spelling; for a private model set HF_TOKEN to your access token",
        )
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return MachineError(f"{doing}: {text}", "what has arrived is kept: run the same command again to go on")


def guarded(call: Callable[[], Any], repo: str, doing: str) -> Any:
    """Return what ``call`` returns, with huggingface_hub's errors turned into ours."""
    try:
        return call()
    except (OSError, ValueError, _http_error()) as error:
        raise hub_error(error, repo, doing) from error
