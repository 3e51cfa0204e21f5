"""Settings of the kernel and the machine that cost speed or break a plan, each with the command that changes it.

hotset changes none of them: that takes root, and other programs may want them as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hotset.machine.files import (
    ROOT,
    format_cpu_list,
    read_int,
    read_kernel_config,
    read_table,
    read_text,
    require_text,
)
from hotset.machine.memory import MemoryState
from hotset.machine.nodes import name_nodes
from hotset.machine.thp import THP, HugePages
from hotset.machine.topology import CPUS, Topology
from hotset.units import format_bytes

AUTO_ONLINE = "/sys/devices/system/memory/auto_online_blocks"
NVIDIA = "/proc/driver/nvidia"
#: A cgroup limit is near when less than this share of it is left.
NEAR_SHARE = 1 / 8
#: Swap in use counts from this share of the memory on: a few pages of idle programs lie there on any machine.
SWAP_SHARE = 1 / 100


@dataclass(frozen=True)
class Advice:
    """One line for a person. ``command`` is for root; ``None`` where no command helps."""

    name: str
    text: str
    command: str | None

    @property
    def line(self) -> str:
        return self.text if self.command is None else f"{self.text}. As root: {self.command}"


@dataclass(frozen=True)
class KernelSettings:
    """What :func:`read_settings` found. ``None``: this kernel does not say."""

    numa_balancing: int | None
    zone_reclaim_mode: int | None
    init_on_alloc: bool | None
    #: For each frequency governor the CPUs (of those that this process may use) under it.
    governors: tuple[tuple[str, tuple[int, ...]], ...]
    swap_used_bytes: int
    auto_online_blocks: str | None
    #: NVIDIA's driver is loaded, and how it manages memory that CPUs can reach: "numa", "driver", "" for its default.
    has_nvidia_driver: bool
    gpu_memory_mode: str | None
    is_arm: bool


def read_settings(topology: Topology, root: Path = ROOT) -> KernelSettings:
    """Read the settings that :func:`advise` judges."""
    governors: dict[str, list[int]] = {}
    for cpu in topology.affinity:
        governor = read_text(root, f"{CPUS}/cpu{cpu}/cpufreq/scaling_governor")
        if governor:
            governors.setdefault(governor, []).append(cpu)
    memory = read_table(require_text(root, "/proc/meminfo"))
    mode = re.search(r'^CoherentGPUMemoryMode: "(.*)"$', read_text(root, f"{NVIDIA}/params") or "", re.MULTILINE)
    return KernelSettings(
        numa_balancing=read_int(root, "/proc/sys/kernel/numa_balancing"),
        zone_reclaim_mode=read_int(root, "/proc/sys/vm/zone_reclaim_mode"),
        init_on_alloc=_init_on_alloc(root),
        governors=tuple((name, tuple(cpus)) for name, cpus in governors.items()),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        auto_online_blocks=read_text(root, AUTO_ONLINE),
        has_nvidia_driver=read_text(root, f"{NVIDIA}/version") is not None,
        gpu_memory_mode=mode[1] if mode else None,
        is_arm="CPU implementer" in (read_text(root, "/proc/cpuinfo") or ""),
    )


def advise(topology: Topology, memory: MemoryState, settings: KernelSettings) -> tuple[Advice, ...]:
    """Return what to change on this machine, most costly first; what does not apply here is left out."""
    found = (
        _numa_balancing(topology, settings),
        huge_page_advice(topology.huge_pages),
        *_near_limits(memory),
        _swap(memory, settings),
        _gpu_memory(topology, settings),
        _guessed_nodes(topology),
        _zone_reclaim(topology, settings),
        _governor(settings),
        _zeroing(settings),
    )
    return tuple(advice for advice in found if advice is not None)


def huge_page_advice(pages: HugePages) -> Advice | None:
    """Say what to do when huge pages are off; ``None`` when they are offered."""
    if pages.is_offered:
        return None
    cost = "reading memory is then 20 to 30 % slower"
    if pages.is_disabled_for_process:
        state, command = "switched off for this process by what started it (PR_SET_THP_DISABLE)", None
    elif pages.mode == "absent":
        state, command = "not in this kernel", None
    else:
        state, command = "off", f"echo madvise > {THP}/enabled"
    return Advice("huge_pages", f"huge pages are {state}; {cost}", command)


def _num_memory_nodes(topology: Topology) -> int:
    return sum(node.total_bytes > 0 for node in topology.nodes)


def _numa_balancing(topology: Topology, settings: KernelSettings) -> Advice | None:
    if not settings.numa_balancing or _num_memory_nodes(topology) < 2:
        return None
    text = "automatic NUMA balancing is on: the kernel interrupts reads to sample them and moves pages between nodes"
    return Advice("numa_balancing", text, "sysctl -w kernel.numa_balancing=0")


def _zone_reclaim(topology: Topology, settings: KernelSettings) -> Advice | None:
    if not settings.zone_reclaim_mode or _num_memory_nodes(topology) < 2:
        return None
    text = "zone_reclaim_mode is on: a full node throws away file cache, the model's too, while other nodes have room"
    return Advice("zone_reclaim_mode", text, "sysctl -w vm.zone_reclaim_mode=0")


def _zeroing(settings: KernelSettings) -> Advice | None:
    if not settings.init_on_alloc:
        return None
    text = "init_on_alloc is on: the kernel fills every page with zeros before a file is read into it, loads are slower"
    command = "add init_on_alloc=0 to the kernel's command line (GRUB_CMDLINE_LINUX) and reboot"
    return Advice("init_on_alloc", text, command)


def _governor(settings: KernelSettings) -> Advice | None:
    slow = [(name, cpus) for name, cpus in settings.governors if name != "performance"]
    if not slow:
        return None
    parts = " and ".join(f"{name} on CPUs {format_cpu_list(cpus)}" for name, cpus in slow)
    text = f"the frequency governor is {parts}: clocks fall between steps and rise late"
    return Advice("governor", text, f"echo performance | tee {CPUS}/cpu*/cpufreq/scaling_governor")


def _near_limits(memory: MemoryState) -> list[Advice]:
    found = []
    for term in memory.terms:
        if term.source.startswith("/sys/fs/cgroup") and term.available_bytes < term.limit_bytes * NEAR_SHARE:
            left = f"{format_bytes(term.available_bytes)} of {format_bytes(term.limit_bytes)}"
            what = "slows processes down" if term.source.endswith("memory.high") else "ends processes"
            text = f"the memory limit {term.source} leaves {left}; at the limit the kernel {what}"
            no_limit = "-1" if term.source.endswith("limit_in_bytes") else "max"
            found.append(Advice("memory_limit", text, f"echo {no_limit} > {term.source}"))
    return found


def _swap(memory: MemoryState, settings: KernelSettings) -> Advice | None:
    if settings.swap_used_bytes < memory.terms[0].limit_bytes * SWAP_SHARE:
        return None
    text = (
        f"{format_bytes(settings.swap_used_bytes)} are swapped out: memory is short, and a model that is swapped "
        "reads its weights from the disk"
    )
    return Advice("swap", text, "swapoff -a, after ending what holds the memory")


def _gpu_memory(topology: Topology, settings: KernelSettings) -> Advice | None:
    """GPU memory that CPUs could reach as NUMA nodes, and cannot as the machine is set up."""
    device_nodes = tuple(node.node_id for node in topology.nodes if node.has_generic_initiator)
    if topology.gpu_nodes:
        return None
    numa_mode = "set 'options nvidia NVreg_CoherentGPUMemoryMode=numa' in /etc/modprobe.d/nvidia.conf and reboot"
    if settings.gpu_memory_mode == "driver" and (device_nodes or settings.is_arm):
        text = "NVIDIA's driver keeps the GPU memory to itself (CDMM): it is no NUMA node, mbind does not reach it"
        return Advice("gpu_memory_mode", text, numa_mode)
    if not device_nodes:
        return None
    text = f"no memory on the device {name_nodes(device_nodes)}, so GPU memory is not a NUMA node"
    if not settings.has_nvidia_driver:
        return Advice("gpu_nodes", f"{text}: no driver is loaded", "modprobe nvidia")
    if settings.auto_online_blocks == "online_movable":
        return Advice("gpu_nodes", f"{text}: the driver seems to keep it", numa_mode)
    text += f": when the driver loaded, {AUTO_ONLINE} was not online_movable"
    return Advice("gpu_nodes", text, f"echo online_movable > {AUTO_ONLINE} before the driver loads, at every boot")


def _guessed_nodes(topology: Topology) -> Advice | None:
    """Memory without CPUs that may be a GPU's or a CXL device's."""
    guessed = tuple(node.node_id for node in topology.nodes if node.is_kind_guessed)
    if not guessed:
        return None
    text = (
        f"movable memory without CPUs on {name_nodes(guessed)}, and no GPU, DAX or CXL device names it: taken for the "
        "memory of a GPU, so it is not counted as available"
    )
    return Advice("guessed_nodes", text, None)


def _init_on_alloc(root: Path) -> bool | None:
    """The last word of the kernel's command line counts, then what the kernel was built with."""
    values = re.findall(r"(?:^|\s)init_on_alloc=(\S+)", read_text(root, "/proc/cmdline") or "")
    if values:
        # As the kernel's kstrtobool reads it.
        return values[-1][:1] in "yYtT1" or values[-1][:2].lower() == "on"
    config = read_kernel_config(root)
    return None if config is None else "\nCONFIG_INIT_ON_ALLOC_DEFAULT_ON=y\n" in f"\n{config}\n"
