"""GPU paths with a driver library that copies nothing: who is copied from where, and that everything is given back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hotset.machine import cuda
from hotset.machine.cuda import BUFFER_BYTES, COPIES_PER_SAMPLE, LIBRARY, GpuPath, GpuReport, measure_gpus
from hotset.machine.gpus import Gpu, Gpus
from hotset.machine.samples import Samples

NO_DEVICE, NO_MEMORY = 100, 2
GH200S = Gpus(tuple(Gpu(i, "GH200", f"000{9 + i}:01:00.0", 0, 0, i, node, ()) for i, node in ((0, 2), (1, 10))), None)


class FakeCuda(SimpleNamespace):
    """The driver with ``num_gpus`` GPUs that are peers. It counts what is held and writes down every copy."""

    def __init__(self, num_gpus: int, *, init: int = 0) -> None:
        super().__init__()
        self.current: Any = None
        self.held: list[str] = []
        self.copies: list[tuple[Any, ...]] = []
        self.peers = 0
        self.alloc_limit = 1000

        def put(reference: Any, value: Any) -> int:
            reference._obj.value = value
            return 0

        def name(text: Any, length: Any, device: Any) -> int:
            text.value = f"NVIDIA GH200 {device.value}".encode()
            return 0

        def address(text: Any, length: Any, device: Any) -> int:
            text.value = f"000{9 + device.value}:01:00.0".encode()
            return 0

        def attribute(value: Any, number: Any, device: Any) -> int:
            return put(value, {cuda.MULTIPROCESSOR_COUNT: 132, cuda.INTEGRATED: 0}[number.value])

        def hold(what: str, reference: Any, value: int) -> int:
            self.held.append(what)
            return put(reference, value)

        def drop(what: str) -> int:
            self.held.remove(what)
            return 0

        def alloc(reference: Any, size: Any) -> int:
            assert size.value == BUFFER_BYTES
            if self.held.count("memory") >= self.alloc_limit:
                return NO_MEMORY
            return hold("memory", reference, 1000 * self.current.value + len(self.held))

        def register(pointer: Any, size: Any, flags: Any) -> int:
            self.held.append("pin")
            return 0

        def current(context: Any) -> int:
            self.current = context
            return 0

        def copy(kind: str) -> Any:
            def run(*arguments: Any) -> int:
                self.copies.append((kind, *(argument.value for argument in arguments)))
                return 0

            return run

        def text(code: Any, reference: Any) -> int:
            known = {NO_DEVICE: b"no CUDA-capable device is detected", NO_MEMORY: b"out of memory"}
            return put(reference, known[code.value])

        def enable(context: Any, flags: Any) -> int:
            self.peers += 1
            return 0

        def disable(context: Any) -> int:
            self.peers -= 1
            return 0

        self.cuInit = lambda flags: init
        self.cuGetErrorString = text
        self.cuDeviceGetCount = lambda count: put(count, num_gpus)
        self.cuDeviceGet = lambda device, index: put(device, index.value)
        self.cuDeviceGetName, self.cuDeviceGetPCIBusId, self.cuDeviceGetAttribute = name, address, attribute
        self.cuDeviceTotalMem_v2 = lambda total, device: put(total, 96 << 30)
        self.cuDevicePrimaryCtxRetain = lambda context, device: hold("context", context, 7 + device.value)
        self.cuDevicePrimaryCtxRelease_v2 = lambda device: drop("context")
        self.cuCtxSetCurrent, self.cuCtxSynchronize = current, lambda: 0
        self.cuMemAlloc_v2, self.cuMemFree_v2 = alloc, lambda address: drop("memory")
        self.cuMemHostRegister_v2, self.cuMemHostUnregister = register, lambda pointer: drop("pin")
        self.cuMemcpyDtoD_v2, self.cuMemcpyHtoD_v2, self.cuMemcpyDtoH_v2 = copy("DtoD"), copy("HtoD"), copy("DtoH")
        self.cuMemcpyPeer = copy("peer")
        self.cuDeviceCanAccessPeer = lambda answer, device, other: put(answer, 1)
        self.cuCtxEnablePeerAccess, self.cuCtxDisablePeerAccess = enable, disable


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is 1 s after the last."""
    now = iter(range(1_000_000))
    monkeypatch.setattr(cuda.time, "perf_counter", lambda: float(next(now)))


