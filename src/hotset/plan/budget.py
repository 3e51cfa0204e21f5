"""The plan: every byte of a run, from headers alone, held against what the machine has.

``make_plan`` is a pure function of the model, the wish and the memory that is offered. The executor allocates
exactly what the plan says; a test holds the process against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from hotset.checkpoint.formats import FORMATS
from hotset.errors import MachineError, RequestError
from hotset.models.spec import ModelSpec
from hotset.program import lower as lowering
from hotset.program.cache import BLOCK_TOKENS, block_bytes, frontier_bytes, num_blocks
from hotset.program.classes import packed_bytes
from hotset.program.cost import decode_bytes
from hotset.units import MIB, align_up, format_bytes

DEFAULT_CONTEXT = 8192
DEFAULT_SEQUENCES = 1
DEFAULT_SNAPSHOTS = 8
"""Of the frontier, and as many more for every sequence: half of them for the last turns, half for a long beginning."""
WORKSPACE_BUDGET = 256 * MIB
"""What a step's buffers may take; the prefill chunk follows from it."""
LARGEST_CHUNK = 512
"""Beyond this a chunk gains nothing: each weight byte already serves over 500 multiply-adds per read."""
CHUNK_ALIGN = 16
RESERVE_BYTES = 256 * MIB
"""Left free for the interpreter, the tokenizer and the rest of the machine."""
SAMPLER_BYTES = 20
"""Per vocabulary entry: logits, weights, counts and candidates of ``SamplerWorkspace`` in native/src/sampler.h."""
TREE_BYTES = 1500
"""Of a block in the prefix tree: its 256 token ids and its node (tests/unit/plan measure it)."""
STAGING_BYTES = MIB // 4
"""Per thread, while loading (kStagingBytes in native/src/executor_setup.cpp)."""


@dataclass(frozen=True)
class Wish:
    """What the user asked for; None leaves the choice to the planner."""

    context: int | None = None
    max_sequences: int | None = None
    prefill_chunk: int | None = None
    threads: int | None = None
    prefix_tokens: int = 0
    """Tokens of finished conversations that stay reusable beyond the blocks that live sequences need."""
    snapshots: int | None = None
    """Frontiers kept beside the live ones, for prefix reuse; 0 for none."""
    nodes: tuple[int, ...] | None = None
    """NUMA nodes that may hold the run and compute it; None leaves them to the planner."""
    pins: tuple[str, ...] = ()
    """Classes of weights and the memory of each, as "experts=node1"; for other machines only."""
    max_hbm: int | None = None
    """Most bytes of the memory of each GPU; for other machines only."""


@dataclass(frozen=True)
class Term:
    """One line of the plan: a name, bytes, and how they come about."""

    name: str
    num_bytes: int
    kind: str  # "resident", "per sequence", "transient", "load", "reserve"
    detail: str


@dataclass(frozen=True)
class NodeBytes:
    """What one NUMA node holds, by names of terms, and what it has for this process."""

    node_id: int
    num_threads: int
    terms: Mapping[str, int]
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes


@dataclass(frozen=True)
class Plan:
    """A placed, sized run. ``terms`` add up to ``total_bytes``."""

    model: str
    context: int
    max_sequences: int
    prefill_chunk: int
    max_outputs: int
    num_threads: int
    num_blocks: int
    block_bytes: int
    cache_bytes_per_token: float
    partial_floats: int
    num_frontiers: int
    num_snapshots: int
    frontier_bytes: int
    """Of one sequence: windows and compressor state; 0 where rows of tokens are all there is."""
    terms: tuple[Term, ...]
    available_bytes: int
    available_source: str
    decode_bytes: dict[int, int]
    """Bytes one decoded token reads, by context."""
    changes: tuple[str, ...] = field(default=())
    """Settings that differ from what was asked: "asked -> used, because"."""
    hint: str = ""
    """For a plan that does not fit: options that make one that does, when there are any."""
    nodes: tuple[NodeBytes, ...] = ()
    """The terms by NUMA node; see :mod:`hotset.plan.nodes`."""
    cpus: tuple[int, ...] = ()
    """CPU of every thread, node by node; empty for a plan of no particular machine."""

    @property
    def total_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)

    @property
    def resident_bytes(self) -> int:
        """What the process itself holds once loaded: everything but the reserve and the staging of the load."""
        return sum(term.num_bytes for term in self.terms if term.kind not in ("reserve", "load"))

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes

    def to_json(self) -> dict[str, object]:
        """The plan as plain JSON values."""
        out = asdict(self)
        out["terms"] = [asdict(term) for term in self.terms]
        out["decode_bytes"] = {str(k): v for k, v in self.decode_bytes.items()}
        return out | {"total_bytes": self.total_bytes, "resident_bytes": self.resident_bytes, "fits": self.fits}


def weights_bytes(spec: ModelSpec, formats: Mapping[str, str]) -> tuple[int, int]:
    """Bytes of packed matrices, and of float vectors and tables (64-byte aligned), of the model's program."""
    matrices = vectors = 0
    for weight in spec.program.weights.values():
        if weight.is_matrix:
            matrices += packed_bytes(weight, formats)
        else:
            vectors += packed_bytes(weight, formats)
    return matrices, vectors


