"""Finding the record that an audit is asked for."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from audit_records import RECORD

from hotset.audit import fetch as fetching
from hotset.audit.fetch import fetch, find_record
from hotset.audit.observe import read_process
from hotset.audit.record import write_record
from hotset.errors import MachineError, RequestError

BODY = json.dumps(RECORD.to_json()).encode()
Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))


class Server:
    """Answers every request with ``answer``."""

    def __init__(self) -> None:
        self.answer: Answer = lambda handler: send(handler, BODY)
        self.paths: list[str] = []
        self.let_go = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                outer.answer(self)

            def log_message(self, *arguments: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.let_go.set()
    made.http.shutdown()
    made.http.server_close()


def test_a_record_from_a_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment is not asked: the address is of this machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert find_record(f"{server.url}/v1/record?x=1") == RECORD
    assert server.paths == ["/v1/record?x=1"]


@pytest.mark.parametrize("status", [404, 500, 302])
def test_another_status_is_no_record(server: Server, status: int) -> None:
    """A redirection is not followed: it could lead to another machine."""
    server.answer = lambda handler: send(handler, BODY, status)
    with pytest.raises(MachineError, match=f"status {status}, expected 200"):
        find_record(server.url)
    assert len(server.paths) == 1


def test_an_answer_without_an_end(server: Server) -> None:
    """Guards against a server that fills the memory."""

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not server.let_go.is_set():
                handler.wfile.write(bytes(1 << 20))
        except OSError:
            return

    server.answer = endless
    with pytest.raises(MachineError, match=r"more than 16\.00 MiB"):
        fetch(server.url)


def test_a_server_that_says_nothing(server: Server) -> None:
    server.answer = lambda handler: server.let_go.wait() and None
    with pytest.raises(MachineError, match=r"timed out"):
        fetch(server.url, timeout_s=0.05)


def test_a_server_that_sends_a_byte_now_and_then(server: Server) -> None:
    """Each read is in time, the whole never is."""

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not server.let_go.wait(0.01):
                handler.wfile.write(b" ")
        except OSError:
            return

    server.answer = drip
    with pytest.raises(MachineError, match=r"no whole answer in 0\.2 seconds"):
        fetch(server.url, timeout_s=0.2)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/", "https://127.0.0.1/", "http://127.0.0.1.example.com/", "http://user@127.0.0.1/",
        "ftp://127.0.0.1/", "file:///etc/passwd", "http://127.0.0.1:999999/", "http://127.0.0.1/a b",
    ],
)  # fmt: skip
def test_only_addresses_of_this_machine(url: str) -> None:
    with pytest.raises(RequestError, match="address"):
        find_record(url)


def test_nobody_listens(server: Server) -> None:
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(MachineError, match="refused"):
        find_record(server.url)


def test_a_record_by_file_and_by_process(tmp_path: Path) -> None:
    record = replace(RECORD, process=read_process())
    write_record(record, tmp_path / "run.json")
    assert find_record(str(tmp_path / "run.json")) == record
    assert find_record(str(os.getpid())) == record


def test_a_record_of_an_earlier_process_of_that_number(tmp_path: Path) -> None:
    own = read_process()
    write_record(replace(RECORD, process=replace(own, start_ticks=own.start_ticks - 1)), tmp_path / "run.json")
    with pytest.raises(MachineError, match="is not the one that wrote the record"):
        find_record(str(own.pid))


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="No such file"):
        find_record(str(tmp_path / "missing.json"))
    monkeypatch.setattr(fetching, "MOST_BYTES", 100)
    (tmp_path / "large.json").write_bytes(bytes(101))
    with pytest.raises(MachineError, match="no run record"):
        find_record(str(tmp_path / "large.json"))
    with pytest.raises(MachineError, match="there is no process 99999999"):
        find_record("99999999")
