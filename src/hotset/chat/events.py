"""What an answer is made of, once its text has been parsed: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text inside the reasoning block. ``note`` as in :class:`ContentText`."""

    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the answer.

    A ``note`` says what was wrong: the text is then markup, or stands where no text may stand, and is given as the
    model wrote it. With an empty text the note is about the answer at this place.
    """

    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls the tool ``name``. Calls of one answer are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next characters of the arguments, which together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """Nothing more of this call will come.

    ``is_sound`` is False when a value was cut, when the end of a value is a guess, or when text of the call had to be
    given as content: show the note to the model instead of running the call. The arguments of a call that was cut are
    left open, so that they are no JSON. ``note`` tells what was wrong, also where it did no harm.
    """

    index: int
    is_sound: bool = True
    note: str = ""


ChatEvent = ReasoningText | ContentText | ToolCallStart | ToolCallArguments | ToolCallEnd


def join_events(events: Iterable[ChatEvent]) -> list[ChatEvent]:
    """Return the events with neighbours of the same kind, call and note joined: the same for every split of a text."""
    joined: list[ChatEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ReasoningText | ContentText):
            # An empty text without a note says nothing.
            if not event.text and not event.note:
                continue
            if isinstance(last, ReasoningText | ContentText) and type(last) is type(event) and last.note == event.note:
                joined[-1] = replace(last, text=last.text + event.text)
                continue
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            joined[-1] = replace(last, text=last.text + event.text)
            continue
        joined.append(event)
    return joined
