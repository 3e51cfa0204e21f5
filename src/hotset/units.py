"""Printing bytes and rates: GiB for capacity, GB/s for bandwidth."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def format_bytes(num_bytes: int) -> str:
    """Return a capacity in the largest binary unit that keeps it at or above 1, e.g. ``"1.25 GiB"``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def format_rate(bytes_per_s: float) -> str:
    """Return a bandwidth in decimal gigabytes per second, e.g. ``"57.3 GB/s"``."""
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def align_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
