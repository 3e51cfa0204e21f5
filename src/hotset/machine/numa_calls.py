"""Which NUMA calls this process may make: containers refuse some of them, and then a plan that binds cannot be kept.

Docker's default profile lets only processes with CAP_SYS_NICE call mbind and get_mempolicy, and nobody move_pages.
libnuma does not notice (numa_available of version 2.0.16 says yes), so each call is tried, on one page of our own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotset.machine.files import ROOT, read_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Makes a system call by number and returns 0 or the error number.
Syscall = Callable[..., int]

#: From asm/unistd_64.h and asm-generic/unistd.h.
NUMBERS = {
    "x86_64": {"mbind": 237, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "move_pages": 239},
}
MPOL_BIND = 2
#: Nodes that a mask holds: as many as any kernel is built for (CONFIG_NODES_SHIFT is 10 at most).
MASK_BITS = 1024

_GRANTS = {
    "mbind": "run the container with --cap-add SYS_NICE",
    "get_mempolicy": "run the container with --cap-add SYS_NICE",
    "move_pages": "run the container with a seccomp profile that allows it",
}


@dataclass(frozen=True)
class NumaCalls:
    """For each call ``None`` when the kernel carries it out, otherwise why not."""

    mbind: str | None
    get_mempolicy: str | None
    move_pages: str | None
    #: /proc/self/numa_maps is there: it tells where the pages of a region are when move_pages may not be asked.
    has_numa_maps: bool

    @property
    def can_bind(self) -> bool:
        """Regions can be bound to nodes. Otherwise pages go where the thread runs that touches them first."""
        return self.mbind is None

    @property
    def can_locate(self) -> bool:
        """The node of a page can be found out, one way or the other."""
        return self.move_pages is None or self.has_numa_maps

    def describe(self) -> str:
        """Say in one line what works and what follows from what does not."""
        refused = {name: why for name in NUMBERS["x86_64"] if (why := getattr(self, name)) is not None}
        if not refused:
            return "mbind, get_mempolicy and move_pages work"
        parts = [f"{name}: {why}" for name, why in refused.items()]
        if not self.can_bind:
            parts.append("memory can be placed by first touch only")
        if self.move_pages is not None:
            parts.append(
                "pages are located by /proc/self/numa_maps" if self.has_numa_maps else "no page can be located"
            )
        return "; ".join(parts)


def try_numa_calls(node_id: int, syscall: Syscall | None = None) -> NumaCalls:
    """Try each call. ``node_id`` is a node with memory that this process may use (Topology.allowed_nodes)."""
    numbers = NUMBERS.get(platform.machine())
    has_numa_maps = read_text(ROOT, "/proc/self/numa_maps") is not None
    if numbers is None:
        reason = f"its number is not known for {platform.machine()}"
        return NumaCalls(reason, reason, reason, has_numa_maps)
    call = syscall or _syscall
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1  # move_pages does not find a page that was never touched
        first_byte = ctypes.c_char.from_buffer(page)
        address = ctypes.addressof(first_byte)
        results = {
            "mbind": call(numbers["mbind"], address, mmap.PAGESIZE, MPOL_BIND, _mask(node_id), MASK_BITS, 0),
            "get_mempolicy": call(numbers["get_mempolicy"], ctypes.pointer(ctypes.c_int()), None, 0, None, 0),
            "move_pages": call(
                numbers["move_pages"], 0, 1, (ctypes.c_void_p * 1)(address), None, (ctypes.c_int * 1)(), 0
            ),
        }
        del first_byte  # a mapping with a view into it cannot be closed
    return NumaCalls(**{name: _reason(name, code) for name, code in results.items()}, has_numa_maps=has_numa_maps)


def nodes_of_pages(addresses: NDArray[np.int64]) -> NDArray[np.int32]:
    """The node of the page at each address of this process; a negative number is an errno (-ENOENT: not in memory).

    Raises:
        RuntimeError: the kernel does not answer, as in containers.
    """
    import numpy as np

    number = NUMBERS.get(platform.machine(), {}).get("move_pages")
    if number is None:
        raise RuntimeError(f"move_pages: its number is not known for {platform.machine()}")
    found = np.zeros(len(addresses), np.int32)
    # Without target nodes the call moves nothing and reports.
    code = _syscall(number, 0, len(addresses), addresses.ctypes.data, None, found.ctypes.data, 0)
    if code:
        raise RuntimeError(f"move_pages: {os.strerror(code)}")
    return found


def _mask(node_id: int) -> ctypes.Array[ctypes.c_ulong]:
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (MASK_BITS // width))()
    mask[node_id // width] = 1 << node_id % width
    return mask


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    # The call takes any number of arguments of unknown type, so integers must be widened here.
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return 0 if libc.syscall(ctypes.c_long(number), *wide) >= 0 else ctypes.get_errno()


def _reason(name: str, code: int) -> str | None:
    if code == 0:
        return None
    if code == errno.EPERM:
        return f"refused (EPERM), as containers do; {_GRANTS[name]}"
    if code == errno.ENOSYS:
        return "not in this kernel (ENOSYS)"
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"
