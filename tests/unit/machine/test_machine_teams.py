"""Teams of threads over nodes: equal sizes, in the order of the nodes, inside what the user and the system allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from machine_trees import GIB, FakeNode, FakeRoot, epyc_9354_nps4, write_nodes

from hotset.api import choose_teams
from hotset.checkpoint.manifest import declared_formats
from hotset.errors import MachineError, RequestError
from hotset.machine.numa_calls import NumaCalls
from hotset.machine.presets import read_preset
from hotset.machine.profile import Profile
from hotset.machine.teams import NodeTeam, Seats, choose_policy, pick_teams
from hotset.machine.topology import Quota, Topology, default_threads, pick_cpus, read_topology
from hotset.models.spec import ModelSpec
from hotset.plan.budget import Wish
from hotset.plan.cards import describe_config, read_card

Snapshot = Callable[[str], Path]
WORKS = NumaCalls(None, None, None, True)
REFUSED = NumaCalls("refused (EPERM), as containers do; run the container with --cap-add SYS_NICE", None, None, True)


@pytest.fixture
def dual(snapshot: Snapshot) -> Topology:
    """Two nodes of two CPUs, GPU memory on nodes 2 and 10, 14 empty nodes."""
    return read_topology(snapshot("x86-gh200x2-mig-hotadd"))


@pytest.fixture
def epyc(machine: FakeRoot) -> Topology:
    epyc_9354_nps4(machine)
    return read_topology(machine.path)


def test_every_node_with_cpus_takes_part(dual: Topology) -> None:
    """Bug class: GPU memory or empty nodes counted as nodes; threads dealt in turn, so that rows lie on both."""
    assert pick_teams(dual) == (NodeTeam(0, (0, 1)), NodeTeam(1, (2, 3)))
    seats = Seats(pick_teams(dual))
    assert (seats.cpus, seats.nodes, seats.node_ids) == ((0, 1, 2, 3), (0, 0, 1, 1), (0, 1))


def test_one_node_is_what_it_was(machine: FakeRoot) -> None:
    """Without nodes to choose from, threads are those of the whole machine."""
    topology = read_topology(machine.path)
    assert pick_teams(topology) == (NodeTeam(0, pick_cpus(topology, default_threads(topology)[0])),)
    assert pick_teams(topology, 6) == (NodeTeam(0, (0, 1, 2, 3, 4, 5)),)


def test_every_number_of_threads_is_even_over_its_nodes(epyc: Topology) -> None:
    """Or refused: a share that is larger on one node would leave the others waiting, and may not fit there."""
    cpus = len(epyc.affinity)
    for num_threads in range(1, cpus + 2):
        try:
            teams = pick_teams(epyc, num_threads)
        except RequestError as error:
            assert error.hint is not None
            hinted = int(error.hint.removeprefix("--threads "))
            assert sum(len(team.cpus) for team in pick_teams(epyc, hinted)) == hinted
            continue
        assert len({len(team.cpus) for team in teams}) == 1
        chosen = [cpu for team in teams for cpu in team.cpus]
        assert len(chosen) == len(set(chosen)) == num_threads
        for team in teams:
            assert set(team.cpus) <= set(epyc.node(team.node_id).cpus)
        assert [team.node_id for team in teams] == sorted(team.node_id for team in teams)


def test_nodes_and_threads_compose(dual: Topology) -> None:
    assert pick_teams(dual, None, (1,)) == (NodeTeam(1, (2, 3)),)
    assert pick_teams(dual, 2, (0, 1)) == (NodeTeam(0, (0,)), NodeTeam(1, (2,)))
    assert pick_teams(dual, 2) == pick_teams(dual, 2, (1, 0))
    assert pick_teams(dual, 1) == (NodeTeam(0, (0,)),)


@pytest.mark.parametrize(
    ("threads", "nodes", "message", "hint"),
    [
        (3, (0, 1), "3 threads asked for, each node takes the same number, and this process may use 2 CPUs of node 0",
         "--threads 2"),
        (3, None, "3 threads asked for, each node takes the same number", "--threads 2"),
        (5, None, "5 threads asked for", "--threads 4"),
        (3, (1,), "3 threads asked for, this process may use 2 CPUs of node 1", "--threads 2"),
        (0, None, "0 threads asked for", "--threads 2"),
        (None, (2,), "no threads can run on node 2: it is the memory of a GPU", "--nodes 0,1"),
        (None, (0, 3), "no threads can run on node 3: the cpuset", "--nodes 0,1"),
        (None, (99,), "this machine has no NUMA node 99", "nodes with CPUs or memory: 0, 1, 2, 10"),
        (None, (), r"nodes are \[\], expected each node once", "--nodes 0,1"),
        (None, (1, 1), r"nodes are \[1, 1\]", "--nodes 0,1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_numbers(dual: Topology, threads, nodes, message: str, hint: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        pick_teams(dual, threads, nodes)
    assert caught.value.hint == hint


def test_cpusets_and_masks_limit_the_nodes(dual: Topology) -> None:
    """Memory of a node that the cpuset forbids cannot be bound (EINVAL), CPUs outside the mask cannot be used."""
    narrow = replace(dual, allowed_nodes=(0,))
    assert pick_teams(narrow) == (NodeTeam(0, (0, 1)),)
    with pytest.raises(
        RequestError, match=r"node 1: the cpuset of this process allows memory of nodes 0 \(Mems_allowed"
    ):
        pick_teams(narrow, None, (1,))
    masked = replace(dual, affinity=(2,), cores=((2,),))
    assert pick_teams(masked) == (NodeTeam(1, (2,)),)
    with pytest.raises(RequestError, match="its CPUs 0-1 are outside the affinity mask 2"):
        pick_teams(masked, None, (0,))
    crossed = replace(dual, allowed_nodes=(1,), affinity=(0, 1), cores=((0,), (1,)))
    assert pick_teams(crossed) == (NodeTeam(1, (0, 1)),)


def test_uneven_masks_take_what_gives_most_threads(epyc: Topology) -> None:
    """Three CPUs of one node and one of another are three threads, not two."""
    first, second = epyc.node(0).cpus[:3], epyc.node(1).cpus[:1]
    masked = replace(epyc, affinity=(*first, *second), cores=tuple((cpu,) for cpu in (*first, *second)))
    assert pick_teams(masked) == (NodeTeam(0, first),)


def test_quotas_are_shared_by_the_nodes(dual: Topology) -> None:
    assert len(pick_teams(replace(dual, quota=Quota(3.5, "x")))) == 2
    assert [len(team.cpus) for team in pick_teams(replace(dual, quota=Quota(3.5, "x")))] == [1, 1]
    assert pick_teams(replace(dual, quota=Quota(1.0, "x"))) == (NodeTeam(0, (0,)),)
    with pytest.raises(RequestError, match="a quota of 1 CPUs gives no thread to each of nodes 0-1"):
        pick_teams(replace(dual, quota=Quota(1.0, "x")), None, (0, 1))


def test_binding_that_is_refused_is_said_or_an_error(dual: Topology, machine: FakeRoot) -> None:
    """Docker's default: EPERM. Silence would be the bug."""
    assert choose_policy(dual, WORKS, "bind") == choose_policy(dual, WORKS, "strict") == ("BIND", ())
    assert choose_policy(dual, WORKS, "prefer") == ("PREFER", ())
    policy, (line,) = choose_policy(dual, REFUSED, "bind")
    assert policy == "TOUCH" and "--numa bind -> placed by first touch, because" in line and "SYS_NICE" in line
    with pytest.raises(MachineError, match="--numa strict, and memory cannot be bound to a node: mbind: refused"):
        choose_policy(dual, REFUSED, "strict")
    assert choose_policy(read_topology(machine.path), None, "strict") == ("TOUCH", ())


