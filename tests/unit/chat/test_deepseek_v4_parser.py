"""DeepSeek-V4's answers: the grammar, the malformed blocks that models were seen to write, and every split of both."""

import json
import re
from collections.abc import Collection
from itertools import pairwise

import pytest
from deepseek_v4_answers import ANSWERS, BLOCK, END_BLOCK, END_CALL, END_VALUE, D, block, call, called, value
from hypothesis import given, settings, strategies

from hotset.chat.deepseek_v4_lexer import MAX_TAG, Lexer, Mark, Tag
from hotset.chat.deepseek_v4_parser import DeepSeekV4Parser
from hotset.chat.events import (
    ChatEvent,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    join_events,
)


def parse(
    text: str,
    cuts: Collection[int] = (),
    *,
    thinking: bool = False,
    tools: Collection[str] | None = None,
    is_cut: bool = False,
) -> list[ChatEvent]:
    parser = DeepSeekV4Parser(is_thinking=thinking, tool_names=tools)
    borders = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    events = [event for a, b in pairwise(borders) for event in parser.feed(text[a:b])]
    return join_events([*events, *parser.finish(is_cut=is_cut)])


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    text, options, expected = ANSWERS[name]
    assert parse(text, **options) == expected


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_in_every_split(name):
    """Bug class: half a tag at the end of a piece is shown as text, or a call is lost only when it streams."""
    text, options, expected = ANSWERS[name]
    if len(text) > 1000:
        text_cuts = [range(0, len(text), step) for step in (1, 7)]
    else:
        text_cuts = [range(len(text)), *((cut,) for cut in range(1, len(text)))]
    for cuts in text_cuts:
        assert parse(text, cuts, **options) == expected, cuts


FRAGMENTS = [
    BLOCK, END_BLOCK, call("f"), call("g"), END_CALL, value("a"), value("b"), value("a", "false"), END_VALUE,
    f"<{D}toolcalls>", f"<{D}invoke>", f"</{D}x>", D, "</parameter>", "</invoke>", "</tool_calls>", "<think>",
    "</think>", "<｜User｜>", "<", "</", "<｜", "｜", "<｜DS", f"<{D}inv", '"', ">", "\n", "\n\n", " ", "1", "{", "[1]",
    "\\", "é𝄞", "\ud83d",
    f"{BLOCK}\n{call('f')}\n", f"{END_VALUE}\n{END_CALL}\n{END_BLOCK}", f'<{D}invoke name="f"/>',
]  # fmt: skip
pieces = strategies.lists(
    strategies.one_of(strategies.sampled_from(FRAGMENTS), strategies.text(max_size=3)), max_size=25
)
ways = strategies.fixed_dictionaries(
    {
        "thinking": strategies.booleans(),
        "tools": strategies.sampled_from([None, (), ("f",)]),
        "is_cut": strategies.booleans(),
    }
)


@settings(max_examples=1500, deadline=None)
@given(pieces, ways, strategies.lists(strategies.integers(0, 600), max_size=8))
def test_any_split_of_any_text_gives_the_same_events(parts, way, cuts):
    """Bug class: the split of the stream decides what a text means."""
    text = "".join(parts)
    expected = parse(text, **way)
    assert parse(text, cuts, **way) == expected
    assert parse(text, range(len(text)), **way) == expected


def shown(events: list[ChatEvent]) -> str:
    return "".join(
        event.name if isinstance(event, ToolCallStart) else "" if isinstance(event, ToolCallEnd) else event.text
        for event in events
    )


@settings(max_examples=1000, deadline=None)
@given(pieces, ways)
def test_no_text_is_lost(parts, way):
    """Bug class: text that the grammar does not know disappears. Words are numbered; all come out, in their order."""
    text = "".join(f"{part}<{i}>" for i, part in enumerate(parts))
    assert re.findall(r"<(\d+)>", shown(parse(text, **way))) == [str(i) for i in range(len(parts))]


