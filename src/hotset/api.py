"""Loading a model: from a name to a running engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hotset.audit.recorder import RunRecorder
from hotset.chat.tokenizer import open_tokenizer
from hotset.checkpoint.checkpoint import Checkpoint, open_checkpoint
from hotset.checkpoint.manifest import Account, account, formats_of
from hotset.checkpoint.resolve import resolve_model
from hotset.engine.engine import Engine
from hotset.engine.native import NativeExecutor
from hotset.engine.native_sampler import NativeSampler
from hotset.errors import MachineError
from hotset.kv.identity import identify
from hotset.log import warn
from hotset.machine.measured import read_measured
from hotset.machine.memory import MemoryState, read_memory
from hotset.machine.native import isa_in_use
from hotset.machine.numa_calls import try_numa_calls
from hotset.machine.profile import Profile
from hotset.machine.room import LoadRoom
from hotset.machine.teams import NodeTeam, NumaMode, Seats, choose_policy, has_many_nodes, pick_teams
from hotset.machine.topology import Topology, read_topology
from hotset.machine.verify import find_problems
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.plan.budget import Plan, Wish, make_plan, require_fit, sizes_of
from hotset.plan.nodes import require_nodes_fit, short_nodes, split_plan
from hotset.plan.placement import Placement, best_to_run, place
from hotset.program.pending import require_runnable


@dataclass(frozen=True)
class Described:
    """A checkpoint that was opened, declared and accounted for; no weight was read.

    ``formats`` is the program's format of every weight by key, see :func:`hotset.checkpoint.manifest.formats_of`.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    account: Account
    formats: dict[str, str]


def describe_model(model: str | Path, cache_format: str | None = None) -> Described:
    """Open a model by path, hub id or pulled name and hold its tensors against what its family declares.

    ``cache_format`` is that of the cache rows, see :func:`hotset.models.spec.with_cache_format`.

    Raises:
        RequestError: no such model here, or no such cache format.
        CheckpointError: the files are damaged, or are not a model that hotset runs.
    """
    checkpoint = open_checkpoint(resolve_model(str(model)))
    spec = describe(checkpoint)
    found = account(checkpoint, spec.tensors)
    formats = formats_of(spec.tensors, found)
    return Described(checkpoint, with_cache_format(spec, formats, cache_format), found, formats)


def find_seats(
    topology: Topology, spec: ModelSpec, formats: Mapping[str, str], wish: Wish, numa: NumaMode = "bind"
) -> Seats:
    """Threads and nodes for a run of ``spec`` on this machine, and how memory gets there.

    Raises:
        RequestError: threads or nodes that this process cannot have.
        MachineError: "strict", and memory cannot be bound here.
    """
    teams, _ = choose_teams(topology, _measured_here(topology), spec, formats, wish)
    return _seated(topology, teams, numa)


def _seated(topology: Topology, teams: tuple[NodeTeam, ...], numa: NumaMode) -> Seats:
    calls = try_numa_calls(teams[0].node_id) if has_many_nodes(topology) else None
    return Seats(teams, *choose_policy(topology, calls, numa))


def choose_teams(
    topology: Topology, profile: Profile | None, spec: ModelSpec, formats: Mapping[str, str], wish: Wish
) -> tuple[tuple[NodeTeam, ...], Placement | None]:
    """Nodes and threads of the fastest layout that fits, by a profile of this machine, and the layouts it was among.

    What the user fixed stays. Without a profile that knows the nodes it is one thread a core of the nodes that give
    most of them (:func:`hotset.machine.teams.pick_teams`), and there is nothing to compare.

    Raises:
        RequestError: threads, nodes or sizes that cannot be had.
    """
    most = pick_teams(topology, wish.threads, wish.nodes)
    cpus = {team.node_id: profile.cpu_of(team.node_id) for team in most} if profile is not None else {}
    known = {node_id: cpu.name for node_id, cpu in cpus.items() if cpu is not None}
    if profile is None or len(known) < len(most):
        return most, None
    machine = _as_seen(profile, {name: (node_id, len(most[0].cpus)) for node_id, name in known.items()})
    sizes = sizes_of(spec, formats, wish)
    placement = place(spec, formats, machine, wish, sizes.context, sizes.chunk)
    best = best_to_run(placement, None if wish.nodes is None and wish.threads is None else len(most))
    if best is None or wish.threads is not None:
        return most, placement
    used = best.teams[0]
    nodes = tuple(node_id for node_id, name in known.items() if name in used.threads)
    if len(nodes) < len(most) and used.each == len(most[0].cpus):
        return pick_teams(topology, None, nodes), placement  # fewer nodes may each give more
    return tuple(NodeTeam(t.node_id, t.cpus[: used.each]) for t in most if t.node_id in nodes), placement


