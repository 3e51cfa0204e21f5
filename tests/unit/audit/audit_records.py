"""A record of a run on two nodes in which everything is as planned, and what was seen of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotset.audit.observe import Neighbour, Observed
from hotset.audit.record import (
    ClassSample,
    Counters,
    GroupState,
    MachineSummary,
    ModelFile,
    Moment,
    NodeSummary,
    PlanNode,
    PlanSummary,
    PlanTerm,
    ProcessId,
    Region,
    RunRecord,
    Sample,
    Seat,
    Setting,
    ThreadState,
)

MIB = 1 << 20
GIB = 1 << 30
PID = 4242
START = 777
BOOT = "b007"
FILE = ModelFile("/models/tiny.gguf", 1000, 5)
SEATS = tuple(
    Seat(thread, PID + thread, cpu, node) for thread, (cpu, node) in enumerate(((0, 0), (1, 0), (8, 1), (9, 1)))
)


def region(name: str, address: int, num_bytes: int, node: int, **fields: Any) -> Region:
    """A region with all pages on its node, and all it can have in huge pages."""
    huge = num_bytes // (2 * MIB) * 2 * MIB
    made = Region(name, address, num_bytes, node, huge, {node: num_bytes // 4096}, huge, 0, "move_pages")
    return replace(made, **fields)


def thread(seat: Seat, **fields: Any) -> ThreadState:
    """A thread where it should be; the caller may run anywhere."""
    allowed = (seat.cpu,) if seat.thread else (0, 1, 8, 9)
    return replace(ThreadState(seat.thread, allowed, seat.cpu, 100, 3, 50, 2), **fields)


def groups(**fields: Any) -> GroupState:
    """A cgroup that counted a little before the run and nothing since."""
    made = GroupState(
        {"/cg/memory.events high": 3, "/cg/memory.events max": 7, "/cg/memory.events oom_kill": 1},
        {"/cg/cpu.stat": 1000},
        {"/cg/cpu.stat": 100},
        {"/cg/memory.pressure": 0.0},
    )
    return replace(made, **fields)


def moment(**fields: Any) -> Moment:
    return replace(Moment("2026-11-30T10:00:00+00:00", tuple(thread(seat) for seat in SEATS), groups()), **fields)


def sample(linear: float = 0.5, context: int = 100, num_tokens: int = 1) -> Sample:
    """A step whose products took ``linear`` times as long as they may."""
    classes = (
        ClassSample("linear", 100e6, 2 * linear * 10e-3, 10e-3),
        ClassSample("attention", 1e6, 50e-3, 1e-3),
        ClassSample("other", 0.0, 1e-3, 1e-6),
    )
    return Sample(num_tokens, 1, context, 0.1, classes)


COUNTERS = Counters(
    num_steps=100, num_prompt_tokens=900, num_cached_tokens=512, num_recomputed_tokens=0, num_generated_tokens=80,
    num_lookups=6, num_repeats=5, num_hits=5, num_snapshots=0, num_used_snapshots=0, minor_faults=4, major_faults=0,
    num_preemptions=1,
)  # fmt: skip

RECORD = RunRecord(
    version=1,
    hotset="9.9.9",
    commit="0123456789ab",
    started="2026-11-30T09:00:00+00:00",
    process=ProcessId(PID, START, BOOT),
    isa="avx512",
    policy="BIND",
    files=(FILE,),
    machine=MachineSummary(
        "Test CPU", (0, 1, 8, 9),
        (NodeSummary(0, "cpu", 8, 8 * GIB), NodeSummary(1, "cpu", 8, 8 * GIB), NodeSummary(2, "gpu", 0, 4 * GIB)),
        4096, 2 * MIB, "madvise", {"/cg/memory.max": 6 * GIB}, "abcdef012345",
    ),
    plan=PlanSummary(
        "tiny", 8192, 1, 512, 4, 32, MIB,
        (PlanTerm("weights", 96 * MIB, "resident", "20 tensors"), PlanTerm("cache", 32 * MIB, "per sequence", "rows")),
        (PlanNode(0, 2, {"weights": 48 * MIB}), PlanNode(1, 2, {"weights": 48 * MIB})), 4 * GIB, "/cg/memory.max",
    ),
    settings=(Setting("context", None, "8192"), Setting("numa", "bind", "bind")),
    seats=SEATS,
    regions=(
        region("weights of thread 0", 0x7F0000000000, 48 * MIB, 0),
        region("weights of thread 2", 0x7F1000000000, 48 * MIB, 1),
        region("cache", 0x7F2000000000, 32 * MIB, 0),
    ),
    baseline=moment(),
    latest=moment(),
    samples=(sample(),),
    counters=COUNTERS,
)  # fmt: skip

SEEN = Observed(
    ended=None,
    regions=RECORD.regions,
    moment=moment(),
    hotset="9.9.9",
    files={FILE.path: FILE},
    cgroup_limits={"/cg/memory.max": 6 * GIB},
    profile_id="abcdef012345",
    neighbours=(Neighbour(5, "idle", 300 * MIB, {0: 200 * MIB, 1: 100 * MIB}),),
)
