"""Every region on its planned node, found out by a judge that shares no code; and what happens when it cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pages
import pytest
from answers import SYNTH, write_synth
from conftest import MODELS, PAYLOAD

import hotset
from hotset.api import describe_model, plan_model
from hotset.engine.native import NativeExecutor
from hotset.errors import MachineError, RequestError
from hotset.machine.native import isa_in_use
from hotset.machine.teams import NodeTeam, Seats, pick_teams
from hotset.machine.topology import read_topology
from hotset.machine.verify import find_problems
from hotset.plan.budget import Plan, Wish

LLAMA = sorted(MODELS.iterdir())[0]
CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture(scope="module", params=["llama", SYNTH])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == SYNTH:
        return write_synth(["hotset"], tmp_path_factory.mktemp("synth") / SYNTH)
    return LLAMA


def judged(engine: hotset.Engine) -> dict[str, tuple[int, dict[int, int]]]:
    """Planned node and pages by node of every region, as the judge finds them."""
    return {
        region.name: (region.node, dict(pages.nodes_of(region.address, region.num_bytes)))
        for region in engine.regions()
    }


def test_all_pages_of_all_regions_are_on_their_nodes(guest, model: Path) -> None:
    """100 %: weights and scratch of each thread on its own node, parts of the cache on all, the rest on the first."""
    nodes = [node.node_id for node in guest.cpu_nodes]
    with hotset.load(model, context=512, max_sequences=4) as engine:
        found = judged(engine)
        wanted = {entry.node_id: entry.total_bytes for entry in engine.plan.nodes}
    threads = [node.node_id for node in guest.cpu_nodes for _ in node.cpus]
    for thread, node in enumerate(threads):
        assert found[f"weights of thread {thread}"][0] == found[f"scratch of thread {thread}"][0] == node
    for node in nodes:
        assert found[f"cache of node {node}"][0] == node
    assert found["vectors"][0] == found["workspace"][0] == nodes[0]
    assert {name: set(by_node) for name, (_, by_node) in found.items()} == {
        name: {node} for name, (node, _) in found.items()
    }
    assert list(wanted) == nodes


def test_chosen_nodes_hold_everything(guest) -> None:
    """Each node alone, with the threads of that node."""
    for node in guest.cpu_nodes:
        with hotset.load(LLAMA, context=512, nodes=(node.node_id,), numa="strict") as engine:
            assert engine.plan.num_threads == len(node.cpus)
            assert {planned: set(by_node) for planned, by_node in judged(engine).values()} == {
                node.node_id: {node.node_id}
            }


def test_a_region_that_was_moved_is_found(guest) -> None:
    """The audit's first question. Pages are moved by the judge; hotset names the region, its node and where it is."""
    here, there = (node.node_id for node in guest.cpu_nodes)
    with hotset.load(LLAMA, context=512) as engine:
        region = next(region for region in engine.regions() if region.name == "weights of thread 0")
        pages.move(region.address, region.num_bytes, there)
        assert set(pages.nodes_of(region.address, region.num_bytes)) == {there}
        (line,) = find_problems(engine.regions(), "BIND")
    assert line.startswith(f"weights of thread 0 ({region.num_bytes / 1024:.2f} KiB) was planned on node {here}, its ")
    assert f" on node {there}; bound pages stay unless somebody moves them" in line


def test_a_plan_that_is_more_than_a_node_has_is_refused(guest) -> None:
    """Bound memory beyond a node ends the process with SIGKILL, and no error."""
    node = guest.cpu_nodes[0].node_id
    plan = _more_than(node)
    (entry,) = plan.nodes
    assert plan.fits and not entry.fits
    with pytest.raises(MachineError, match=rf"on node {node} \(cache .*\), it has .* for this process") as caught:
        hotset.load(LLAMA, context=plan.context, max_sequences=plan.max_sequences, nodes=(node,))
    assert caught.value.hint is not None and "--numa prefer" in caught.value.hint


