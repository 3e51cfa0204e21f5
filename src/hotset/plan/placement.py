"""Where a model should lie on a machine: every layout with its bytes and its predicted speed, and the one that wins.

Pure: program costs, a machine's profile and a wish in, candidates out. What the user fixed holds in every candidate, or
the plan is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.errors import MachineError, RequestError
from hotset.machine.profile import Consumer, Memory, Profile
from hotset.models.spec import ModelSpec
from hotset.plan.budget import DEFAULT_SEQUENCES, SAMPLER_BYTES, Wish, snapshot_term
from hotset.plan.homes import module_of
from hotset.plan.layouts import Fractions, Layout, layouts, pinned
from hotset.plan.predict import Prediction, Step, count_ops, model_step, predict_step
from hotset.plan.teams import ANSWER_TOKENS, PROMPT_TOKENS, Team, explain_teams, order_teams, team_sizes
from hotset.program import program as p
from hotset.program.cache import block_bytes, frontier_bytes, num_blocks
from hotset.program.classes import WEIGHT_CLASSES, WeightClass, class_bytes
from hotset.program.lower import step_bytes
from hotset.units import format_bytes

DECODE_CONTEXT = 4096
MIN_CHUNK = 512
"""What a hint suggests where a prefill chunk is too large."""


@dataclass(frozen=True)
class Held:
    """What one memory holds, by names of terms, and what a run may take of it."""

    memory: str
    terms: Mapping[str, int]
    usable_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.usable_bytes


@dataclass(frozen=True)
class Candidate:
    """One layout: its bytes by memory, and sizes of CPUs' teams with what is expected of them, the chosen one first.

    ``problem`` says why it cannot be; then there may be no prediction.
    """

    layout: Layout
    held: tuple[Held, ...]
    problem: str = ""
    teams: tuple[Team, ...] = ()

    @property
    def decode(self) -> Prediction | None:
        """A step of one token, by the chosen teams."""
        return self.teams[0].decode if self.teams else None

    @property
    def prefill(self) -> Prediction | None:
        """A step of a prompt's chunk, by the chosen teams."""
        return self.teams[0].prefill if self.teams else None

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def request_s(self) -> float:
        """Seconds of the request that layouts are compared by; without end when nothing can be predicted."""
        return self.teams[0].request_s if self.teams else float("inf")

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.name,
            "about": self.layout.about,
            "fits": self.fits,
            "problem": self.problem,
            "memories": [
                {"memory": held.memory, "usable_bytes": held.usable_bytes, "terms": dict(held.terms)}
                for held in self.held
            ],
            "shares": {
                name: [vars(share) for share in self.layout.decode.of(name)] for name in (*WEIGHT_CLASSES, "cache")
            },
            "teams": [team.to_json() for team in self.teams],
            "decode": self.decode.to_json() if self.decode else None,
            "prefill": self.prefill.to_json() if self.prefill else None,
        }


