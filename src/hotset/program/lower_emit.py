"""From program ops to native ops: what packs its input how, and which op runs as several."""

from __future__ import annotations

from collections.abc import Mapping

from hotset.errors import CheckpointError, InternalError
from hotset.program import program as p
from hotset.program.cache import BLOCK_TOKENS, FrontierGroup, frontier_offset, group_offset
from hotset.program.lower_types import (
    ACT_KIND,
    CACHE_KIND,
    INDEX_ACT,
    INDEX_KIND,
    INDEX_ROWS,
    MAX_EXPERTS,
    MAX_POOLED,
    MAX_TOP_K,
    ROW_KIND,
    TILE_ROWS,
    UNIT_TOKENS,
    Lowered,
    NativeBuffer,
    NativeOp,
    NativeWeight,
    act_bytes,
)
from hotset.program.rows import TRANSFORMED, kv_row
from hotset.units import align_up


def emit(program: p.Program, formats: Mapping[str, str]) -> Lowered:
    """The native ops of ``program`` in its order; no slots and barriers yet."""
    emitter = _Emitter(program, formats)
    turned = _turned_by_index(program)
    for index, op in enumerate(program.ops):
        emitter.source = index
        if index in turned.values():
            continue
        rope = program.ops[turned[index]] if index in turned else None
        emitter.lower(op, rope if isinstance(rope, p.Rope) else None)
    emitter.out.logits = emitter.buffer_ids[program.logits]
    return emitter.out


def _turned_by_index(program: p.Program) -> dict[int, int]:
    """IndexRows ops, by number, whose queries only they read: they turn them themselves, in a copy.

    Every thread packs all queries in a small step, but a rotation in place is shared out: it would cost a barrier.
    """
    uses: dict[p.Buffer, list[int]] = {}
    for index, op in enumerate(program.ops):
        for buffer in {*p.reads(op), *p.writes(op)}:
            uses.setdefault(buffer, []).append(index)
    out = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, p.IndexRows) and uses[op.q][-1] == index and len(uses[op.q]) > 1:
            before = uses[op.q][-2]
            if isinstance(program.ops[before], p.Rope):
                out[index] = before
    return out


