"""Holds the prediction of one model's decode against its run, on this machine, with the bandwidth of the same minute.

    python benchmarks/predicted.py MODEL [--context 128,4096] [--sequences 1] [--repeats 9]

Every repeat reads the bandwidth before and after, predicts with it, and prints medians: measured and predicted tokens
per second, and what one op costs beside the reading and arithmetic of the step: as `hotset probe` measures it, and as
the run has it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

import numpy as np

import hotset
from hotset.api import describe_model
from hotset.bench.costs import ModelCosts
from hotset.bench.rows import Bench, Row, context_needed
from hotset.machine.native import native_module
from hotset.machine.probe import CeilingMeter
from hotset.machine.profile import Consumer, Memory, Path, Profile
from hotset.models.spec import ModelSpec
from hotset.plan.homes import default_homes
from hotset.plan.predict import count_ops, model_step, predict_step
from hotset.program.classes import class_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--context", default="128,4096", help="tokens in the cache, comma separated")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    contexts = [int(part) for part in options.context.split(",")]
    described = describe_model(options.model)
    with described.checkpoint:
        spec, formats = described.spec, described.formats
    costs = ModelCosts(spec, formats)
    context = context_needed(contexts, [options.sequences], options.repeats, 16)
    with (
        hotset.load(options.model, context=context, max_sequences=options.sequences) as engine,
        CeilingMeter(engine.plan.cpus) as meter,
    ):
        rates = {kind: meter.measure_compute(kind).median for kind, _ in meter.compute_kinds()}
        chunk = engine.plan.prefill_chunk
        bench = Bench(engine, costs, meter, chunk, options.repeats, np.random.default_rng())
        for tokens in contexts:
            compare(spec, formats, rates, op_seconds(meter), bench.decode_row(tokens, options.sequences))
    return 0


def op_seconds(meter: CeilingMeter) -> float:
    """Fixed cost of an op of this team, now."""
    return statistics.median(native_module().probe_steps(meter.isa, list(meter.cpus), 0.3, 1000).exchange_s)


def compare(spec: ModelSpec, formats: dict[str, str], rates: dict[str, float], op_s: float, row: Row) -> None:
    """Print one context's line."""
    num_ops = count_ops(spec, formats)
    step = model_step(spec, formats, num_ops, context=row.num_tokens, num_sequences=row.num_sequences)
    measured, predicted, per_op = [], [], []
    for sample in row.samples:
        profile = profile_of(statistics.mean(sample.read_ceilings), rates, op_s)
        homes = default_homes(profile, class_bytes(spec.program, formats))
        measured.append(sample.tokens_per_s)
        predicted.append(predict_step(step, profile, homes).tokens_per_s)
        bare = predict_step(replace(step, num_ops=0), profile, homes)
        per_op.append((row.num_sequences / sample.tokens_per_s - bare.seconds) / num_ops)
    off = statistics.median(p / m - 1 for p, m in zip(predicted, measured, strict=True))
    print(
        f"decode @ {row.num_tokens} x {row.num_sequences}: measured {statistics.median(measured):.1f} tok/s, predicted "
        f"{statistics.median(predicted):.1f}, median error {off:+.1%}; {num_ops:,} ops of {op_s * 1e6:.2f} us, "
        f"would fit {statistics.median(per_op) * 1e6:.2f} us"
    )


def profile_of(read_bytes_per_s: float, rates: dict[str, float], op_s: float) -> Profile:
    """This machine as it was in one repeat."""
    return Profile(
        "this", "", "", (Memory("node0", "ddr", 1, 1.0),), (Consumer("cpu0", "cpu", "node0", 1, rates, op_s),),
        (Path("cpu0", "node0", read_bytes_per_s),),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
