"""What hotset finds about the machine, against what QEMU was told to make."""

from __future__ import annotations

import json
import subprocess

import pytest

from hotset.machine.topology import Topology, read_topology

# The kernel keeps page tables, its own image and the initramfs out of a node's total.
LEAST_SHARE = 0.75


@pytest.fixture(scope="module")
def topology() -> Topology:
    return read_topology()


def test_nodes_have_their_kind_cpus_and_memory(guest, topology) -> None:
    """Bug class: nodes counted or numbered from 0, memory-only nodes taken for nodes to spread over."""
    assert [node.node_id for node in topology.nodes] == [node.node_id for node in guest.nodes]
    for found, made in zip(topology.nodes, guest.nodes, strict=True):
        assert found.cpus == made.cpus
        assert found.kind == made.kind
        assert LEAST_SHARE * made.num_bytes <= found.total_bytes <= made.num_bytes
        assert found.free_bytes <= found.total_bytes
    assert topology.cpu_nodes == tuple(node.node_id for node in guest.cpu_nodes)
    assert topology.gpu_nodes == tuple(node.node_id for node in guest.nodes if node.kind == "gpu")
    assert set(topology.allowed_nodes) >= {node.node_id for node in guest.nodes if node.num_bytes}


def test_distances_are_the_firmwares(guest, topology) -> None:
    """Bug class: rows and columns exchanged, or a place in the list taken for a node's number."""
    for source in guest.nodes:
        for target in guest.nodes:
            assert topology.distance(source.node_id, target.node_id) == source.distances[target.node_id]
        assert topology.nearest_cpu_node(source.node_id) == source.initiator


def test_memory_attributes_are_the_firmwares(guest, topology) -> None:
    """Bug class: MiB/s read as MB/s, nanoseconds as microseconds, the wrong initiator; 0 where nothing is known."""
    for found, made in zip(topology.nodes, guest.nodes, strict=True):
        if made.bytes_per_s is None:
            assert found.initiators is None
            continue
        assert found.initiators is not None
        assert found.initiators.nodes == (made.initiator,)
        assert found.initiators.read_bytes_per_s == found.initiators.write_bytes_per_s == made.bytes_per_s
        assert found.initiators.read_latency_s == pytest.approx(made.latency_ns / 1e9)
        assert found.cpu_initiators == found.initiators


def test_processors_and_pages_are_the_machines(guest, topology) -> None:
    """Bug class: sockets or cores that Arm firmware numbers in another way than x86 firmware."""
    cpus = tuple(sorted(cpu for node in guest.nodes for cpu in node.cpus))
    assert topology.online == topology.affinity == cpus
    assert topology.cores == tuple((cpu,) for cpu in cpus)
    assert sorted(socket.cpus for socket in topology.sockets) == [node.cpus for node in guest.cpu_nodes]
    assert topology.page_bytes == guest.page_bytes
    assert topology.huge_pages.page_bytes == guest.huge_page_bytes


def test_the_command_shows_what_the_library_reads(guest) -> None:
    """Bug class: a report that counts nodes, or leaves the ones without CPUs out."""
    done = subprocess.run(["hotset", "machine", "--json"], check=True, capture_output=True, text=True)
    report = json.loads(done.stdout)
    kinds = [(node["node_id"], node["kind"]) for node in report["machine"]["nodes"]]
    assert kinds == [(node.node_id, node.kind) for node in guest.nodes]
    assert [report["numa_calls"][name] for name in ("mbind", "get_mempolicy", "move_pages")] == [None, None, None]