def nodes_and_threads(topology: Topology, profile: Profile | None, wish: Wish) -> dict[int, int]:
    """Threads by node of a model of 145 GiB."""
    teams, placement = choose_teams(topology, profile, *flash(), wish)
    assert (placement is None) == (profile is None)
    return {team.node_id: len(team.cpus) for team in teams}


@cache
def flash() -> tuple[ModelSpec, dict[str, str]]:
    spec = describe_config("deepseek-v4-flash", read_card("deepseek-v4-flash").config)
    return spec, declared_formats(spec.tensors)


def test_measured_paths_choose_the_nodes(dual: Topology) -> None:
    """Rows over nodes unless the exchange between them costs more than half of the reading; what is fixed stays."""
    fast = read_preset("dual-gh200")
    slow = replace(fast, paths=tuple(replace(path, latency_s=0.5) for path in fast.paths))
    assert nodes_and_threads(dual, fast, Wish()) == {0: 2, 1: 2}
    assert nodes_and_threads(dual, slow, Wish()) == {0: 2}
    assert nodes_and_threads(dual, slow, Wish(nodes=(0, 1))) == {0: 2, 1: 2}
    assert nodes_and_threads(dual, slow, Wish(nodes=(1,))) == {1: 2}
    assert nodes_and_threads(dual, slow, Wish(threads=4)) == {0: 2, 1: 2}
    assert nodes_and_threads(dual, None, Wish()) == {0: 2, 1: 2}
    uneven = replace(dual, affinity=(0, 1, 2), cores=((0,), (1,), (2,)))
    assert nodes_and_threads(uneven, slow, Wish()) == {0: 2}
    forbidden = replace(dual, allowed_nodes=(1,))
    assert nodes_and_threads(forbidden, slow, Wish()) == {1: 2}


