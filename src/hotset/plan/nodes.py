"""The plan by NUMA node: what each one holds, held against what it has.

Bound memory cannot spill: a process that asks for more than its node has is killed by the kernel, without an error. So
no byte is bound before every node was found to have room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from hotset.checkpoint.formats import FORMATS
from hotset.errors import MachineError
from hotset.models.spec import ModelSpec
from hotset.plan.budget import NodeBytes, Plan, weights_bytes
from hotset.program.lower import TILE_ROWS, tile_bytes
from hotset.units import align_up, format_bytes

SPLIT = ("weights", "cache", "thread scratch", "load staging")
"""Terms that every node has a share of. The first node holds the others: all threads use them, and they are small."""


def split_plan(
    plan: Plan,
    spec: ModelSpec,
    formats: Mapping[str, str],
    node_ids: Sequence[int],
    available: Mapping[int, int],
    page_bytes: int,
) -> tuple[NodeBytes, ...]:
    """Bytes of ``plan`` by node; those of all nodes add up to the plan's, to the byte.

    ``node_ids`` are the nodes of the teams in their order; ``available`` is what each has.
    """
    count = len(node_ids)
    total = {term.name: term.num_bytes for term in plan.terms}
    weights = split_weights(spec, formats, plan.num_threads, count)
    cache = split_cache(plan.num_blocks, plan.block_bytes, count, page_bytes)
    out = []
    for place, node_id in enumerate(node_ids):
        terms = {"weights": weights[place], "cache": cache[place]}
        terms |= {name: total[name] // count for name in SPLIT[2:]}
        if place == 0:
            terms |= {name: num_bytes for name, num_bytes in total.items() if name not in SPLIT}
        out.append(NodeBytes(node_id, plan.num_threads // count, terms, available[node_id]))
    return tuple(out)


def split_weights(spec: ModelSpec, formats: Mapping[str, str], num_threads: int, num_nodes: int) -> list[int]:
    """Bytes of weights by node: each thread has an even share of the tiles of every matrix, the first node all vectors.

    As ``Executor::place_weights`` in native/src/executor_setup.cpp places them.
    """
    stacks: Counter[tuple[int, int]] = Counter()
    for weight in spec.program.weights.values():
        if weight.is_matrix:
            tiles = -(-weight.out_width // TILE_ROWS)
            stacks[tiles, tile_bytes(FORMATS[formats[weight.key]], weight.in_width)] += weight.count
    each = num_threads // num_nodes
    out = [0] * num_nodes
    for (tiles, size), matrices in stacks.items():
        for node in range(num_nodes):
            first, last = (tiles * thread // num_threads for thread in (node * each, (node + 1) * each))
            out[node] += matrices * (last - first) * size
    out[0] += weights_bytes(spec, formats)[1]
    return out


def split_cache(num_blocks: int, block_bytes: int, num_nodes: int, page_bytes: int) -> list[int]:
    """Bytes of cache by node: blocks in turn, whole pages (``Executor::place_cache``)."""
    ends, blocks, size = [0], 0, num_blocks * block_bytes
    for node in range(num_nodes):
        blocks += (num_blocks - node + num_nodes - 1) // num_nodes
        ends.append(size if node + 1 == num_nodes else min(size, align_up(blocks * block_bytes, page_bytes)))
    return [end - begin for begin, end in pairwise(ends)]


def short_nodes(nodes: Sequence[NodeBytes]) -> list[str]:
    """What is missing on the nodes that have less than the plan places there."""
    lines = []
    for node in nodes:
        if not node.fits:
            name = max(node.terms, key=lambda name: node.terms[name])
            lines.append(
                f"the plan places {format_bytes(node.total_bytes)} on node {node.node_id} ({name} "
                f"{format_bytes(node.terms[name])}), it has {format_bytes(node.available_bytes)} for this process"
            )
    return lines


def require_nodes_fit(nodes: Sequence[NodeBytes]) -> None:
    """Refuse a plan that asks more of a node than it has. Raises MachineError."""
    short = short_nodes(nodes)
    if short:
        hint = "hotset machine shows what takes it; --nodes chooses nodes, --numa prefer lets pages go to others"
        raise MachineError(short[0], hint)


def explain_nodes(nodes: Sequence[NodeBytes]) -> list[str]:
    """Lines that print the split; none for one node."""
    if len(nodes) < 2:
        return []
    lines = ["rows of all matrices are split over the nodes, blocks of the cache are dealt to them in turn:"]
    for node in nodes:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in node.terms.items() if size)
        room = f"{'fits' if node.fits else 'does NOT fit'} in {format_bytes(node.available_bytes)}"
        total = format_bytes(node.total_bytes)
        lines.append(f"  node {node.node_id}: {node.num_threads} threads, {total} ({parts}), {room}")
    return lines
