"""The three kinds of error, each with its own exit code.

Every error is one line that says what was found and what was expected, and an optional hint that
names a value that works. The command line prints ``error: ...`` and ``hint: ...`` and exits with
:attr:`HotsetError.exit_code`; the Python API lets the exception through.
"""

from __future__ import annotations


class HotsetError(Exception):
    """Base of all errors that hotset raises on purpose."""

    exit_code = 4

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class RequestError(HotsetError):
    """What you asked for cannot be done: an option, a prompt, a setting."""

    exit_code = 2


class MachineError(HotsetError):
    """Your machine or your files do not allow it: memory, instruction set, access."""

    exit_code = 3


class CheckpointError(MachineError):
    """A model file is damaged, incomplete, or not what it says it is."""


class InternalError(HotsetError):
    """Our fault: an invariant of hotset itself was broken."""

    exit_code = 4
