"""Products alone, as shares of what the machine can do, measured in the same run.

For every weight format, one matrix of random blocks times

- one token: about ``--mib`` MiB, far larger than the caches, as a share of the read bandwidth;
- ``--tokens`` tokens: ``--many-mib`` MiB, as a share of the arithmetic rate of its inputs (int8, BF16 or F32).

Products and probes are interleaved. Prints medians and spread; ``--json`` keeps the samples.

    .venv/bin/python benchmarks/kernels.py [--formats Q4_0,FP8] [--mib 1024] [--tokens 512] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hotset.checkpoint.formats import FORMATS
from hotset.engine.batch import Segment, StepBatch
from hotset.engine.native import NativeExecutor
from hotset.machine.native import isa_in_use
from hotset.machine.probe import CeilingMeter
from hotset.machine.teams import Seats, pick_teams
from hotset.machine.topology import read_topology
from hotset.models.spec import ModelSpec
from hotset.plan.budget import Wish, make_plan
from hotset.program.builder import Builder
from hotset.program.lower_types import weight_bytes
from hotset.program.program import Weight

INPUTS = 4096
VOCAB = 16


def product_model(num_rows: int, num_tokens: int) -> ModelSpec:
    """A program that is one product: a tiny embedding, then a matrix [num_rows, INPUTS] for every token."""
    b = Builder(())
    x = b.embed("embed", VOCAB, INPUTS)
    if num_tokens == 1:
        logits = b.linear(b.select_outputs(x), "matrix", num_rows)
    else:  # a last matrix of next to no work makes logits of one row
        logits = b.linear(b.select_outputs(b.linear(x, "matrix", num_rows)), "last", VOCAB)
    return ModelSpec("bench", "one product", 1, INPUTS, logits.width, num_tokens, (), (), (), b.finish(logits))


def random_blocks(name: str, num_bytes: int, seed: int) -> np.ndarray:
    """Bytes of valid blocks whose scales are small, so that nothing overflows."""
    rng = np.random.default_rng(seed)
    fmt = FORMATS[name]
    if name == "F32":
        return rng.standard_normal(num_bytes // 4, dtype=np.float32).view(np.uint8)
    if name == "FP8":
        codes = rng.integers(0, 256, num_bytes, dtype=np.uint8)
        return np.where(codes & 127 == 127, codes ^ 64, codes)  # no NaN
    blocks = rng.integers(0, 256, (num_bytes // fmt.block_bytes, fmt.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(116, 122, len(blocks))
        return blocks.reshape(-1)
    halves = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,), "F16": (0,), "BF16": (0,)}
    for at in halves[name]:  # the high byte of a half or BF16: about 0.01 to 0.1
        blocks[:, at + 1] = (blocks[:, at + 1] & 0x83) | (0x3C if name == "BF16" else 0x28)
    return blocks.reshape(-1)


class Product:
    """One matrix in one format, ready to run with ``num_tokens`` tokens."""

    def __init__(self, name: str, mib: int, num_tokens: int, seats: Seats, folder: Path) -> None:
        row = FORMATS[name].row_bytes(INPUTS)
        self.num_rows = (mib << 20) // row // 128 * 128
        self.num_tokens = num_tokens
        spec = product_model(self.num_rows, num_tokens)
        formats = {"embed": "F32", "matrix": name, "last": "F32"}
        plan = make_plan(spec, formats, Wish(prefill_chunk=max(16, num_tokens)), len(seats.cpus), 1 << 62, "no limit")
        self.executor = NativeExecutor(spec, formats, plan, seats, isa_in_use())
        self._load(name, row, folder / name)
        self.num_bytes = weight_bytes(Weight("matrix", self.num_rows, INPUTS), FORMATS[name])
        rng = np.random.default_rng(3)
        tokens = rng.integers(0, VOCAB, num_tokens).astype(np.int32)
        segment = Segment(0, num_tokens, 0, np.zeros((num_tokens + 255) // 256, np.int32))
        self.batch = StepBatch(tokens, [segment], np.array([num_tokens - 1], np.int32))

    def _load(self, name: str, row: int, path: Path) -> None:
        piece = random_blocks(name, 128 * row, 1)
        rng = np.random.default_rng(2)
        embed = rng.standard_normal((VOCAB, INPUTS), dtype=np.float32)
        last = np.zeros((VOCAB, self.num_rows), np.float32)
        scales = rng.integers(112, 118, self.num_rows // 128 * (INPUTS // 128), dtype=np.uint8)  # of FP8
        offsets = {"embed": 0, "scales": embed.nbytes, "last": embed.nbytes + scales.nbytes}
        offsets["matrix"] = offsets["last"] + (last.nbytes if self.num_tokens > 1 else 0)
        with path.open("wb") as out:
            out.write(embed.tobytes() + scales.tobytes())
            if self.num_tokens > 1:
                out.write(last.tobytes())
            for _ in range(self.num_rows // 128):
                out.write(piece.tobytes())
        with path.open("rb") as source:
            for index, weight in enumerate(self.executor.low.weights):
                scale_offset = offsets["scales"] if weight.format == "FP8" else None
                self.executor.load_raw(index, source.fileno(), offsets[weight.key], scale_offset)
        path.unlink()

    def seconds(self) -> float:
        """Time of one product, with the embedding and the packing of its inputs."""
        begin = time.perf_counter()
        self.executor.step(self.batch)
        return time.perf_counter() - begin


def compute_kind(name: str, meter: CeilingMeter) -> str:
    """The arithmetic rate that bounds products of this format."""
    if name in ("F32", "F16"):
        return "f32"
    if name not in ("BF16", "FP8"):
        return "int8"
    return "bf16" if meter.isa == "avx512" else "f32"  # other sets widen BF16 to floats


@dataclass
class Row:
    """Samples of one format and number of tokens, and of the ceiling beside them, in units per second."""

    format: str
    tokens: int
    ceiling: str
    rates: list[float] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Median of the products' shares of their ceilings."""
        return statistics.median(a / b for a, b in zip(self.rates, self.ceilings, strict=True))

    def __str__(self) -> str:
        def shown(samples: list[float]) -> str:
            values = sorted(x / 1e9 for x in samples)
            return f"{statistics.median(values):6.1f} ({values[0]:.1f}..{values[-1]:.1f})"

        unit = "GB/s" if self.ceiling == "read" else "G/s "
        return (
            f"{self.format:5} {self.tokens:4} tokens  product {shown(self.rates)} {unit}  "
            f"{self.ceiling} {shown(self.ceilings)}   share {self.share:.0%}"
        )


