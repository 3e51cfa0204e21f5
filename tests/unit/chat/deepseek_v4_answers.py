"""Answers of DeepSeek-V4, well-formed and as models were seen to break them, and the events they stand for."""

from __future__ import annotations

import json
from typing import Any

from hotset.chat.deepseek_v4_parser import (
    EMPTY_BLOCK,
    IN_BLOCK,
    NO_CALL,
    OPEN_BLOCK,
    OPEN_REASONING,
    OUT_OF_PLACE,
    OWN_REASONING,
)
from hotset.chat.events import ChatEvent, ContentText, ReasoningText, ToolCallArguments, ToolCallEnd, ToolCallStart

D = "｜DSML｜"
BLOCK, END_BLOCK, END_CALL, END_VALUE = f"<{D}tool_calls>", f"</{D}tool_calls>", f"</{D}invoke>", f"</{D}parameter>"


def call(name: str) -> str:
    return f'<{D}invoke name="{name}">'


def value(name: str, string: str = "true") -> str:
    return f'<{D}parameter name="{name}" string="{string}">'


def block(*calls: str) -> str:
    return f"{BLOCK}\n" + "".join(f"{text}\n" for text in calls) + END_BLOCK


def find(text: str = "x", name: str = "find", key: str = "q") -> str:
    return f"{call(name)}\n{value(key)}{text}{END_VALUE}\n{END_CALL}"


def called(name: str, arguments: str, note: str = "", *, index: int = 0, sound: bool = True) -> list[ChatEvent]:
    return [ToolCallStart(index, name), ToolCallArguments(index, arguments), ToolCallEnd(index, sound, note)]


