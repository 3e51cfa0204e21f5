"""``hotset probe`` with the real native module, quickly: that it runs, not what it measures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from hotset.cli.main import cli
from hotset.machine.advice import Advice
from hotset.machine.measured import find_profile, read_measured
from hotset.machine.native import available_isas, native_module
from hotset.machine.probe import CeilingMeter
from hotset.machine.samples import MIN_SAMPLES, Effort
from hotset.machine.topology import default_threads, read_topology
from hotset.units import MIB

TINY = Effort(buffer_bytes=64 * MIB, row_seconds=0.01, choice_seconds=0.01, file_bytes=20 * MIB, file_seconds=0.01)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("hotset.machine.samples.FULL", TINY)
    monkeypatch.setattr("hotset.machine.samples.QUICK", TINY)
    monkeypatch.setattr("hotset.machine.probe.CACHES_PER_BUFFER", 0)
    monkeypatch.setattr("hotset.machine.matrix.CACHES_PER_BUFFER", 0)
    monkeypatch.setattr("hotset.machine.cuda.load_library", lambda: None)


def test_json_has_machine_and_rows() -> None:
    result = CliRunner().invoke(cli, ["probe", "--json", "--chunk", "256KiB"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    topology = read_topology()
    threads = default_threads(topology)[0]
    probe = report["probe"]
    assert probe["num_threads"] == threads and probe["buffer_bytes"] == 64 * MIB and probe["chunk_bytes"] == 256 << 10
    pairs = [(row["cpus_of_node"], row["memory_of_node"]) for row in probe["paths"]]
    assert (topology.cpu_nodes[0],) * 2 in pairs and len(set(pairs)) == len(pairs)
    rates = [probe["ceiling_bytes_per_s"], *(row["bytes_per_s"] for row in probe["caches"])]
    for row in probe["paths"]:
        assert 1 <= row["threads"] <= threads and row["reads"][0]["num_threads"] == 1
        rates += [entry["bytes_per_s"] for entry in row["reads"]]
        rates += [row[f"{kind}_bytes_per_s"] for kind in ("chunk", "write", "copy")]
    rates += [row["ops_per_s"] for row in probe["computes"]]
    for row in probe["steps"]:
        rates += [row[f"{part}_s"] for part in ("run", "barrier", "exchange")]
    for rate in (*rates, *(probe["storage"][f"{part}_bytes_per_s"] for part in ("read", "page_cache"))):
        assert 0 < rate["min"] <= rate["median"] <= rate["max"] < 1e14
        assert len(rate["samples"]) >= MIN_SAMPLES
    assert {"int8", "f32"} <= {row["kind"] for row in probe["computes"]}
    assert report["memory"]["available_bytes"] > 0 and report["machine"]["affinity"]
    assert "libcuda.so.1 is not installed" in probe["no_gpu"] and probe["gpu_paths"] == []


def test_text_ends_with_the_ceiling() -> None:
    result = CliRunner().invoke(cli, ["probe", "--threads", "1"])
    assert result.exit_code == 0
    assert result.stdout.rstrip().splitlines()[-2].startswith("ceiling: ")
    assert re.search(r"^node 0 +node 0 +1 +[0-9.]+ +\([0-9.]+\.\.[0-9.]+\)( +[0-9.]+){3} +\d+ ns$", result.stdout, re.M)
    assert re.search(r"^L1 +1 +[0-9.]+ KiB +[0-9.]+ +\([0-9.]+\.\.[0-9.]+\)$", result.stdout, re.M)
    assert "GPUs        none: libcuda.so.1 is not installed" in result.stdout
    steps = re.findall(r"^\[(\d+)/(\d+)\] ", result.stderr, re.M)
    assert [int(done) for done, _ in steps] == list(range(1, int(steps[0][1]) + 1))


def test_pictures_and_a_profile_where_asked(tmp_path: Path) -> None:
    svg, page = tmp_path / "new" / "paths.svg", tmp_path / "paths.html"
    result = CliRunner().invoke(cli, ["probe", "--quick", "--threads", "1", "--svg", str(svg), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    profile_id = result.stdout.split("profile: ")[1].split(",")[0]
    assert profile_id in svg.read_text() and svg.read_text() in page.read_text()


def test_a_chunk_that_is_no_size_is_refused() -> None:
    result = CliRunner().invoke(cli, ["probe", "--chunk", "six"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'six' is not a size such as 80GiB" in result.stderr


def test_the_profile_is_kept_and_written_where_asked(tmp_path: Path) -> None:
    """What `hotset plan` reads afterwards: one memory, one team, one path, the rates of all threads."""
    result = CliRunner().invoke(cli, ["probe", "--threads", "1", "--out", str(tmp_path / "mine.json")])
    assert result.exit_code == 0, result.output
    kept = read_measured()
    assert kept is not None and kept == find_profile("this") == find_profile(str(tmp_path / "mine.json"))
    assert result.stdout.rstrip().splitlines()[-1].startswith(f"profile: {kept.id}, kept in ")
    consumer, path = kept.consumers[0], kept.paths[0]
    assert (consumer.num_cores, consumer.near, path.memory, path.threads) == (1, "node0", "node0", 1)
    assert {"int8", "f32"} <= consumer.rates.keys() and consumer.step_s is not None
    assert path.spread is not None and path.spread[0] <= path.read_bytes_per_s <= path.spread[1]
    assert path.write_bytes_per_s and path.chunk_bytes_per_s and path.latency_s and kept.storage_bytes_per_s
    assert kept.measured.endswith("+00:00")


def test_a_quick_look_keeps_nothing() -> None:
    result = CliRunner().invoke(cli, ["probe", "--threads", "1", "--quick"])
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().endswith(", not kept") and read_measured() is None


def test_too_many_threads() -> None:
    result = CliRunner().invoke(cli, ["probe", "--threads", "4096"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: 4096 threads asked for, this process may use ")


def test_huge_pages_that_are_off_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    off = Advice("huge_pages", "huge pages are off", None)
    monkeypatch.setattr("hotset.machine.advice.huge_page_advice", lambda pages: off)
    result = CliRunner().invoke(cli, ["probe", "--threads", "1"])
    assert result.stderr.splitlines()[-1] == "warning: huge pages are off"


@pytest.mark.parametrize("isa", available_isas())
def test_every_kernel_set_reads_and_computes(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setattr("hotset.machine.probe.isa_in_use", lambda: isa)
    native = native_module()
    cpu = read_topology().affinity[0]
    buffers = native.ProbeBuffers([[cpu]], [native.ANY_NODE], MIB)
    for rates in (
        buffers.read_chunks(isa, [cpu], 64 << 10, 0, 0.0, 1), buffers.write(isa, [cpu], 0.0, 1),
        buffers.copy(isa, [cpu], 0.0, 1), native.probe_steps(isa, [cpu], 0.0, 1).exchange_s,
    ):  # fmt: skip
        assert min(rates) > 0
    assert native.probe_write_instruction(isa)
    with CeilingMeter(read_topology().affinity[:1], buffer_bytes=64 * MIB, choice_seconds=0.01) as meter:
        assert meter.measure_read(0.01).low > 0
        for kind, _ in meter.compute_kinds():
            assert meter.measure_compute(kind, 0.01).low > 0
