"""The layouts that a machine allows: who holds what, who reads it, before anybody asked whether it fits.

Each is a plain description; :mod:`hotset.plan.placement` adds up its bytes, predicts its speed and chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hotset.machine.profile import Consumer, Profile
from hotset.plan.homes import Homes, Share, even_shares, host_memory, module_of
from hotset.program.classes import WEIGHT_CLASSES, WeightClass

Fractions = tuple[tuple[str, float], ...]
"""(memory, part of the whole that it holds)."""


@dataclass(frozen=True)
class Layout:
    """One way to lay a model out.

    Attributes:
        decode: who reads which share in a step of one token, at the worst moment that is expected.
        prefill: the same in a step of many tokens, where every expert is busy.
        weights: by class, the part of its bytes that each memory holds; 1 in each for copies.
        cache: part of the cache that each memory holds.
        heads: memories that hold a workspace, a sampler and the frontiers of their own.
        is_run: whether the engine of this release can run a model so.
    """

    name: str
    about: str
    decode: Homes
    prefill: Homes
    weights: Mapping[WeightClass, Fractions]
    cache: Fractions
    heads: tuple[str, ...]
    is_run: bool = False


def cpu_layout(cpus: Sequence[Consumer]) -> Layout:
    """How the engine lays a model out over the nodes of these CPUs."""
    return _one(cpus[0]) if len(cpus) == 1 else _rows(cpus)


def layouts(
    profile: Profile, cpus: Sequence[Consumer], gpus: Sequence[Consumer], outside: float, top_k: int
) -> list[Layout]:
    """Every layout over these consumers.

    ``outside`` is the part of the experts that the GPUs' memory has no room for; ``top_k`` the experts of one token.
    """
    found: list[Layout] = []
    for group in (gpus, cpus):
        found += [_one(consumer) for consumer in group]
        if len(group) > 1:
            found += [_rows(group), _experts(group, top_k), _replicas(group)]
    if len(cpus) > 1:
        found.append(_interleaved(cpus))
    hosts = {gpu.name: host_memory(profile, gpu) for gpu in gpus}
    beside = {gpu.name: cpu for gpu in gpus for cpu in cpus if cpu.near == hosts[gpu.name] != gpu.near}
    if gpus and outside > 0 and len(beside) == len(gpus):
        found += _offloaded(gpus, beside, cpus, outside)
    return found


def _pairs(group: Sequence[Consumer]) -> list[tuple[str, str]]:
    return [(consumer.near, consumer.name) for consumer in group]


def _names(group: Iterable[Consumer]) -> str:
    return ", ".join(dict.fromkeys(consumer.near for consumer in group))


def _fractions(shares: Iterable[Share]) -> Fractions:
    total: dict[str, float] = {}
    for share in shares:
        total[share.memory] = total.get(share.memory, 0.0) + share.share
    return tuple(total.items())


def _layout(name: str, about: str, homes: Homes, cache: Fractions, heads: Sequence[str]) -> Layout:
    weights: dict[WeightClass, Fractions] = {name: _fractions(homes.of(name)) for name in WEIGHT_CLASSES}
    return Layout(name, about, homes, homes, weights, cache, tuple(heads))


def _one(consumer: Consumer) -> Layout:
    own = even_shares(_pairs([consumer]))
    name, cache = f"all in {consumer.near}", ((consumer.near, 1.0),)
    layout = _layout(name, f"{consumer.name} reads it", Homes(name, own, own, own, own), cache, [consumer.near])
    return replace(layout, is_run=consumer.kind == "cpu")


def _cache(group: Sequence[Consumer]) -> tuple[tuple[Share, ...], Fractions, list[str]]:
    """Cache shares of a team, its parts, and the memories with a workspace.

    GPUs have a copy each, since rows that are key and value of all heads cannot be split by head. CPUs read from blocks
    dealt to the nodes in turn, whoever has the head.
    """
    if group[0].kind == "gpu":
        copies = tuple(Share(consumer.near, 1.0, consumer.name) for consumer in group)
        return copies, tuple((consumer.near, 1.0) for consumer in group), [consumer.near for consumer in group]
    dealt = _everywhere(group)
    return dealt, _fractions(dealt), [group[0].near]


def _everywhere(group: Sequence[Consumer]) -> tuple[Share, ...]:
    """Everyone reads from every memory of the group alike."""
    return even_shares([(consumer.near, reader.name) for reader in group for consumer in group])


def _rows(group: Sequence[Consumer]) -> Layout:
    own = even_shares(_pairs(group))
    cache, parts, heads = _cache(group)
    name = f"rows over {_names(group)}"
    about = "each holds the same part of every matrix and every expert"
    layout = _layout(name, about, Homes(name, own, own, own, cache), parts, heads)
    return replace(layout, is_run=group[0].kind == "cpu")


def _experts(group: Sequence[Consumer], top_k: int) -> Layout:
    """Whole experts: the node that a token's router favours has more to read than the others."""
    own = even_shares(_pairs(group))
    cache, parts, heads = _cache(group)
    name = f"experts over {_names(group)}"
    most = busiest_share(top_k, len(group)) if top_k else 1.0 / len(group)
    rest = (1.0 - most) / (len(group) - 1)
    uneven = tuple(Share(near, rest if i else most, reader) for i, (near, reader) in enumerate(_pairs(group)))
    plain = Homes(name, own, own, own, cache)
    about = f"whole experts, the busiest has {most:.0%} of a token's {top_k}"
    layout = _layout(name, about, plain, parts, heads)
    return replace(layout, decode=replace(plain, experts=uneven))


