"""Every region on its planned node, found out by a judge that shares no code; and what happens when it cannot be."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pages
import pytest
from answers import SYNTH, on_cpus, write_synth
from conftest import MODELS, PAYLOAD

import hotset
from hotset.api import describe_model, plan_model
from hotset.audit.recorder import planned_huge_bytes
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
    """100 %: weights and scratch of each thread on its own node, parts of the cache on all, the rest on the first.

    Automatic NUMA balancing is on in every guest, and leaves bound pages where they are.
    """
    assert Path("/proc/sys/kernel/numa_balancing").read_text().strip() == "1"
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


def test_file_cache_on_another_node_stays_there_and_changes_nothing(guest) -> None:
    """Policies do not reach pages of files that are in memory: weights that were mapped would lie on the wrong node."""
    first, second = guest.cpu_nodes
    files = sorted(LLAMA.glob("*.safetensors"))
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    with on_cpus(second.cpus[:1]):
        for file in files:
            file.read_bytes()
    with hotset.load(LLAMA, context=512, nodes=(first.node_id,)) as engine:
        assert {node for _, by_node in judged(engine).values() for node in by_node} == {first.node_id}
    for file in files:
        with file.open("rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        with on_cpus(first.cpus[:1]):
            sum(mapped[:: mmap.PAGESIZE])
        assert set(pages.nodes_of(pages.address_of(mapped), len(mapped))) == {second.node_id}


def test_large_regions_are_huge_pages_on_their_node(guest) -> None:
    """512 MiB each on kernels with pages of 64 KiB: where they begin, and how many fit, follows from that.

    What is smaller must take none: it would be the whole of one.
    """
    node, huge = guest.cpu_nodes[0].node_id, guest.huge_page_bytes
    for name, word in (("drop_caches", "3"), ("compact_memory", "1")):
        Path("/proc/sys/vm", name).write_text(word)
    with hotset.load(LLAMA, context=512, max_sequences=sequences_of(huge), nodes=(node,)) as engine:
        found = {region.name: region for region in engine.regions()}
        assert {node for _, by_node in judged(engine).values() for node in by_node} == {node}
    cache = found.pop(next(name for name in found if name.startswith("cache")))
    assert cache.num_bytes >= huge
    assert cache.huge_bytes == planned_huge_bytes(cache.address, cache.num_bytes, huge) == huge
    assert {region.huge_bytes for region in found.values() if region.num_bytes < huge} == {0}


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
    count = sequences_of(read_topology().node(node).available_bytes * 5 // 4)
    described = describe_model(LLAMA)
    with described.checkpoint:
        return plan_model(described, Wish(context=512, max_sequences=count, nodes=(node,)))


def sequences_of(cache_bytes: int) -> int:
    """Sequences of 512 tokens that have a cache of that size, or a little more."""
    described = describe_model(LLAMA)
    with described.checkpoint:
        one = plan_model(described, Wish(context=512, max_sequences=1, threads=1))
    return -(-cache_bytes // (one.num_blocks * one.block_bytes))


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
    with hotset.load(
        sys.argv[1], context=512, nodes=nodes, numa=sys.argv[3], max_sequences=int(sys.argv[4])
    ) as engine:
        regions = engine.regions()
        print(json.dumps({
            "regions": [[region.name, region.node, dict(region.pages)] for region in regions],
            "nodes": [node.node_id for node in engine.plan.nodes],
        }))
except HotsetError as error:
    print(json.dumps({"error": str(error)}))
"""


def run(before: list[str], nodes: list[int], numa: str, max_sequences: int = 1) -> tuple[dict[str, object], str]:
    """Load the model in a process of its own; what it printed, and its talk."""
    words = [*before, sys.executable, "-c", RUN, str(LLAMA), json.dumps(nodes), numa, str(max_sequences)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout), done.stderr


FORBIDDEN = [sys.executable, str(PAYLOAD / "tests" / "seccomp.py")]


def test_where_binding_is_forbidden_threads_place_their_own(guest) -> None:
    """Docker's default profile: EPERM for mbind and move_pages. Said, done by first touch, and found in numa_maps."""
    report, talk = run(FORBIDDEN, [], "bind")
    assert (
        "warning: --numa bind -> placed by first touch, because memory cannot be bound to a node: mbind: refused"
        in talk
    )
    assert report["nodes"] == [node.node_id for node in guest.cpu_nodes]
    for name, node, by_node in report["regions"]:
        assert set(by_node) == {str(node)}, name
    strict, _ = run(FORBIDDEN, [], "strict")
    assert "--numa strict, and memory cannot be bound to a node" in strict["error"]


def test_no_huge_page_is_shared_by_nodes(guest) -> None:
    """Bug class: by first touch the huge page at the border of two parts of the cache is on one node as a whole.

    The border is in the middle of the only one here: half of it would be on the wrong node.
    """
    report, _ = run(FORBIDDEN, [], "bind", sequences_of(guest.huge_page_bytes * 9 // 8))
    assert "error" not in report, report
    parts = {name: (node, by_node) for name, node, by_node in report["regions"] if name.startswith("cache of node")}
    assert list(parts) == [f"cache of node {node.node_id}" for node in guest.cpu_nodes]
    for node, by_node in parts.values():
        assert set(by_node) == {str(node)}


@dataclass(frozen=True)
class Cpuset:
    """A group of processes that may use the memory of some nodes, and all CPUs."""

    folder: Path

    def allow(self, nodes: Sequence[int]) -> None:
        (self.folder / "cpuset.mems").write_text(",".join(map(str, nodes)))

    @property
    def words(self) -> list[str]:
        """Before a command that runs in the group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]


@pytest.fixture
def cpuset() -> Iterator[Cpuset]:
    (CGROUPS / "cgroup.subtree_control").write_text("+cpuset")
    group = CGROUPS / "hotset-test"
    group.mkdir()
    yield Cpuset(group)
    group.rmdir()


def test_a_cpuset_limits_the_nodes(guest, cpuset: Cpuset) -> None:
    """mbind to a node outside cpuset.mems is EINVAL; the planner must not get there."""
    first, second = (node.node_id for node in guest.cpu_nodes)
    cpuset.allow([second])
    report, _ = run(cpuset.words, [], "strict")
    assert report["nodes"] == [second]
    assert {(node, *by_node) for _, node, by_node in report["regions"]} == {(second, str(second))}
    refused, _ = run(cpuset.words, [first], "bind")
    assert (
        f"no threads can run on node {first}: the cpuset of this process allows memory of nodes {second}"
        in refused["error"]
    )


WAIT = """
import json, sys, hotset
from hotset.machine.verify import find_problems
with hotset.load(sys.argv[1], context=512) as engine:
    print("loaded", flush=True)
    sys.stdin.readline()
    print(json.dumps(find_problems(engine.regions(), "BIND")))
"""


def test_a_cpuset_that_becomes_smaller_takes_bound_pages_along(guest, cpuset: Cpuset) -> None:
    """The kernel moves them at once, and changes their policy; every region that was on the lost node is named."""
    first, second = (node.node_id for node in guest.cpu_nodes)
    cpuset.allow([first, second])
    words = [*cpuset.words, sys.executable, "-c", WAIT, str(LLAMA)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "loaded\n"
        cpuset.allow([second])
        talk, _ = process.communicate("\n")
    problems = json.loads(talk)
    assert any(line.startswith("weights of thread 0 ") for line in problems)
    for line in problems:
        assert f"was planned on node {first}, " in line
        assert f"the cpuset of this process has nodes {second} only" in line
