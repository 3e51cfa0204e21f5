"""An audit of a run over two nodes: green as it is, and red for pages and threads that were moved to the other node."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pages
from conftest import MODELS

import hotset
from hotset.audit.checks import Line, audit
from hotset.audit.observe import observe
from hotset.audit.record import RunRecord, write_record

LLAMA = sorted(MODELS.iterdir())[0]
ENVIRONMENT = ("memory", "cpu", "neighbours")
"""Lines about the guest and not about the run: it is as small as it can be."""


def red(record: RunRecord) -> dict[str, Line]:
    lines = audit(record, observe(record, None))
    return {line.name: line for line in lines if line.state == "red" and line.name not in ENVIRONMENT}


def test_a_run_over_the_nodes_is_green(guest) -> None:
    """And the command says so of the living process, by its number."""
    with hotset.load(LLAMA, context=512) as engine:
        for _ in engine.generate("hello", hotset.Sampling(max_tokens=8, ignore_eos=True)):
            pass
        record = engine.record()
        assert {seat.node for seat in record.seats} == {node.node_id for node in guest.cpu_nodes}
        assert red(record) == {}
        write_record(record, Path("run.json"))
        words = [word for name in ENVIRONMENT for word in ("--ignore", name)]
        done = subprocess.run(
            ["hotset", "audit", str(os.getpid()), "--json", *words, "--html", "run.html"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        states = {line["name"]: line["state"] for line in json.loads(done.stdout)["lines"]}
        assert states["pages"] == states["absent"] == states["threads"] == "green"
    html = Path("run.html").read_text()
    for node in guest.cpu_nodes:
        assert f"node {node.node_id} (cpu)" in html


def test_a_region_on_the_wrong_node(guest) -> None:
    """Half of a region's pages are enough, and the line names it."""
    here, there = (node.node_id for node in guest.cpu_nodes)
    with hotset.load(LLAMA, context=512) as engine:
        record = engine.record()
        region = next(region for region in record.regions if region.name == "weights of thread 0")
        pages.move(region.address, region.num_bytes // 2, there)
        found = red(record)
    assert list(found) == ["pages"]
    assert found["pages"].found.startswith(f"weights of thread 0 was planned on node {here}, of ")
    assert found["pages"].found.endswith(f" on node {there}")


def test_a_region_in_the_memory_of_a_gpu(guest) -> None:
    """Memory without CPUs is a node like others to the kernel, and the wrong one for every region."""
    node = guest.memory_nodes[0].node_id
    with hotset.load(LLAMA, context=512) as engine:
        record = engine.record()
        region = next(region for region in record.regions if region.name.startswith("cache"))
        pages.move(region.address, region.num_bytes, node)
        found = red(record)
    assert list(found) == ["pages"] and found["pages"].found.endswith(f" on node {node}")


def test_a_thread_on_the_other_node(guest) -> None:
    first, second = guest.cpu_nodes
    with hotset.load(LLAMA, context=512) as engine:
        record = engine.record()
        seat = next(seat for seat in record.seats if seat.node == second.node_id)
        os.sched_setaffinity(seat.thread_id, {first.cpus[0]})
        found = red(record)
    assert list(found) == ["threads"]
    assert found["threads"].found.startswith(
        f"thread {seat.thread} of CPU {seat.cpu} may run on {first.cpus[0]} and ran last on "
    )
