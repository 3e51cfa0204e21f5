"""The run record as a file: what goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pytest
from audit_records import RECORD

from hotset.audit.record import check_writable, parse_record, record_of_process, write_record
from hotset.audit.recorder import planned_huge_bytes, printable
from hotset.errors import MachineError, RequestError


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    content = json.loads(json.dumps(RECORD.to_json()))
    change(content)
    return json.dumps(content).encode()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """Every field, integer keys of pages and None included."""
    regions = (replace(RECORD.regions[0], pages={0: 1, -2: 5}, huge_bytes=None), *RECORD.regions[1:])
    record = replace(RECORD, regions=regions, baseline=None, commit=None)
    write_record(record, tmp_path / "run.json")
    assert parse_record((tmp_path / "run.json").read_bytes(), "run.json") == record


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Also when an older file of that name was open to all."""
    path = tmp_path / "run.json"
    path.touch(mode=0o666)
    write_record(RECORD, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["run.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(prompt="x"), "unknown field 'prompt'"),
        (lambda c: c["plan"].update(secret=1), "plan: unknown field 'secret'"),
        (
            lambda c: c["regions"][1].update(extra=1),
            "regions: regions 1: unknown field 'extra'|regions 1: unknown field",
        ),
        (lambda c: c.pop("seats"), "no field 'seats'"),
        (lambda c: c.update(version=2), "not a run record of version 1"),
        (lambda c: c.pop("version"), "not a run record of version 1"),
        (lambda c: c["regions"][0].update(num_bytes=-1), "num_bytes is -1, expected a whole number"),
        (lambda c: c["regions"][0].update(num_bytes=True), "num_bytes is True"),
        (lambda c: c["regions"][0].update(num_bytes=1.5), "num_bytes is 1.5"),
        (lambda c: c["regions"][0].update(num_bytes=1 << 70), "num_bytes is 118"),
        (lambda c: c["regions"][0].update(pages={"x": 1}), "expected whole numbers as keys"),
        (lambda c: c["regions"][0].update(pages=[1]), "pages is .*expected an object"),
        (lambda c: c["samples"][0].update(seconds=-1.0), "seconds is -1.0, expected a number"),
        (lambda c: c["samples"][0].update(seconds="1"), "seconds is '1'"),
        (lambda c: c.update(policy="LOOSE"), "policy is 'LOOSE', expected one of TOUCH, BIND, PREFER"),
        (lambda c: c.update(seats={}), "seats is .*expected a list"),
        (lambda c: c.update(hotset=None), "hotset is None, expected a text"),
        (lambda c: c["plan"].update(model="a\x1b[2Jb"), "expected a text of one line"),
        (lambda c: c["plan"].update(model="a\nb"), "expected a text of one line"),
    ],
)
def test_anything_else_is_refused_by_name(change: Callable[[dict[str, Any]], None], message: str) -> None:
    """A field that nobody reads would be a check that nobody makes; escapes would be obeyed by a terminal."""
    with pytest.raises(MachineError, match=message):
        parse_record(changed(change), "run.json")


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b'{"version": 1', b'{"version": NaN}', b"\xff"])
def test_no_json_or_no_record(text: bytes) -> None:
    with pytest.raises(MachineError, match=r"run\.json"):
        parse_record(text, "run.json")


def test_a_record_is_found_by_the_number_of_its_process(tmp_path: Path, home: Path) -> None:
    write_record(replace(RECORD, process=replace(RECORD.process, pid=1)), tmp_path / "a.json")
    write_record(replace(RECORD, process=replace(RECORD.process, pid=1)), tmp_path / "b.json")
    assert record_of_process(1).resolve() == tmp_path / "b.json"
    with pytest.raises(MachineError, match="process 2 wrote no run record"):
        record_of_process(2)


def test_links_of_ended_processes_are_taken_away(tmp_path: Path, home: Path) -> None:
    """Numbers beyond the kernel's largest: such processes never live."""
    gone = 99_999_999
    write_record(replace(RECORD, process=replace(RECORD.process, pid=gone)), tmp_path / "a.json")
    write_record(replace(RECORD, process=replace(RECORD.process, pid=1)), tmp_path / "b.json")
    assert [link.name for link in (home / "runs").iterdir()] == ["1.json"]


def test_a_home_that_takes_no_links_is_named(tmp_path: Path, home: Path) -> None:
    """The record itself was written; the message must not say that it was not."""
    home.write_text("a file")
    with pytest.raises(MachineError, match="runs: no link to the record can be left there"):
        write_record(RECORD, tmp_path / "run.json")
    assert parse_record((tmp_path / "run.json").read_bytes(), "run.json") == RECORD


def test_a_place_that_cannot_be_written_is_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(RequestError, match="no file can be written"):
        check_writable(tmp_path / "missing" / "run.json")
    check_writable(tmp_path / "run.json")


def test_a_write_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing beside it."""
    path = tmp_path / "run.json"
    write_record(RECORD, path)

    def fill_disk(content: object, file: TextIO, **options: object) -> None:
        file.write("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", fill_disk)
    with pytest.raises(MachineError, match=r"run\.json: cannot be written: No space left"):
        write_record(replace(RECORD, hotset="other"), path)
    assert parse_record(path.read_bytes(), "run.json") == RECORD
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["run.json"]


def test_names_from_files_are_made_printable() -> None:
    """A model's name comes from its file."""
    assert printable("a\x1b[2J\n\u202eb") == "a\N{REPLACEMENT CHARACTER}[2J" + 2 * "\N{REPLACEMENT CHARACTER}" + "b"


@pytest.mark.parametrize(
    ("address", "num_bytes", "expected"),
    [(0, 2048, 2048), (0, 2044, 0), (4, 4096, 2048), (2048, 5120, 4096), (4, 8, 0)],
)
def test_whole_huge_pages_inside_a_region(address: int, num_bytes: int, expected: int) -> None:
    """In KiB. Rows of a region that begin in the middle of a huge page cannot have it for themselves."""
    assert planned_huge_bytes(address << 10, num_bytes << 10, 2 << 20) == expected << 10
