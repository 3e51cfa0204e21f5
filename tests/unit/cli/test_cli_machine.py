"""``hotset machine``: the page that a person reads, for whole machines."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hotset.cli.main import cli
from hotset.machine.gpus import Gpu, Gpus

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"
DUAL_GH200 = """\
processor   Arm implementer 0x41 part 0xd49, 4 CPUs, 2 sockets, 1 thread per core
may use     CPUs 0-3, memory of nodes 0-2,10
pages       64.00 KiB; huge pages 512.00 MiB, madvise
memory      3.48 GiB available of 3.92 GiB (limit: NUMA nodes 0-1, the others are GPU memory)

node  kind  CPUs    memory   available  shared  unevictable       firmware says
0     cpu   0-1   1.98 GiB    1.77 GiB     0 B          0 B  373.7 GB/s, 120 ns
1     cpu   2-3   1.93 GiB    1.71 GiB     0 B          0 B  373.7 GB/s, 120 ns
2     gpu   none  1.00 GiB  993.19 MiB     0 B          0 B             nothing
10    gpu   none  1.00 GiB  993.38 MiB     0 B          0 B             nothing
empty: 3-9,11-17

distance to    0    1    2   10
from 0        10   40   80  120
from 1        40   10  120   80
from 2        80  120   10   40
from 10      120   80   40   10

GPUs        none: not part of a snapshot
"""


def machine(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["machine", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    return result


def unpack(name: str, tmp_path: Path) -> str:
    with tarfile.open(MACHINES / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return str(tmp_path)


def test_the_page_of_a_dual_gh200(tmp_path: Path) -> None:
    root = unpack("arm64-64k-gh200x2-mig-hotadd", tmp_path)
    assert machine("--root", root).stdout == DUAL_GH200


def test_advice_comes_last(tmp_path: Path) -> None:
    root = unpack("x86-gh200x2-cdmm-cdmm", tmp_path)
    last = machine("--root", root).stdout.splitlines()[-1]
    assert last.startswith("advice: automatic NUMA balancing is on")
    assert last.endswith("As root: sysctl -w kernel.numa_balancing=0")


def test_json_of_a_snapshot(tmp_path: Path) -> None:
    report = json.loads(machine("--json", "--root", unpack("x86-gh200x2-cdmm-cdmm", tmp_path)).stdout)
    assert [node["kind"] for node in report["machine"]["nodes"]] == ["cpu", "cpu"]
    assert [item["name"] for item in report["advice"]] == ["numa_balancing"]
    assert report["gpus"] == {"found": [], "absence": "not part of a snapshot"} and report["numa_calls"] is None


def test_huge_pages_set_aside_are_said(tmp_path: Path) -> None:
    root = unpack("x86-gb10-gb10", tmp_path)
    pool = tmp_path / "sys/devices/system/node/node0/hugepages/hugepages-1048576kB"
    (pool / "nr_hugepages").write_text("4\n")
    (pool / "free_hugepages").write_text("3\n")
    assert "node 0: 4 huge pages of 1.00 GiB set aside, 3 free\n" in machine("--root", root).stdout


def test_this_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (
        Gpu(0, "NVIDIA GH200", "0009:01:00.0", 96 << 30, 95 << 30, 0, 2, (1,)),
        Gpu(1, "NVIDIA GB10", "000a:01:00.0", None, None, None, None, ()),
    )
    monkeypatch.setattr("hotset.machine.gpus.read_gpus", lambda topology: Gpus(found))
    text = machine().stdout
    assert "GPU  name          PCI address      memory  CPU node  own node  reads GPUs\n" in text
    assert "0    NVIDIA GH200  0009:01:00.0  96.00 GiB         0         2           1\n" in text
    assert "1    NVIDIA GB10   000a:01:00.0     shared      none      none        none\n" in text
    assert "\nNUMA calls  " in text
    report = json.loads(machine("--json").stdout)
    assert set(report["numa_calls"]) == {"mbind", "get_mempolicy", "move_pages", "has_numa_maps"}


def test_a_root_that_is_not_there() -> None:
    result = CliRunner().invoke(cli, ["machine", "--root", "/nowhere"])
    assert (result.exit_code, result.stdout) == (2, "")