def _as_seen(profile: Profile, cpus: Mapping[str, tuple[int, int]]) -> Profile:
    """A profile with these CPUs alone, each with its node and the threads that this process may have there."""
    machine = profile.with_consumers(cpus).with_teams({name: threads for name, (_, threads) in cpus.items()})
    nodes = {machine.consumer(name).near: node_id for name, (node_id, _) in cpus.items()}
    memories = (replace(memory, node=nodes.get(memory.name, memory.node)) for memory in machine.memories)
    return replace(machine, memories=tuple(memories))


def _measured_here(topology: Topology) -> Profile | None:
    """The measured profile of this machine with the memory that is available now; None where there is none."""
    profile = read_measured()
    if profile is None:
        return None
    nodes = [memory.node if memory.node is not None else topology.nodes[0].node_id for memory in profile.memories]
    free = _available(topology, nodes, read_memory())
    return replace(
        profile,
        memories=tuple(
            replace(memory, num_bytes=free[node], usable=1.0)
            for memory, node in zip(profile.memories, nodes, strict=True)
        ),
    )


def _available(topology: Topology, node_ids: Iterable[int], memory: MemoryState) -> dict[int, int]:
    """Bytes by node that a run may take; 0 for a node that is not there."""
    if not has_many_nodes(topology):
        # One node is the machine, with its cgroups.
        return dict.fromkeys(node_ids, memory.available_bytes)
    nodes = {node.node_id: node.available_bytes for node in topology.nodes}
    return {node_id: nodes.get(node_id, 0) for node_id in node_ids}


def plan_model(described: Described, wish: Wish) -> Plan:
    """Plan a run of ``described`` on this machine, from headers alone."""
    return plan_here(described.spec, described.formats, wish)[0]


def plan_here(spec: ModelSpec, formats: Mapping[str, str], wish: Wish) -> tuple[Plan, Placement | None]:
    """Plan a run of a model that may have no files, its weights in ``formats`` by key, on this machine.

    The second result are the layouts that were compared; None where this machine was not measured.
    """
    topology = read_topology()
    teams, placement = choose_teams(topology, _measured_here(topology), spec, formats, wish)
    return _plan_on(topology, teams, spec, formats, wish), placement


def _plan_on(
    topology: Topology, teams: tuple[NodeTeam, ...], spec: ModelSpec, formats: Mapping[str, str], wish: Wish
) -> Plan:
    memory, cpus = read_memory(), Seats(teams).cpus
    plan = make_plan(spec, formats, wish, len(cpus), memory.available_bytes, memory.source)
    node_ids = Seats(teams).node_ids
    available = _available(topology, node_ids, memory)
    nodes = split_plan(plan, spec, formats, node_ids, available, topology.page_bytes)
    return replace(plan, nodes=nodes, cpus=cpus)


