"""How long a step should take: bytes over the paths of a machine, arithmetic over its rates. Pure.

An op takes the longest of three: what each consumer reads, over the bandwidth of the path that it reads it by; what
crosses from one module of the machine to another; and its arithmetic over the rate. To that come a fixed cost of every
op, and, where consumers of several modules hold parts of one matrix, their exchange of the
result. Caches are left out: small matrices that would stay in one are counted as read from memory.

How far real steps stay behind is in two named constants, both measured; nothing else is adjusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hotset.machine.profile import Consumer, ConsumerKind, Profile
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.plan.homes import Homes, Share, module_of
from hotset.program import program as p
from hotset.program.cache import CacheGroup, FrontierGroup
from hotset.program.cost import arithmetic, op_class, op_cost
from hotset.program.lower import lower

READ_SHARE: Mapping[ConsumerKind, float] = {"cpu": 0.94, "gpu": 1.0}
"""Share of the measured bandwidth that the reading of a step reaches.

cpu: `hotset bench` on a 3.3 B model prints 90 to 98 % for decode (docs/reference/peers.md, `make bench-peers`). gpu:
the published runs of docs/reference/validation.md show no constant loss beside that of each op.
"""
COMPUTE_SHARE = 0.55
"""Share of the arithmetic rate that products with many tokens reach: `hotset bench --prefill 512` prints 50 to 65 %."""
JOINS_PER_LAYER = 2
"""Results that consumers of several modules exchange in a layer: of its attention and of its feed-forward part."""
JOIN_BYTES = 2
"""Of one exchanged number, BF16."""

Home = Literal["dense", "experts", "sparse", "cache"]


@dataclass(frozen=True)
class Work:
    """What one op of a step reads, out of which home, and computes with which kinds of arithmetic (fastest first)."""

    name: str
    home: Home
    num_bytes: float
    num_ops: float = 0.0
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """The work of one step: ops that read or compute, with the number of those alike; all ops there are; and what is
    exchanged where a matrix has several owners."""

    work: Mapping[Work, int]
    num_ops: int
    num_joins: int
    join_bytes: float
    num_tokens: int = 1
    num_sequences: int = 1
    context: int = 0


@dataclass(frozen=True)
class ClassTime:
    """One op class of a step. ``bound`` names what took most of its time."""

    name: str
    num_bytes: float
    num_ops: float
    seconds: float
    bound: str


@dataclass(frozen=True)
class Prediction:
    """A step's expected time, by op class; the fixed cost and the exchanges of all ops are classes of their own."""

    machine: str
    profile_id: str
    homes: str
    num_tokens: int
    num_sequences: int
    context: int
    classes: tuple[ClassTime, ...]
    path_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes by path, as "gpu0 from node0"."""
    unknown: tuple[str, ...] = ()
    """What the profile does not say and was counted as nothing."""

    @property
    def seconds(self) -> float:
        return sum(entry.seconds for entry in self.classes)

    @property
    def num_bytes(self) -> float:
        """Bytes read, all consumers together."""
        return sum(self.path_bytes.values())

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together."""
        return self.num_tokens * self.num_sequences / self.seconds

    def class_seconds(self, name: str) -> float:
        """Seconds of one class, 0 when the step has none of it."""
        return sum(entry.seconds for entry in self.classes if entry.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "profile": self.profile_id,
            "homes": self.homes,
            "num_tokens": self.num_tokens,
            "num_sequences": self.num_sequences,
            "context": self.context,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "classes": [vars(entry) for entry in self.classes],
            "path_bytes": dict(self.path_bytes),
            "unknown": list(self.unknown),
        }


def count_ops(spec: ModelSpec, formats: Mapping[str, str]) -> int:
    """Native ops of one step: each costs its team something, however small it is (on a GPU the launch of a kernel)."""
    # The same in every cache form; the default form is one that kernels read.
    return len(lower(with_cache_format(spec, formats).program, formats, 1, 1).ops)


def model_step(
    spec: ModelSpec,
    formats: Mapping[str, str],
    num_ops: int,
    *,
    context: int,
    num_tokens: int = 1,
    num_sequences: int = 1,
    num_outputs: int | None = None,
) -> Step:
    """The work of a step of ``num_tokens`` tokens of each of ``num_sequences`` sequences, ``context`` tokens cached.

    ``num_ops`` is :func:`count_ops`, which does not depend on the step. ``num_outputs`` of a sequence are all its
    tokens where it is None (verifying a draft), and one for a prompt.
    """
    outputs = num_tokens if num_outputs is None else num_outputs
    groups: tuple[CacheGroup | FrontierGroup, ...] = (*spec.program.groups, *spec.program.frontier)
    row_formats = {group.name: group.format for group in groups}
    work: Counter[Work] = Counter()
    for op in spec.program.ops:
        cost = op_cost(op, formats, groups, num_tokens, outputs, context, num_sequences)
        if cost.weight_bytes or cost.cache_bytes or cost.num_ops:
            home, kinds = _home(op, formats, row_formats)
            is_head = isinstance(op, p.Linear) and op.x.rows == "outputs"
            name = "head" if is_head else op_class(op)
            work[Work(name, home, cost.weight_bytes + cost.cache_bytes, cost.num_ops, kinds)] += 1
    tokens = num_tokens * num_sequences
    return Step(
        work,
        num_ops,
        JOINS_PER_LAYER * spec.num_layers,
        JOIN_BYTES * spec.hidden_size * tokens,
        num_tokens,
        num_sequences,
        context,
    )