QUOTED = f"a {BLOCK} {call('g')} {value('b')}<think></think>{END_CALL} <｜User｜> </parameter> b{D}"
FOUND = called("find", '{"q": "x"}')
ANSWERS: dict[str, tuple[str, dict[str, Any], list[ChatEvent]]] = {
    # The grammar.
    "content": ("hello", {}, [ContentText("hello")]),
    "reasoning": ("why\n</think>\nso", {"thinking": True}, [ReasoningText("why\n"), ContentText("\nso")]),
    "reasoning is empty": ("</think>so", {"thinking": True}, [ContentText("so")]),
    "call": ("so\n\n" + block(find()), {}, [ContentText("so"), *FOUND]),
    "call after reasoning": ("r</think>\n\n" + block(find()), {"thinking": True}, [ReasoningText("r"), *FOUND]),
    "two calls": (block(find(), find("y", "g")), {}, [*FOUND, *called("g", '{"q": "y"}', index=1)]),
    "no arguments": (block(f"{call('f')}\n\n{END_CALL}"), {}, called("f", "{}")),
    "no arguments, one line": (block(f"{call('f')}{END_CALL}"), {}, called("f", "{}")),
    "values of every kind": (
        block(f"{call('f')}{value('a')}1\n{END_VALUE}{value('b', 'false')}[1, {{}}]{END_VALUE}{END_CALL}"),
        {},
        called("f", '{"a": "1\\n", "b": [1, {}]}'),
    ),
    "numbers as they are written": (
        block(
            f"{call('f')}{value('a', 'false')} 1.50e1 {END_VALUE}{value('b', 'false')}{'9' * 5000}{END_VALUE}{END_CALL}"
        ),
        {},
        called("f", '{"a":  1.50e1 , "b": ' + "9" * 5000 + "}"),
    ),
    "a value that quotes markup": (
        block(find(QUOTED)),
        {},
        called("find", json.dumps({"q": QUOTED}, ensure_ascii=False)),
    ),
    "a name with odd characters": (
        block(call('a>b"c') + value("k'>") + f"v{END_VALUE}{END_CALL}"),
        {},
        called('a>b"c', '{"k\'>": "v"}'),
    ),
    "more line breaks than belong to the block": ("a\n\n\n" + block(find()), {}, [ContentText("a\n"), *FOUND]),
    "fewer": ("a\n" + block(find()), {}, [ContentText("a"), *FOUND]),
    "none": ("a" + block(find()), {}, [ContentText("a"), *FOUND]),
    "white space after the block": (block(find()) + " \n", {}, FOUND),
    # Around blocks.
    "text after the block": (block(find()) + "\n so", {}, [*FOUND, ContentText("\n so")]),
    "a second block": (
        block(find()) + "\n\n" + block(find("y", "g")),
        {},
        [*FOUND, *called("g", '{"q": "y"}', index=1)],
    ),
    "an empty block": (
        f"a\n\n{BLOCK}\n{END_BLOCK}\nb",
        {},
        [ContentText("a"), ContentText("", EMPTY_BLOCK), ContentText("\nb")],
    ),
    "stray closing tags": (
        f"a{END_VALUE}b{END_CALL}{END_BLOCK}",
        {},
        [
            ContentText("a"),
            ContentText(END_VALUE, NO_CALL),
            ContentText("b"),
            ContentText(END_CALL + END_BLOCK, NO_CALL),
        ],
    ),
    "the block is not closed": (f"{BLOCK}\n{find()}\n", {}, [*FOUND, ContentText("", OPEN_BLOCK)]),
    "text between calls": (
        block(find(), "and  now", find("y", "g")),
        {},
        [*FOUND, ContentText("and  now", IN_BLOCK), *called("g", '{"q": "y"}', index=1)],
    ),
    "the opening tag with letters missing": (
        block(find()).replace("tool_calls", "toolcalls", 1),
        {},
        called("find", '{"q": "x"}', f"the block begins with <{D}toolcalls>"),
    ),
    "the block's name in the family before": (
        block(find()).replace("tool_calls", "function_calls"),
        {},
        called("find", '{"q": "x"}', f"the block begins with <{D}function_calls>"),
    ),
    "doubled bars and curly quotes": (
        block(find()).replace(D, "｜｜DSML｜｜").replace('"q"', "“q”"),
        {},
        called(
            "find",
            '{"q": "x"}',
            'the block begins with <｜｜DSML｜｜tool_calls>; the call begins with <｜｜DSML｜｜invoke name="find">; '
            'parameter q begins with <｜｜DSML｜｜parameter name=“q” string="true">; '
            "parameter q ends with </｜｜DSML｜｜parameter>; the call ends with </｜｜DSML｜｜invoke>",
            sound=False,
        ),
    ),
    "a block that is talked about": (
        f"Write {BLOCK} and then {call('f')}.",
        {"tools": {"g"}},
        [
            ContentText("Write "),
            ContentText(f"{BLOCK} ", NO_CALL),
            ContentText("and then "),
            ContentText(call("f"), NO_CALL),
            ContentText("."),
        ],
    ),
    # Calls without a block.
    "a bare call of a declared tool": (
        f"a\n\n{find()}\n{END_BLOCK}\n",
        {"tools": {"find"}},
        [ContentText("a"), *called("find", '{"q": "x"}', "there is no tool_calls block around the call")],
    ),
    "a bare call of another tool": (
        find(),
        {"tools": {"g"}},
        [
            ContentText(call("find"), NO_CALL),
            ContentText("\n"),
            ContentText(value("q"), NO_CALL),
            ContentText("x"),
            ContentText(END_VALUE, NO_CALL),
            ContentText("\n"),
            ContentText(END_CALL, NO_CALL),
        ],
    ),
    "a bare call that is talked about": (
        f"Use {call('find')} to search.",
        {"tools": {"find"}},
        [ContentText("Use "), ContentText(call("find") + " ", NO_CALL), ContentText("to search.")],
    ),
    "a bare call that never closes": (
        f"{call('find')}\n{value('q')}rm -rf /tmp",
        {"tools": {"find"}},
        [ContentText(f"{call('find')}\n{value('q')}rm -rf /tmp", NO_CALL)],
    ),
    "a bare call that closes without the marker": (
        f"{call('find')}</invoke>",
        {"tools": {"find"}},
        [ContentText(call("find"), NO_CALL), ContentText("</invoke>")],
    ),
    "a bare call, then a block": (
        f"{call('find')}\n{block(find())}",
        {"tools": {"find"}},
        [ContentText(f"{call('find')}\n", NO_CALL), *FOUND],
    ),
    "a tool that was not declared": (
        block(find()),
        {"tools": ()},
        called("find", '{"q": "x"}', "no such tool was declared"),
    ),
    "a call that closes itself": (
        block(f'<{D}invoke name="f" />'),
        {},
        called("f", "{}", f'the call begins with <{D}invoke name="f" />'),
    ),
    # Reasoning.
    "a call inside the reasoning, which it ends": (
        f"r\n\n{block(find())}\n",
        {"thinking": True},
        [ReasoningText("r"), *called("find", '{"q": "x"}', "the reasoning was not closed before the call")],
    ),
    "a call inside the reasoning, which closes behind it": (
        f"{block(find())}</think>",
        {"thinking": True},
        called("find", '{"q": "x"}', "the reasoning was not closed before the call"),
    ),
    "a call that the reasoning only tries": (
        f"r\n{block(find())}\nno</think>so",
        {"thinking": True},
        [ReasoningText("r"), ReasoningText(f"\n{block(find())}\n", NO_CALL), ReasoningText("no"), ContentText("so")],
    ),
    "a tried call, then the real one": (
        f"{block(find('y'))}</think>\n\n{block(find())}",
        {"thinking": True},
        [ReasoningText(block(find("y")), NO_CALL), *FOUND],
    ),
    "a tried call just before the answer": (
        f"r\n{block(find())}</think> \n so",
        {"thinking": True},
        [ReasoningText("r"), ReasoningText(f"\n{block(find())}", NO_CALL), ContentText(" \n so")],
    ),
    "a call mentioned in the reasoning": (
        f"r {BLOCK} s</think>",
        {"thinking": True},
        [ReasoningText("r "), ReasoningText(BLOCK, NO_CALL), ReasoningText(" s")],
    ),
    "a call inside the reasoning that was cut": (
        block(find()),
        {"thinking": True, "is_cut": True},
        [ReasoningText(block(find()), NO_CALL), ReasoningText("", OPEN_REASONING)],
    ),
    "the reasoning is never closed": ("r", {"thinking": True}, [ReasoningText("r"), ReasoningText("", OPEN_REASONING)]),
    "the reasoning is opened again": (
        "<think>r</think>a</think><think>b",
        {"thinking": True},
        [
            ReasoningText("<think>", OUT_OF_PLACE),
            ReasoningText("r"),
            ContentText("a"),
            ContentText("</think><think>", OUT_OF_PLACE),
            ContentText("b"),
        ],
    ),
    "reasoning that nobody asked for": (
        "<think>r</think>a",
        {},
        [ReasoningText("", OWN_REASONING), ReasoningText("r"), ContentText("a")],
    ),
    "role markers": ("a<｜User｜>b", {}, [ContentText("a"), ContentText("<｜User｜>", OUT_OF_PLACE), ContentText("b")]),
    "a lone marker with two bars": (
        "a｜｜DSML｜｜b",
        {},
        [ContentText("a"), ContentText("｜｜DSML｜｜", NO_CALL), ContentText("b")],
    ),
    "a lone marker": (f"a{D}b", {}, [ContentText("a"), ContentText(D, NO_CALL), ContentText("b")]),
    # Inside calls.
    "the call is not closed before the next": (
        block(find().removesuffix(END_CALL), find("y", "g")),
        {},
        [*called("find", '{"q": "x"}', "the call has no closing tag"), *called("g", '{"q": "y"}', index=1)],
    ),
    "the call is not closed before the end of the block": (
        block(find().removesuffix(END_CALL)),
        {},
        called("find", '{"q": "x"}', "the call has no closing tag"),
    ),
    "the call is not closed at the end": (
        f"{BLOCK}{find().removesuffix(END_CALL)}",
        {},
        [*called("find", '{"q": "x"}', "the call has no closing tag"), ContentText("", OPEN_BLOCK)],
    ),
    "the call was cut": (
        f"{BLOCK}{find().removesuffix(END_CALL)}",
        {"is_cut": True},
        [
            *called("find", '{"q": "x"', "the answer was cut; the call has no closing tag", sound=False),
            ContentText("", OPEN_BLOCK),
        ],
    ),
    "the call was cut at its name": (
        f"{BLOCK}{call('find')}",
        {"is_cut": True},
        [
            *called("find", "{", "the answer was cut; the call has no closing tag", sound=False),
            ContentText("", OPEN_BLOCK),
        ],
    ),
    "a value was cut": (
        f"{BLOCK}{call('find')}{value('q')}rm -rf /\n",
        {},
        [
            *called(
                "find",
                '{"q": "rm -rf /\\n',
                "the answer ended inside parameter q; the call has no closing tag",
                sound=False,
            ),
            ContentText("", OPEN_BLOCK),
        ],
    ),
    "a JSON value was cut": (
        f"{BLOCK}{call('find')}{value('q', 'false')}[1, 2]{END_VALUE[:-1]}",
        {"is_cut": True},
        [
            *called(
                "find",
                '{"q": [1, 2]' + END_VALUE[:-1],
                "the answer ended inside parameter q; the answer was cut; the call has no closing tag",
                sound=False,
            ),
            ContentText("", OPEN_BLOCK),
        ],
    ),
    "a value was cut behind what may close it": (
        f"{BLOCK}{call('find')}{value('q')}1</parameter>",
        {"is_cut": True},
        [
            *called(
                "find",
                '{"q": "1</parameter>',
                "the answer ended inside parameter q; the answer was cut; the call has no closing tag",
                sound=False,
            ),
            ContentText("", OPEN_BLOCK),
        ],
    ),
    "a tag was cut": (
        f"{BLOCK}{call('find')}{value('q')[:-1]}",
        {"is_cut": True},
        [
            ToolCallStart(0, "find"),
            ToolCallArguments(0, "{"),
            ContentText("<", IN_BLOCK),
            ContentText(D, NO_CALL),
            ContentText('parameter name="q" string="true"', IN_BLOCK),
            ToolCallEnd(0, False, "text of the call is content; the answer was cut; the call has no closing tag"),
            ContentText("", OPEN_BLOCK),
        ],
    ),
    "text between values": (
        block(f"{call('f')}\n{value('a')}1{END_VALUE}\nplus two \n{value('b')}2{END_VALUE}\n{END_CALL}"),
        {},
        [
            ToolCallStart(0, "f"),
            ToolCallArguments(0, '{"a": "1"'),
            ContentText("plus two", IN_BLOCK),
            ToolCallArguments(0, ', "b": "2"}'),
            ToolCallEnd(0, False, "text of the call is content"),
        ],
    ),
    "arguments written as an object": (
        block(f'{call("f")}\n{{"a": 1}}\n{END_CALL}'),
        {},
        [
            ToolCallStart(0, "f"),
            ToolCallArguments(0, "{"),
            ContentText('{"a": 1}', IN_BLOCK),
            ToolCallArguments(0, "}"),
            ToolCallEnd(0, False, "text of the call is content"),
        ],
    ),
    "a parameter twice": (
        block(f"{call('f')}{value('a')}1{END_VALUE}{value('a')}2 3{END_VALUE}{END_CALL}"),
        {},
        [
            ToolCallStart(0, "f"),
            ToolCallArguments(0, '{"a": "1"'),
            ContentText(f"{value('a')}2 3{END_VALUE}", "a second parameter a"),
            ToolCallArguments(0, "}"),
            ToolCallEnd(0, False, "there are two parameters a"),
        ],
    ),
    "a parameter without a name": (
        block(f'{call("f")}<{D}parameter string="true">1{END_VALUE}{END_CALL}'),
        {},
        [
            ToolCallStart(0, "f"),
            ToolCallArguments(0, "{"),
            ContentText(f'<{D}parameter string="true">', NO_CALL),
            ContentText("1", IN_BLOCK),
            ContentText(END_VALUE, NO_CALL),
            ToolCallArguments(0, "}"),
            ToolCallEnd(0, False, "text of the call is content"),
        ],
    ),
    "JSON that is none": (
        block(f"{call('f')}{value('a', 'false')}[1, 2{END_VALUE}{value('b', 'false')}NaN{END_VALUE}{END_CALL}"),
        {},
        called(
            "f",
            '{"a": "[1, 2", "b": "NaN"}',
            "parameter a is marked as JSON and is none; it is passed as a string; "
            "parameter b is marked as JSON and is none; it is passed as a string",
        ),
    ),
    "a type that is none": (
        block(f"{call('f')}{value('a', 'maybe')}1{END_VALUE}<{D}parameter name='b'>2{END_VALUE}{END_CALL}"),
        {},
        called(
            "f",
            '{"a": "1", "b": "2"}',
            "parameter a does not say whether it is a string; it is passed as one; "
            "parameter b does not say whether it is a string; it is passed as one",
        ),
    ),
    # Values without their closing tag.
    "the next parameter begins a line": (
        block(f"{call('f')}\n{value('a')}1\n{value('b')}2{END_VALUE}\n{END_CALL}"),
        {},
        called("f", '{"a": "1", "b": "2"}', "parameter a has no closing tag", sound=False),
    ),
    "the next call begins a line": (
        block(f"{call('f')}\n{value('a')}1\n{find()}"),
        {},
        [
            *called("f", '{"a": "1"}', "parameter a has no closing tag; the call has no closing tag", sound=False),
            *called(
                "find", '{"q": "x"}', "the call begins inside a parameter that has no closing tag", index=1, sound=False
            ),
        ],
    ),
    "the call closes, and nothing else comes": (
        block(f"{call('f')}\n{value('a')}1\n{END_CALL}"),
        {},
        called("f", '{"a": "1"}', f"parameter a ends with {END_CALL}", sound=False),
    ),
    "the call closes, and another begins": (
        block(f"{call('f')}\n{value('a')}1{END_CALL}", find()),
        {},
        [
            *called("f", '{"a": "1"}', f"parameter a ends with {END_CALL}", sound=False),
            *called("find", '{"q": "x"}', index=1),
        ],
    ),
    "the block closes, and text comes": (
        f"{BLOCK}{call('f')}{value('a')}1{END_CALL}{END_BLOCK} 2",
        {},
        [
            *called(
                "f",
                json.dumps({"a": f"1{END_CALL}{END_BLOCK} 2"}, ensure_ascii=False).removesuffix('"}'),
                "the answer ended inside parameter a; the call has no closing tag",
                sound=False,
            ),
            ContentText("", OPEN_BLOCK),
        ],
    ),
    "closing tags without the marker": (
        f"{BLOCK}\n{call('f')}\n{value('a')}1</parameter>\n</invoke>\n</tool_calls>",
        {},
        called("f", '{"a": "1"}', "parameter a ends with </parameter>; the call ends with </invoke>", sound=False),
    ),
    "a closing tag without the marker, then a parameter": (
        block(f"{call('f')}\n{value('a')}1</parameter>\n{value('b')}2{END_VALUE}{END_CALL}"),
        {},
        called("f", '{"a": "1", "b": "2"}', "parameter a ends with </parameter>", sound=False),
    ),
    "a closing tag with a wrong name": (
        block(f"{call('f')}\n{value('a')}1</{D}value>\n{END_CALL}"),
        {},
        called("f", '{"a": "1"}', f"parameter a ends with </{D}value>", sound=False),
    ),
}
