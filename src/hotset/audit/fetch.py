"""Finding the record that an audit is asked for: a file, a process, or the address of a server on this machine."""

from __future__ import annotations

import http.client
import time
from pathlib import Path
from urllib.parse import urlsplit

from hotset.audit.observe import read_process
from hotset.audit.record import RunRecord, parse_record, record_of_process
from hotset.errors import MachineError, RequestError
from hotset.units import MIB, format_bytes

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BYTES = 16 * MIB
"""Of a record: some thousand regions and samples take one."""
TIMEOUT_S = 10.0
_PIECE_BYTES = 65536


def find_record(target: str) -> RunRecord:
    """The record that ``target`` names: the number of a process, an http:// address, or a file.

    Raises:
        RequestError: an address of another machine.
        MachineError: nothing there, or no record.
    """
    if target.isascii() and target.isdecimal():
        return _of_process(int(target))
    if "://" in target:
        return parse_record(fetch(target), target)
    return _of_file(Path(target), target)


def _of_file(path: Path, name: str) -> RunRecord:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise MachineError(f"{name}: {error.strerror}", "hotset run MODEL --record FILE writes a record") from None
    if len(text) > MOST_BYTES:
        raise MachineError(f"{name} has more than {format_bytes(MOST_BYTES)}, it is no run record")
    return parse_record(text, name)


def _of_process(pid: int) -> RunRecord:
    now = read_process(pid)
    path = record_of_process(pid)
    record = _of_file(path, str(path))
    if record.process != now:
        raise MachineError(f"process {pid} is not the one that wrote the record: that one has ended")
    return record


def fetch(url: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """The body behind an address of this machine; no proxy, no other place to go on to.

    Raises:
        RequestError: an address that is not http:// on this machine.
        MachineError: no answer in time, another status than 200, or more than :data:`MOST_BYTES`.
    """
    host, port, path = _parts(url)
    deadline = time.monotonic() + timeout_s
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Accept": "application/json"})
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            raise MachineError(f"{url}: status {reply.status}, expected 200 with a run record")
        body = bytearray()
        # read1 gives what has come: a server that sends a byte now and then cannot hold the audit up.
        while piece := reply.read1(_PIECE_BYTES):
            body += piece
            if len(body) > MOST_BYTES:
                raise MachineError(f"{url}: more than {format_bytes(MOST_BYTES)}, it is no run record")
            if time.monotonic() > deadline:
                raise MachineError(f"{url}: no whole answer in {timeout_s:g} seconds")
    except (OSError, http.client.HTTPException) as error:
        raise MachineError(f"{url}: {error or type(error).__name__}", "is the server running?") from error
    finally:
        connection.close()
    return bytes(body)


def _parts(url: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RequestError(f"{url!r} is not an address: {error}") from None
    if parts.scheme != "http" or parts.hostname not in LOOPBACK or parts.username is not None:
        raise RequestError(
            f"{url} is not an address of this machine", f"http://{LOOPBACK[0]}:PORT/..., through a tunnel if need be"
        )
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not target.isascii() or not target.isprintable() or " " in target:
        raise RequestError(f"{url!r} is not an address")
    return parts.hostname, port or 80, target
