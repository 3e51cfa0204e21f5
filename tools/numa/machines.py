"""The machines that are emulated: their nodes, distances and memory attributes, and the words that tell QEMU.

Everything about a machine stands here once. Guests get the same description as JSON, and hold what hotset finds
against it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

OWN_DISTANCE = 10
#: By architecture: CONFIG_NODES_SHIFT of Debian's kernels. Further nodes are left out without an error.
DEBIAN_MOST_NODES = {"x86-64": 1024, "arm64": 16}
_MEBIBYTES_FOR_HOT_ADDING = 4096


@dataclass(frozen=True)
class Node:
    """A NUMA node. ``module`` is the socket that it belongs to; a node without ``cpus`` has only memory.

    The nodes of a GPU belong to a PCI device (a Generic Initiator of the firmware's table). What memory they have is
    hot-added and movable, as NVIDIA's driver adds it on Grace-Hopper.
    """

    module: int
    num_mebibytes: int
    cpus: tuple[int, ...] = ()
    is_gpu: bool = False

    @property
    def kind(self) -> str:
        """In hotset's words."""
        if self.cpus:
            return "cpu"
        if not self.num_mebibytes:
            return "empty"
        return "gpu" if self.is_gpu else "memory"


@dataclass(frozen=True)
class Link:
    """How a module's CPUs reach a node's memory: the attributes of the firmware's HMAT."""

    latency_ns: int
    gibibytes_per_s: int


@dataclass(frozen=True)
class Machine:
    """A machine with two CPUs on every module. ``distances[i][j]`` is from node i to node j."""

    name: str
    about: str
    nodes: tuple[Node, ...]
    distances: tuple[tuple[int, ...], ...]

    @property
    def has_gpus(self) -> bool:
        return any(node.is_gpu for node in self.nodes)

    @property
    def num_cpus(self) -> int:
        return sum(len(node.cpus) for node in self.nodes)

    @property
    def num_mebibytes(self) -> int:
        return sum(node.num_mebibytes for node in self.nodes)

    def initiator(self, node_id: int) -> int:
        """The node whose CPUs are nearest to that node."""
        module = self.nodes[node_id].module
        return next(i for i, node in enumerate(self.nodes) if node.cpus and node.module == module)

    def links(self) -> dict[tuple[int, int], Link]:
        """Attributes by (node with CPUs, node). Firmware knows none of memory that is hot-added."""
        return {
            (i, j): _link(source, target)
            for i, source in enumerate(self.nodes)
            if source.cpus
            for j, target in enumerate(self.nodes)
            if not target.is_gpu
        }

    def as_json(self) -> dict[str, object]:
        """The description that the guest's tests compare with; bandwidths in bytes per second."""
        nodes = []
        for i, node in enumerate(self.nodes):
            initiator = self.initiator(i)
            link = self.links().get((initiator, i))
            nodes.append(
                {
                    "node_id": i,
                    "kind": node.kind,
                    "cpus": list(node.cpus),
                    "num_bytes": node.num_mebibytes << 20,
                    "distances": list(self.distances[i]),
                    "initiator": initiator,
                    "latency_ns": link.latency_ns if link else None,
                    "bytes_per_s": link.gibibytes_per_s << 30 if link else None,
                }
            )
        return {"name": self.name, "about": self.about, "nodes": nodes}


def _link(source: Node, target: Node) -> Link:
    """After measurements of a dual GH200: local LPDDR5X, the other Grace's, own GPU's HBM, the other's.

    They were GB/s. The firmware's table holds 16 bits a value, in a unit that divides all of them, hence GiB/s.
    """
    is_near = source.module == target.module
    if target.cpus:
        return Link(120, 348) if is_near else Link(400, 116)
    return Link(600, 297) if is_near else Link(900, 132)


def _distance(source: Node, target: Node) -> int:
    """Between two nodes, as `numactl -H` prints it on Grace-Blackwell machines, whose layout a dual GH200 has."""
    if bool(source.cpus) != bool(target.cpus):
        return 80 if source.module == target.module else 120
    return 11 if source.module == target.module else 40


def _machine(name: str, about: str, nodes: tuple[Node, ...]) -> Machine:
    places = range(len(nodes))
    distances = (tuple(OWN_DISTANCE if i == j else _distance(nodes[i], nodes[j]) for j in places) for i in places)
    return Machine(name, about, nodes, tuple(distances))


_GRACE_0, _GRACE_1 = Node(0, 1024, (0, 1)), Node(1, 1024, (2, 3))
_HBM_0, _HBM_1 = Node(0, 512), Node(1, 512)
_GPU_0, _GPU_1 = Node(0, 512, is_gpu=True), Node(1, 512, is_gpu=True)
_MIG_0, _MIG_1 = Node(0, 0, is_gpu=True), Node(1, 0, is_gpu=True)

MACHINES = {
    machine.name: machine
    for machine in (
        _machine(
            "gh200x2",
            "two modules as two GH200 are: CPUs with memory on nodes 0 and 1, memory alone on 2 and 3",
            (_GRACE_0, _GRACE_1, _HBM_0, _HBM_1),
        ),
        _machine(
            "gh200x2-gpu",
            "the same with the memory of GPUs on 2 and 4, as their driver adds it, and empty MIG nodes 3 and 5",
            (_GRACE_0, _GRACE_1, _GPU_0, _MIG_0, _GPU_1, _MIG_1),
        ),
        _machine(
            "gh200x2-mig",
            "18 nodes numbered as those of two GH200: the memory of GPUs on 2 and 10, seven MIG nodes after each",
            (_GRACE_0, _GRACE_1, _GPU_0, *[_MIG_0] * 7, _GPU_1, *[_MIG_1] * 7),
        ),
    )
}


def enlarged(machine: Machine) -> Machine:
    """The same with 3 GiB at the CPUs of each module: six huge pages of 512 MiB, some of which the kernel leaves whole.

    Huge pages have that size where pages have 64 KiB. The memory of GPUs is added in such blocks there.
    """
    nodes = tuple(replace(node, num_mebibytes=3072) if node.cpus else node for node in machine.nodes)
    return replace(machine, nodes=nodes)


def kernel_words(machine: Machine) -> list[str]:
    """Words of the kernel's command line that this machine needs."""
    return ["memhp_default_state=online_movable"] if machine.has_gpus else []


def qemu_words(machine: Machine) -> list[str]:
    """QEMU's options for CPUs, memory, nodes, distances, HMAT and stand-ins for GPUs."""
    num_modules = len({node.module for node in machine.nodes})
    cores = machine.num_cpus // num_modules
    at_boot = sum(node.num_mebibytes for node in machine.nodes if not node.is_gpu)
    most = machine.num_mebibytes + _MEBIBYTES_FOR_HOT_ADDING
    words = ["-smp", f"{machine.num_cpus},sockets={num_modules},cores={cores},threads=1"]
    words += ["-m", f"{at_boot}M,slots=8,maxmem={most}M" if machine.has_gpus else f"{at_boot}M"]
    backends = [f"memory{i}" for i, node in enumerate(machine.nodes) if node.num_mebibytes]
    devices = [f"initiator{i}" for i, node in enumerate(machine.nodes) if node.is_gpu]
    names = ordered_ids([*backends, *devices])
    for i, node in enumerate(machine.nodes):
        options = f"node,nodeid={i}" + (f",cpus={node.cpus[0]}-{node.cpus[-1]}" if node.cpus else "")
        if node.num_mebibytes:
            words += ["-object", f"memory-backend-ram,id={names[f'memory{i}']},size={node.num_mebibytes}M"]
        if not node.is_gpu:
            options += f",memdev={names[f'memory{i}']},initiator={machine.initiator(i)}"
        words += ["-numa", options]
    for i, row in enumerate(machine.distances):
        for j, value in enumerate(row):
            if i != j:
                words += ["-numa", f"dist,src={i},dst={j},val={value}"]
    for (i, j), link in machine.links().items():
        place = f"hmat-lb,initiator={i},target={j},hierarchy=memory"
        words += ["-numa", f"{place},data-type=access-latency,latency={link.latency_ns}"]
        words += ["-numa", f"{place},data-type=access-bandwidth,bandwidth={link.gibibytes_per_s}G"]
    return words + (_gpu_words(machine, names) if machine.has_gpus else [])


def _gpu_words(machine: Machine, names: dict[str, str]) -> list[str]:
    """A PCI device for each module, under a bridge of that module's node, that owns its nodes and their memory."""
    words = []
    for module in sorted({node.module for node in machine.nodes}):
        node_id = next(i for i, node in enumerate(machine.nodes) if node.cpus and node.module == module)
        bridge = f"pxb-pcie,id=bridge{module},bus=pcie.0,bus_nr={16 * (module + 1)},numa_node={node_id}"
        port = f"pcie-root-port,id=port{module},bus=bridge{module},chassis={module + 1}"
        words += ["-device", bridge, "-device", port, "-device", f"virtio-rng-pci,id=gpu{module},bus=port{module}"]
    for i, node in enumerate(machine.nodes):
        if node.is_gpu:
            owner = f"acpi-generic-initiator,id={names[f'initiator{i}']},pci-dev=gpu{node.module},node={i}"
            words += ["-object", owner]
        if node.is_gpu and node.num_mebibytes:
            words += ["-device", f"pc-dimm,id=dimm{i},memdev={names[f'memory{i}']},node={i}"]
    return words


def ordered_ids(names: list[str]) -> dict[str, str]:
    """Ids for QEMU's objects, by name, that make it list the objects in the order of ``names``.

    QEMU writes Generic Initiators in the order of a GLib hash table of all objects, and Linux numbers nodes in the
    order in which firmware mentions them. So every id is one whose slot in that table (djb2 times 11, modulo a prime
    below the table's size) is its place in the list.
    """
    prime = next(prime for prime in (7, 13, 31, 61) if prime >= len(names))

    def slot(text: str) -> int:
        value = 5381
        for byte in text.encode():
            value = (value * 33 + byte) % 2**32
        return value * 11 % 2**32 % prime

    ids = {}
    for place, name in enumerate(names):
        ids[name] = next(text for text in (f"{name}-{k}" for k in count()) if slot(text) == place)
    return ids
