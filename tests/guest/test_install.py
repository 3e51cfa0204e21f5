"""The wheel in a fresh Linux: its script, its kernels, what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ISA = {"x86_64": "avx2", "aarch64": "neon"}


def test_version_names_the_kernels_of_this_processor(guest) -> None:
    """Bug class: a wheel whose native module needs a library or an instruction that a plain machine lacks."""
    done = subprocess.run(["hotset", "version", "--json"], check=True, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["isa"] == ISA[guest.machine]
    assert report["system"].endswith(guest.machine)


def test_import_loads_neither_numpy_nor_the_native_module(record_property: pytest.RecordProperty) -> None:
    """Bug class: `hotset --help` that takes seconds. The time is recorded in the results, and judged by nobody here."""
    code = (
        "import sys, time; t = time.monotonic(); import hotset; s = time.monotonic() - t;"
        "print(s, *(name for name in ('numpy', 'tokenizers', 'rich', 'hotset._native') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, *heavy = done.stdout.split()
    record_property("import_seconds", seconds)
    assert not heavy
