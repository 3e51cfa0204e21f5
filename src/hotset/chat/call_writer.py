"""The events of one tool call, its arguments written as JSON while they stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from hotset.chat.events import ChatEvent, ToolCallArguments, ToolCallEnd, ToolCallStart


@dataclass
class _Value:
    """The value under way. A line break at its end is held back: it is layout when the closing tag is missing."""

    name: str
    is_string: bool
    parts: list[str] = field(default_factory=list)
    line: str = ""
    is_blank: bool = True


class CallWriter:
    """Writes ``{"name": value, ...}`` piece by piece, and remembers what was wrong with the call."""

    def __init__(self, emit: Callable[[ChatEvent], None], index: int, name: str) -> None:
        """Begin the call; ``emit`` gets its events."""
        self._emit = emit
        self._index = index
        self._names: set[str] = set()
        self._value: _Value | None = None
        self._is_sound = True
        self._notes: list[str] = []
        emit(ToolCallStart(index, name))
        # At once, so that a call that is cut never has arguments that are JSON.
        self._write("{")

    def note(self, text: str) -> None:
        """Say something about the call that did no harm; nothing for ``""``."""
        if text and text not in self._notes:
            self._notes.append(text)

    def flaw(self, text: str) -> None:
        """Say why the call may not be what the model meant."""
        self._is_sound = False
        self.note(text)

    def has(self, name: str) -> bool:
        """Whether there is a parameter of this name."""
        return name in self._names

    @property
    def value_name(self) -> str | None:
        """The parameter whose value is under way."""
        return self._value.name if self._value else None

    @property
    def is_at_line_start(self) -> bool:
        """Whether the value under way ends with a line break, or has no text yet."""
        return self._value is not None and (bool(self._value.line) or self._value.is_blank)

    def begin_value(self, name: str, is_string: bool) -> None:
        """Begin a parameter that the call does not have yet."""
        self._write((", " if self._names else "") + _json(name) + (': "' if is_string else ": "))
        self._names.add(name)
        self._value = _Value(name, is_string)

    def add(self, text: str) -> None:
        """Append to the value under way."""
        value = self._value
        if value is not None:
            text = value.line + text
            value.line = "\n" if text.endswith("\n") else ""
            self._add(value, text.removesuffix("\n"))

    def end_value(self, *, keeps_line: bool) -> None:
        """End the value under way. ``keeps_line``: a line break at its end is part of it.

        A value that is marked as JSON and is none becomes a string.
        """
        value, self._value = self._value, None
        if value is None:
            return
        self._add(value, value.line if keeps_line else "")
        text = "".join(value.parts)
        if value.is_string:
            self._write('"')
        elif _is_json(text):
            self._write(text)
        else:
            self.note(f"parameter {value.name} is marked as JSON and is none; it is passed as a string")
            self._write(_json(text))

    def cut_value(self) -> None:
        """Give what there is of the value under way, and leave it open."""
        value, self._value = self._value, None
        if value is not None:
            self._add(value, value.line)
            self._write("".join(value.parts))
            self.flaw(f"the answer ended inside parameter {value.name}")

    def end(self, *, is_closed: bool = True) -> None:
        """End the call; ``is_closed`` is False when its arguments are to stay open."""
        if is_closed:
            self._write("}")
        self._emit(ToolCallEnd(self._index, self._is_sound, "; ".join(self._notes)))

    def _add(self, value: _Value, text: str) -> None:
        value.is_blank = value.is_blank and not text
        if value.is_string:
            self._write(_json(text)[1:-1])
        else:
            value.parts.append(text)

    def _write(self, text: str) -> None:
        if text:
            self._emit(ToolCallArguments(self._index, text))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        # Numbers are passed on as they are written, so their size does not matter.
        json.loads(text, parse_constant=refuse, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return False
    return True