def measure(library: Any, known: Gpus = GH200S) -> GpuReport:
    return measure_gpus(library, known, [0, 1], lambda node, size: (None, 0x1000 * (node + 1)), 0.0, lambda label: None)


def ends(report: GpuReport) -> list[tuple[int, str, int]]:
    return [(path.gpu_id, path.memory, path.memory_id) for path in report.paths]


def test_every_path_of_every_gpu(clock: None) -> None:
    library = FakeCuda(2)
    report = measure(library)
    assert [(gpu.gpu_id, gpu.cpu_node, gpu.memory_node) for gpu in report.gpus] == [(0, 0, 2), (1, 1, 10)]
    assert ends(report) == [
        (gpu, *end) for gpu in (0, 1) for end in (("hbm", gpu), ("node", 0), ("node", 1), ("hbm", 1 - gpu))
    ]
    assert report.problems == () and report.absence is None
    one = COPIES_PER_SAMPLE * BUFFER_BYTES
    assert [path.read.median for path in report.paths[:4]] == [2 * one, one, one, one], "a copy inside counts twice"
    assert [path.write is None for path in report.paths[:4]] == [True, False, False, False]
    assert library.held == [] and library.peers == 0, "memory, pins, contexts and peer access are given back"


def test_copies_go_the_right_way(clock: None) -> None:
    """Swapped arguments measure the same on a symmetric link, and wrong on Grace-Hopper's."""
    library = FakeCuda(2)
    measure(library)
    kinds = {kind: next(copy for copy in library.copies if copy[0] == kind) for kind in ("DtoD", "HtoD", "DtoH")}
    own = kinds["HtoD"][1]
    assert own == 7001 and kinds["HtoD"] == ("HtoD", own, 0x1000, BUFFER_BYTES)
    assert kinds["DtoH"] == ("DtoH", 0x1000, own, BUFFER_BYTES)
    assert kinds["DtoD"][1:3] == (7002, own)
    peers = list(dict.fromkeys(copy for copy in library.copies if copy[0] == "peer"))
    assert [(to, to_context, from_context) for _, to, to_context, _, from_context, _ in peers[:2]] == [
        (own, 7, 8), (peers[0][3], 8, 7),
    ]  # fmt: skip


def test_gpus_that_the_management_library_does_not_know_keep_the_drivers_numbers(clock: None) -> None:
    report = measure(FakeCuda(1), Gpus((), "no NVML"))
    assert [(gpu.gpu_id, gpu.cpu_node, gpu.memory_node) for gpu in report.gpus] == [(0, None, None)]
    shuffled = replace(GH200S, found=tuple(replace(gpu, gpu_id=1 - gpu.gpu_id) for gpu in GH200S.found))
    assert [gpu.gpu_id for gpu in measure(FakeCuda(2), shuffled).gpus] == [1, 0]


def test_a_path_that_fails_is_a_problem_and_the_others_are_measured(clock: None) -> None:
    library = FakeCuda(1)
    library.alloc_limit = 1
    library.cuMemHostRegister_v2 = lambda pointer, size, flags: NO_MEMORY if pointer.value == 0x2000 else 0
    library.cuMemHostUnregister = lambda pointer: 0
    report = measure(library)
    assert ends(report) == [(0, "node", 0)]
    assert report.problems == (
        "GPU 0, own memory: cuMemAlloc_v2: out of memory",
        "GPU 0, memory of node 1: cuMemHostRegister_v2: out of memory",
    )
    assert library.held == []


def test_without_a_driver_it_says_so() -> None:
    assert measure(None).absence == f"{LIBRARY} is not installed (it comes with NVIDIA's driver)"
    assert measure(FakeCuda(0, init=NO_DEVICE)).absence == "cuInit: no CUDA-capable device is detected"
    assert measure(FakeCuda(0)).absence == "the driver has no GPU"


def test_paths_as_json() -> None:
    sample = Samples((1.0, 2.0))
    assert GpuPath(0, "node", 1, sample, None).to_json() == {
        "gpu": 0, "memory": "node1", "read_bytes_per_s": sample.to_json(), "write_bytes_per_s": None,
    }  # fmt: skip
