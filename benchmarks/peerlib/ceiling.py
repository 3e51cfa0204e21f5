"""What the machine could do, measured as ``hotset bench`` measures it, in the same run as the engines."""

from __future__ import annotations

import json
import subprocess
import sys

from peerlib.client import leave_for_own_autogroup

# In a process of its own: the memory it used is gone before an engine starts.
_PROGRAM = """
import json, sys
from hotset.machine.probe import CeilingMeter
from hotset.machine.teams import Seats, pick_teams
from hotset.machine.topology import read_topology
with CeilingMeter(Seats(pick_teams(read_topology(), int(sys.argv[1]))).cpus) as meter:
    read, int8 = meter.measure_read().median, meter.measure_compute("int8").median
print(json.dumps({"read_bytes_per_s": read, "int8_ops_per_s": int8}))
"""


def measure_ceilings(threads: int, has_priority: bool) -> dict[str, float]:
    """Return DRAM ``read_bytes_per_s`` and ``int8_ops_per_s`` of ``threads`` threads."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(threads)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=leave_for_own_autogroup if has_priority else None,
    )
    return {name: float(value) for name, value in json.loads(done.stdout).items()}
