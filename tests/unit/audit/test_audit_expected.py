"""Bytes, seconds and expected seconds of the op classes of a timed step."""

from __future__ import annotations

import pytest
from helpers import Tiny, spec_and_formats

from hotset.audit.expected import StepShape, class_name, class_samples
from hotset.audit.record import ClassSample
from hotset.bench.costs import ModelCosts
from hotset.machine.profile import Consumer, Memory, Path, Profile
from hotset.program.lower import lower

SPEC, FORMATS = spec_and_formats(Tiny("Q8_0"))
OPS = lower(SPEC.program, FORMATS, 16, 4).ops
GIB = 1 << 30
DECODE = StepShape(1, 1, 100, 1)


def profile(num_nodes: int = 1, threads: int | None = 2, node: int | None = 0, cores: int = 2) -> Profile:
    """Each node reads a million bytes per second, and any op takes its team a millisecond."""
    nodes = range(num_nodes)
    return Profile(
        "this", "", "",
        tuple(Memory(f"node{i}", "ddr", GIB, 1.0, None if node is None else node + i) for i in nodes),
        tuple(Consumer(f"cpu{i}", "cpu", f"node{i}", cores, {}, 1e-3) for i in nodes),
        tuple(Path(f"cpu{i}", f"node{i}", 1e6, threads=threads) for i in nodes),
    )  # fmt: skip


def samples(
    shape: StepShape = DECODE,
    times: list[tuple[int, int]] | None = None,
    machine: Profile | None = None,
    node_ids: tuple[int, ...] = (0,),
    num_threads: int = 2,
) -> dict[str, ClassSample]:
    times = [(1000, 10)] * len(OPS) if times is None else times
    made = class_samples(SPEC, FORMATS, OPS, shape, times, machine, node_ids, num_threads)
    return {part.name: part for part in made}


def test_bytes_are_those_of_the_bench() -> None:
    """One count of bytes for bench, plan and audit; the table's row of an embedding included."""
    costs = ModelCosts(SPEC, FORMATS)
    for contexts in ([0], [300], [300, 300, 300]):
        found = samples(StepShape(1, len(contexts), contexts[0], 1))
        # The bench counts one embedding row whatever the number of sequences.
        row = sum(part.num_bytes for part in samples(StepShape(1, 1, 0, 1)).values() if part.name == "other")
        total = sum(part.num_bytes for part in found.values()) - row * (len(contexts) - 1)
        assert abs(total - costs.decode_bytes(contexts)) <= row * len(contexts)


def test_all_time_is_counted_once() -> None:
    found = samples()
    assert sum(part.seconds for part in found.values()) == pytest.approx(len(OPS) * 1010e-9)
    assert {class_name(op) for op in SPEC.program.ops} == set(found)


def test_waiting_belongs_to_the_op_that_was_waited_for() -> None:
    """Thread 0 waits at the barrier before an op until the others have finished the one before. Guards against giving
    a slow product's time to the small op that follows it."""
    names = [class_name(SPEC.program.ops[op.source]) for op in OPS]
    index = next(i for i in range(1, len(OPS)) if names[i] == "attention" and names[i - 1] != "attention")
    times = [(1, 0)] * len(OPS)
    times[index] = (1, 1_000_000_000)
    found = samples(times=times)
    assert found[names[index - 1]].seconds > 0.9 and found["attention"].seconds < 0.1


def test_ops_that_did_not_run_do_not_take_the_waiting() -> None:
    """A norm that was fused into the next op, a merge without parts: their time is 0."""
    times = [(1, 0)] * len(OPS)
    names = [class_name(SPEC.program.ops[op.source]) for op in OPS]
    index = next(i for i in range(2, len(OPS)) if names[i - 2] != names[i - 1] != names[i])
    times[index - 1] = (0, 0)
    times[index] = (1, 1_000_000_000)
    found = samples(times=times)
    assert found[names[index - 2]].seconds > 0.9


def test_expected_is_bytes_over_the_path_and_the_fixed_cost_of_ops() -> None:
    found = samples(machine=profile())
    names = [class_name(SPEC.program.ops[op.source]) for op in OPS]
    for name in ("linear", "head"):
        part = found[name]
        assert part.expected_seconds == pytest.approx(part.num_bytes / (0.94 * 1e6) + 1e-3 * names.count(name))


def reading(part: ClassSample) -> float:
    """Expected seconds without the fixed cost of the class's ops."""
    ops = sum(class_name(SPEC.program.ops[op.source]) == part.name for op in OPS)
    return (part.expected_seconds or 0.0) - 1e-3 * ops


def test_two_nodes_read_their_halves_at_once() -> None:
    one, two = samples(machine=profile()), samples(machine=profile(2), node_ids=(0, 1), num_threads=4)
    ops = 1e-3 * sum(class_name(SPEC.program.ops[op.source]) == "linear" for op in OPS)
    assert (one["linear"].expected_seconds or 0) - ops == pytest.approx(
        2 * ((two["linear"].expected_seconds or 0) - ops)
    )


def test_a_run_on_one_of_two_nodes_is_held_against_that_node() -> None:
    assert samples(machine=profile(2), node_ids=(1,)) == samples(machine=profile(1, node=1), node_ids=(1,))


def test_fewer_threads_than_saturate_are_expected_to_be_slower() -> None:
    """Guards against a red line for --threads 1 on a machine that was measured with more."""
    measured = profile(threads=8, cores=16)
    few, enough = samples(machine=measured), samples(machine=measured, num_threads=8)
    ops = 1e-3 * sum(class_name(SPEC.program.ops[op.source]) == "head" for op in OPS)
    assert (few["head"].expected_seconds or 0) - ops == pytest.approx(
        4 * ((enough["head"].expected_seconds or 0) - ops)
    )


def test_threads_of_two_nodes_are_counted_on_each() -> None:
    """Eight threads over two nodes are four on each, which read half of what eight would."""
    measured = profile(2, threads=8, cores=16)
    four, eight = (samples(machine=measured, node_ids=(0, 1), num_threads=count) for count in (8, 16))
    assert reading(four["head"]) == pytest.approx(2 * reading(eight["head"]))


@pytest.mark.parametrize("machine", [None, profile(node=5)])
def test_no_profile_of_these_nodes_expects_nothing(machine: Profile | None) -> None:
    assert {part.expected_seconds for part in samples(machine=machine).values()} == {None}
