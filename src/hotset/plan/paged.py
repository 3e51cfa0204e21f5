"""What the paged cache of other engines (vLLM) takes for a model whose layers keep rows at different rates.

One logical block is 256 token positions. Every kind of row has pages of its own, rounded up in size, and all groups of
layers draw block ids from one pool, so a block of any group costs one *stride* of memory: 4 tokens of compressor state
take as much as 256 tokens of compressed rows. State and windows are kept per token in flight:

    blocks of a windowed group = ceil(min(window - 1 + in flight, length) / tokens per page) + 1

Asynchronous scheduling takes the blocks of the next batch before those of the last one are known to be free, so twice
the batch is in flight. hotset has no such blocks (a frontier of fixed size per sequence, and scratch that every layer
uses again); this model of the others' bytes explains why a run that they refuse fits.

Source: specs/deepseek_v4.md sections 4.4 and 4.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hotset.errors import RequestError
from hotset.models.spec import ModelSpec
from hotset.program.cache import BLOCK_TOKENS
from hotset.units import align_up

Form = Literal["padded", "bucketed", "dense"]

FLASHMLA_ALIGN = 576
"""Pages of 584-byte rows are a multiple of this; pages of 512-byte rows, of 512."""
WINDOW_ROWS = 64
"""Rows of a page of a sliding window."""
STATE_TOKENS = {"csa_state": 4, "index_state": 4, "hca_state": 8}
"""Tokens of a page of compressor state."""


@dataclass(frozen=True)
class PageKind:
    """Pages of one kind of row: each of ``num_layers`` layers has one per ``tokens`` tokens, of ``num_bytes`` bytes."""

    name: str
    num_layers: int
    tokens: int
    num_bytes: int


@dataclass(frozen=True)
class PageGroup:
    """Layers that take and give back blocks together. ``window`` is None where every token of the context is kept."""

    name: str
    kinds: tuple[PageKind, ...]
    window: int | None

    @property
    def tokens(self) -> int:
        """Token positions of one block of this group."""
        return self.kinds[0].tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of one block's pages, all layers."""
        return sum(kind.num_layers * kind.num_bytes for kind in self.kinds)

    def num_blocks(self, length: int, in_flight: int) -> int:
        """Blocks of one sequence of ``length`` tokens with ``in_flight`` of them scheduled and not yet finished."""
        if self.window is None:
            return -(-length // self.tokens)
        return -(-min(self.window - 1 + in_flight, length) // self.tokens) + 1


@dataclass(frozen=True)
class PagedLayout:
    """The groups of one model: compressed rows first, then windows, then compressor states."""

    main: PageGroup
    window: PageGroup
    states: tuple[PageGroup, ...]

    @property
    def tuple_size(self) -> int:
        """Layers of every kind in one group: the size that leaves the fewest slots of a tuple empty."""
        counts = [*(kind.num_layers for kind in self.main.kinds), self.window.kinds[0].num_layers]
        counts += [group.kinds[0].num_layers for group in self.states]
        least = max(kind.num_layers for kind in self.main.kinds)
        return min(range(least, max(counts) + 1), key=lambda k: sum(align_up(n, k) - n for n in counts))

    @property
    def num_windows(self) -> int:
        """Equal parts that the windows of all layers are cut into, each a group of its own."""
        return -(-self.window.kinds[0].num_layers // self.tuple_size)

    def stride(self, form: Form) -> int:
        """Bytes that one block costs.

        * "padded": tuples of one page of each compressed kind, any other page padded to one of them (what the check at
          start assumes);
        * "bucketed": pages gathered by size, those of windows and states padded to the next size;
        * "dense": every group from the start of the block, the largest decides (after vLLM's pull request 48993).
        """
        part = -(-self.window.kinds[0].num_layers // self.num_windows)
        if form == "padded":
            return self.tuple_size * sum(kind.num_bytes for kind in self.main.kinds)
        if form == "dense":
            groups = (self.main, *self.states)
            return max(part * self.window.kinds[0].num_bytes, *(group.num_bytes for group in groups))
        buckets = {kind.num_bytes: kind.num_layers for kind in self.main.kinds}
        sizes = sorted(buckets)
        others = [(self.window.kinds[0].num_bytes, part)]
        others += [(kind.num_bytes, kind.num_layers) for group in self.states for kind in group.kinds]
        for num_bytes, count in others:
            size = next(size for size in sizes if size >= num_bytes)
            buckets[size] = max(buckets[size], count)
        return sum(size * count for size, count in buckets.items())

    def num_blocks(self, length: int, in_flight: int) -> int:
        """Blocks that one sequence of ``length`` tokens needs from the pool."""
        windows = self.num_windows * self.window.num_blocks(length, in_flight)
        return windows + sum(group.num_blocks(length, in_flight) for group in (self.main, *self.states))

    def pool_bytes(self, length: int, in_flight: int, form: Form = "padded") -> int:
        """Bytes of those blocks."""
        return self.num_blocks(length, in_flight) * self.stride(form)

    def own_bytes(self, length: int, in_flight: int) -> int:
        """Bytes when every block costs what its own pages take."""
        groups = (self.main, self.window, *self.states)
        return sum(group.num_blocks(length, in_flight) * group.num_bytes for group in groups)

    def bytes_per_token_in_flight(self, form: Form = "padded") -> float:
        """What one more token in flight costs, in bytes of the pool."""
        per_block = self.num_windows / self.window.tokens + sum(1 / group.tokens for group in self.states)
        return per_block * self.stride(form)


def has_paged_layout(spec: ModelSpec) -> bool:
    """Whether the model keeps what the paged layout is made for: compressed rows of all kinds, windows and states."""
    rings, groups = {group.name for group in spec.frontier}, {group.name for group in spec.groups}
    return groups >= {"csa", "index", "hca"} and rings >= {"window", *STATE_TOKENS}


def tokens_in_flight(chunk: int, *, is_async: bool) -> int:
    """Tokens scheduled and not yet known to be finished: one batch, or two with asynchronous scheduling."""
    return (2 if is_async else 1) * chunk


def paged_layout(spec: ModelSpec, *, draft_layers: int = 0, align: int = FLASHMLA_ALIGN) -> PagedLayout:
    """The paged layout of a model's cache rows, in the formats that ``spec`` has.

    Args:
        draft_layers: layers of the draft head, which keep a window and nothing else.
        align: page sizes are rounded up to a multiple of it.

    Raises:
        RequestError: a model without compressed rows and windows.
    """
    rings = {group.name: group for group in spec.frontier}
    groups = {group.name: group for group in spec.groups}
    if not has_paged_layout(spec):
        raise RequestError(f"{spec.name} has no cache of compressed rows and windows to compare")
    main = tuple(
        PageKind(name, len(group.layers), BLOCK_TOKENS, align_up(group.layer_block_bytes, align))
        for name, group in groups.items()
    )
    window = rings["window"]
    window_page = align_up(WINDOW_ROWS * window.row_bytes, align)
    window_kind = PageKind("window", len(window.layers) + draft_layers, WINDOW_ROWS, window_page)
    states: Mapping[str, PageKind] = {
        name: PageKind(name, len(rings[name].layers), tokens, align_up(tokens * rings[name].row_bytes, align))
        for name, tokens in STATE_TOKENS.items()
    }
    return PagedLayout(
        PageGroup("rows", main, None),
        PageGroup("window", (window_kind,), window.num_rows),
        (
            PageGroup("csa_state", (states["csa_state"], states["index_state"]), rings["csa_state"].num_rows),
            PageGroup("hca_state", (states["hca_state"],), rings["hca_state"].num_rows),
        ),
    )
