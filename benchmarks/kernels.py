"""One-token products alone, as a share of the read bandwidth measured in the same run.

For every weight format: one matrix of about ``--mib`` MiB of random blocks, far larger than the caches, multiplied by
one token, interleaved with reads of the probe. Prints medians and spread; ``--json`` keeps the samples.

    .venv/bin/python benchmarks/kernels.py [--formats Q4_0,Q8_0] [--mib 1024] [--repeats 15] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hotset.checkpoint.formats import FORMATS
from hotset.engine.batch import Segment, StepBatch
from hotset.engine.native import NativeExecutor
from hotset.machine.native import isa_in_use
from hotset.machine.probe import CeilingMeter
from hotset.models.spec import ModelSpec
from hotset.plan.budget import Wish, make_plan
from hotset.program.builder import Builder
from hotset.program.lower import weight_bytes
from hotset.program.program import Weight

INPUTS = 4096
VOCAB = 16


def product_model(num_rows: int) -> ModelSpec:
    """A program that is one product: a tiny embedding, then a matrix [num_rows, INPUTS]."""
    b = Builder(())
    x = b.select_outputs(b.embed("embed", VOCAB, INPUTS))
    logits = b.linear(x, "matrix", num_rows)
    return ModelSpec("bench", "one product", 1, INPUTS, num_rows, 256, (), (), (), b.finish(logits))


def random_blocks(name: str, num_bytes: int, seed: int) -> np.ndarray:
    """Bytes of valid blocks whose scales are small, so that nothing overflows."""
    rng = np.random.default_rng(seed)
    fmt = FORMATS[name]
    if name == "F32":
        return rng.standard_normal(num_bytes // 4, dtype=np.float32).view(np.uint8)
    blocks = rng.integers(0, 256, (num_bytes // fmt.block_bytes, fmt.block_bytes), dtype=np.uint8)
    halves = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,), "F16": (0,), "BF16": (0,)}
    for at in halves[name]:  # the high byte of a half or BF16: about 0.01 to 0.1
        blocks[:, at + 1] = (blocks[:, at + 1] & 0x83) | (0x3C if name == "BF16" else 0x28)
    return blocks.reshape(-1)


class Product:
    """One matrix in one format, ready to run."""

    def __init__(self, name: str, mib: int, cpus: list[int], folder: Path) -> None:
        row = FORMATS[name].row_bytes(INPUTS)
        self.num_rows = (mib << 20) // row // 16 * 16
        spec = product_model(self.num_rows)
        formats = {"embed": "F32", "matrix": name}
        plan = make_plan(spec, formats, Wish(prefill_chunk=16), len(cpus), 1 << 62, "no limit")
        self.executor = NativeExecutor(spec, formats, plan, cpus, isa_in_use())
        path = folder / name
        piece = random_blocks(name, 64 * row, 1)
        with path.open("wb") as out:
            embed = np.random.default_rng(2).standard_normal((VOCAB, INPUTS), dtype=np.float32)
            out.write(embed.tobytes())
            for _ in range(self.num_rows // 64 + 1):
                out.write(piece.tobytes())
        offsets = {"embed": 0, "matrix": embed.nbytes}
        with path.open("rb") as source:
            for index, weight in enumerate(self.executor.low.weights):
                self.executor.load_raw(index, source.fileno(), offsets[weight.key])
        path.unlink()
        self.num_bytes = weight_bytes(Weight("matrix", self.num_rows, INPUTS), FORMATS[name])
        self.batch = StepBatch(np.zeros(1, np.int32), [Segment(0, 1, 0, np.zeros(1, np.int32))], np.zeros(1, np.int32))

    def rate(self) -> float:
        """Bytes per second of one product."""
        begin = time.perf_counter()
        self.executor.step(self.batch)
        return self.num_bytes / (time.perf_counter() - begin)


def measure(name: str, args: argparse.Namespace, meter: CeilingMeter, folder: Path) -> dict[str, object]:
    product = Product(name, args.mib, list(meter.cpus), folder)
    rates, reads = [], []
    product.rate()
    for _ in range(args.repeats):
        rates.append(product.rate())
        reads.append(meter.measure_read(0.05).median)
    product.executor.close()
    shares = [a / b for a, b in zip(rates, reads, strict=True)]
    return {
        "format": name,
        "bytes": product.num_bytes,
        "rates": rates,
        "reads": reads,
        "share": statistics.median(shares),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="Q4_0,Q4_1,Q8_0,Q4_K,Q6_K,F16,BF16,F32")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with CeilingMeter(args.threads) as meter, tempfile.TemporaryDirectory() as folder:
        print(f"{len(meter.cpus)} threads, {isa_in_use()}, {args.mib} MiB each, medians of {args.repeats}, GB/s")
        for name in args.formats.split(","):
            row = measure(name, args, meter, Path(folder))
            rows.append(row)
            rates, reads = (sorted(x / 1e9 for x in row[key]) for key in ("rates", "reads"))
            print(
                f"{name:5} product {statistics.median(rates):5.1f} ({rates[0]:.1f}..{rates[-1]:.1f})   "
                f"read {statistics.median(reads):5.1f} ({reads[0]:.1f}..{reads[-1]:.1f})   share {row['share']:.0%}"
            )
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "isa": isa_in_use(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
