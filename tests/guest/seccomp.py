"""Runs a command as a container does whose profile forbids the NUMA system calls: they fail with EPERM.

Usage: python seccomp.py COMMAND...
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

# mbind, set_mempolicy, get_mempolicy, migrate_pages, move_pages
_NUMBERS = {"x86_64": (237, 238, 239, 256, 279), "aarch64": (235, 237, 236, 238, 239)}[platform.machine()]
_LOAD_NUMBER, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction))]


def forbid() -> None:
    """Make the calls fail in this process and all that it starts."""
    lines = [(_LOAD_NUMBER, 0, 0, 0)]
    lines += [(_JUMP_EQUAL, len(_NUMBERS) - i, 0, number) for i, number in enumerate(_NUMBERS)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    code = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
        _SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(lines), code)), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid()
    os.execvp(sys.argv[1], sys.argv[1:])
