"""The plan for a machine that is not this one: what each of its devices holds, from a model's declarations alone.

Devices are the GPUs of a machine, or the nodes of one that has none. Weights are split evenly over the devices. Every
device has a copy of the cache, since a row that is key and value of all heads cannot be split by head, and a workspace
of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from hotset.checkpoint.formats import FORMATS
from hotset.checkpoint.manifest import TensorDecl
from hotset.errors import RequestError
from hotset.machine.profile import Profile
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.plan.budget import DEFAULT_CONTEXT, DEFAULT_SEQUENCES, SAMPLER_BYTES, Term, Wish, snapshot_term
from hotset.plan.expect import Expectation, expect, explain_expectation
from hotset.plan.paged import has_paged_layout, paged_layout, tokens_in_flight
from hotset.plan.placement import Placement, consumers_of, explain_placement, place
from hotset.program.cache import BLOCK_TOKENS, block_bytes, frontier_bytes, num_blocks
from hotset.program.cost import decode_bytes
from hotset.program.lower import step_bytes
from hotset.units import format_bytes, format_rate

CHUNKS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Prefill chunks whose workspace is shown."""
CHUNK_SHARE = 1 / 16
"""Of a device's memory for the workspace, where the devices cannot hold all weights anyway."""
PAGED_FORM = "FP8+FP8"
"""The row formats that the published runs of the paged layout had."""
PAGED_CHUNKS = (8192, 32768)
PAGED_LENGTH = 65536


@dataclass(frozen=True)
class WeightBytes:
    """Tensors and bytes of a checkpoint: those that are loaded, and those that are not, for ``spare_reason``."""

    num_tensors: int
    num_bytes: int
    num_spare: int = 0
    spare_bytes: int = 0
    spare_reason: str = ""


@dataclass(frozen=True)
class CacheLine:
    """One form of the cache: bytes of a token, of one sequence of the planned context, and of its frontier."""

    form: str
    rows: str
    bytes_per_token: float
    context_bytes: int
    frontier_bytes: int


@dataclass(frozen=True)
class PagedLine:
    """What the paged layout of other engines takes for one sequence, see :mod:`hotset.plan.paged`."""

    length: int
    chunk: int
    is_async: bool
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True)
class DevicePlan:
    """One device of the machine; all are alike. ``terms`` add up to ``total_bytes``."""

    model: str
    machine: str
    num_devices: int
    context: int
    max_sequences: int
    prefill_chunk: int
    cache_form: str
    weights: WeightBytes
    terms: tuple[Term, ...]
    usable_bytes: int
    caches: tuple[CacheLine, ...]
    workspace: dict[int, int]
    """Bytes of a step's buffers by prefill chunk."""
    decode_bytes: dict[int, int]
    """Bytes one decoded token reads, by context, on all devices together."""
    read_bytes_per_s: float
    """Read bandwidth of all devices together."""
    placement: Placement
    expected: Expectation | None
    """Of the layout that won; None when none fits."""
    paged: tuple[PagedLine, ...] = ()
    paged_bytes_per_token: float = 0.0
    """Bytes of the paged pool for one more token in flight; 0 for a model that it is not made for."""

    @property
    def total_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)

    @property
    def fits(self) -> bool:
        """Whether some layout fits, on the devices alone or with the memory beside them."""
        return self.placement.winner is not None

    def to_json(self) -> dict[str, object]:
        """The plan as plain JSON values."""
        tables = {
            name: {str(key): num_bytes for key, num_bytes in table.items()}
            for name, table in (("workspace", self.workspace), ("decode_bytes", self.decode_bytes))
        }
        parts = {name: value for name, value in vars(self).items() if name not in ("expected", "placement")}
        parts |= {name: asdict(parts[name]) for name in ("weights",)}
        parts |= {name: [asdict(entry) for entry in parts[name]] for name in ("terms", "caches", "paged")}
        totals = {
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "placement": self.placement.to_json(),
            "expected": self.expected.to_json() if self.expected else None,
        }
        return parts | tables | totals


def declared_bytes(declarations: Iterable[TensorDecl]) -> WeightBytes:
    """Bytes of a model without files: of every tensor the first format that its declaration accepts."""
    sizes: dict[str, list[int]] = {"must": [], "spare": []}
    reason = ""
    for decl in declarations:
        if decl.need in sizes:
            sizes[decl.need].append(FORMATS[decl.formats[0]].nbytes(decl.shape))
            reason = decl.reason if decl.need == "spare" else reason
    must, spare = sizes["must"], sizes["spare"]
    return WeightBytes(len(must), sum(must), len(spare), sum(spare), reason)