def test_a_profile_that_does_not_know_the_nodes_chooses_nothing(dual: Topology) -> None:
    """A profile of one node, copied to a machine with two."""
    teams, placement = choose_teams(dual, read_preset("gh200"), *flash(), Wish())
    assert placement is None and [team.node_id for team in teams] == [0, 1]


def test_a_node_without_room_is_not_chosen(dual: Topology) -> None:
    """The faster layout does not fit: the model would be refused although another fits."""
    fast = read_preset("dual-gh200")
    small = tuple(replace(m, num_bytes=64 * GIB) if m.name == "node0" else m for m in fast.memories)
    assert nodes_and_threads(dual, replace(fast, memories=small), Wish()) == {1: 2}


def test_one_team_decodes_and_reads_prompts(machine: FakeRoot) -> None:
    """32 of 72 threads saturate a Grace, and prompts are bound by arithmetic: teams of 32 read them at less than half
    the speed. A user's number of threads is taken as it is."""
    write_nodes(machine, [FakeNode(0, "0-71", 4096, "10 40"), FakeNode(1, "72-143", 4096, "40 10")])
    machine.set_affinity("0-143", "Mems_allowed_list:\t0-1")
    topology = read_topology(machine.path)
    topology = replace(topology, cores=tuple((cpu,) for cpu in range(144)), affinity=tuple(range(144)))
    unknown = read_preset("dual-gh200")

    def rated(rate: float) -> Profile:
        rates = dict.fromkeys(("int8", "bf16", "f32"), rate)
        return replace(unknown, consumers=tuple(replace(c, rates=rates, step_s=1e-6) for c in unknown.consumers))

    assert nodes_and_threads(topology, rated(20e12), Wish()) == {0: 72, 1: 72}
    assert nodes_and_threads(topology, rated(20e15), Wish()) == {0: 32, 1: 32}
    assert nodes_and_threads(topology, rated(20e15), Wish(nodes=(1,))) == {1: 32}
    assert nodes_and_threads(topology, unknown, Wish()) == {0: 72, 1: 72}
    assert nodes_and_threads(topology, rated(20e15), Wish(threads=100)) == {0: 50, 1: 50}
    masked = replace(topology, cores=topology.cores[:20], affinity=tuple(range(20)))
    assert nodes_and_threads(masked, rated(20e15), Wish()) == {0: 20}
