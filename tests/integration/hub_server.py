"""A small Hugging Face hub on the loopback interface: what huggingface_hub asks for, and the ways it can go wrong."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


def commit_id(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Repo:
    """The files of every revision; files of ``large`` are stored with a SHA-256, others with a git object id."""

    revisions: dict[str, dict[str, bytes]]
    large: tuple[str, ...] = (".safetensors", ".gguf")

    def info(self, revision: str) -> dict[str, Any]:
        siblings = []
        for path, content in self.revisions[revision].items():
            sibling: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": git_id(content)}
            if path.endswith(self.large):
                sha256 = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(sibling)
        return {"id": "x/y", "sha": commit_id(revision), "siblings": siblings, "tags": [], "private": False}

    def find(self, revision: str) -> str | None:
        for name in self.revisions:
            if revision in (name, commit_id(name)):
                return name
        return None


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Hub:
    """The state of one server. Tests change it while it runs."""

    repos: dict[str, Repo] = field(default_factory=dict)
    address: str = ""
    #: Authorization that is needed, if any.
    token: str | None = None
    #: Path of a file -> after how many bytes the connection is cut, one entry for each request.
    cuts: dict[str, list[int]] = field(default_factory=dict)
    #: Path of a file -> the bytes that are sent in the place of it, one entry for each request.
    forged: dict[str, list[bytes]] = field(default_factory=dict)
    #: Address of another server that large files are sent from, as hubs do.
    cdn: str | None = None
    ignores_ranges: bool = False
    #: How many of the next requests for files are answered with 503.
    trouble: int = 0
    #: Answer to a question about any repository, in the place of the right one.
    info_body: bytes | None = None
    #: (method, path, Range header, Authorization header) of every request.
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)

    def ranges(self, path: str) -> list[str | None]:
        """The Range headers of all GET requests for a file."""
        return [range for method, asked, range, _ in self.requests if method == "GET" and asked.endswith("/" + path)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(with_body=False)

    def do_GET(self) -> None:
        self._serve(with_body=True)

    def _serve(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        self.hub.requests.append((self.command, path, self.headers.get("Range"), authorization))
        if self.hub.token is not None and authorization != f"Bearer {self.hub.token}":
            message = (
                "Invalid credentials in Authorization header" if authorization else "Invalid username or password."
            )
            self._answer(401, {"X-Error-Message": message}, b"{}", with_body)
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._info("/".join(parts[2:4]), "/".join(parts[5:]) or "main", with_body)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), with_body)
        else:
            self._answer(404, {}, b"", with_body)

    def _info(self, repo_id: str, revision: str, with_body: bool) -> None:
        repo = self.hub.repos.get(repo_id)
        name = repo.find(revision) if repo else None
        if repo is None or name is None:
            code = "RepoNotFound" if repo is None else "RevisionNotFound"
            self._answer(404, {"X-Error-Code": code}, b"{}", with_body)
            return
        body = self.hub.info_body or json.dumps(repo.info(name)).encode()
        self._answer(200, {"Content-Type": "application/json"}, body, with_body)

    def _file(self, repo_id: str, revision: str, path: str, with_body: bool) -> None:
        repo = self.hub.repos.get(repo_id)
        name = repo.find(revision) if repo else None
        content = repo.revisions[name].get(path) if repo and name else None
        if content is None:
            self._answer(404, {"X-Error-Code": "EntryNotFound"}, b"", with_body)
            return
        if self.hub.trouble > 0:
            self.hub.trouble -= 1
            self._answer(503, {}, b"", with_body)
            return
        headers = {"X-Repo-Commit": commit_id(name or ""), "ETag": f'"{git_id(content)}"', "Accept-Ranges": "bytes"}
        if path.endswith(repo.large if repo else ()):
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(content))
            if self.hub.cdn:
                self._answer(302, {**headers, "Location": self.hub.cdn + self.path}, b"", with_body)
                return
        if with_body and self.hub.forged.get(path):
            content = self.hub.forged[path].pop(0)
        status, start = 200, 0
        if (range := self.headers.get("Range")) and not self.hub.ignores_ranges:
            status, start = 206, int(range.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.hub.cuts[path].pop(0) if with_body and self.hub.cuts.get(path) else None
        self._answer(status, headers, content[start:], with_body, cut)

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes, with_body: bool, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run a hub on a free port of the loopback interface."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
