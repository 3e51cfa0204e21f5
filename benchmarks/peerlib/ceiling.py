"""What the machine could do, measured by ``hotset probe`` in the same run as the engines."""

from __future__ import annotations

import json
import subprocess
import sys

from peerlib.client import leave_for_own_autogroup


def measure_ceilings(threads: int, has_priority: bool) -> dict[str, float]:
    """Return DRAM ``read_bytes_per_s`` and ``int8_ops_per_s`` of ``threads`` threads."""
    program = "from hotset.cli.main import main; main()"
    command = [sys.executable, "-c", program, "probe", "--quick", "--json", "--threads", str(threads)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=leave_for_own_autogroup if has_priority else None,
    )
    probe = json.loads(done.stdout)["probe"]
    reads = [row for row in probe["reads"] if row["level"] == "DRAM" and row["num_threads"] == threads]
    computes = [row for row in probe["computes"] if row["kind"] == "int8" and row["num_threads"] == threads]
    return {
        "read_bytes_per_s": reads[0]["bytes_per_s"]["median"],
        "int8_ops_per_s": computes[0]["ops_per_s"]["median"],
    }