@settings(max_examples=500, deadline=None)
@given(pieces, ways)
def test_calls_keep_their_form(parts, way):
    """Bug class: arguments of a whole call that no JSON parser takes; a cut call with arguments that one takes."""
    open_calls: dict[int, str] = {}
    ended = 0
    for event in parse("".join(parts), **way):
        if isinstance(event, ToolCallStart):
            assert event.index == ended + len(open_calls) and not open_calls
            open_calls[event.index] = ""
        elif isinstance(event, ToolCallArguments):
            open_calls[event.index] += event.text
        elif isinstance(event, ToolCallEnd):
            ended += 1
            arguments = open_calls.pop(event.index)
            if "the answer ended" in event.note or "was cut" in event.note:
                with pytest.raises(ValueError):
                    json.loads(arguments)
                assert not event.is_sound
            else:
                assert isinstance(json.loads(arguments), dict)
    assert not open_calls


texts = strategies.text(strategies.characters(blacklist_categories=["Cs"], blacklist_characters="｜"), max_size=12)
names = strategies.text("abc_.-é ", min_size=1, max_size=5)
values = strategies.one_of(
    texts, strategies.integers(), strategies.booleans(), strategies.none(), strategies.lists(texts)
)
calls = strategies.lists(strategies.tuples(names, strategies.dictionaries(names, values, max_size=3)), max_size=3)


@given(
    strategies.one_of(strategies.none(), texts), texts, calls, strategies.lists(strategies.integers(0, 400), max_size=5)
)
@settings(max_examples=500, deadline=None)
def test_what_the_encoder_writes_comes_back(reasoning, content, calls, cuts):
    """Bug class: a conversation changes when an answer is parsed and written down again."""
    from hotset.chat.deepseek_v4 import EOS, Texts, write_prompt
    from hotset.chat.deepseek_v4_messages import read_turns

    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    message["tool_calls"] = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    is_thinking = reasoning is not None
    # Tags written without the marker are nobody's, but these two mean something where an answer begins.
    if "think>" in content + (reasoning or ""):
        return
    pieces = list(write_prompt(read_turns([message]), Texts("", "", {}), is_thinking=is_thinking))
    events = parse("".join(pieces[1:]).removesuffix(EOS), cuts, thinking=is_thinking)
    expected: list[ChatEvent] = [ReasoningText(reasoning or ""), ContentText(content)]
    for index, (name, arguments) in enumerate(calls):
        expected += called(name, json.dumps(arguments, ensure_ascii=False), index=index)
    assert events == join_events(expected)


#: As long as a tag can be, and not complete.
LONG = f'<{D}invoke name="'.ljust(MAX_TAG, "f")


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("a < b", ""),
        ("a <", "<"),
        ("a <b", ""),
        ("a </thin", "</thin"),
        ("a </thing", ""),
        ("a <｜DSML", "<｜DSML"),
        ("a <｜DSMX", ""),
        (f"a <{D}tool_calls", f"<{D}tool_calls"),
        (f"a <{D}tool calls", f"<{D}tool calls"),
        (f"a <{D}tool calls,", ""),
        (f"a <{D}tool_calls>", f"<{D}tool_calls>"),
        ("a " + LONG[:-1], LONG[:-1]),
        ("a " + LONG, ""),
        ("a\n", "\n"),
        ("a\n\n\n", "\n\n"),
        ("a\n\nb", ""),
        ("a ", ""),
    ],
)
def test_only_what_can_become_markup_is_held_back(text, held):
    """Bug class: an answer that stands still until it is complete."""
    parser = DeepSeekV4Parser(is_thinking=False)
    given_out = "".join(event.text for event in parser.feed(text) if isinstance(event, ContentText))
    assert (given_out, text.removeprefix(given_out)) == (text.removesuffix(held), held)
    assert given_out + "".join(event.text for event in parser.finish()) == text