@dataclass(frozen=True)
class Placement:
    """All candidates, the best first, those that cannot be last. ``fixed`` are the terms that the user set."""

    machine: str
    context: int
    num_sequences: int
    prefill_chunk: int
    candidates: tuple[Candidate, ...]
    fixed: tuple[str, ...]

    @property
    def winner(self) -> Candidate | None:
        return self.candidates[0] if self.candidates and self.candidates[0].fits else None

    def to_json(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "fixed": list(self.fixed),
            "winner": self.winner.layout.name if self.winner else None,
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


def best_to_run(placement: Placement, num_cpus: int | None = None) -> Candidate | None:
    """The best layout that the engine can run, over ``num_cpus`` CPUs where that is given; None when none fits."""
    for candidate in placement.candidates:
        if candidate.fits and candidate.layout.is_run and num_cpus in (None, len(candidate.teams[0].threads)):
            return candidate
    return None


def parse_pins(pins: Iterable[str], profile: Profile) -> dict[str, str]:
    """``experts=node1`` by class. Raises RequestError for a class or a memory that is not there."""
    found: dict[str, str] = {}
    for pin in pins:
        name, separator, memory = pin.partition("=")
        memories = [memory.name for memory in profile.memories]
        if not separator or name not in WEIGHT_CLASSES or memory not in memories:
            expected = f"one of {', '.join(WEIGHT_CLASSES)}, =, and one of {', '.join(memories)}"
            raise RequestError(f"pin is {pin!r}, expected {expected}", f"--pin experts={memories[0]}")
        if found.setdefault(name, memory) != memory:
            raise RequestError(f"{name} are pinned to {found[name]} and to {memory}", f"--pin {name}={memory}")
    return found


@dataclass(frozen=True)
class _Terms:
    """Bytes that have to lie somewhere."""

    weights: Mapping[WeightClass, int]
    cache: int
    each: Mapping[str, int]
    """Of every memory with a workspace of its own."""


def place(
    spec: ModelSpec, formats: Mapping[str, str], profile: Profile, wish: Wish, context: int, prefill_chunk: int
) -> Placement:
    """Compare the layouts of ``spec`` on ``profile``, with room for ``context`` tokens of every sequence.

    Raises:
        RequestError: something fixed that this machine does not have.
    """
    sequences = wish.max_sequences or DEFAULT_SEQUENCES
    cpus, gpus = consumers_of(profile, wish.nodes)
    pins = parse_pins(wish.pins, profile)
    usable = _usable(profile, wish, cpus, gpus)
    terms = _terms(spec, formats, wish, sequences, context, prefill_chunk)
    top_k = max((op.top_k for op in spec.program.ops if isinstance(op, p.ExpertGated)), default=0)
    found: dict[object, Layout] = {}
    for layout in layouts(profile, cpus, gpus, _outside(terms, pins, gpus, usable), top_k):
        for name in WEIGHT_CLASSES:
            if name in pins:
                layout = pinned(layout, profile, name, pins[name])
        shares = (*(layout.decode.of(name) for name in WEIGHT_CLASSES), layout.decode.cache)
        found.setdefault((shares, tuple(layout.weights.items())), layout)
    num_ops = count_ops(spec, formats)
    depth = min(context, DECODE_CONTEXT)
    steps = (
        model_step(spec, formats, num_ops, context=depth, num_tokens=1),
        model_step(spec, formats, num_ops, context=0, num_tokens=prefill_chunk, num_outputs=1),
    )
    candidates = []
    for layout in found.values():
        held = _held(layout, terms, usable)
        problem = next((_shortage(entry) for entry in held if not entry.fits), "")
        try:
            teams = _teams(layout, profile, steps, is_fixed=wish.threads is not None)
        except MachineError as error:
            candidates.append(Candidate(layout, held, problem or str(error)))
            continue
        candidates.append(Candidate(layout, held, problem, teams))
    # Of equal speed, the one that takes fewer bytes.
    candidates.sort(key=lambda c: (not c.fits, round(c.request_s, 9), sum(held.total_bytes for held in c.held)))
    return Placement(profile.name, context, sequences, prefill_chunk, tuple(candidates), _fixed(wish, pins))


def _teams(layout: Layout, profile: Profile, steps: tuple[Step, Step], *, is_fixed: bool) -> tuple[Team, ...]:
    """Sizes of the teams of a layout's CPUs and what is expected of them, the best first. Raises MachineError."""
    consumers = (profile.consumer(name) for name in (*layout.decode.consumers, *layout.prefill.consumers))
    cpus = {consumer.name: bool(consumer.rates) for consumer in consumers if consumer.kind == "cpu"}
    found = [
        Team(
            threads,
            predict_step(steps[0], profile, layout.decode, threads),
            predict_step(steps[1], profile, layout.prefill, threads),
        )
        for threads in team_sizes(profile, tuple(cpus))[: 1 if is_fixed else None]
    ]
    return order_teams(found, are_rates_known=all(cpus.values()))


def _fixed(wish: Wish, pins: Mapping[str, str]) -> tuple[str, ...]:
    found = [f"{name} in {memory} (--pin)" for name, memory in pins.items()]
    if wish.nodes is not None:
        found.append(f"nodes {', '.join(map(str, wish.nodes))} only (--nodes)")
    if wish.threads is not None:
        found.append(f"{wish.threads} threads (--threads)")
    if wish.max_hbm is not None:
        found.append(f"at most {format_bytes(wish.max_hbm)} of the memory of each GPU (--max-hbm)")
    return tuple(found)


def consumers_of(profile: Profile, nodes: Sequence[int] | None) -> tuple[list[Consumer], list[Consumer]]:
    """CPUs and GPUs, of ``nodes`` and beside them alone when these are given."""
    chosen = profile.consumers
    if nodes is not None:
        hosts = {
            consumer.near: node
            for consumer in chosen
            if consumer.kind == "cpu" and (node := profile.memory(consumer.near).node) is not None
        }
        missing = [node for node in nodes if node not in hosts.values()]
        if missing or not nodes:
            known = ", ".join(str(node) for node in hosts.values()) or "none are known"
            what = f"node {missing[0]} with CPUs" if missing else "nodes in an empty list"
            raise RequestError(f"{profile.name} has no {what}", f"nodes with CPUs: {known}")
        chosen = tuple(c for c in chosen if hosts.get(module_of(profile, c.near)) in nodes)
    return [c for c in chosen if c.kind == "cpu"], [c for c in chosen if c.kind == "gpu"]


def _usable(profile: Profile, wish: Wish, cpus: Sequence[Consumer], gpus: Sequence[Consumer]) -> dict[str, int]:
    """What a run may take of every memory; nothing of those beside nodes that were not chosen."""
    own = {gpu.near for gpu in gpus} - {cpu.near for cpu in cpus}
    if wish.max_hbm is not None and not own:
        raise RequestError(f"{profile.name} has no memory of a GPU alone", "leave --max-hbm out")

    def allowed(memory: Memory) -> int:
        home = module_of(profile, memory.name)
        others = {module_of(profile, c.near) for c in profile.consumers} - {
            module_of(profile, c.near) for c in (*cpus, *gpus)
        }
        if home in others:
            return 0
        limited = memory.name in own and wish.max_hbm is not None
        return min(memory.usable_bytes, wish.max_hbm) if limited and wish.max_hbm is not None else memory.usable_bytes

    return {memory.name: allowed(memory) for memory in profile.memories}


def _terms(spec: ModelSpec, formats: Mapping[str, str], wish: Wish, sequences: int, context: int, chunk: int) -> _Terms:
    each = {
        "frontier": sequences * frontier_bytes(spec.frontier),
        "workspace": step_bytes(spec.program, formats, (chunk,), max(sequences, 8))[chunk],
        "sampler": SAMPLER_BYTES * spec.vocab_size,
    }
    _, kept = snapshot_term(spec, wish.snapshots, sequences)
    if kept is not None:
        each[kept.name] = kept.num_bytes
    blocks = sequences * num_blocks(context) + num_blocks(wish.prefix_tokens)
    return _Terms(class_bytes(spec.program, formats), blocks * block_bytes(spec.groups), each)


def _outside(terms: _Terms, pins: Mapping[str, str], gpus: Sequence[Consumer], usable: Mapping[str, int]) -> float:
    """Part of the experts that the memory of the GPUs has no room for, beside everything else."""
    experts = terms.weights["experts"]
    if not gpus or not experts:
        return 0.0
    room = sum(usable[gpu.near] for gpu in gpus) - len(gpus) * (terms.cache + sum(terms.each.values()))
    room -= sum(size for name, size in terms.weights.items() if name not in ("experts", *pins))
    # A byte a memory is lost to rounding.
    return min(1.0, max(0.0, 1.0 - (room - 4 * len(gpus)) / experts))


def split_exactly(total: int, parts: Sequence[float]) -> list[int]:
    """``total`` in parts of about these fractions that add up to it: what rounding leaves goes to the largest rests."""
    sizes = [int(total * part) for part in parts]
    order = sorted(range(len(parts)), key=lambda i: sizes[i] - total * parts[i])
    for i in range(total - sum(sizes)):
        sizes[order[i % len(order)]] += 1
    return sizes


def _dealt(total: int, fractions: Fractions) -> dict[str, int]:
    """Bytes by memory: split where the fractions are parts of one whole, a copy each where they are wholes."""
    if all(part == 1.0 for _, part in fractions):
        return {memory: total for memory, _ in fractions}
    sizes = split_exactly(total, [part for _, part in fractions])
    return {memory: size for (memory, _), size in zip(fractions, sizes, strict=True)}


def _held(layout: Layout, terms: _Terms, usable: Mapping[str, int]) -> tuple[Held, ...]:
    held: dict[str, dict[str, int]] = {}
    for name in WEIGHT_CLASSES:
        for memory, size in _dealt(terms.weights[name], layout.weights[name]).items():
            held.setdefault(memory, {})[name] = size
    for memory, size in _dealt(terms.cache, layout.cache).items():
        held.setdefault(memory, {})["cache"] = size
    for memory in layout.heads:
        held.setdefault(memory, {}).update(terms.each)
    parts = {memory: {name: size for name, size in entry.items() if size} for memory, entry in held.items()}
    return tuple(Held(memory, entry, usable[memory]) for memory, entry in parts.items() if entry)


def _shortage(held: Held) -> str:
    if not held.usable_bytes:
        return f"{held.memory} is not among the chosen nodes"
    return f"{held.memory} would hold {format_bytes(held.total_bytes)}, {format_bytes(held.usable_bytes)} are usable"


def require_winner(placement: Placement) -> Candidate:
    """The best layout. Raises MachineError when nothing fits, with what comes nearest."""
    winner = placement.winner
    if winner is not None:
        return winner
    fixed = f" with {'; '.join(placement.fixed)}" if placement.fixed else ""
    nearest = min(placement.candidates, key=lambda c: sum(max(0, h.total_bytes - h.usable_bytes) for h in c.held))
    message = f"no layout fits {placement.machine}{fixed}; the nearest, {nearest.layout.name}: {nearest.problem}"
    short = next((held for held in nearest.held if not held.fits), None)
    if short is None or not short.usable_bytes:
        raise MachineError(message, "leave out what was fixed")
    largest = max(short.terms, key=lambda name: short.terms[name])
    smaller = {"cache": "a smaller --context or --sequences", "workspace": f"--prefill-chunk {MIN_CHUNK}"}
    hint = smaller.get(largest, "a machine with more memory, or a smaller model")
    message += f", of {largest} {format_bytes(short.terms[largest])}"
    raise MachineError(message, hint + (", or leave out what was fixed" if placement.fixed else ""))


def explain_placement(placement: Placement) -> list[str]:
    """Lines that print the table and say why its first line won."""
    lines = [f"layouts on {placement.machine}, best first, for {PROMPT_TOKENS:,} tokens in and {ANSWER_TOKENS:,} out:"]
    lines += [f"  fixed by you: {line}" for line in placement.fixed]
    rows = [("", "tok/s", "prompt", "bytes by memory", "most of a token's time")]
    for candidate in placement.candidates:
        if not candidate.fits or candidate.decode is None or candidate.prefill is None:
            continue
        where = ", ".join(f"{held.memory} {format_bytes(held.total_bytes)}" for held in candidate.held)
        # Bytes alone bound a prompt where nobody published an arithmetic rate.
        sign = "<" if any("rate" in what for what in candidate.prefill.unknown) else ""
        rates = f"{candidate.decode.tokens_per_s:,.1f}", f"{sign}{candidate.prefill.tokens_per_s:,.0f}"
        rows.append((candidate.layout.name, *rates, where, _bound(candidate.decode)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows if len(rows) > 1 else ():
        cells = (
            row[0].ljust(widths[0]),
            row[1].rjust(widths[1]),
            row[2].rjust(widths[2]),
            row[3].ljust(widths[3]),
            row[4],
        )
        lines.append("  " + "  ".join(cells).rstrip())
    for candidate in placement.candidates:
        if not candidate.fits:
            speed = f" ({candidate.decode.tokens_per_s:,.1f} tok/s)" if candidate.decode else ""
            lines.append(f"  {candidate.layout.name}{speed}: cannot be, {candidate.problem}")
    unknown = placement.winner.decode.unknown if placement.winner and placement.winner.decode else ()
    if unknown:
        lines.append(f"  counted as nothing, since nobody published it: {'; '.join(unknown)}")
    return lines + _why(placement)


def _bound(prediction: Prediction) -> str:
    largest = max(prediction.classes, key=lambda entry: entry.seconds)
    return f"{largest.name} {largest.seconds / prediction.seconds:.0%}, {largest.bound}"


def _why(placement: Placement) -> list[str]:
    fitting = [c for c in placement.candidates if c.fits]
    if not fitting:
        return ["nothing fits"]
    best = fitting[0]
    lines = [f"{best.layout.name}: {best.layout.about}", *explain_teams(best.teams)]
    for other in fitting[1:2]:
        ratio = other.request_s / best.request_s
        if ratio > 1.005 and other.decode is not None:
            lines.append(f"it wins by {ratio:.2f}x over {other.layout.name}, whose time is {_bound(other.decode)}")
        else:
            more = sum(held.total_bytes for held in other.held) - sum(held.total_bytes for held in best.held)
            lines.append(f"{other.layout.name} is as fast and takes {format_bytes(more)} more")
    return lines