def _home(op: p.Op, formats: Mapping[str, str], row_formats: Mapping[str, str]) -> tuple[Home, tuple[str, ...]]:
    match op:
        case p.Embed():
            return "sparse", ()
        case p.ExpertGated() | p.ExpertDown():
            return "experts", arithmetic(formats[p.weights_of(op)[0].key])
        case p.Linear() | p.GatedLinear() | p.LatentQuery() | p.LatentValue():
            return "dense", arithmetic(formats[p.weights_of(op)[0].key])
        case p.AttendRows():
            return "cache", arithmetic(row_formats[op.window])
        case p.Attend() | p.IndexRows() | p.AttendLatent():
            return "cache", arithmetic(row_formats[op.group])
        case p.Compress():
            return "cache", ("f32",)
        case _:
            return "dense", ("f32",)


def predict_step(step: Step, profile: Profile, homes: Homes, threads: Mapping[str, int] | None = None) -> Prediction:
    """Expected time of ``step`` on ``profile`` with its bytes in ``homes``.

    ``threads`` are the sizes of CPUs' teams, by consumer; a CPU that is left out reads as fast as any team of it and
    computes with all cores.

    Raises:
        MachineError: homes that the machine does not have, or a path that nobody measured.
    """
    profile_id = profile.id
    if threads:
        profile = profile.with_teams(threads)
    consumers = tuple(profile.consumer(name) for name in homes.consumers)
    unknown: dict[str, None] = {}
    totals: dict[str, tuple[float, float, float]] = {}
    bounds: dict[str, dict[str, float]] = {}
    path_bytes: dict[str, float] = {}
    for work, count in step.work.items():
        shares = homes.of(work.home)
        for share in shares:
            key = f"{share.consumer} from {share.memory}"
            path_bytes[key] = path_bytes.get(key, 0.0) + count * share.share * work.num_bytes
        seconds, bound = _op_time(work, shares, profile, unknown)
        before = totals.get(work.name, (0.0, 0.0, 0.0))
        added = (count * work.num_bytes, count * work.num_ops, count * seconds)
        totals[work.name] = (before[0] + added[0], before[1] + added[1], before[2] + added[2])
        spent = bounds.setdefault(work.name, {})
        spent[bound] = spent.get(bound, 0.0) + count * seconds
    classes = [ClassTime(name, *entry, _largest(bounds[name])) for name, entry in totals.items()]
    classes += _fixed_costs(step, profile, consumers, unknown)
    return Prediction(
        profile.name, profile_id, homes.name, step.num_tokens, step.num_sequences, step.context,
        tuple(classes), path_bytes, tuple(unknown),
    )  # fmt: skip


def _largest(spent: Mapping[str, float]) -> str:
    return max(spent, key=lambda name: spent[name])


def _op_time(work: Work, shares: Sequence[Share], profile: Profile, unknown: dict[str, None]) -> tuple[float, str]:
    """Seconds of one op, and what they are: consumers work at once, each reads its memories one after another."""
    times: dict[str, float] = {}
    bridge = 0.0
    reading: dict[str, float] = {}
    parts = sum(share.share for share in shares)
    computing: dict[str, float] = {}
    for share in shares:
        path = profile.path(share.consumer, share.memory)
        consumer = profile.consumer(share.consumer)
        seconds = share.share * work.num_bytes / (path.read_bytes_per_s * READ_SHARE[consumer.kind])
        reading[share.consumer] = reading.get(share.consumer, 0.0) + seconds
        if module_of(profile, share.memory) != module_of(profile, consumer.near):
            bridge += seconds
        rate = _rate(consumer, work.kinds, unknown) if work.num_ops else None
        if rate is not None:
            spent = work.num_ops * share.share / parts / (rate[1] * COMPUTE_SHARE)
            label = f"{share.consumer} {rate[0]}"
            computing[label] = computing.get(label, 0.0) + spent
    for name, seconds in reading.items():
        memories = "+".join(dict.fromkeys(share.memory for share in shares if share.consumer == name))
        times[f"{name} from {memories}"] = seconds
    times["bridge"] = bridge
    times |= computing
    bound = _largest(times)
    return times[bound], bound


def _rate(consumer: Consumer, kinds: Sequence[str], unknown: dict[str, None]) -> tuple[str, float] | None:
    """The first kind that the consumer has a rate for."""
    for kind in kinds:
        if kind in consumer.rates:
            return kind, consumer.rates[kind]
    unknown[f"rate of {' or '.join(kinds)} ({consumer.kind})"] = None
    return None


def _fixed_costs(
    step: Step, profile: Profile, consumers: Sequence[Consumer], unknown: dict[str, None]
) -> Iterable[ClassTime]:
    costs = []
    for consumer in consumers:
        if consumer.step_s is None:
            unknown[f"fixed cost of an op ({consumer.kind})"] = None
        else:
            costs.append(consumer.step_s)
    slowest = max(costs, default=0.0)
    yield ClassTime("each op", 0.0, 0.0, slowest * step.num_ops, f"{step.num_ops:,} x {slowest * 1e6:.1f} us")
    if len({module_of(profile, consumer.near) for consumer in consumers}) > 1:
        seconds = step.num_joins * max(_exchange(step, profile, a, b, unknown) for a in consumers for b in consumers)
        yield ClassTime("exchange", step.num_joins * step.join_bytes, 0.0, seconds, f"{step.num_joins} exchanges")


def _exchange(step: Step, profile: Profile, a: Consumer, b: Consumer, unknown: dict[str, None]) -> float:
    """Seconds until ``a`` has what ``b`` computed."""
    if a is b or module_of(profile, a.near) == module_of(profile, b.near):
        return 0.0
    path = profile.find_path(a.name, b.near)
    if path is None or path.latency_s is None:
        unknown[f"{a.name} from {b.near}: latency of an exchange"] = None
    if path is None:
        return 0.0
    return (path.latency_s or 0.0) + step.join_bytes / path.read_bytes_per_s
