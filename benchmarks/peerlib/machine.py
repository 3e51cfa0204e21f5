"""One paragraph about the machine, so that a table can be read later."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from peerlib.environments import ROOT


def _cpuinfo(field: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return "unknown"


def memory_bytes(field: str) -> int:
    """Return a field of ``/proc/meminfo``, e.g. ``MemAvailable``."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"error: /proc/meminfo has no {field}")


def describe() -> dict[str, Any]:
    """Return the facts that the report prints."""
    flags = set(_cpuinfo("flags").split())
    shown = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": _cpuinfo("model name"),
        "cpu_family_model": f"{_cpuinfo('cpu family')}/{_cpuinfo('model')}",
        "num_cpus": len(os.sched_getaffinity(0)),
        "features": [name for name in shown if name in flags],
        "memory_bytes": memory_bytes("MemTotal"),
        "huge_pages": huge.read_text().strip() if huge.exists() else "none",
        "is_virtual": "hypervisor" in flags,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "hotset_commit": commit,
    }
