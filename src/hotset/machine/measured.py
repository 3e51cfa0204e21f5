"""The measured profile of this machine: made by ``hotset probe``, kept in hotset's data folder, named ``this``."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hotset.config import load_settings
from hotset.errors import MachineError, RequestError
from hotset.machine.cuda import BUFFER_BYTES, CudaGpu, GpuPath
from hotset.machine.matrix import PathRow, Target
from hotset.machine.memory import MemoryState
from hotset.machine.presets import preset_names, read_preset
from hotset.machine.probe import ProbeReport
from hotset.machine.profile import Consumer, Memory, MemoryKind, Profile, parse_profile
from hotset.machine.profile import Path as MemoryPath
from hotset.machine.teams import has_many_nodes
from hotset.machine.topology import Topology

THIS = "this"
SOURCE = "hotset probe"


def measured_profile(report: ProbeReport, topology: Topology, memory: MemoryState, measured: str) -> Profile:
    """What a probe found. ``measured`` is the ISO time of it.

    Memories are named by their node (``node0``) or GPU (``hbm0``), consumers ``cpu0`` by node and ``gpu0`` by GPU.
    """
    names = _node_names(report, topology)
    nearest = {row.node_id: _near(report, topology, row.node_id) for row in report.paths}
    consumers = [_cpu_consumer(report, node_id, names[near]) for node_id, near in nearest.items()]
    gpu_paths = [path for path in report.gpus.paths if _memory_name(path, report, names) is not None]
    memories = [_node_memory(row.target, topology, memory, names) for row in report.paths]
    for gpu in report.gpus.gpus:
        near = _gpu_memory(gpu, names)
        if not any(path.gpu_id == gpu.gpu_id and _memory_name(path, report, names) == near for path in gpu_paths):
            continue  # its own memory could not be measured; the report says why
        if near not in names.values():
            memories.append(Memory(near, "hbm", gpu.total_bytes, 1.0, gpu.memory_node, SOURCE))
        consumers.append(Consumer(f"gpu{gpu.gpu_id}", "gpu", near, gpu.num_cores, {}, None, f"{SOURCE}: {gpu.name}"))
    known = {consumer.name for consumer in consumers}
    placed = {entry.name for entry in memories}
    paths = [_cpu_path(row, names) for row in report.paths]
    for path in gpu_paths:
        name = _memory_name(path, report, names)
        if name in placed and f"gpu{path.gpu_id}" in known:
            paths.append(_gpu_path(path, str(name)))
    threads = sum(consumer.num_cores for consumer in consumers if consumer.kind == "cpu")
    storage = report.storage.read
    return Profile(
        name=THIS,
        about=f"{topology.model}, {threads} threads, {report.isa}",
        source=SOURCE,
        memories=tuple(dict.fromkeys(memories)),
        consumers=tuple(consumers),
        paths=tuple(paths),
        storage_bytes_per_s=storage.median if storage else None,
        measured=measured,
    )


def _node_names(report: ProbeReport, topology: Topology) -> dict[int, str]:
    """Names of the nodes whose memory was measured."""
    gpu_of = {gpu.memory_node: gpu.gpu_id for gpu in report.gpus.gpus if gpu.memory_node is not None}
    names = {}
    for row in report.paths:
        node_id = row.target.node_id
        if row.target.kind == "gpu":
            names[node_id] = f"hbm{gpu_of.get(node_id, topology.gpu_nodes.index(node_id))}"
        else:
            names[node_id] = f"node{node_id}"
    return names


def _near(report: ProbeReport, topology: Topology, node_id: int) -> int:
    """The node of the own memory of these CPUs: their own, or the fastest where that was not measured."""
    rows = [row for row in report.paths if row.node_id == node_id]
    own = topology.nearest_cpu_node(node_id) if topology.cpu_nodes else node_id
    return max(rows, key=lambda row: (row.target.node_id == own, row.read.median)).target.node_id


def _node_memory(target: Target, topology: Topology, memory: MemoryState, names: dict[int, str]) -> Memory:
    kind: MemoryKind = "hbm" if target.kind == "gpu" else "ddr"
    # One node is the machine, with the limits of its cgroups.
    size = target.total_bytes if has_many_nodes(topology) else memory.total_bytes
    return Memory(names[target.node_id], kind, size, 1.0, target.node_id, SOURCE)


def _cpu_consumer(report: ProbeReport, node_id: int, near: str) -> Consumer:
    step = next(row for row in report.steps if row.node_id == node_id)
    rates = {
        row.kind: row.ops_per_s.median
        for row in report.computes
        if row.node_id == node_id and row.num_threads == step.num_threads
    }
    return Consumer(f"cpu{node_id}", "cpu", near, step.num_threads, rates, step.exchange_s.median, SOURCE)


def _cpu_path(row: PathRow, names: dict[int, str]) -> MemoryPath:
    return MemoryPath(
        f"cpu{row.node_id}",
        names[row.target.node_id],
        row.read.median,
        row.write.median,
        row.chunks.median,
        row.latency_s.median,
        row.threads,
        (row.read.low, row.read.high),
        f"{SOURCE}, {row.target.buffer_bytes} bytes {'bound to the node' if row.target.is_bound else 'by first touch'}",
        tuple((count, samples.median) for count, samples in row.reads),
    )


def _gpu_memory(gpu: CudaGpu, names: dict[int, str]) -> str:
    if gpu.is_integrated and gpu.cpu_node in names:
        return names[gpu.cpu_node]
    return names.get(gpu.memory_node, f"hbm{gpu.gpu_id}") if gpu.memory_node is not None else f"hbm{gpu.gpu_id}"


def _memory_name(path: GpuPath, report: ProbeReport, names: dict[int, str]) -> str | None:
    """The memory at the other end; None for one that is not in the profile."""
    if path.memory == "node":
        gpu = next(gpu for gpu in report.gpus.gpus if gpu.gpu_id == path.gpu_id)
        # An integrated GPU's copies inside "its own" memory are the same path, with all of its bandwidth.
        return None if gpu.is_integrated and path.memory_id == gpu.cpu_node else names.get(path.memory_id)
    return _gpu_memory(next(gpu for gpu in report.gpus.gpus if gpu.gpu_id == path.memory_id), names)


def _gpu_path(path: GpuPath, memory: str) -> MemoryPath:
    return MemoryPath(
        f"gpu{path.gpu_id}",
        memory,
        path.read.median,
        path.write.median if path.write else None,
        spread=(path.read.low, path.read.high),
        source=f"{SOURCE}, copies of {BUFFER_BYTES} bytes" + ("" if path.write else ", read and write counted"),
    )


def profile_path() -> Path:
    """Where the measured profile is kept."""
    return load_settings().profile_path


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON. MachineError when the file cannot be written."""
    write_text(path, json.dumps(profile.to_json(), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file; nobody ever sees half of it. MachineError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror}") from error


def read_measured() -> Profile | None:
    """The measured profile of this machine, None when there is none. MachineError when it is damaged."""
    path = profile_path()
    if not path.exists():
        return None
    return read_profile(path)


def read_profile(path: Path) -> Profile:
    """Read a profile's file; MachineError when it cannot be read or is damaged."""
    try:
        return parse_profile(path.read_bytes(), str(path))
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror}", "hotset probe --out FILE writes one") from error


def find_profile(name: str) -> Profile:
    """The machine that ``--machine`` names: ``this``, a preset, or the path of a profile's JSON file.

    Raises:
        RequestError: no such preset.
        MachineError: no measured profile, or a damaged one.
    """
    if name == THIS:
        profile = read_measured()
        if profile is None:
            raise MachineError("this machine was not measured yet", "hotset probe")
        return profile
    if name in preset_names():
        return read_preset(name)
    if name.endswith(".json"):
        return read_profile(Path(name))
    raise RequestError(
        f"no machine is named {name}", f"one of {', '.join((THIS, *preset_names()))}, or the .json file of a profile"
    )
