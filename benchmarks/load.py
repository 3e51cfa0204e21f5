"""How fast a model is loaded from the page cache, as a share of the copy bandwidth of the same run.

    python benchmarks/load.py MODEL [--repeats 3] [--threads N]

The file is read once before, so that every page is in memory. A sample is a copy of as many bytes of anonymous memory
by as many threads (the ceiling: a load reads and writes every byte, as a copy does), then a load, then a copy again.
Copies count bytes read, as loads do. Memory that is written is fresh in both: the kernel has to find and clear its
pages. In a virtual machine such pages may be fresh to the host too, which costs far more: the first sample is thrown
away.

Beside it stands what reading the files into a buffer of 1 MiB takes, without any packing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hotset.api import describe_model, find_seats, plan_model
from hotset.bench.conditions import conditions
from hotset.engine.native import NativeExecutor
from hotset.machine.native import isa_in_use
from hotset.machine.topology import read_topology
from hotset.plan.budget import Wish, require_fit
from hotset.units import GIB, MIB, format_rate

MAX_COPY_BYTES = 4 * GIB
PIECE_BYTES = MIB
"""What a thread of the loader reads at a time."""


def on_each(cpus: tuple[int, ...], work: Callable[[int], None]) -> float:
    """Seconds until ``work`` has run on a thread of every CPU."""
    gate = threading.Barrier(len(cpus) + 1)

    def pinned(index: int, cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})
        gate.wait()
        work(index)
        gate.wait()

    threads = [threading.Thread(target=pinned, args=pair) for pair in enumerate(cpus)]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    gate.wait()
    seconds = time.perf_counter() - start
    for thread in threads:
        thread.join()
    return seconds


def copy_rate(cpus: tuple[int, ...], num_bytes: int) -> float:
    """Bytes per second of a copy of as many bytes into fresh memory."""
    share = max(1, min(num_bytes, MAX_COPY_BYTES) // len(cpus) // PIECE_BYTES) * PIECE_BYTES
    sources = [np.ones(share, np.uint8) for _ in cpus]
    targets = [np.empty(share, np.uint8) for _ in cpus]

    def work(index: int) -> None:
        for at in range(0, share, PIECE_BYTES):
            targets[index][at : at + PIECE_BYTES] = sources[index][at : at + PIECE_BYTES]

    return share * len(cpus) / on_each(cpus, work)


def read_rate(cpus: tuple[int, ...], paths: list[str]) -> float:
    """Bytes per second from the page cache into a buffer that each thread uses again."""
    handles = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
    pieces = [(handle, at) for handle in handles for at in range(0, os.fstat(handle).st_size, PIECE_BYTES)]

    def work(index: int) -> None:
        buffer = [bytearray(PIECE_BYTES)]
        for handle, at in pieces[index * len(pieces) // len(cpus) : (index + 1) * len(pieces) // len(cpus)]:
            os.preadv(handle, buffer, at)

    try:
        return sum(os.fstat(handle).st_size for handle in handles) / on_each(cpus, work)
    finally:
        for handle in handles:
            os.close(handle)


def read_files(paths: list[str]) -> None:
    """Bring every page of the files into memory."""
    buffer = bytearray(16 * MIB)
    for path in paths:
        with Path(path).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    described = describe_model(options.model)
    wish = Wish(context=256, threads=options.threads)
    seats = find_seats(read_topology(), described.spec, described.formats, wish)
    copies, loads, shares, reads = [], [], [], []
    with described.checkpoint as checkpoint:
        plan = plan_model(described, wish)
        require_fit(plan)
        num_bytes = sum(info.nbytes for info in described.account.loaded.values())
        paths = [str(path) for path in checkpoint.files]
        read_files(paths)
        for sample in range(options.repeats + 1):
            before = copy_rate(seats.cpus, num_bytes)
            start = time.perf_counter()
            executor = NativeExecutor(described.spec, described.formats, plan, seats, isa_in_use())
            executor.load(checkpoint, described.account)
            rate = num_bytes / (time.perf_counter() - start)
            executor.close()
            ceiling = (before + copy_rate(seats.cpus, num_bytes)) / 2
            if sample == 0:
                continue
            loads.append(rate)
            copies.append(ceiling)
            reads.append(read_rate(seats.cpus, paths))
            shares.append(rate / ceiling)
            line = f"load {format_rate(rate)}, copy {format_rate(ceiling)}: {shares[-1]:.0%}"
            print(f"{line}; read {format_rate(reads[-1])}", file=sys.stderr, flush=True)
    report = conditions() | {
        "model": options.model, "num_bytes": num_bytes, "num_threads": len(seats.cpus), "load_bytes_per_s": loads,
        "copy_bytes_per_s": copies, "read_bytes_per_s": reads, "share": statistics.median(shares),
    }  # fmt: skip
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
