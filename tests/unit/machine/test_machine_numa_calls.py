"""NUMA calls that a container refuses must be noticed before a plan relies on them (libnuma says all is well)."""

from __future__ import annotations

import errno
import json
import platform
import subprocess
import sys

import pytest

from hotset.machine.numa_calls import NUMBERS, NumaCalls, try_numa_calls
from hotset.machine.topology import read_topology

NAMES = {number: name for name, number in NUMBERS[platform.machine()].items()}

#: Refuses the given calls as Docker's default profile does, then tries them. Arguments: call numbers.
REFUSE = """
import ctypes, dataclasses, json, struct, sys
from hotset.machine.numa_calls import try_numa_calls
from hotset.machine.topology import read_topology
node = read_topology().allowed_nodes[0]
numbers = [int(word) for word in sys.argv[1:]]
step = lambda code, yes, no, k: struct.pack("HBBI", code, yes, no, k)
program = step(0x20, 0, 0, 0)  # load the number of the call
program += b"".join(step(0x15, len(numbers) - place, 0, number) for place, number in enumerate(numbers))
program += step(0x06, 0, 0, 0x7FFF0000) + step(0x06, 0, 0, 0x00050001)  # allow; EPERM
code = ctypes.create_string_buffer(program)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
chosen = Filter(len(program) // 8, ctypes.addressof(code))
if libc.prctl(22, 2, ctypes.byref(chosen), 0, 0) != 0:  # PR_SET_SECCOMP
    sys.exit(77)
print(json.dumps(dataclasses.asdict(try_numa_calls(node))))
"""


def refusing(**codes: int) -> NumaCalls:
    return try_numa_calls(0, lambda number, *arguments: codes.get(NAMES[number], 0))


def test_everything_works() -> None:
    calls = refusing()
    assert calls.can_bind and calls.can_locate
    assert calls.describe() == "mbind, get_mempolicy and move_pages work"


def test_docker_default_profile() -> None:
    calls = refusing(mbind=errno.EPERM, get_mempolicy=errno.EPERM, move_pages=errno.EPERM)
    assert not calls.can_bind
    assert calls.mbind == "refused (EPERM), as containers do; run the container with --cap-add SYS_NICE"
    assert "memory can be placed by first touch only; pages are located by /proc/self/numa_maps" in calls.describe()


def test_docker_with_cap_sys_nice() -> None:
    """move_pages stays refused there: binding works, and pages are located another way."""
    calls = refusing(move_pages=errno.EPERM)
    assert calls.can_bind and calls.can_locate == calls.has_numa_maps
    assert calls.describe().startswith("move_pages: refused (EPERM)") and "first touch" not in calls.describe()


def test_kernels_without_numa_and_other_errors() -> None:
    calls = refusing(mbind=errno.ENOSYS, move_pages=errno.EINVAL)
    assert (calls.mbind, calls.move_pages) == ("not in this kernel (ENOSYS)", "Invalid argument (EINVAL)")


def test_unknown_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    assert try_numa_calls(0).mbind == "its number is not known for vax"


@pytest.mark.parametrize("names", [("mbind", "get_mempolicy", "move_pages"), ("move_pages",)])
def test_a_real_seccomp_filter(names: tuple[str, ...]) -> None:
    """The calls as this kernel answers them, behind the filter that a container has."""
    before = try_numa_calls(read_topology().allowed_nodes[0])
    numbers = [str(NUMBERS[platform.machine()][name]) for name in names]
    done = subprocess.run([sys.executable, "-c", REFUSE, *numbers], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this system allows no seccomp filter")
    assert done.returncode == 0, done.stderr
    after = json.loads(done.stdout)
    for name in ("mbind", "get_mempolicy", "move_pages"):
        if name in names:
            assert after[name].startswith("refused (EPERM)")
        else:
            assert after[name] == getattr(before, name)