def test_arguments_stream():
    """Bug class: a long value comes at the very end."""
    parser = DeepSeekV4Parser(is_thinking=False)
    parser.feed(f"{BLOCK}\n{call('write')}\n{value('text')}")
    for word in ("one ", "two ", "three "):
        assert parser.feed(word) == [ToolCallArguments(0, word)]


def tags(text: str) -> list[Tag]:
    lexer = Lexer()
    return [token for token in [*lexer.feed(text), *lexer.finish()] if isinstance(token, Tag)]


@pytest.mark.parametrize(
    ("text", "mark", "name", "is_string", "is_exact"),
    [
        (f'<{D}invoke name="f">', Mark.CALL, "f", None, True),
        (f"<{D}invoke name='f'>", Mark.CALL, "f", None, False),
        (f"<{D}invoke name = f >", Mark.CALL, "f", None, False),
        (f'<{D}invoke  name="f">', Mark.CALL, "f", None, False),
        (f'<{D}INVOKE name="f">', Mark.CALL, "f", None, False),
        (f'<{D}invoke name="f" x="1">', Mark.CALL, "f", None, False),
        (f'<{D}invok name="f">', Mark.CALL, "f", None, False),
        (f'<{D}invoke name="">', Mark.CALL, None, None, False),
        (f'<{D}parameter name="a" string="true">', Mark.VALUE, "a", True, True),
        (f'<{D}parameter name="a" string="false">', Mark.VALUE, "a", False, True),
        (f'<{D}parameter string="false" name="a">', Mark.VALUE, "a", False, False),
        (f'<{D}parameter name="a" string="True">', Mark.VALUE, "a", True, False),
        (f'<{D}parameter name="a" string=“false”>', Mark.VALUE, "a", False, False),
        (f'<{D}parameter name="a">', Mark.VALUE, "a", None, False),
        (f'<{D}parmeter name="a" string="true">', Mark.VALUE, "a", True, False),
        (f"</{D}invoke >", Mark.END_CALL, None, None, False),
        (f"</{D}tool_call>", Mark.END_BLOCK, None, None, False),
        (f"<{D}table>", Mark.OTHER, None, None, False),
    ],
)
def test_tags(text, mark, name, is_string, is_exact):
    (tag,) = tags(text)
    assert (tag.mark, tag.raw, tag.name, tag.is_string, tag.is_exact) == (mark, text, name, is_string, is_exact)
    # Every beginning of a tag is held back, or the tag would depend on the split.
    for length in range(1, len(text)):
        assert Lexer().feed(text[:length]) == []


@pytest.mark.parametrize(
    "text",
    [
        f'<{D}invoke name="a\nb">',
        f'<{D}invoke name="{"a" * MAX_TAG}">',
        f"<{D}invoke the tool>",
        f'<{D}invoke name"f">',
        f"< {D}invoke>",
        f"<{D}>",
        f"<{D}{'x' * 33}>",
        "<parameter>",
        "<THINK>",
    ],
)
def test_what_is_no_tag(text):
    assert [tag.raw for tag in tags(text) if tag.raw != D] == []


def test_long_answers_take_linear_time():
    """Bug class: every piece is searched from the beginning again. 20 times the text, not 400 times the work."""
    steps = 0

    class Counted(DeepSeekV4Parser):
        def _take(self, token):
            nonlocal steps
            steps += 1
            super()._take(token)

    def work(size: int) -> int:
        nonlocal steps
        steps = 0
        parser = Counted(is_thinking=False)
        for _ in range(size):
            parser.feed("<a href=x> ｜ </b>\n")
        parser.finish()
        return steps

    assert work(2000) <= 21 * work(100)


def test_deep_nesting_is_not_json():
    deep = "[" * 100_000
    text = block(f"{call('f')}{value('a', 'false')}{deep}{END_VALUE}{END_CALL}")
    assert json.loads("".join(e.text for e in parse(text) if isinstance(e, ToolCallArguments))) == {"a": deep}
