"""``hotset probe`` with the real native module, quickly: that it runs, not what it measures."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from hotset.cli.main import cli
from hotset.machine import probe as probing
from hotset.machine.native import available_isas
from hotset.machine.probe import CeilingMeter, Effort
from hotset.machine.topology import default_threads, read_topology
from hotset.units import MIB

TINY = Effort(buffer_bytes=64 * MIB, row_seconds=0.01, choice_seconds=0.01)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "FULL", TINY)
    monkeypatch.setattr(probing, "CACHES_PER_BUFFER", 0)


def test_json_has_machine_and_rows() -> None:
    result = CliRunner().invoke(cli, ["probe", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    threads = default_threads(read_topology())[0]
    probe = report["probe"]
    assert probe["num_threads"] == threads and probe["buffer_bytes"] == 64 * MIB
    dram = [row for row in probe["reads"] if row["level"] == "DRAM"]
    assert dram[-1]["num_threads"] == threads
    for row in probe["reads"]:
        rate = row["bytes_per_s"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"] < 1e14
        assert len(rate["samples"]) >= probing.MIN_SAMPLES
    assert {"int8", "f32"} <= {row["kind"] for row in probe["computes"]}
    assert report["memory"]["available_bytes"] > 0 and report["machine"]["affinity"]


def test_text_ends_with_the_ceiling() -> None:
    result = CliRunner().invoke(cli, ["probe", "--threads", "1"])
    assert result.exit_code == 0
    assert result.stdout.rstrip().splitlines()[-1].startswith("ceiling: ")
    assert re.search(r"^DRAM +1 +64\.00 MiB +[0-9.]+ +\([0-9.]+\.\.[0-9.]+\)$", result.stdout, re.MULTILINE)
    assert "[1/4] placing the buffer" in result.stderr and "[4/4] arithmetic" in result.stderr


def test_too_many_threads() -> None:
    result = CliRunner().invoke(cli, ["probe", "--threads", "4096"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: 4096 threads asked for, this process may use ")


def test_huge_pages_that_are_off_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.machine.thp.advice", lambda pages: "huge pages are off")
    result = CliRunner().invoke(cli, ["probe", "--threads", "1"])
    assert result.stderr.splitlines()[-1] == "warning: huge pages are off"


@pytest.mark.parametrize("isa", available_isas())
def test_every_kernel_set_reads_and_computes(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setattr(probing, "isa_in_use", lambda: isa)
    with CeilingMeter(1, buffer_bytes=64 * MIB, choice_seconds=0.01) as meter:
        assert meter.measure_read(0.01).low > 0
        for kind, _ in meter.compute_kinds():
            assert meter.measure_compute(kind, 0.01).low > 0