def busiest_share(top_k: int, num_nodes: int) -> float:
    """Expected share of ``top_k`` experts, each on a random node, that the node with most of them has."""
    # P(no node has more than m) = top_k! / num_nodes^top_k, times the coefficient of x^top_k in
    # (sum over j <= m of x^j / j!)^num_nodes.
    expected = 0.0
    for most in range(top_k):
        term = [1.0 / math.factorial(j) for j in range(most + 1)]
        power = [1.0]
        for _ in range(num_nodes):
            power = [
                sum(power[i] * term[j - i] for i in range(len(power)) if 0 <= j - i < len(term))
                for j in range(min(top_k, len(power) + len(term) - 2) + 1)
            ]
        inside = power[top_k] if len(power) > top_k else 0.0
        expected += 1.0 - inside * math.factorial(top_k) / num_nodes**top_k
    return expected / top_k


def _replicas(group: Sequence[Consumer]) -> Layout:
    """A copy on each: nothing that rows would not read locally too, for as many times the bytes."""
    rows = _rows(group)
    name = f"copies on {_names(group)}"
    homes = replace(rows.decode, name=name)
    copies = tuple((consumer.near, 1.0) for consumer in group)
    weights: dict[WeightClass, Fractions] = dict.fromkeys(WEIGHT_CLASSES, copies)
    return replace(
        rows,
        name=name,
        about="each holds all weights and reads its part",
        decode=homes,
        prefill=homes,
        weights=weights,
        is_run=False,
    )


def _interleaved(group: Sequence[Consumer]) -> Layout:
    mixed = _everywhere(group)
    name = f"interleaved over {_names(group)}"
    homes = Homes(name, mixed, mixed, mixed, mixed)
    return _layout(name, "pages in turn, each reads mostly from the others", homes, _fractions(mixed), [group[0].near])


def _offloaded(
    gpus: Sequence[Consumer], beside: Mapping[str, Consumer], cpus: Sequence[Consumer], outside: float
) -> list[Layout]:
    """GPUs hold what they can; the other experts are in the memory of CPUs."""
    own = even_shares(_pairs(gpus))
    inside = even_shares(_pairs(gpus), 1.0 - outside) if outside < 1.0 else ()
    cache, parts, heads = _cache(gpus)
    near = [(beside[gpu.name].near, gpu.name) for gpu in gpus]
    hosts = list({beside[gpu.name].name: beside[gpu.name] for gpu in gpus}.values())
    ways = [
        ("GPUs, experts beside them", "each GPU reads them from the memory of its own CPU", even_shares(near, outside)),
        ("GPUs, CPUs compute experts", "CPUs compute what GPUs have no room for", even_shares(_pairs(hosts), outside)),
    ]
    if len(cpus) > 1:
        mixed = [(cpu.near, gpu.name) for gpu in gpus for cpu in cpus]
        about = "pages in turn over the CPUs' memories, as without a plan"
        ways.append(("GPUs, experts interleaved", about, even_shares(mixed, outside)))
    where = _names(cpus)
    return [
        _layout(
            name,
            f"{outside:.0%} of them in {where}; {about}",
            Homes(name, own, (*inside, *far), own, cache),
            parts,
            heads,
        )
        for name, about, far in ways
    ]


def pinned(layout: Layout, profile: Profile, name: WeightClass, memory: str) -> Layout:
    """``layout`` with all weights of a class in ``memory``.

    Who of the layout's readers stands in the same module reads them, or else all of them in equal parts.
    """
    readers = [profile.consumer(reader) for reader in dict.fromkeys(share.consumer for share in layout.decode.dense)]
    home = module_of(profile, memory)
    near = [reader for reader in readers if reader.near == memory] or [
        reader for reader in readers if module_of(profile, reader.near) == home
    ]
    shares = even_shares([(memory, reader.name) for reader in near or readers])
    return replace(
        layout,
        decode=_with(layout.decode, name, shares),
        prefill=_with(layout.prefill, name, shares),
        weights={**layout.weights, name: ((memory, 1.0),)},
        is_run=False,
    )


def _with(homes: Homes, name: WeightClass, shares: tuple[Share, ...]) -> Homes:
    parts = {part: shares if part == name else homes.of(part) for part in WEIGHT_CLASSES}
    return Homes(homes.name, parts["dense"], parts["experts"], parts["sparse"], homes.cache)