def _staging_bytes(spec: ModelSpec, formats: Mapping[str, str]) -> int:
    """What one thread reads at a time: 256 KiB, or one tile of the widest matrix (``Executor::load`` in C++)."""
    matrices = [w for w in spec.program.weights.values() if w.is_matrix]
    tiles = [lowering.tile_bytes(FORMATS[formats[w.key]], w.in_width) for w in matrices]
    return max(STAGING_BYTES, *tiles)


def choose_chunk(spec: ModelSpec, formats: Mapping[str, str], outputs: int, context: int) -> int:
    """The largest useful prefill chunk whose step buffers stay within :data:`WORKSPACE_BUDGET`."""
    least, twice = lowering.step_bytes(spec.program, formats, (CHUNK_ALIGN, 2 * CHUNK_ALIGN), outputs).values()
    per_token = (twice - least) // CHUNK_ALIGN
    room = max(0, WORKSPACE_BUDGET - least) // max(per_token, 1) + CHUNK_ALIGN
    return max(CHUNK_ALIGN, min(room // CHUNK_ALIGN * CHUNK_ALIGN, LARGEST_CHUNK, align_up(context, CHUNK_ALIGN)))


@dataclass(frozen=True)
class Sizes:
    """What a step and a sequence may be at most; ``changes`` as :attr:`Plan.changes`."""

    context: int
    sequences: int
    outputs: int
    chunk: int
    changes: tuple[str, ...] = ()


def sizes_of(spec: ModelSpec, formats: Mapping[str, str], wish: Wish) -> Sizes:
    """The sizes that a wish comes to. Raises RequestError for what this model cannot have."""
    sequences = _positive("max_sequences", DEFAULT_SEQUENCES if wish.max_sequences is None else wish.max_sequences)
    context = min(spec.max_context, DEFAULT_CONTEXT) if wish.context is None else _positive("context", wish.context)
    if context > spec.max_context:
        limit = f"the {spec.max_context} tokens that {spec.name} was made for"
        raise RequestError(f"context {context} is more than {limit}", f"--context {spec.max_context}")
    if wish.prefix_tokens < 0:
        raise RequestError(f"prefix_tokens is {wish.prefix_tokens}, expected 0 or more")
    outputs = max(sequences, 8)
    chunk = wish.prefill_chunk
    chunk = choose_chunk(spec, formats, outputs, context) if chunk is None else _positive("prefill_chunk", chunk)
    if chunk < sequences:
        change = f"prefill_chunk {chunk} -> {sequences}, because every sequence needs one row in a step"
        return Sizes(context, sequences, outputs, sequences, (change,))
    return Sizes(context, sequences, outputs, chunk)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise RequestError(f"{name} is {value}, expected at least 1")
    return value


def snapshot_term(spec: ModelSpec, wish: int | None, sequences: int) -> tuple[int, Term | None]:
    """Number of frontier snapshots and their bytes; no term for a model that has no frontier.

    Raises:
        RequestError: a negative number, or snapshots of a model that has nothing to keep.
    """
    per_frontier = frontier_bytes(spec.frontier)
    if wish is not None and wish < 0:
        raise RequestError(f"snapshots is {wish}, expected 0 or more")
    if not per_frontier:
        if wish:
            raise RequestError(f"snapshots is {wish}, {spec.name} has no frontier to keep", "leave it out")
        return 0, None
    count = DEFAULT_SNAPSHOTS * (1 + sequences) if wish is None else wish
    detail = f"{count} x {per_frontier:,} B for prefix reuse"
    return count, Term("frontier snapshots", count * per_frontier, "resident", detail)


def make_plan(
    spec: ModelSpec, formats: Mapping[str, str], wish: Wish, num_threads: int, available_bytes: int, source: str
) -> Plan:
    """Plan a run of ``spec`` whose tensors have ``formats`` (by key), on ``num_threads`` threads.

    Args:
        available_bytes: memory that this process may use, and ``source`` says what sets that limit.

    Raises:
        RequestError: a wish that this model cannot meet at any size of memory.
    """
    plan = _size(spec, formats, wish, num_threads, available_bytes, source)
    if plan.fits:
        return plan
    for options, smaller in _smaller_wishes(plan, wish):
        if _size(spec, formats, smaller, num_threads, available_bytes, source).fits:
            return replace(plan, hint=f"{options} fits")
    return plan


def _size(
    spec: ModelSpec, formats: Mapping[str, str], wish: Wish, num_threads: int, available_bytes: int, source: str
) -> Plan:
    sizes = sizes_of(spec, formats, wish)
    context, sequences, outputs, chunk = sizes.context, sizes.sequences, sizes.outputs, sizes.chunk
    low = lowering.lower(spec.program, formats, chunk, outputs)
    partials = lowering.partial_floats(spec.program, sequences, context, num_threads)
    blocks = sequences * num_blocks(context) + num_blocks(wish.prefix_tokens)
    per_block, per_frontier = block_bytes(spec.groups), frontier_bytes(spec.frontier)
    matrices, vectors = weights_bytes(spec, formats)
    rows = ", ".join(dict.fromkeys(group.format for group in spec.groups))
    cache = f"{blocks} blocks of {BLOCK_TOKENS} tokens, {per_block:,} B of {rows}, for {sequences} x {context:,} tokens"
    if not spec.groups:
        cache = "no layer keeps rows of all tokens"
    scratch = num_threads * low.scratch_bytes
    snapshots, kept = snapshot_term(spec, wish.snapshots, sequences)
    frontier = f"{sequences} x {per_frontier:,} B of windows and compressor state"
    terms = (
        Term("weights", matrices + vectors, "resident", f"{len(spec.program.weights)} tensors, the files' own formats"),
        Term("cache", blocks * per_block, "per sequence", cache),
        *([Term("frontier", sequences * per_frontier, "per sequence", frontier)] if per_frontier else []),
        *([kept] if kept else []),
        Term(
            "token ids", 4 * sequences * context + TREE_BYTES * blocks, "resident", "of sequences and the prefix tree"
        ),
        Term("workspace", sum(low.slot_bytes), "transient", f"step buffers for {chunk} tokens and {outputs} outputs"),
        Term("attention partials", partials * 4, "transient", f"sums over spans of up to {context:,} tokens"),
        Term("thread scratch", scratch, "transient", f"{num_threads} threads"),
        Term("sampler", SAMPLER_BYTES * spec.vocab_size, "resident", f"{spec.vocab_size:,} logits"),
        Term("load staging", num_threads * _staging_bytes(spec, formats), "load", "freed when loaded"),
        Term("reserve", RESERVE_BYTES, "reserve", "interpreter, tokenizer, the rest of the machine"),
    )
    contexts = sorted({1, min(4096, context), context})
    return Plan(
        model=spec.name,
        context=context,
        max_sequences=sequences,
        prefill_chunk=chunk,
        max_outputs=outputs,
        num_threads=num_threads,
        num_blocks=blocks,
        block_bytes=per_block,
        cache_bytes_per_token=per_block / BLOCK_TOKENS,
        partial_floats=partials,
        num_frontiers=sequences if per_frontier else 0,
        num_snapshots=snapshots,
        frontier_bytes=per_frontier,
        terms=terms,
        available_bytes=available_bytes,
        available_source=source,
        decode_bytes={c: decode_bytes(spec.program, formats, c) for c in contexts},
        changes=sizes.changes,
    )


def require_fit(plan: Plan) -> None:
    """Refuse a plan that does not fit, naming the largest term and a setting that fits. Raises MachineError."""
    if plan.fits:
        return
    largest = max(plan.terms, key=lambda term: term.num_bytes)
    message = (
        f"this run needs {format_bytes(plan.total_bytes)}, {format_bytes(plan.available_bytes)} are available "
        f"({plan.available_source}); the largest term is {largest.name}: {format_bytes(largest.num_bytes)}"
    )
    missing = format_bytes(plan.total_bytes - plan.available_bytes)
    raise MachineError(message, plan.hint or f"a machine with {missing} more free memory, or a smaller model")


def _smaller_wishes(plan: Plan, wish: Wish) -> Iterator[tuple[str, Wish]]:
    """Wishes that need less, the mildest first, each with the options that ask for it."""
    cache = next(term for term in plan.terms if term.name == "cache")
    spare = (cache.num_bytes - (plan.total_bytes - plan.available_bytes)) // plan.block_bytes if plan.block_bytes else 0
    spare -= num_blocks(wish.prefix_tokens)
    chunk = f"--prefill-chunk {CHUNK_ALIGN}"
    if plan.num_snapshots:
        yield "--snapshots 0", replace(wish, snapshots=0)
    if wish.prefill_chunk is not None and wish.prefill_chunk > LARGEST_CHUNK:
        yield f"--prefill-chunk {LARGEST_CHUNK}", replace(wish, prefill_chunk=LARGEST_CHUNK)
    sequences = min(plan.max_sequences - 1, spare // num_blocks(plan.context))
    if sequences >= 1:
        yield f"--sequences {sequences}", replace(wish, max_sequences=sequences)
    for count in dict.fromkeys((plan.max_sequences, 1)):
        context = min(plan.context, spare // count * BLOCK_TOKENS)
        if context >= 1:
            options = f"--context {context}" + (f" --sequences {count}" if count != plan.max_sequences else "")
            smaller = replace(wish, context=context, max_sequences=count)
            yield options, smaller
            yield f"{options} {chunk}", replace(smaller, prefill_chunk=CHUNK_ALIGN)
    least = replace(wish, context=min(plan.context, BLOCK_TOKENS), max_sequences=1, prefill_chunk=CHUNK_ALIGN)
    yield f"--context {least.context} --sequences 1 {chunk}", least
    if plan.num_snapshots:
        yield f"--context {least.context} --sequences 1 --snapshots 0 {chunk}", replace(least, snapshots=0)