def measure(
    name: str, num_tokens: int, args: argparse.Namespace, seats: Seats, meter: CeilingMeter, folder: Path
) -> Row:
    product = Product(name, args.mib if num_tokens == 1 else args.many_mib, num_tokens, seats, folder)
    row = Row(name, num_tokens, "read" if num_tokens == 1 else compute_kind(name, meter))
    operations = 2.0 * product.num_rows * INPUTS * num_tokens
    product.seconds()
    for _ in range(args.repeats):
        row.rates.append((product.num_bytes if num_tokens == 1 else operations) / product.seconds())
        ceiling = meter.measure_read(0.05) if num_tokens == 1 else meter.measure_compute(row.ceiling, 0.05)
        row.ceilings.append(ceiling.median)
    product.executor.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="Q4_0,Q4_1,Q8_0,Q4_K,Q6_K,MXFP4,FP8,F16,BF16,F32")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--many-mib", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="0 leaves products with many tokens out")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    seats = Seats(pick_teams(read_topology(), args.threads))
    with CeilingMeter(seats.cpus) as meter, tempfile.TemporaryDirectory() as folder:
        print(
            f"{len(meter.cpus)} threads, {isa_in_use()}, {args.mib} and {args.many_mib} MiB, medians of {args.repeats}"
        )
        for name in args.formats.split(","):
            for num_tokens in (1, args.tokens) if args.tokens > 1 else (1,):
                rows.append(measure(name, num_tokens, args, seats, meter, Path(folder)))
                print(rows[-1], flush=True)
    if args.json:
        found = [asdict(row) | {"share": row.share} for row in rows]
        args.json.write_text(json.dumps({"command": sys.argv, "isa": isa_in_use(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
