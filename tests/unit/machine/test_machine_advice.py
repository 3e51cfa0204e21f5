"""Settings that hurt: each is named on a machine where it does, and not on one where it does not matter."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from machine_trees import GIB, FakeNode, FakeRoot, epyc_9354_nps4, gh200, laptop, write_nodes

from hotset.machine.advice import AUTO_ONLINE, advise, read_settings
from hotset.machine.memory import read_memory
from hotset.machine.thp import THP
from hotset.machine.topology import read_topology


@pytest.fixture
def quiet(machine: FakeRoot) -> FakeRoot:
    """A machine with nothing to say about."""
    machine.write(f"{THP}/enabled", "always [madvise] never")
    return machine


def lines(root: Path) -> dict[str, str]:
    topology = read_topology(root)
    return {item.name: item.line for item in advise(topology, read_memory(root), read_settings(topology, root))}


def test_nothing_to_say(quiet: FakeRoot) -> None:
    """A kernel that hides its settings is not accused of any."""
    assert lines(quiet.path) == {}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("numa_balancing", "/proc/sys/kernel/numa_balancing"),
        ("zone_reclaim_mode", "/proc/sys/vm/zone_reclaim_mode"),
    ],
)
def test_settings_that_matter_with_several_nodes(quiet: FakeRoot, name: str, path: str) -> None:
    laptop(quiet)
    quiet.write(path, "1")
    assert lines(quiet.path) == {}, "one node: it does nothing"
    epyc_9354_nps4(quiet)
    assert list(lines(quiet.path)) == [name]
    assert lines(quiet.path)[name].endswith(f"As root: sysctl -w {path.removeprefix('/proc/sys/').replace('/', '.')}=0")
    quiet.write(path, "0")
    assert lines(quiet.path) == {}


def test_huge_pages_off(quiet: FakeRoot) -> None:
    quiet.write(f"{THP}/enabled", "always madvise [never]")
    assert list(lines(quiet.path)) == ["huge_pages"]


@pytest.mark.parametrize(
    ("cmdline", "config", "is_on"),
    [
        ("quiet init_on_alloc=1", "", True),
        ("init_on_alloc=0 init_on_alloc=on", "", True),
        ("init_on_alloc=1 init_on_alloc=0", "CONFIG_INIT_ON_ALLOC_DEFAULT_ON=y", False),
        ("init_on_alloc=off", "CONFIG_INIT_ON_ALLOC_DEFAULT_ON=y", False),
        ("quiet", "CONFIG_A=y\nCONFIG_INIT_ON_ALLOC_DEFAULT_ON=y\nCONFIG_B=y", True),
        ("quiet", "# CONFIG_INIT_ON_ALLOC_DEFAULT_ON is not set", False),
        ("xinit_on_alloc=1", "", False),
    ],
)
@pytest.mark.parametrize("is_packed", [True, False])
def test_pages_filled_with_zeros(quiet: FakeRoot, cmdline: str, config: str, is_on: bool, is_packed: bool) -> None:
    quiet.write("/proc/cmdline", cmdline)
    if is_packed:
        quiet.write_bytes("/proc/config.gz", gzip.compress(config.encode()))
    else:
        quiet.write("/proc/sys/kernel/osrelease", "6.12.0")
        quiet.write("/boot/config-6.12.0", config)
    assert list(lines(quiet.path)) == (["init_on_alloc"] if is_on else [])


def test_governors_of_the_cpus_that_may_be_used(quiet: FakeRoot) -> None:
    for cpu in range(8):
        quiet.write(
            f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "performance" if cpu < 4 else "ondemand"
        )
    assert "ondemand on CPUs 4-7: clocks" in lines(quiet.path)["governor"]
    quiet.set_affinity("0-3")
    assert lines(quiet.path) == {}


def test_swap_in_use(quiet: FakeRoot) -> None:
    memory = (quiet.path / "proc/meminfo").read_text()
    quiet.write("/proc/meminfo", f"{memory}SwapTotal: 8388608 kB\nSwapFree: 8380000 kB")
    assert lines(quiet.path) == {}, "a few idle pages"
    quiet.write("/proc/meminfo", f"{memory}SwapTotal: 8388608 kB\nSwapFree: 6291456 kB")
    assert lines(quiet.path)["swap"].startswith("2.00 GiB are swapped out")


@pytest.mark.parametrize(("name", "what"), [("memory.max", "ends processes"), ("memory.high", "slows processes down")])
def test_a_limit_that_is_near(quiet: FakeRoot, name: str, what: str) -> None:
    quiet.mount_v2("/job")
    quiet.write(f"/sys/fs/cgroup/job/{name}", str(8 * GIB))
    quiet.write("/sys/fs/cgroup/job/memory.current", str(2 * GIB))
    assert lines(quiet.path) == {}
    quiet.write("/sys/fs/cgroup/job/memory.current", str(15 * GIB // 2))
    line = lines(quiet.path)["memory_limit"]
    assert f"leaves 512.00 MiB of 8.00 GiB; at the limit the kernel {what}" in line
    assert line.endswith(f"echo max > /sys/fs/cgroup/job/{name}")


def test_a_near_limit_of_version_1_has_another_word_for_none(quiet: FakeRoot) -> None:
    quiet.mount_v1("/job")
    quiet.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(GIB))
    quiet.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", str(GIB))
    assert lines(quiet.path)["memory_limit"].endswith("echo -1 > /sys/fs/cgroup/memory/job/memory.limit_in_bytes")


def without_gpu_memory(machine: FakeRoot) -> None:
    nodes = [FakeNode(0, "0-7", 1024, "10 80 80")]
    write_nodes(machine, nodes + [FakeNode(node, "", 0, "80 10 11", has_device=True) for node in (1, 2)])


def test_gpu_memory_that_is_a_node_needs_no_advice(quiet: FakeRoot) -> None:
    """The nodes for MIG are always empty: emptiness alone is no fault."""
    gh200(quiet)
    assert lines(quiet.path) == {}


def test_memory_that_nobody_names(quiet: FakeRoot) -> None:
    """What cannot be decided is said; a device that names the node ends it."""
    write_nodes(quiet, [FakeNode(0, "0-7", 1024, "10 20"), FakeNode(4, "", 512, "20 10", is_movable=True)])
    assert list(lines(quiet.path)) == ["guessed_nodes"]
    assert lines(quiet.path)["guessed_nodes"].startswith(
        "movable memory without CPUs on node 4, and no GPU, DAX or CXL"
    )
    quiet.write("/sys/bus/dax/devices/dax4.0/target_node", "4")
    assert lines(quiet.path) == {}


def test_gpu_nodes_at_0_mb(quiet: FakeRoot) -> None:
    without_gpu_memory(quiet)
    quiet.write(AUTO_ONLINE, "offline")
    assert lines(quiet.path)["gpu_nodes"].startswith(
        "no memory on the device nodes 1-2, so GPU memory is not a NUMA node: no"
    )
    quiet.write("/proc/driver/nvidia/version", "NVRM version: 595.45.04")
    line = lines(quiet.path)["gpu_nodes"]
    assert f"{AUTO_ONLINE} was not online_movable. As root: echo online_movable > {AUTO_ONLINE}" in line
    quiet.write(AUTO_ONLINE, "online_movable")
    assert "the driver seems to keep it. As root: set 'options nvidia NVreg_Coherent" in lines(quiet.path)["gpu_nodes"]


def test_cdmm(quiet: FakeRoot) -> None:
    """The same parameter on a machine with PCIe GPUs changes nothing there."""
    quiet.write("/proc/driver/nvidia/version", "NVRM version: 595.45.04")
    quiet.write("/proc/driver/nvidia/params", 'EnableMSI: 1\nCoherentGPUMemoryMode: "driver"\nDeviceFileUID: 0')
    assert lines(quiet.path) == {}
    quiet.write("/proc/cpuinfo", "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd4f\n")
    assert list(lines(quiet.path)) == ["gpu_memory_mode"]
    quiet.write("/proc/cpuinfo", "processor : 0\nmodel name : Test CPU\n")
    without_gpu_memory(quiet)
    assert list(lines(quiet.path)) == ["gpu_memory_mode"], "one cause, one line"