def load(
    model: str | Path,
    *,
    threads: int | None = None,
    context: int | None = None,
    prefill_chunk: int | None = None,
    max_sequences: int | None = None,
    prefix_tokens: int = 0,
    snapshots: int | None = None,
    cache_format: str | None = None,
    nodes: tuple[int, ...] | None = None,
    numa: NumaMode = "bind",
    on_plan: Callable[[Plan], None] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Engine:
    """Load a model and return its engine.

    Args:
        model: path of a ``.gguf`` file or of a folder, a pulled name, or a hub id that was pulled.
        threads: worker threads; default one per physical core that this process may use, or those that saturate the
            memory where `hotset probe` found that fewer answer sooner.
        context: most tokens of one sequence, prompt and answer together; default the model's, at most 8,192.
        prefill_chunk: most tokens in one step; default from a workspace budget.
        max_sequences: most sequences at once; default 1, since each one costs a whole context of cache.
        prefix_tokens: tokens of finished requests that stay reusable beyond what live sequences need.
        snapshots: frontiers kept for prefix reuse, for a model that has one (docs/concepts/memory.md); default 8, and 8
            more for every sequence.
        cache_format: of the cache rows, one of the family's; default what suits the weights (Llama: BF16, or F16 where
            all weights are F32 or F16; DeepSeek-V4: FP8).
        nodes: NUMA nodes that hold the model and compute it, an equal share each; default those with CPUs and memory
            for this process that give most threads.
        numa: what happens when memory cannot lie on its node: "bind" (an error, or first touch where a container
            forbids binding), "strict" (always an error), "prefer" (a warning); see docs/concepts/placement.md.
        on_plan: called with the plan after it was found to fit and before the first large allocation.
        progress: called with each tensor's name and bytes as it is loaded.

    Raises:
        RequestError: no such model, a setting that it cannot have, or a family that is only planned so far.
        MachineError: the plan does not fit this machine or one of its nodes (the message names the largest term, the
            hint what fits), or pages lie elsewhere than planned.
        CheckpointError: damaged or unsupported files.
    """
    described = describe_model(model, cache_format)
    with described.checkpoint as checkpoint:
        spec = described.spec
        require_runnable(spec.program, described.formats, spec.name)
        wish = Wish(context, max_sequences, prefill_chunk, threads, prefix_tokens, snapshots, nodes)
        topology = read_topology()
        seats = find_seats(topology, spec, described.formats, wish, numa)
        plan = _plan_on(topology, seats.teams, spec, described.formats, wish)
        require_fit(plan)
        _require_room(plan, seats, numa)
        if on_plan is not None:
            on_plan(plan)
        tokenizer = open_tokenizer(checkpoint)
        executor = NativeExecutor(spec, described.formats, plan, seats, isa_in_use())
        executor.load(checkpoint, described.account, progress, _load_room(plan, described, seats))
        if has_many_nodes(topology):
            _verify(executor, numa)
        identity = identify(spec, checkpoint, described.account, executor.isa)
        asked = {
            "context": context, "max_sequences": max_sequences, "prefill_chunk": prefill_chunk, "threads": threads,
            "prefix_tokens": prefix_tokens, "snapshots": snapshots, "cache_format": cache_format, "nodes": nodes,
            "numa": numa,
        }  # fmt: skip
        recorder = RunRecorder(executor, checkpoint, spec, described.formats, plan, topology, asked)
    return Engine(
        executor,
        tokenizer,
        NativeSampler(spec.vocab_size),
        vocab_size=spec.vocab_size,
        max_context=plan.context,
        max_sequences=plan.max_sequences,
        eos_ids=spec.eos_ids,
        plan=plan,
        num_snapshots=plan.num_snapshots,
        identity=identity,
        recorder=recorder,
    )


def _require_room(plan: Plan, seats: Seats, numa: NumaMode) -> None:
    for line in seats.notes:
        warn(line)
    if numa == "prefer":
        for line in short_nodes(plan.nodes):
            warn(f"{line}; the rest goes to other nodes (--numa prefer)")
    else:
        require_nodes_fit(plan.nodes)


def _load_room(plan: Plan, described: Described, seats: Seats) -> LoadRoom:
    """Bytes that each node will hold when loaded, without what is only reserved."""
    kept = [term.name for term in plan.terms if term.kind not in ("reserve", "load")]
    planned = {node.node_id: sum(node.terms.get(name, 0) for name in kept) for node in plan.nodes}
    file_bytes = sum(info.nbytes for info in described.account.loaded.values())
    return LoadRoom(planned, file_bytes, is_bound=seats.policy == "BIND")


def _verify(executor: NativeExecutor, numa: NumaMode) -> None:
    """Hold the pages of all regions against the plan. Raises MachineError, or warns where the user lets pages stray."""
    problems = find_problems(executor.regions(), executor.seats.policy)
    if problems and numa != "prefer":
        executor.close()
        more = f"; and {len(problems) - 1} more regions" if len(problems) > 1 else ""
        raise MachineError(f"{problems[0]}{more}", "--numa prefer goes on all the same")
    for line in problems:
        warn(line)