def plan_devices(
    spec: ModelSpec, formats: Mapping[str, str], weights: WeightBytes, machine: Profile, wish: Wish
) -> DevicePlan:
    """Plan ``spec``, in its cache form, on the devices of ``machine``.

    Raises:
        RequestError: a wish that this model cannot meet.
    """
    context = min(spec.max_context, DEFAULT_CONTEXT) if wish.context is None else wish.context
    sequences = DEFAULT_SEQUENCES if wish.max_sequences is None else wish.max_sequences
    if context > spec.max_context:
        limit = f"the {spec.max_context} tokens that {spec.name} was made for"
        raise RequestError(f"context {context} is more than {limit}", f"--context {spec.max_context}")
    cpus, gpus = consumers_of(machine, wish.nodes)
    devices = gpus or cpus
    count = len(devices)
    usable = min(machine.memory(device.near).usable_bytes for device in devices)
    usable = usable if wish.max_hbm is None else min(usable, wish.max_hbm)
    caches = tuple(
        _cache_line(with_cache_format(spec, formats, form.name), form.name, context) for form in spec.cache_forms
    )
    own = _cache_line(spec, _form_of(spec), context)
    chunks = sorted({*CHUNKS, *([wish.prefill_chunk] if wish.prefill_chunk else [])})
    outputs = max(sequences, 8)
    # Step buffers are the same in every cache form; the default form is one that kernels read.
    program = with_cache_format(spec, formats).program
    workspace = step_bytes(program, formats, chunks, outputs)
    share = f"1/{count} of {weights.num_tensors:,} tensors"
    terms = [
        Term("weights", -(-weights.num_bytes // count), "resident", share),
        Term("cache", sequences * own.context_bytes, "per sequence", f"{own.rows}, {sequences} x {context:,} tokens"),
        Term("sampler", SAMPLER_BYTES * spec.vocab_size, "resident", f"{spec.vocab_size:,} logits"),
    ]
    if own.frontier_bytes:
        frontier = sequences * own.frontier_bytes
        terms.insert(2, Term("frontier", frontier, "per sequence", "windows and compressor state"))
    _, kept = snapshot_term(spec, wish.snapshots, sequences)
    terms += [kept] if kept else []
    room = usable - sum(term.num_bytes for term in terms)
    # Weights that lie in part beside the devices leave room for what the planner wants.
    room = room if room > 0 else int(usable * CHUNK_SHARE)
    fitting = [chunk for chunk in CHUNKS if workspace[chunk] <= room and chunk <= context]
    chunk = wish.prefill_chunk or max(fitting, default=CHUNKS[0])
    terms.append(Term("workspace", workspace[chunk], "transient", f"step buffers for {chunk:,} tokens"))
    paged, per_token = _paged(spec, formats, context)
    contexts = sorted({1, min(4096, context), context})
    placement = place(spec, formats, machine, wish, context, chunk)
    winner = placement.winner
    expected = None
    if winner is not None:
        threads = winner.teams[0].threads
        expected = expect(spec, formats, machine, contexts, chunk, winner.layout.decode, threads)
    return DevicePlan(
        model=spec.name,
        machine=machine.name,
        num_devices=count,
        context=context,
        max_sequences=sequences,
        prefill_chunk=chunk,
        cache_form=own.form,
        weights=weights,
        terms=tuple(terms),
        usable_bytes=usable,
        caches=caches,
        workspace=workspace,
        decode_bytes={c: decode_bytes(spec.program, formats, c) for c in contexts},
        read_bytes_per_s=sum(machine.path(device.name, device.near).read_bytes_per_s for device in devices),
        placement=placement,
        expected=expected,
        paged=paged,
        paged_bytes_per_token=per_token,
    )


def _form_of(spec: ModelSpec) -> str:
    """Name of the form that the groups of ``spec`` have."""
    rows = {group.name: (group.format, group.row_bytes) for group in spec.groups}
    rows |= {group.name: (group.format, group.row_bytes) for group in spec.frontier}
    matching = (form.name for form in spec.cache_forms if rows.items() >= form.rows.items())
    return next(matching, next(iter(dict.fromkeys(group.format for group in spec.groups)), ""))


def _cache_line(spec: ModelSpec, form: str, context: int) -> CacheLine:
    per_block = block_bytes(spec.groups)
    rows = ", ".join(f"{group.name} {group.format}" for group in spec.groups) or "no layer keeps rows of all tokens"
    frontier = frontier_bytes(spec.frontier)
    return CacheLine(form, rows, per_block / BLOCK_TOKENS, num_blocks(context) * per_block, frontier)


def _paged(spec: ModelSpec, formats: Mapping[str, str], context: int) -> tuple[tuple[PagedLine, ...], float]:
    if PAGED_FORM not in {form.name for form in spec.cache_forms} or not has_paged_layout(spec):
        return (), 0.0
    layout = paged_layout(with_cache_format(spec, formats, PAGED_FORM))
    lines = []
    for length in sorted({min(PAGED_LENGTH, context), context}):
        for chunk in (chunk for chunk in PAGED_CHUNKS if chunk <= length):
            for is_async in (False, True):
                flight = tokens_in_flight(chunk, is_async=is_async)
                blocks, num_bytes = layout.num_blocks(length, flight), layout.pool_bytes(length, flight)
                lines.append(PagedLine(length, chunk, is_async, blocks, num_bytes))
    return tuple(lines), layout.bytes_per_token_in_flight()


def explain_devices(plan: DevicePlan) -> list[str]:
    """Lines that print the plan."""
    w = plan.weights
    each = format_bytes(-(-w.num_bytes // plan.num_devices))
    lines = [
        f"{plan.model} on {plan.machine}: context {plan.context:,}, {plan.max_sequences} sequences, prefill chunk "
        f"{plan.prefill_chunk:,}, cache {plan.cache_form}",
        f"weights: {w.num_tensors:,} tensors, {format_bytes(w.num_bytes)}; each of {plan.num_devices} devices: {each}",
    ]
    if w.num_spare:
        lines.append(f"not loaded: {w.num_spare:,} tensors, {format_bytes(w.spare_bytes)}: {w.spare_reason}")
    lines.append("each device, holding its part of everything:")
    for term in plan.terms:
        lines.append(f"  {term.name:<10}  {format_bytes(term.num_bytes):>11}  {term.kind:<12}  {term.detail}")
    verdict = "fits" if plan.total_bytes <= plan.usable_bytes else "does NOT fit"
    verdict += f" in {format_bytes(plan.usable_bytes)}"
    lines.append(f"  {'total':<10}  {format_bytes(plan.total_bytes):>11}  {verdict}")
    for context, num_bytes in plan.decode_bytes.items():
        lines.append(
            f"a token at context {context:,} reads {num_bytes / 1e6:,.1f} MB: at most "
            f"{plan.read_bytes_per_s / num_bytes:,.1f} tok/s at {format_rate(plan.read_bytes_per_s)} of all devices"
        )
    lines.append(f"cache of one sequence of {plan.context:,} tokens, by form:")
    for line in plan.caches:
        lines.append(
            f"  {line.form:<10}  {format_bytes(line.context_bytes):>11}  {line.bytes_per_token:>9,.2f} B per token, "
            f"{f'frontier {format_bytes(line.frontier_bytes)}; ' if line.frontier_bytes else ''}{line.rows}"
        )
    lines.append("workspace by prefill chunk, the same memory for every layer:")
    lines += [f"  {chunk:>10,}  {format_bytes(num_bytes):>11}" for chunk, num_bytes in plan.workspace.items()]
    lines += _explain_paged(plan) + explain_placement(plan.placement)
    return lines if plan.expected is None else lines + explain_expectation(plan.expected)


def _explain_paged(plan: DevicePlan) -> list[str]:
    if not plan.paged:
        return []
    lines = [
        f"the paged layout of other engines keeps {plan.paged_bytes_per_token / 1e3:,.0f} KB per token in flight "
        "(state and windows of a batch, of two with asynchronous scheduling); one sequence would take:"
    ]
    for line in plan.paged:
        mode = "asynchronous" if line.is_async else "synchronous"
        lines.append(
            f"  {format_bytes(line.num_bytes):>11}  {line.length:,} tokens, batches of {line.chunk:,}, {mode}: "
            f"{line.num_blocks:,} blocks"
        )
    return lines
