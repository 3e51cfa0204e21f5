"""A native module that measures nothing: bandwidths follow from the number of threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


class FakeNative:
    """Bandwidth is 10 a thread; a prefetch of 2048 bytes gives 1 more. ``refused`` nodes cannot be bound."""

    ANY_NODE = -1

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.reads: list[tuple[Any, ...]] = []
        self.calls: list[str] = []
        self.refused = refused

    def isas(self) -> list[str]:
        return ["avx2"]

    def ProbeBuffers(self, cpus: list[list[int]], nodes: list[int], num_bytes: int) -> FakeNative:
        if set(nodes) & set(self.refused):
            raise RuntimeError("mbind of the probe's buffer: Invalid argument")
        self.made.append((cpus, nodes, num_bytes))
        self.calls.append("allocate")
        return self

    def read(self, isa: str, cpus: list[int], num_bytes: int, prefetch: int, seconds: float, least: int) -> list[float]:
        self.reads.append((isa, cpus, num_bytes, prefetch))
        rate = 10.0 * len(cpus) + (prefetch == 2048)
        return [rate - 1, rate + 1, rate]

    def read_chunks(
        self, isa: str, cpus: list[int], num_bytes: int, prefetch: int, seconds: float, least: int
    ) -> list[float]:
        self.calls.append("chunks")
        return [9.0 * len(cpus)]

    def write(self, isa: str, cpus: list[int], seconds: float, least: int) -> list[float]:
        self.calls.append("write")
        return [7.0 * len(cpus)]

    def copy(self, isa: str, cpus: list[int], seconds: float, least: int) -> list[float]:
        self.calls.append("copy")
        return [5.0 * len(cpus)]

    def link(self, num_bytes: int) -> int:
        self.calls.append("link")
        return num_bytes // 64

    def chase(self, cpu: int, seconds: float, least: int) -> list[float]:
        self.calls.append("chase")
        return [1e7]

    def address(self, region: int) -> int:
        return 4096

    def pages(self, region: int) -> dict[int, int]:
        return {self.made[-1][1][region]: 100}

    def probe_computes(self, isa: str) -> list[tuple[str, str]]:
        return [("int8", "vpmaddubsw"), ("f32", "vfmadd")]

    def probe_compute(self, isa: str, kind: str, cpus: list[int], seconds: float, least: int) -> list[float]:
        return [100.0 * len(cpus)]

    def probe_write_instruction(self, isa: str) -> str:
        return "vmovntdq ymm"

    def probe_steps(self, isa: str, cpus: list[int], seconds: float, least: int) -> SimpleNamespace:
        return SimpleNamespace(run_s=[2e-6] * least, barrier_s=[1e-6] * least, exchange_s=[3e-6] * least)


def use_native(monkeypatch: pytest.MonkeyPatch, native: object) -> None:
    """Make the probe measure with ``native``, as if it had been loaded."""
    for module in ("native", "probe", "matrix"):
        monkeypatch.setattr(f"hotset.machine.{module}.native_module", lambda: native)
    monkeypatch.setattr("hotset.machine.probe.isa_in_use", lambda: native.isas()[0])  # type: ignore[attr-defined]
