"""Tests that run inside an emulated machine, started by `make test-numa`; see docs/guides/emulated_machines.md.

The folder above this one is the guest's payload: what the host says about the machine and about right answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

PAYLOAD = Path(__file__).resolve().parents[1]
MODELS = PAYLOAD / "models"


@dataclass(frozen=True)
class GuestNode:
    """A node as QEMU was told to make it: "cpu", "memory", "gpu" or "empty".

    ``latency_ns`` and ``bytes_per_s`` are those of its nearest CPUs, ``None`` where firmware tells none.
    """

    node_id: int
    kind: str
    cpus: tuple[int, ...]
    num_bytes: int
    distances: tuple[int, ...]
    initiator: int
    latency_ns: int | None
    bytes_per_s: int | None


@dataclass(frozen=True)
class Guest:
    """The machine as QEMU was told to make it. ``machine`` is what ``uname -m`` prints."""

    name: str
    machine: str
    page_bytes: int
    nodes: tuple[GuestNode, ...]

    @property
    def huge_page_bytes(self) -> int:
        """One page of 8-byte entries maps a huge one."""
        return self.page_bytes**2 // 8

    @property
    def cpu_nodes(self) -> tuple[GuestNode, ...]:
        return tuple(node for node in self.nodes if node.cpus)

    @property
    def memory_nodes(self) -> tuple[GuestNode, ...]:
        """Nodes with memory alone."""
        return tuple(node for node in self.nodes if node.num_bytes and not node.cpus)


def pytest_configure() -> None:
    if not (PAYLOAD / "machine.json").is_file():
        raise pytest.UsageError("these tests run inside an emulated machine: make test-numa")


@pytest.fixture(scope="session")
def guest() -> Guest:
    content = json.loads((PAYLOAD / "machine.json").read_text())
    nodes = tuple(
        GuestNode(**node | {"cpus": tuple(node["cpus"]), "distances": tuple(node["distances"])})
        for node in content["nodes"]
    )
    return Guest(content["name"], content["machine"], content["page_bytes"], nodes)


@pytest.fixture(scope="session")
def host_answers() -> dict[str, dict[str, object]]:
    """By model: what :func:`answers.answer` gave on the host."""
    return json.loads((PAYLOAD / "answers.json").read_text())
