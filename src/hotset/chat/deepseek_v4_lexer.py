"""DeepSeek-V4's answers, first step: text into tags and the text between.

A tag is looked for without regard to where it stands, and a half one is held back only as long as the characters so far
can become one. What is a tag depends on the characters from its ``<`` on and nothing else, so the split of the stream
does not matter. Spellings that models were seen to write instead are tags too, told apart by ``is_exact``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Mark(Enum):
    """What a tag does."""

    THINK = "<think>"
    END_THINK = "</think>"
    CONTROL = "a control token"
    BLOCK = "<tool_calls>"
    END_BLOCK = "</tool_calls>"
    CALL = "<invoke>"
    END_CALL = "</invoke>"
    VALUE = "<parameter>"
    END_VALUE = "</parameter>"
    OTHER = "an unknown tag"


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag as it was written.

    Attributes:
        has_marker: it holds the DSML token; without it, it may as well be text about XML.
        is_exact: it is spelled as the model was trained to.
        name: of the tool or parameter.
        is_string: what a parameter says about its value; None when it says nothing that can be understood.
        is_empty: it closes itself, ``<.../>``.
    """

    mark: Mark
    raw: str
    has_marker: bool = True
    is_exact: bool = True
    name: str | None = None
    is_string: bool | None = None
    is_empty: bool = False


Token = str | Tag

#: A longer tag is text.
MAX_TAG = 512
_MARKER = "｜DSML｜"
# Written with two bars where a service escapes its own markup, and by models that have read such text.
_HEADS = tuple(f"{start}{bars}DSML{bars}" for start in ("<", "</") for bars in ("｜", "｜｜"))
_STRAY = (_MARKER, "｜｜DSML｜｜")
_FIXED = {
    "<think>": Tag(Mark.THINK, "<think>"),
    "</think>": Tag(Mark.END_THINK, "</think>"),
    **{
        f"</{name}>": Tag(mark, f"</{name}>", has_marker=False, is_exact=False)
        for name, mark in (
            ("tool_calls", Mark.END_BLOCK),
            ("invoke", Mark.END_CALL),
            ("parameter", Mark.END_VALUE),
        )
    },
    **{
        text: Tag(Mark.CONTROL, text)
        for text in (
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜latest_reminder｜>",
            "<｜action｜>",
            "<｜query｜>",
            "<｜authority｜>",
            "<｜domain｜>",
            "<｜title｜>",
            "<｜read_url｜>",
        )
    },
}
_NAMES = {"tool_calls": Mark.BLOCK, "invoke": Mark.CALL, "parameter": Mark.VALUE}
_SPELLINGS = {mark: name for name, mark in _NAMES.items()}
_ENDS = {Mark.BLOCK: Mark.END_BLOCK, Mark.CALL: Mark.END_CALL, Mark.VALUE: Mark.END_VALUE}

_SPACE = r"[ \t\r\n]"
_WORD = r"[A-Za-z_]"
_TAIL = rf"(?={_SPACE}|[/>])"
# A quote ends a value where the tag can go on; other quotes are part of the value. Values hold no line break.
_QUOTES = (('"', '"'), ("'", "'"), ("“", "”"), ("”", "”"))
_INSIDE = [rf"{a}(?:[^{b}\n]|{b}(?!{_SPACE}|[/>]))*" for a, b in _QUOTES]
_BARE = r"""[^\s"'“”<>/=]"""
_ENDINGS = [(inside, b) for inside, (_, b) in zip(_INSIDE, _QUOTES, strict=True)]
_VALUE = "(?:" + "|".join(f"{inside}{b}{_TAIL}" for inside, b in _ENDINGS) + f"|{_BARE}+)"
_VALUE_PART = "(?:" + "|".join(f"{inside}{b}?" for inside, b in _ENDINGS) + f"|{_BARE}*)"
_ATTRIBUTE = rf"{_SPACE}+{_WORD}+{_SPACE}*={_SPACE}*{_VALUE}"
_OPEN = re.compile(rf"{_WORD}{{1,32}}(?:{_ATTRIBUTE})*{_SPACE}*/?>")
_OPEN_PART = re.compile(
    rf"{_WORD}{{0,32}}|{_WORD}{{1,32}}(?:{_ATTRIBUTE})*(?:{_SPACE}*/?"
    rf"|{_SPACE}+{_WORD}+{_SPACE}*|{_SPACE}+{_WORD}+{_SPACE}*={_SPACE}*{_VALUE_PART})"
)
_CLOSE = re.compile(rf"{_WORD}{{1,32}}{_SPACE}*>")
_CLOSE_PART = re.compile(rf"{_WORD}{{0,32}}|{_WORD}{{1,32}}{_SPACE}*")
_ATTRIBUTES = re.compile(rf"{_SPACE}({_WORD}+){_SPACE}*={_SPACE}*({_VALUE})")
_START = re.compile("[<｜]")