def _more_than(node: int) -> Plan:
    """A plan whose cache is a quarter more than the node has, and fits the machine."""
    room = read_topology().node(node).available_bytes
    described = describe_model(LLAMA)
    with described.checkpoint:
        small = plan_model(described, Wish(context=512, max_sequences=1, nodes=(node,)))
        count = room * 5 // 4 // (small.num_blocks * small.block_bytes)
        return plan_model(described, Wish(context=512, max_sequences=count, nodes=(node,)))


def test_nodes_without_cpus_or_memory_are_refused(guest) -> None:
    """By the planner; and where it is passed by, by the kernel, with the region and the node in the message."""
    others = [node for node in guest.nodes if not node.cpus]
    for node in others:
        with pytest.raises(RequestError, match=f"no threads can run on node {node.node_id}: "):
            hotset.load(LLAMA, context=512, nodes=(node.node_id,))
    absent = next(n for n in range(1024) if n not in [node.node_id for node in guest.nodes if node.num_bytes])
    described = describe_model(LLAMA)
    with described.checkpoint:
        plan = replace(plan_model(described, Wish(context=512, threads=1)), num_threads=1)
        seats = Seats((NodeTeam(absent, pick_teams(read_topology(), 1)[0].cpus),), "BIND")
        with pytest.raises(MachineError, match=f"mbind of weights of thread 0 to node {absent}: Invalid argument"):
            NativeExecutor(described.spec, described.formats, plan, seats, isa_in_use())


RUN = """
import json, sys, hotset
from hotset.errors import HotsetError
nodes = tuple(json.loads(sys.argv[2])) or None
try:
    with hotset.load(sys.argv[1], context=512, nodes=nodes, numa=sys.argv[3]) as engine:
        regions = engine.regions()
        print(json.dumps({
            "regions": [[region.name, region.node, dict(region.pages)] for region in regions],
            "nodes": [node.node_id for node in engine.plan.nodes],
        }))
except HotsetError as error:
    print(json.dumps({"error": str(error)}))
"""


def run(before: list[str], nodes: list[int], numa: str) -> tuple[dict[str, object], str]:
    """Load the model in a process of its own; what it printed, and its talk."""
    words = [*before, sys.executable, "-c", RUN, str(LLAMA), json.dumps(nodes), numa]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout), done.stderr


def test_where_binding_is_forbidden_threads_place_their_own(guest) -> None:
    """Docker's default profile: EPERM for mbind and move_pages. Said, done by first touch, and found in numa_maps."""
    forbidden = [sys.executable, str(PAYLOAD / "tests" / "seccomp.py")]
    report, talk = run(forbidden, [], "bind")
    assert (
        "warning: --numa bind -> placed by first touch, because memory cannot be bound to a node: mbind: refused"
        in talk
    )
    assert report["nodes"] == [node.node_id for node in guest.cpu_nodes]
    for name, node, by_node in report["regions"]:
        assert set(by_node) == {str(node)}, name
    strict, _ = run(forbidden, [], "strict")
    assert "--numa strict, and memory cannot be bound to a node" in strict["error"]


@pytest.fixture
def cpuset(guest) -> Iterator[list[str]]:
    """Words before a command that runs it where only the second node's memory is allowed, and all CPUs."""
    group = CGROUPS / "hotset-test"
    (CGROUPS / "cgroup.subtree_control").write_text("+cpuset")
    group.mkdir()
    (group / "cpuset.mems").write_text(str(guest.cpu_nodes[1].node_id))
    yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    group.rmdir()


def test_a_cpuset_limits_the_nodes(guest, cpuset: list[str]) -> None:
    """mbind to a node outside cpuset.mems is EINVAL; the planner must not get there."""
    first, second = (node.node_id for node in guest.cpu_nodes)
    report, _ = run(cpuset, [], "strict")
    assert report["nodes"] == [second]
    assert {(node, *by_node) for _, node, by_node in report["regions"]} == {(second, str(second))}
    refused, _ = run(cpuset, [first], "bind")
    assert (
        f"no threads can run on node {first}: the cpuset of this process allows memory of nodes {second}"
        in refused["error"]
    )
