"""DeepSeek-V4's answers: text to reasoning, content and tool calls, as it streams.

Grammar: /encoding/encoding_dsv4.py of the released checkpoints. ::

    reasoning </think> content "\\n\\n" <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Every text gives events; nothing is raised and no text is dropped. What is not in the grammar is read so:

- A tag that means nothing where it stands, and text between the tags of a block, is content with a note. White space
  between tags, and between a block and the end, is layout.
- A block begins when an ``invoke`` follows its opening tag. An ``invoke`` without a block is a call only if its tool
  was declared and it closes properly; a block inside the reasoning only if it closes properly and the answer ends with
  it (a model forgot ``</think>``). Otherwise they are text: models also write about tool calls.
- A value ends at its closing tag and at no other, as in the official grammar, unless the rest proves that the tag was
  forgotten: the next tag begins a line, or the closing tags of the call and the block follow and nothing else.
- A call whose values or end are in doubt is not ``is_sound``; one that was cut has arguments that are no JSON.
- A value that is marked as JSON and is not, or not marked at all, is passed on as a string. Of two parameters with one
  name the first counts, the second is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeGuard

from hotset.chat.call_writer import CallWriter
from hotset.chat.deepseek_v4_lexer import Lexer, Mark, Tag, Token
from hotset.chat.events import ChatEvent, ContentText, ReasoningText, join_events

_SPACES = " \t\r\n"
_RUNS = re.compile(f"[{_SPACES}]+|[^{_SPACES}]+")
#: Tags that can close a value which lacks its own, and how much they close.
_CLOSERS = {Mark.END_VALUE: 0, Mark.OTHER: 0, Mark.END_CALL: 1, Mark.END_BLOCK: 2}

NO_CALL = "markup of a tool call, where it makes no call"
OUT_OF_PLACE = "a control tag out of place"
IN_BLOCK = "text inside a tool_calls block"
EMPTY_BLOCK = "a tool_calls block without a call"
OPEN_BLOCK = "the tool_calls block was not closed"
OPEN_REASONING = "the answer ended inside the reasoning"
OWN_REASONING = "the model began to reason without being asked to"


class _Rejected(Exception):
    """What was read on trial is no tool call after all."""


class _Goal(Enum):
    """What makes the text on trial a call."""

    NEXT_CALL = auto()  # the opening tag of a block: a call follows
    CLOSED_CALL = auto()  # a call without a block: it closes properly
    LAST_BLOCK = auto()  # a block inside the reasoning: it closes properly and is the end


@dataclass
class _Trial:
    """Text that may be a call: its events wait, and so does its raw text, of which one is used.

    ``behind`` is what came behind a ``</think>`` after the block, None while there was none.
    """

    goal: _Goal
    raw: list[str]
    num_calls: int
    events: list[ChatEvent] = field(default_factory=list)
    behind: list[str] | None = None

    def take(self, token: Token) -> None:
        (self.raw if self.behind is None else self.behind).append(_raw(token))

    def give_back(self) -> None:
        """Forget the last token."""
        (self.behind or self.raw).pop()


class DeepSeekV4Parser:
    """Implements :class:`hotset.chat.dialect.AnswerParser`."""

    def __init__(self, *, is_thinking: bool, tool_names: Collection[str] | None = None) -> None:
        """``is_thinking``: the prompt ended with ``<think>``. ``tool_names``: the declared tools, None when unknown."""
        self._lexer = Lexer()
        self._tool_names = tool_names
        self._out: list[ChatEvent] = []
        self._trial: _Trial | None = None
        self._state: Callable[[Token], None] = self._in_text
        self._is_reasoning = is_thinking
        self._has_reasoned = is_thinking
        self._has_spoken = False
        # White space at the end of the text, held back: it is layout when a block follows.
        self._gap = ""
        # Behind a block all white space is layout, until there is other text.
        self._is_layout = False
        self._num_calls = 0
        self._call: CallWriter | None = None
        # What to say about every call that begins now, and whether it puts the call in doubt.
        self._call_note = ""
        self._is_tainted = False
        self._has_bare_call = False
        self._lost_note = ""
        # White space after text between tags: part of that text when more follows.
        self._stray_gap: str | None = None
        self._doubts: list[Tag] = []
        self._doubt_raw = ""

    def feed(self, text: str) -> list[ChatEvent]:
        """Take the next text and return what became certain."""
        return self._run(self._lexer.feed(text))

    def finish(self, *, is_cut: bool = False) -> list[ChatEvent]:
        """Return the rest. ``is_cut``: the answer was ended by a limit or by the caller, not by the model."""
        events = self._run(self._lexer.finish())
        self._end(is_cut)
        return join_events([*events, *self._run(())])

    def _run(self, tokens: Iterable[Token]) -> list[ChatEvent]:
        for token in tokens:
            if isinstance(token, str) and self._state not in (self._in_text, self._in_value):
                # These states tell white space from other text, wherever the text was cut.
                for part in _RUNS.findall(token):
                    self._take(part)
            else:
                self._take(token)
        events, self._out = self._out, []
        return join_events(events)

    def _take(self, token: Token) -> None:
        trial = self._trial
        if trial is None:
            self._state(token)
            return
        trial.take(token)
        try:
            self._state(token)
        except _Rejected:
            trial.give_back()
            self._reject(trial)
            self._take(token)

    def _emit(self, event: ChatEvent) -> None:
        (self._trial.events if self._trial else self._out).append(event)

    # Trials

    @property
    def _goal(self) -> _Goal | None:
        return self._trial.goal if self._trial else None

    def _begin_trial(self, goal: _Goal, tag: Tag, note: str) -> None:
        self._trial = _Trial(goal, [self._gap, tag.raw], self._num_calls)
        self._call_note = note
        self._gap, self._is_layout = "", False

    def _commit(self) -> None:
        trial, self._trial = self._trial, None
        if trial:
            self._out += trial.events

    def _reject(self, trial: _Trial) -> None:
        self._trial = self._call = None
        self._num_calls = trial.num_calls
        self._call_note = ""
        self._state = self._in_text
        self._speak("".join(trial.raw), NO_CALL)
        if trial.behind is not None:
            self._is_reasoning = False
            self._say("".join(trial.behind))

    # Reasoning and content

    def _in_text(self, token: Token) -> None:
        if isinstance(token, str) or not token.has_marker:
            self._say(_raw(token))
        elif token.mark is Mark.END_THINK and self._is_reasoning:
            self._flush_gap()
            self._is_reasoning = False
        elif token.mark is Mark.BLOCK and not self._is_reasoning:
            self._begin_trial(_Goal.NEXT_CALL, token, "" if token.is_exact else f"the block begins with {token.raw}")
            self._state = self._after_opening
        elif token.mark is Mark.BLOCK and (self._gap or not self._has_spoken):
            self._begin_trial(_Goal.LAST_BLOCK, token, "the reasoning was not closed before the call")
            self._state = self._after_opening
        elif token.mark is Mark.CALL and not self._is_reasoning and token.name in (self._tool_names or ()):
            self._begin_trial(_Goal.CLOSED_CALL, token, "there is no tool_calls block around the call")
            self._begin_call(token)
        elif token.mark is Mark.END_BLOCK and self._has_bare_call:
            self._end_block()
        elif token.mark is Mark.THINK and not (self._has_reasoned or self._has_spoken or self._gap):
            self._is_reasoning = self._has_reasoned = True
            self._emit(ReasoningText("", OWN_REASONING))
        else:
            self._flush_gap()
            self._speak(token.raw, _fault(token))

    def _say(self, text: str) -> None:
        """Text; as many line breaks at its end as may be layout are held back."""
        text = self._gap + text
        if self._is_layout and not text.strip(_SPACES):
            self._gap = text
            return
        self._is_layout = self._has_bare_call = False
        border = max(len(text.rstrip("\n")), len(text) - 2)
        self._gap = text[border:]
        self._speak(text[:border])

    def _speak(self, text: str, note: str = "") -> None:
        self._has_spoken = self._has_spoken or bool(text)
        self._emit((ReasoningText if self._is_reasoning else ContentText)(text, note))

    def _flush_gap(self) -> None:
        gap, self._gap = self._gap, ""
        self._is_layout = False
        self._speak(gap)

    # Blocks

    def _after_opening(self, token: Token) -> None:
        """Behind the opening tag of a block, which the next tag makes one."""
        if _is_space(token):
            return
        if _begins(token, Mark.CALL):
            if self._goal is _Goal.NEXT_CALL:
                self._commit()
            self._begin_call(token)
        elif isinstance(token, Tag) and token.mark is Mark.END_BLOCK and self._goal is _Goal.NEXT_CALL:
            self._commit()
            self._emit(ContentText("", EMPTY_BLOCK))
            self._end_block()
        else:
            raise _Rejected

    def _between_calls(self, token: Token) -> None:
        if _begins(token, Mark.CALL):
            self._begin_call(token)
        elif isinstance(token, Tag) and token.mark is Mark.END_BLOCK:
            self._end_block()
        else:
            self._stray(token)

    def _end_block(self) -> None:
        self._stray_gap = None
        self._call_note = ""
        self._has_bare_call = False
        if self._trial:
            self._state = self._after_trial
        else:
            self._state = self._in_text
            self._gap, self._is_layout = "", True

    def _after_trial(self, token: Token) -> None:
        """Behind a block inside the reasoning: anything but the end makes it text."""
        trial = self._trial
        if trial and trial.behind is None and isinstance(token, Tag) and token.mark is Mark.END_THINK:
            trial.give_back()
            trial.behind = []
        elif not _is_space(token):
            raise _Rejected

    def _stray(self, token: Token) -> None:
        """Text and tags that have no place between tags."""
        if isinstance(token, str) and _is_space(token):
            if self._stray_gap is not None:
                self._stray_gap += token
            return
        self._flaw("text of the call is content")
        if isinstance(token, str):
            self._emit(ContentText((self._stray_gap or "") + token, IN_BLOCK))
            self._stray_gap = ""
        else:
            self._emit(ContentText(token.raw, _fault(token)))
            self._stray_gap = None

    # Calls

    def _begin_call(self, tag: Tag) -> None:
        self._stray_gap = None
        self._call = CallWriter(self._emit, self._num_calls, tag.name or "")
        self._num_calls += 1
        if self._is_tainted:
            self._call.flaw("the call begins inside a parameter that has no closing tag")
        self._call.note(self._call_note)
        if not tag.is_exact:
            self._call.note(f"the call begins with {tag.raw}")
        if self._tool_names is not None and tag.name not in self._tool_names:
            self._call.note("no such tool was declared")
        if tag.is_empty:
            self._end_call()
        else:
            self._state = self._in_call

    def _flaw(self, note: str) -> None:
        """The call under way, if there is one, may not be what the model meant."""
        if self._trial:
            raise _Rejected
        if self._call:
            self._call.flaw(note)

    def _end_call(self, *, is_closed: bool = True) -> None:
        call, self._call = self._call, None
        self._stray_gap = None
        if call:
            call.end(is_closed=is_closed)
        self._state = self._between_calls
        if self._goal is _Goal.CLOSED_CALL:
            self._commit()
            self._end_block()
            self._has_bare_call = True

    def _in_call(self, token: Token) -> None:
        call = self._call
        if call is None or isinstance(token, str):
            self._stray(token)
        elif _begins(token, Mark.VALUE):
            self._begin_value(call, token)
        elif token.mark is Mark.END_CALL and (token.has_marker or self._goal is not _Goal.CLOSED_CALL):
            if not token.is_exact:
                call.note(f"the call ends with {token.raw}")
            self._end_call()
        elif (_begins(token, Mark.CALL) or token.mark is Mark.END_BLOCK) and self._goal is not _Goal.CLOSED_CALL:
            call.note("the call has no closing tag")
            self._end_call()
            self._between_calls(token)
        else:
            self._stray(token)

    # Values

    def _begin_value(self, call: CallWriter, tag: Tag) -> None:
        self._stray_gap = None
        name = tag.name or ""
        if call.has(name):
            self._flaw(f"there are two parameters {name}")
            self._lost_note = f"a second parameter {name}"
            self._emit(ContentText(tag.raw, self._lost_note))
            self._state = self._in_call if tag.is_empty else self._in_lost_value
            return
        if tag.is_string is None:
            call.note(f"parameter {name} does not say whether it is a string; it is passed as one")
        elif not tag.is_exact:
            call.note(f"parameter {name} begins with {tag.raw}")
        call.begin_value(name, tag.is_string is not False)
        if tag.is_empty:
            call.end_value(keeps_line=True)
        else:
            self._state = self._in_value

    def _in_value(self, token: Token) -> None:
        call = self._call
        if call is None or isinstance(token, str):
            self._add(_raw(token))
        elif token.mark is Mark.END_VALUE and token.is_exact:
            call.end_value(keeps_line=True)
            self._state = self._in_call
        elif _closes(token):
            if self._trial:
                raise _Rejected
            self._doubts, self._doubt_raw = [token], token.raw
            self._state = self._in_doubt
        elif call.is_at_line_start and (_begins(token, Mark.VALUE) or _begins(token, Mark.CALL)):
            self._flaw(f"parameter {call.value_name} has no closing tag")
            call.end_value(keeps_line=False)
            self._is_tainted = True
            self._in_call(token)
            self._is_tainted = False
        else:
            self._add(token.raw)

    def _add(self, text: str) -> None:
        if self._call:
            self._call.add(text)

    def _in_doubt(self, token: Token) -> None:
        """Behind a closing tag inside a value that is not the value's own: what follows says what it is."""
        level = _CLOSERS[self._doubts[-1].mark]
        if isinstance(token, Tag) and _closes(token) and _CLOSERS[token.mark] > level:
            self._doubts.append(token)
            self._doubt_raw += token.raw
        elif (_begins(token, Mark.VALUE) and level == 0) or (_begins(token, Mark.CALL) and level < 2):
            self._believe()
            self._state(token)
        elif isinstance(token, str) and _is_space(token):
            self._doubt_raw += token
        else:
            self._state = self._in_value
            self._add(self._doubt_raw)
            self._in_value(token)

    def _believe(self) -> None:
        """The tags in doubt do close the value, and what else they say."""
        if self._call:
            self._flaw(f"parameter {self._call.value_name} ends with {self._doubts[0].raw}")
            self._call.end_value(keeps_line=False)
        self._state = self._in_call
        for tag in self._doubts:
            if _CLOSERS[tag.mark]:
                self._state(tag)

    def _in_lost_value(self, token: Token) -> None:
        """Inside a parameter that cannot be passed on."""
        if isinstance(token, Tag) and token.has_marker:
            if _begins(token, Mark.VALUE) or _begins(token, Mark.CALL) or _CLOSERS.get(token.mark, 0) > 0:
                self._in_call(token)
                return
            if token.mark is Mark.END_VALUE:
                self._state = self._in_call
        self._emit(ContentText(_raw(token), self._lost_note))

    # The end

    def _end(self, is_cut: bool) -> None:
        if self._trial and (is_cut or self._state != self._after_trial):
            self._reject(self._trial)
        if self._trial:
            self._is_reasoning = False
            self._is_layout = True
            self._commit()
        if self._state == self._in_doubt and is_cut:
            self._add(self._doubt_raw)
        elif self._state == self._in_doubt:
            self._believe()
        if self._call:
            self._end_open_call(self._call, is_cut)
        if self._state == self._between_calls:
            self._emit(ContentText("", OPEN_BLOCK))
        if not self._is_layout:
            self._flush_gap()
        if self._is_reasoning:
            self._emit(ReasoningText("", OPEN_REASONING))

    def _end_open_call(self, call: CallWriter, is_cut: bool) -> None:
        is_inside = call.value_name is not None
        call.cut_value()
        if is_cut:
            call.flaw("the answer was cut")
        call.note("the call has no closing tag")
        self._end_call(is_closed=not is_inside and not is_cut)


def _raw(token: Token) -> str:
    return token if isinstance(token, str) else token.raw


def _is_space(token: Token) -> bool:
    return isinstance(token, str) and not token.strip(_SPACES)


def _begins(token: Token, mark: Mark) -> TypeGuard[Tag]:
    """Whether a token is a usable opening tag of this kind."""
    return isinstance(token, Tag) and token.mark is mark and token.has_marker and bool(token.name)


def _closes(tag: Tag) -> bool:
    return tag.mark in _CLOSERS and tag.raw.startswith("</")


def _fault(tag: Tag) -> str:
    return OUT_OF_PLACE if tag.mark in (Mark.THINK, Mark.END_THINK, Mark.CONTROL) else NO_CALL