class Lexer:
    """Cuts a stream of text into tokens; neighbouring texts are one text in several pieces."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> list[Token]:
        """Take the next text and return the tokens that are certain."""
        return self._cut(self._held + text, is_end=False)

    def finish(self) -> list[Token]:
        """Return the tokens of the text held back; no more will come."""
        return self._cut(self._held, is_end=True)

    def _cut(self, text: str, *, is_end: bool) -> list[Token]:
        tokens: list[Token] = []
        done = position = 0
        self._held = ""
        while (start := _START.search(text, position)) is not None:
            found = _find_tag(text[start.start() : start.start() + MAX_TAG])
            if found is None or (found == "" and (is_end or len(text) - start.start() >= MAX_TAG)):
                position = start.end()
                continue
            if start.start() > done:
                tokens.append(text[done : start.start()])
            done = start.start()
            if isinstance(found, str):
                self._held = text[done:]
                return tokens
            tokens.append(found)
            done = position = done + len(found.raw)
        if done < len(text):
            tokens.append(text[done:])
        return tokens


def _find_tag(text: str) -> Tag | str | None:
    """The tag that ``text`` begins with; ``""`` when it may become one; None when it cannot."""
    for raw, tag in _FIXED.items():
        if text.startswith(raw):
            return tag
    for raw in reversed(_STRAY):
        if text.startswith(raw):
            return Tag(Mark.OTHER, raw, is_exact=False)
    for head in _HEADS:
        if text.startswith(head):
            return _find_dsml(text, head)
    return "" if any(known.startswith(text) for known in (*_FIXED, *_STRAY, *_HEADS)) else None


def _find_dsml(text: str, head: str) -> Tag | str | None:
    is_close = head.startswith("</")
    whole = (_CLOSE if is_close else _OPEN).match(text, len(head))
    if whole is None:
        part = (_CLOSE_PART if is_close else _OPEN_PART).fullmatch(text, len(head))
        return None if part is None else ""
    raw = head + whole.group()
    word = re.match(f"{_WORD}+", whole.group())
    mark = _closest(word.group()) if word else None
    if mark is None:
        return Tag(Mark.OTHER, raw, is_exact=False)
    if is_close:
        return Tag(_ENDS[mark], raw, is_exact=raw == f"</{_MARKER}{_SPELLINGS[mark]}>")
    return _open_tag(mark, raw)


def _open_tag(mark: Mark, raw: str) -> Tag:
    values: dict[str, str] = {}
    for attribute in _ATTRIBUTES.finditer(raw):
        value = attribute.group(2)
        values.setdefault(attribute.group(1), value[1:-1] if value[0] in "\"'“”" else value)
    name = values.get("name") or None
    string = values.get("string", "")
    attributes = {
        Mark.BLOCK: "",
        Mark.CALL: f' name="{name}"',
        Mark.VALUE: f' name="{name}" string="{string}"',
    }
    is_known = mark is not Mark.VALUE or string in ("true", "false")
    return Tag(
        mark,
        raw,
        is_exact=is_known and raw == f"<{_MARKER}{_SPELLINGS[mark]}{attributes[mark]}>",
        name=name,
        is_string={"true": True, "false": False}.get(string.lower()),
        is_empty=raw.endswith("/>"),
    )


def _closest(word: str) -> Mark | None:
    """The tag that a word means: with few letters wrong, or the word of the family before."""
    if word == "function_calls":
        return Mark.BLOCK
    for name, mark in _NAMES.items():
        if _distance(word.lower(), name) <= (1 if len(name) < 8 else 2):
            return mark
    return None


def _distance(a: str, b: str) -> int:
    """Number of letters to change, add or drop to get from one word to the other."""
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1]
