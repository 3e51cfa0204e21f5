"""Where the memory of a run lies."""

from __future__ import annotations

import pages
from answers import on_cpus
from conftest import MODELS

import hotset

LEAST_BYTES = 8 << 20  # far less than a process with NumPy and an engine has touched


def test_a_run_leaves_memory_only_nodes_alone(guest) -> None:
    """Bug class: memory spread over "all nodes", and so in part into the memory of a GPU.

    Every node has room for all of it, so pages lie where policy and threads put them.
    """
    first, second = guest.cpu_nodes[0], guest.cpu_nodes[1]
    cpus = (first.cpus[0], second.cpus[0])
    with on_cpus(cpus), hotset.load(sorted(MODELS.iterdir())[0], threads=len(cpus), context=512):
        found = pages.pages_by_node()
    assert found[first.node_id] + found[second.node_id] > LEAST_BYTES
    assert {node.node_id: found[node.node_id] for node in guest.memory_nodes} == {
        node.node_id: 0 for node in guest.memory_nodes
    }