class _Emitter:
    def __init__(self, program: p.Program, formats: Mapping[str, str]) -> None:
        self.program = program
        self.formats = formats
        self.out = Lowered()
        self.buffer_ids: dict[p.Buffer, int] = {}
        self.packed_ids: dict[p.Buffer, dict[tuple[int, int, int], int]] = {}
        self.weight_ids: dict[str, int] = {}
        self.row_ids: dict[int, tuple[int, int]] = {}  # by layer: buffer of the step's window rows, plain channels
        self.order_ids: dict[p.Buffer, int] = {}
        self.source = 0

    # ---- buffers, weights, groups ----

    def new_buffer(self, buffer: NativeBuffer) -> int:
        self.out.buffers.append(buffer)
        return len(self.out.buffers) - 1

    def buffer(self, buffer: p.Buffer, is_private: bool = False, rows_per_token: int = 1) -> int:
        if buffer not in self.buffer_ids:
            self.buffer_ids[buffer] = self.new_buffer(
                NativeBuffer(
                    buffer.width, buffer.rows == "outputs", is_private=is_private, rows_per_token=rows_per_token
                )
            )
        return self.buffer_ids[buffer]

    def weight(self, weight: p.Weight) -> int:
        if weight.key not in self.weight_ids:
            self.weight_ids[weight.key] = len(self.out.weights)
            is_vector = weight.in_width == 1 and not weight.is_table
            fmt = "F32" if is_vector or weight.is_table else self.formats[weight.key]
            in_width = 0 if is_vector else weight.in_width
            self.out.weights.append(
                NativeWeight(weight.key, fmt, weight.out_width, in_width, count=weight.count, is_table=weight.is_table)
            )
        return self.weight_ids[weight.key]

    def cache_format(self, group: str) -> str:
        return next(g.format for g in self.program.groups if g.name == group)

    def frontier_group(self, name: str) -> FrontierGroup:
        return next(g for g in self.program.frontier if g.name == name)

    def frequency(self, frequencies: tuple[float, ...]) -> int:
        """Where these frequencies begin in the one list of all of them."""
        known, count = self.out.frequencies, len(frequencies)
        for start in range(len(known) - count + 1):
            if tuple(known[start : start + count]) == frequencies:
                return start
        known.extend(frequencies)
        return len(known) - count

    def emit(self, kind: str, **fields: object) -> None:
        self.out.ops.append(NativeOp(kind, source=self.source, **fields))  # type: ignore[arg-type]

    def packed(self, x: p.Buffer, weight: p.Weight, groups: int = 1) -> int:
        """The packed form of ``x`` that this weight multiplies; emitted once per buffer value and kind."""
        kind = ACT_KIND[self.formats[weight.key]]
        forms, key = self.packed_ids.setdefault(x, {}), (kind, groups, -1)
        if key not in forms:
            source = self.out.buffers[self.buffer(x)]
            forms[key] = self.new_buffer(
                NativeBuffer(x.width, source.is_outputs, True, kind, is_private=True, groups=groups)
            )
            self.emit("pack", x=self.buffer(x), out=forms[key], groups=groups)
        return forms[key]

    def packed_pairs(self, x: p.Buffer, weight: p.Weight, route: p.Buffer, top_k: int) -> int:
        """The row of ``x`` of every (token, expert) pair, packed expert by expert."""
        kind, order = ACT_KIND[self.formats[weight.key]], self.order_ids[route]
        forms, key = self.packed_ids.setdefault(x, {}), (kind, 1, order)
        if key not in forms:
            forms[key] = self.new_buffer(
                NativeBuffer(x.width, False, True, kind, is_private=True, rows_per_token=top_k)
            )
            self.emit(
                "pack_pairs", x=self.buffer(x), y=order, out=forms[key], top_k=top_k,
                num_experts=weight.count, by_pair=x.rows == "pairs",
            )  # fmt: skip
        return forms[key]

    # ---- ops ----

    def lower(self, op: p.Op, rope: p.Rope | None = None) -> None:
        match op:
            case p.Embed():
                out = self.buffer(op.out, is_private=op.copies > 1)  # streams, see hyper_merge
                self.emit("embed", weight=self.weight(op.table), out=out, copies=op.copies)
            case p.RopeAngles():
                out = self.buffer(op.out, is_private=True)
                self.emit("angles", out=out, frequency=self.frequency(op.frequencies))
            case p.RmsNorm():
                out = self.buffer(op.out, is_private=True)
                self.emit("rms_norm", x=self.buffer(op.x), weight=self.weight(op.weight), value=op.eps, out=out)
            case p.Linear():
                self.lower_linear(op)
            case p.GatedLinear():
                self.lower_gated(op)
            case p.Rope():
                self.emit("rope", x=self.buffer(op.x), y=self.buffer(op.angles), **_rope_fields(op))
            case p.StoreKV() | p.Attend():
                self.lower_attention(op)
            case p.HeadNorm():
                self.emit("head_norm", x=self.buffer(op.x), num_heads=op.num_heads, head_dim=op.head_dim, value=op.eps)
            case p.HyperMix() | p.HyperMerge():
                self.lower_hyper(op)
            case p.WindowRows():
                self.lower_window(op)
            case p.Compress():
                self.lower_compress(op)
            case p.IndexRows():
                self.lower_index(op, rope)
            case p.AttendRows():
                self.lower_attend_rows(op)
            case p.Route() | p.ExpertGated() | p.ExpertDown():
                self.lower_experts(op)
            case p.SelectOutputs():
                self.emit("select", x=self.buffer(op.x), out=self.buffer(op.out))
            case _:
                self.lower_latent(op)
        for buffer in p.writes(op):  # a new value makes older packed forms stale
            self.packed_ids.pop(buffer, None)

    def lower_linear(self, op: p.Linear) -> None:
        if op.groups > 1 and op.weight.out_width // op.groups % TILE_ROWS:
            raise InternalError(
                f"{op.weight.key}: groups of {op.weight.out_width // op.groups} rows are not whole tiles"
            )
        x = self.packed(op.x, op.weight, op.groups)
        weight, out = self.weight(op.weight), self.buffer(op.out)
        self.emit("linear", x=x, weight=weight, out=out, add=op.add, groups=op.groups)

    def lower_gated(self, op: p.GatedLinear) -> None:
        limit = op.limit or 0.0
        if self.formats[op.gate.key] != self.formats[op.up.key]:
            # Tiles of different size cannot alternate: two products, then the gate.
            halves = [p.Buffer(f"{op.out.name}.{side}", op.out.width, op.out.rows) for side in ("gate", "up")]
            for weight, half in zip((op.gate, op.up), halves, strict=True):
                self.lower(p.Linear(op.x, weight, half))
            x, y = (self.buffer(half) for half in halves)
            self.emit("silu_mul", x=x, y=y, out=self.buffer(op.out, is_private=True), limit=limit)
            return
        x = self.packed(op.x, op.gate)
        gate, up = self.weight(op.gate), self.weight(op.up)
        self.out.weights[gate].pair = up
        self.emit("gated", x=x, weight=gate, weight2=up, out=self.buffer(op.out), limit=limit)

    def lower_attention(self, op: p.StoreKV | p.Attend) -> None:
        offset = group_offset(self.program.groups, op.group, op.layer)
        kind = CACHE_KIND[self.cache_format(op.group)]
        if isinstance(op, p.StoreKV):
            self.emit(
                "store_kv", x=self.buffer(op.k), y=self.buffer(op.v), num_kv_heads=op.num_kv_heads,
                head_dim=op.head_dim, cache_kind=kind, cache_offset=offset,
            )  # fmt: skip
            return
        for name in ("attend", "attend_merge"):
            self.emit(
                name, x=self.buffer(op.q), out=self.buffer(op.out), num_heads=op.num_heads,
                num_kv_heads=op.num_kv_heads, head_dim=op.head_dim, cache_kind=kind, cache_offset=offset,
                value=op.scale,
            )  # fmt: skip

    def lower_hyper(self, op: p.HyperMix | p.HyperMerge) -> None:
        if isinstance(op, p.HyperMerge):
            if op.y.width % TILE_ROWS:
                raise InternalError(f"streams of {op.y.width} columns, expected a multiple of {TILE_ROWS}")
            self.emit(
                "hyper_merge", x=self.buffer(op.x), y=self.buffer(op.y), z=self.buffer(op.coefficients),
                num_heads=op.num_streams,
            )  # fmt: skip
            return
        out = self.buffer(op.out, is_private=True)
        coefficients = -1 if op.coefficients is None else self.buffer(op.coefficients, is_private=True)
        self.emit(
            "hyper_mix", x=self.buffer(op.x), y=self.buffer(op.mix), weight=self.weight(op.base),
            weight2=self.weight(op.scale), out=out, out2=coefficients, num_heads=op.num_streams,
            iterations=op.iterations, value=op.eps, value2=op.norm_eps,
        )  # fmt: skip

    # ---- rows: window, compressed, index ----

    def ring_fields(self, name: str, layer: int, width: int, plain: int) -> dict[str, object]:
        """Where the window's ring of a layer lies, and the format of its rows."""
        group = self.frontier_group(name)
        layout = kv_row(group.format, width, plain)
        return {
            "ring_offset": frontier_offset(self.program.frontier, name, layer), "ring_rows": group.num_rows,
            "ring_kind": _kind(ROW_KIND, group.format), "ring_row_bytes": layout.data_bytes,
            "ring_scale_bytes": layout.scale_bytes, "plain": plain,
        }  # fmt: skip

    def row_fields(self, name: str, layer: int, width: int, plain: int) -> dict[str, object]:
        """Where the compressed rows of a layer lie in a block, and their format."""
        layout = kv_row(self.cache_format(name), width, plain)
        return {
            "cache_offset": group_offset(self.program.groups, name, layer),
            "row_kind": _kind(ROW_KIND, self.cache_format(name)), "row_bytes": layout.data_bytes,
            "scale_bytes": layout.scale_bytes, "plain": plain,
        }  # fmt: skip

    def lower_window(self, op: p.WindowRows) -> None:
        fields = self.ring_fields(op.group, op.layer, op.x.width, op.plain)
        row_bytes = self.frontier_group(op.group).row_bytes
        rows = self.new_buffer(NativeBuffer(-(-row_bytes // 4), False, is_private=True))
        self.row_ids[op.layer] = rows, op.plain
        self.emit("encode_rows", x=self.buffer(op.x), out=rows, **fields)

    def lower_compress(self, op: p.Compress) -> None:
        num_pooled = op.ratio * (2 if op.overlap else 1)
        if num_pooled > MAX_POOLED:
            raise InternalError(f"a compressed row of {num_pooled} tokens, expected at most {MAX_POOLED}")
        width, state = op.width, self.frontier_group(op.state)
        ring = {
            "ring_offset": frontier_offset(self.program.frontier, op.state, op.layer), "ring_rows": state.num_rows,
            "ring_row_bytes": state.row_bytes,
        }  # fmt: skip
        if op.hadamard:
            rows = self.index_fields(op.group, op.layer, op.ratio)
        else:
            rows = self.row_fields(op.group, op.layer, width, width - 2 * len(op.frequencies))
        x, y = self.buffer(op.k), self.buffer(op.g)
        self.emit(
            "compress", x=x, y=y, weight=self.weight(op.ape), weight2=self.weight(op.norm), value=op.eps,
            frequency=self.frequency(op.frequencies), rotary_dim=2 * len(op.frequencies), ratio=op.ratio,
            overlap=op.overlap, head_dim=width, **ring, **rows,
        )  # fmt: skip
        self.emit("store_state", x=x, y=y, **ring)

    def index_kind(self, group: str) -> dict[str, object]:
        """The format of index rows, and of the queries that meet them."""
        fmt = self.cache_format(group)
        return {"row_kind": INDEX_ROWS + _kind(INDEX_KIND, fmt), "hadamard": fmt in TRANSFORMED}

    def index_fields(self, group: str, layer: int, ratio: int) -> dict[str, object]:
        """Where the index rows of a layer lie in a block, whole tiles of sixteen, and their format."""
        if BLOCK_TOKENS // ratio % TILE_ROWS:
            raise InternalError(f"{BLOCK_TOKENS // ratio} index rows to a block, expected a multiple of {TILE_ROWS}")
        return {"cache_offset": group_offset(self.program.groups, group, layer)} | self.index_kind(group)

    def lower_index(self, op: p.IndexRows, rope: p.Rope | None) -> None:
        """Pack queries and weights, put rows forward (or choose them, with many tokens), choose among the threads'."""
        is_planned = op.ratio == 1
        act = INDEX_ACT[self.cache_format(op.group)]
        query_bytes = act_bytes(act, op.head_dim, op.num_heads) + 4 * op.num_heads
        query = self.new_buffer(NativeBuffer(query_bytes // 4, False, is_private=True))
        turn = {} if rope is None else _rope_fields(rope) | {"y": self.buffer(rope.angles)}
        self.emit(
            "index_pack", x=self.buffer(op.q), z=self.buffer(op.weights), out=query, value=op.scale,
            **turn | self.index_kind(op.group) | {"num_heads": op.num_heads, "head_dim": op.head_dim},
        )  # fmt: skip
        counts = {"num_heads": op.num_heads, "head_dim": op.head_dim, "ratio": op.ratio, "top_k": op.top_k}
        out = self.buffer(op.out, is_private=True)
        if is_planned:
            offset = group_offset(self.program.groups, op.group, op.layer)
            self.emit("index_rows", x=query, out=out, cache_offset=offset, **counts)
            return
        fields = self.index_fields(op.group, op.layer, op.ratio) | counts
        self.emit("index_select", x=query, out=out, **fields)
        self.emit("index_merge", out=out, **fields)

    def lower_attend_rows(self, op: p.AttendRows) -> None:
        if op.layer not in self.row_ids:
            raise InternalError(f"layer {op.layer} attends to window rows before they are made")
        rows, plain = self.row_ids[op.layer]
        ring = self.ring_fields(op.window, op.layer, op.head_dim, plain)
        fields = ring if op.group is None else ring | self.row_fields(op.group, op.layer, op.head_dim, plain)
        chosen = -1 if op.chosen is None else self.buffer(op.chosen)
        counts = {
            "num_heads": op.num_heads, "head_dim": op.head_dim, "ratio": op.ratio if op.group else 0,
            "top_k": 0 if op.chosen is None else op.chosen.width, "window": op.window_tokens,
        }  # fmt: skip
        out, sink = self.buffer(op.out), self.weight(op.sink)
        self.emit(
            "attend_rows", x=self.buffer(op.q), y=chosen, z=rows, out=out, weight=sink, value=op.scale,
            unit_tokens=UNIT_TOKENS if op.chosen is None else 1, **counts, **fields,
        )  # fmt: skip
        self.emit("attend_rows_merge", out=out, weight=sink, **counts)
        self.emit("store_window", x=rows, **ring)

    # ---- latent rows ----

    def lower_latent(self, op: p.Op) -> None:
        """Ops without kernels: what they keep in memory, for the plan."""
        match op:
            case p.LayerNorm():
                self.emit(
                    "layer_norm", x=self.buffer(op.x), weight=self.weight(op.weight), weight2=self.weight(op.bias),
                    value=op.eps, out=self.buffer(op.out, is_private=True),
                )  # fmt: skip
            case p.LatentNorm():
                out = self.buffer(op.out, is_private=True)
                self.emit("latent_norm", x=self.buffer(op.x), weight=self.weight(op.weight), value=op.eps, out=out)
            case p.StoreRows():
                offset = group_offset(self.program.groups, op.group, op.layer)
                self.emit("store_rows", x=self.buffer(op.x), cache_offset=offset, plain=op.plain, hadamard=op.hadamard)
            case p.LatentQuery():
                # The rotary channels go from the buffer itself.
                x = self.packed(op.x, op.weight, op.num_heads)
                self.emit(
                    "latent_query", x=x, y=self.buffer(op.x), weight=self.weight(op.weight), out=self.buffer(op.out),
                    num_heads=op.num_heads, plain=op.plain,
                )  # fmt: skip
            case p.LatentValue():
                x = self.packed(op.x, op.weight, op.num_heads)
                self.emit(
                    "latent_value", x=x, weight=self.weight(op.weight), out=self.buffer(op.out),
                    num_heads=op.num_heads, plain=op.plain,
                )  # fmt: skip
            case p.AttendLatent():
                self.emit(
                    "attend_latent", x=self.buffer(op.q), y=self.buffer(op.chosen), out=self.buffer(op.out),
                    num_heads=op.num_heads, head_dim=op.key_dim, plain=op.latent, value=op.scale,
                    top_k=op.chosen.width, unit_tokens=1,
                    cache_offset=group_offset(self.program.groups, op.group, op.layer),
                )  # fmt: skip
            case _:
                raise InternalError(f"no native ops for {type(op).__name__}")

    # ---- experts ----

    def lower_experts(self, op: p.Route | p.ExpertGated | p.ExpertDown) -> None:
        match op:
            case p.Route():
                self.lower_route(op)
            case p.ExpertGated():
                if self.formats[op.gate.key] != self.formats[op.up.key]:
                    raise CheckpointError(
                        f"{op.gate.key} is {self.formats[op.gate.key]} and {op.up.key} {self.formats[op.up.key]}, "
                        "expected one format: gate and up rows of an expert lie in turn"
                    )
                x = self.packed_pairs(op.x, op.gate, op.route, op.top_k)
                gate, up = self.weight(op.gate), self.weight(op.up)
                self.out.weights[gate].pair = up
                out = self.buffer(op.out, rows_per_token=op.top_k)
                self.emit(
                    "expert_gated", x=x, y=self.order_ids[op.route], weight=gate, weight2=up, out=out, top_k=op.top_k,
                    limit=op.limit or 0.0, num_experts=op.gate.count,
                )  # fmt: skip
            case p.ExpertDown():
                x = self.packed_pairs(op.x, op.down, op.route, op.top_k)
                self.emit(
                    "expert_down", x=x, y=self.order_ids[op.route], weight=self.weight(op.down), top_k=op.top_k,
                    out=self.buffer(op.out), num_experts=op.down.count, add=op.add,
                )  # fmt: skip

    def lower_route(self, op: p.Route) -> None:
        if op.num_experts > MAX_EXPERTS or op.top_k > MAX_TOP_K:
            raise InternalError(
                f"{op.top_k} of {op.num_experts} experts, expected at most {MAX_TOP_K} of {MAX_EXPERTS}"
            )
        table = -1
        if op.table is not None:
            table = self.weight(op.table)
            self.out.weights[table].num_ids = op.num_experts
        route = self.buffer(op.out, is_private=True)
        self.emit(
            "route", x=self.buffer(op.scores), weight=-1 if op.bias is None else self.weight(op.bias), weight2=table,
            out=route, num_experts=op.num_experts, top_k=op.top_k, value=op.scaling,
        )  # fmt: skip
        order = NativeBuffer(2 * op.top_k, False, is_private=True, header_bytes=align_up(4 * (op.num_experts + 1), 64))
        self.order_ids[op.out] = self.new_buffer(order)
        self.emit("pair_order", x=route, out=self.order_ids[op.out], num_experts=op.num_experts, top_k=op.top_k)


def _rope_fields(op: p.Rope) -> dict[str, object]:
    return {
        "num_heads": op.num_heads, "head_dim": op.head_dim, "rotary_dim": op.rotary_dim,
        "adjacent": op.pairs == "adjacent", "first": op.first, "inverse": op.is_inverse,
    }  # fmt: skip


def _kind(kinds: Mapping[str, int], format: str) -> int:
    if format not in kinds:
        raise InternalError(f"rows in {format} have no kernels, expected one of {', '.join(kinds)}")
    return kinds[format]
