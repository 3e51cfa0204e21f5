"""What GPUs read and write, through NVIDIA's driver library: own memory, each node's memory, each other's.

Only copies are measured, by the GPU's copy engines: hotset has no code that runs on a GPU. A copy inside the GPU's own
memory reads and writes every byte, so its traffic is twice what it copies.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hotset.machine.gpus import Gpus
from hotset.machine.samples import MIN_SAMPLES, Samples
from hotset.units import MIB

LIBRARY = "libcuda.so.1"
BUFFER_BYTES = 256 * MIB
COPIES_PER_SAMPLE = 4
NAME_LENGTH = 96

# cuda.h
SUCCESS = 0
MULTIPROCESSOR_COUNT = 16
INTEGRATED = 18

#: Memory of a size, bound to a node, with its address; the object keeps it.
HostBuffer = Callable[[int, int], tuple[Any, int]]


@dataclass(frozen=True)
class CudaGpu:
    """One GPU. ``gpu_id`` is NVML's number of it, the driver's own where NVML does not know it."""

    gpu_id: int
    name: str
    num_cores: int
    total_bytes: int
    #: It has no memory of its own but uses the CPUs'.
    is_integrated: bool
    #: Node with CPUs beside it, and the node that is its own memory, where they are known.
    cpu_node: int | None
    memory_node: int | None


@dataclass(frozen=True)
class GpuPath:
    """Bytes per second that a GPU reads from, and writes to, a memory: of a GPU ("hbm") or of a node ("node")."""

    gpu_id: int
    memory: str
    memory_id: int
    read: Samples
    write: Samples | None

    def to_json(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu_id,
            "memory": f"{self.memory}{self.memory_id}",
            "read_bytes_per_s": self.read.to_json(),
            "write_bytes_per_s": self.write.to_json() if self.write else None,
        }


@dataclass(frozen=True)
class GpuReport:
    """All GPUs and their paths, or why there are none. ``problems`` are paths that could not be measured, and why."""

    gpus: tuple[CudaGpu, ...] = ()
    paths: tuple[GpuPath, ...] = ()
    problems: tuple[str, ...] = ()
    absence: str | None = None


class _CudaError(Exception):
    """A call failed; its text is what the driver says."""


def load_library() -> Any:
    """Return the driver library, or ``None`` when it is not installed."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def measure_gpus(
    library: Any,
    known: Gpus,
    node_ids: Sequence[int],
    open_host: HostBuffer,
    seconds: float,
    step: Callable[[str], None],
) -> GpuReport:
    """Measure every path of every GPU, ``seconds`` each way. Never fails: what does not work is stated in the result.

    Args:
        library: what :func:`load_library` returned.
        known: the GPUs by NVML, for their numbers and nodes.
        node_ids: nodes whose memory is copied from and to.
        open_host: returns host memory of (node, bytes).
    """
    if library is None:
        return GpuReport(absence=f"{LIBRARY} is not installed (it comes with NVIDIA's driver)")
    try:
        _call(library, "cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        _call(library, "cuDeviceGetCount", ctypes.byref(count))
        devices = [_Device(library, index, known) for index in range(count.value)]
    except _CudaError as error:
        return GpuReport(absence=str(error))
    paths: list[GpuPath] = []
    problems: list[str] = []
    for device in devices:
        step(f"GPU {device.gpu.gpu_id}")
        with _guard(problems, device.name), device.current():
            paths += _device_paths(device, devices, node_ids, open_host, seconds, problems)
    return GpuReport(
        tuple(device.gpu for device in devices), tuple(paths), tuple(problems),
        None if devices else "the driver has no GPU",
    )  # fmt: skip


@contextmanager
def _guard(problems: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except (_CudaError, RuntimeError) as error:  # RuntimeError: host memory that the system refuses
        problems.append(f"{what}: {error}")


def _call(library: Any, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code == SUCCESS:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
    raise _CudaError(f"{name}: {text.value.decode(errors='replace') if text.value else f'error {code}'}")


class _Device:
    """One GPU as the driver sees it, with its primary context."""

    def __init__(self, library: Any, index: int, known: Gpus) -> None:
        self.library = library
        self.handle = ctypes.c_int()
        self.context = ctypes.c_void_p()
        _call(library, "cuDeviceGet", ctypes.byref(self.handle), ctypes.c_int(index))
        name, address = (ctypes.create_string_buffer(NAME_LENGTH) for _ in range(2))
        _call(library, "cuDeviceGetName", name, ctypes.c_int(NAME_LENGTH), self.handle)
        _call(library, "cuDeviceGetPCIBusId", address, ctypes.c_int(NAME_LENGTH), self.handle)
        total = ctypes.c_size_t()
        _call(library, "cuDeviceTotalMem_v2", ctypes.byref(total), self.handle)
        pci_address = address.value.decode(errors="replace").lower()
        told = next((gpu for gpu in known.found if gpu.pci_address == pci_address), None)
        self.gpu = CudaGpu(
            gpu_id=told.gpu_id if told else index,
            name=name.value.decode(errors="replace"),
            num_cores=self._attribute(MULTIPROCESSOR_COUNT),
            total_bytes=total.value,
            is_integrated=self._attribute(INTEGRATED) == 1,
            cpu_node=told.cpu_node if told else None,
            memory_node=told.memory_node if told else None,
        )
        self.name = f"GPU {self.gpu.gpu_id}"

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        _call(self.library, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), self.handle)
        return value.value

    @contextmanager
    def current(self) -> Iterator[None]:
        """Calls are for this GPU."""
        _call(self.library, "cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.handle)
        try:
            _call(self.library, "cuCtxSetCurrent", self.context)
            yield
        finally:
            self.library.cuDevicePrimaryCtxRelease_v2(self.handle)

    @contextmanager
    def memory(self) -> Iterator[ctypes.c_uint64]:
        """A buffer in the memory of the current GPU."""
        address = ctypes.c_uint64()
        _call(self.library, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(BUFFER_BYTES))
        try:
            yield address
        finally:
            self.library.cuMemFree_v2(address)

    @contextmanager
    def pinned(self, address: int) -> Iterator[ctypes.c_void_p]:
        """Host memory that the copy engines read directly."""
        pointer = ctypes.c_void_p(address)
        _call(self.library, "cuMemHostRegister_v2", pointer, ctypes.c_size_t(BUFFER_BYTES), ctypes.c_uint(0))
        try:
            yield pointer
        finally:
            self.library.cuMemHostUnregister(pointer)

    def rates(self, seconds: float, name: str, *arguments: Any) -> Samples:
        """Bytes per second of a copy of a whole buffer."""
        values: list[float] = []
        begin = time.perf_counter()
        _call(self.library, name, *arguments)  # warm-up
        while len(values) < MIN_SAMPLES or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            for _ in range(COPIES_PER_SAMPLE):
                _call(self.library, name, *arguments)
            _call(self.library, "cuCtxSynchronize")
            values.append(COPIES_PER_SAMPLE * BUFFER_BYTES / (time.perf_counter() - start))
        return Samples(tuple(values))


def _device_paths(
    device: _Device,
    devices: Sequence[_Device],
    node_ids: Sequence[int],
    open_host: HostBuffer,
    seconds: float,
    problems: list[str],
) -> Iterator[GpuPath]:
    size, gpu_id = ctypes.c_size_t(BUFFER_BYTES), device.gpu.gpu_id
    with device.memory() as first:
        with _guard(problems, f"{device.name}, own memory"), device.memory() as second:
            inside = device.rates(seconds, "cuMemcpyDtoD_v2", second, first, size).times(2)
            yield GpuPath(gpu_id, "hbm", gpu_id, inside, None)
        for node_id in node_ids:
            with _guard(problems, f"{device.name}, memory of node {node_id}"):
                keep, address = open_host(node_id, BUFFER_BYTES)
                with device.pinned(address) as host:
                    reads = device.rates(seconds, "cuMemcpyHtoD_v2", first, host, size)
                    writes = device.rates(seconds, "cuMemcpyDtoH_v2", host, first, size)
                del keep
                yield GpuPath(gpu_id, "node", node_id, reads, writes)
        for other in devices:
            if other is device or not _can_reach(device, other):
                continue
            with _guard(problems, f"{device.name}, memory of {other.name}"):
                yield _peer_path(device, other, first, size, seconds)


def _can_reach(device: _Device, other: _Device) -> bool:
    answer = ctypes.c_int()
    _call(device.library, "cuDeviceCanAccessPeer", ctypes.byref(answer), device.handle, other.handle)
    return answer.value == 1


def _peer_path(device: _Device, other: _Device, own: ctypes.c_uint64, size: ctypes.c_size_t, seconds: float) -> GpuPath:
    try:
        with other.current(), other.memory() as far:
            _call(device.library, "cuCtxSetCurrent", device.context)
            # Without this the driver copies by way of host memory.
            _call(device.library, "cuCtxEnablePeerAccess", other.context, ctypes.c_uint(0))
            reads = device.rates(seconds, "cuMemcpyPeer", own, device.context, far, other.context, size)
            writes = device.rates(seconds, "cuMemcpyPeer", far, other.context, own, device.context, size)
            device.library.cuCtxDisablePeerAccess(other.context)
            device.library.cuCtxSetCurrent(other.context)  # whose memory is freed now
    finally:
        device.library.cuCtxSetCurrent(device.context)
    return GpuPath(device.gpu.gpu_id, "hbm", other.gpu.gpu_id, reads, writes)
