"""DeepSeek-V4's prompts, against texts written out by hand from the rules of the format."""

import json
from typing import Any

import pytest
from encoder_files import ABSOLUTE, BEYOND, DIGESTS, PREVIEW, texts, write_model
from hypothesis import given, settings, strategies

from hotset.chat.deepseek_v4 import DeepSeekV4, Texts, write_prompt
from hotset.chat.deepseek_v4_messages import read_turns
from hotset.chat.dialect import ChatSettings, Control
from hotset.chat.tokenizer import Tokenizer
from hotset.errors import CheckpointError, RequestError

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
D = "｜DSML｜"


def message(role: str, content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def user(content: Any = "q", **fields: Any) -> dict[str, Any]:
    return message("user", content, **fields)


def call(name: str, arguments: Any = "{}", call_id: str | None = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str = "find") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


SCHEMA = '{"name": "find", "parameters": {"type": "object"}}'
PREAMBLE = f"## How\n<{D}tool_calls> after </think>, not <think>\n{SCHEMA}\n{{x}} end\n"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return texts(tmp_path_factory.mktemp("release"))


class Speller:
    """A coder whose tokens are characters: it shows the prompt, and which of it are control tokens."""

    def __init__(self) -> None:
        self.spellings: list[str] = []

    def control_id(self, spelling: str) -> int:
        self.spellings.append(spelling)
        return 0x110000 + len(self.spellings) - 1

    def encode_parts(self, parts: Any) -> list[int]:
        return [token for part in parts for token in ([part] if isinstance(part, int) else map(ord, part))]

    def encode_prompt(self, text: str) -> list[int]:
        raise AssertionError(text)


def encode(release: Texts, messages: list[dict[str, Any]], **options: Any) -> str:
    """The prompt as text, control tokens spelled out."""
    speller = Speller()
    ids = DeepSeekV4(speller, release).encode(messages, ChatSettings.from_options(options))
    return "".join(speller.spellings[i - 0x110000] if i >= 0x110000 else chr(i) for i in ids)


def written(release: Texts, messages: list[dict[str, Any]], is_thinking: bool = True, **options: Any) -> str:
    return "".join(write_prompt(read_turns(messages), release, is_thinking=is_thinking, **options))


def test_the_two_modes(release):
    """Bug class: the model reasons where it must not, or the other way round."""
    messages = [message("system", "s"), user()]
    assert encode(release, messages) == encode(release, messages, thinking=True) == f"{B}s{U}q{A}<think>"
    assert encode(release, messages, thinking=False) == f"{B}s{U}q{A}</think>"


def test_effort_is_a_text_before_everything(release, tmp_path):
    """Bug class: the levels of the two encoders taken for each other."""
    messages = [message("system", "s"), user()]
    assert encode(release, messages, effort="low") == f"{B}s{U}q{A}<think>"
    assert encode(release, messages, effort="high") == f"{B}{ABSOLUTE}s{U}q{A}<think>"
    assert encode(release, messages, effort="max") == f"{B}{BEYOND}s{U}q{A}<think>"
    preview = texts(tmp_path, PREVIEW)
    assert encode(preview, messages, effort="max") == f"{B}{ABSOLUTE}s{U}q{A}<think>"
    for level in ("low", "high"):
        with pytest.raises(RequestError, match=f"effort is '{level}', this checkpoint knows max"):
            encode(preview, messages, effort=level)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"effort": "medium"}, "effort is 'medium', this checkpoint knows low, high, max"),
        ({"effort": ["low"]}, "effort is "),
        ({"effort": "max", "thinking": False}, "effort max needs thinking, which is off"),
        ({"thinking": "on"}, "thinking is 'on', expected true or false"),
        ({"thinking": 0}, "thinking is 0, expected true or false"),
        ({"enable_thinking": True, "x": 1}, "no setting enable_thinking, x"),
        ({"tools": {}}, "tools is {}, expected a list"),
        ({"tools": [{"type": "web"}]}, "a tool is {'type': 'web'}, expected"),
        ({"tools": [{"type": "function", "function": {}}]}, "the function of a tool has no name"),
        ({"tools": [{**tool(), "strict": True}]}, "a tool holds strict, expected function, type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": {1}}}]}, "is not JSON"),
        ({"response_format": "json"}, "response_format is 'json', expected a JSON object"),
    ],
)
def test_settings_that_cannot_be(release, options, fault):
    with pytest.raises(RequestError, match=fault):
        encode(release, [user()], **options)


def test_reasoning_before_the_last_question_is_dropped(release):
    answers = [message("assistant", "a1", reasoning_content="r1"), message("assistant", "a2", reasoning_content="r2")]
    messages = [user("q1"), answers[0], user("q2"), answers[1]]
    assert written(release, messages) == f"{B}{U}q1{A}</think>a1{E}{U}q2{A}<think>r2</think>a2{E}"
    assert written(release, messages, drops_reasoning=False) == (
        f"{B}{U}q1{A}<think>r1</think>a1{E}{U}q2{A}<think>r2</think>a2{E}"
    )
    assert written(release, messages, is_thinking=False) == f"{B}{U}q1{A}</think>a1{E}{U}q2{A}</think>a2{E}"


def test_tools_keep_all_reasoning(release):
    messages = [user("q1"), message("assistant", "a1", reasoning_content="r1"), user("q2")]
    prompt = encode(release, messages, tools=[tool()])
    assert prompt == f"{B}\n\n{PREAMBLE}{U}q1{A}<think>r1</think>a1{E}{U}q2{A}<think>"
    assert encode(release, messages, tools=[]) == f"{B}{U}q1{A}</think>a1{E}{U}q2{A}<think>"


def test_developer_messages_before_the_last_question_go(release):
    messages = [message("developer", "d1"), message("assistant", "a"), message("developer", "d2")]
    assert encode(release, messages) == f"{B}a{E}{U}d2{A}<think>"
    assert encode(release, messages, thinking=False) == f"{B}{U}d1{A}</think>a{E}{U}d2{A}</think>"


def test_tools_and_format_stand_in_the_first_message(release):
    options = {"tools": [tool()], "response_format": {"type": "ö"}}
    heading = '## Form:\n{"type": "ö"}'
    assert encode(release, [message("system", "s"), user()], **options) == (
        f"{B}s\n\n{PREAMBLE}\n\n{heading}{U}q{A}<think>"
    )
    developer = message("developer", "d", tools=[tool()], response_format={"type": "ö"})
    assert encode(release, [developer]) == f"{B}{U}d\n\n{PREAMBLE}\n\n{heading}{A}<think>"
    with pytest.raises(RequestError, match="given twice"):
        encode(release, [developer], tools=[tool()])


def test_calls_are_written_in_markup(release):
    arguments = json.dumps({"city": "Zürich\n", "days": 3, "deep": {"a": [True, None]}})
    messages = [user(), message("assistant", None, tool_calls=[call("find", arguments), call("stop")])]
    assert written(release, messages, is_thinking=False) == (
        f"{B}{U}q{A}</think>\n\n<{D}tool_calls>\n"
        f'<{D}invoke name="find">\n'
        f'<{D}parameter name="city" string="true">Zürich\n</{D}parameter>\n'
        f'<{D}parameter name="days" string="false">3</{D}parameter>\n'
        f'<{D}parameter name="deep" string="false">{{"a": [true, null]}}</{D}parameter>\n'
        f"</{D}invoke>\n"
        f'<{D}invoke name="stop">\n\n</{D}invoke>\n'
        f"</{D}tool_calls>{E}"
    )


@pytest.mark.parametrize("arguments", ['{"a": "cut', "[1]", ""])
def test_arguments_that_are_no_object_are_shown_as_they_are(release, arguments):
    """Bug class: the history of a call that was cut can no longer be written down."""
    prompt = written(release, [message("assistant", "", tool_calls=[call("f", arguments)])])
    assert f'<{D}parameter name="arguments" string="true">{arguments}</{D}parameter>' in prompt


def test_arguments_may_be_an_object(release):
    text, value = (written(release, [message("assistant", tool_calls=[call("f", a)])]) for a in ('{"a": 1}', {"a": 1}))
    assert text == value


def test_tool_results_join_the_user_turn_in_the_order_of_the_calls(release):
    """Bug class: two results swapped, each under the other's call."""
    calls = message("assistant", "", tool_calls=[call("f", call_id="a"), call("g", call_id="b")])
    results = [message("tool", "B", tool_call_id="b"), user("note"), message("tool", "A", tool_call_id="a")]
    prompt = encode(release, [user(), calls, *results, user("more")], thinking=False)
    turn = "<tool_result>A</tool_result>\n\nnote\n\n<tool_result>B</tool_result>\n\nmore"
    assert prompt.endswith(f"{E}{U}{turn}{A}</think>")


def test_a_result_of_an_unknown_call_stays_in_front(release):
    calls = message("assistant", "", tool_calls=[call("f", call_id="a"), call("g", call_id="b")])
    results = [message("tool", text, tool_call_id=text) for text in ("b", "x", "a")]
    turn = "\n\n".join(f"<tool_result>{text}</tool_result>" for text in ("x", "a", "b"))
    assert f"{U}{turn}{A}" in encode(release, [user(), calls, *results])


def test_user_messages_merge_up_to_a_task(release):
    assert encode(release, [user("a"), user("b")]) == f"{B}{U}a\n\nb{A}<think>"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert encode(release, [user(parts)]) == f"{B}{U}a\n\nb{A}<think>"
    assert encode(release, [message("system", parts), user()]) == f"{B}a\n\nb{U}q{A}<think>"
    assert encode(release, [user("a", task="query"), message("assistant", "x"), user("b")]) == (
        f"{B}{U}a<｜query｜>x{E}{U}b{A}<think>"
    )


def test_tasks(release):
    assert encode(release, [user(task="action")]) == f"{B}{U}q{A}<think><｜action｜>"
    assert encode(release, [user(task="action")], thinking=False) == f"{B}{U}q{A}</think><｜action｜>"
    for task in ("query", "authority", "domain", "read_url"):
        assert encode(release, [user(task=task)]) == f"{B}{U}q<｜{task}｜>"
    titled = [user(), message("assistant", "a", reasoning_content="r", task="title")]
    assert encode(release, titled) == f"{B}{U}q{A}<think>r</think>a{E}<｜title｜>"
    # The answer to a task has no reasoning.
    assert written(release, [user(task="action"), message("assistant", "Search")]) == (
        f"{B}{U}q{A}<think><｜action｜>Search{E}"
    )


def test_a_task_behind_tool_results_is_kept(release):
    """Bug class: a setting accepted and lost when messages are merged."""
    messages = [message("tool", "r", tool_call_id="a"), user(task="query")]
    assert encode(release, messages).endswith("q<｜query｜>")


def test_reminder(release):
    messages = [message("system", "s"), message("latest_reminder", "today"), user()]
    assert encode(release, messages) == f"{B}s<｜latest_reminder｜>today{U}q{A}<think>"


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "there are no messages"),
        ([message("critic", "x")], "message 0: the role is 'critic'"),
        ([{"content": "x"}], "message 0: the role is None"),
        ([user(), user(name="Ann", x=1)], r"message 1 \(user\): this model's prompt has no place for name, x"),
        ([message("system", "s", task="query")], "no place for task"),
        ([message("tool", "x", name="f")], "no place for name"),
        ([message("assistant", "x", wo_eos=True)], "no place for wo_eos"),
        ([user(None)], "the content is None, expected a text"),
        ([user([])], r"the content is \[\], expected a text"),
        ([user([{"type": "image_url"}])], "of type 'image_url', only text"),
        ([user([{"type": "text", "text": 1}])], "of type 'text', only text"),
        ([message("developer", "")], "message 0 .developer.: the content is empty"),
        ([user(task="sing")], "the task is 'sing'"),
        ([message("assistant", task="action")], "the task is 'action'"),
        ([message("assistant", reasoning_content=3)], "reasoning_content is 3"),
        ([message("assistant", tool_calls={})], "tool_calls is {}"),
        ([message("assistant", tool_calls=["f"])], "a tool call is 'f'"),
        ([message("assistant", tool_calls=[{"function": {"name": ""}}])], "the function of a tool call has no name"),
        ([message("assistant", tool_calls=[{**call("f"), "index": 0}])], "a tool call holds index"),
        ([message("assistant", tool_calls=[{"function": {"name": "f", "x": 1}}])], "function holds x"),
        ([message("assistant", tool_calls=[call("f", 7)])], "the arguments of a tool call are 7"),
        ([message("assistant", tool_calls=[call("f", call_id=7)])], "the id of a tool call is 7"),
        ([message("tool", "x", tool_call_id=7)], "tool_call_id is 7"),
        ([message("system", "s")], "the last message is of the role system"),
        ([user(), message("assistant", "a")], "the last message is of the role assistant"),
        ([user(), message("latest_reminder", "a")], "the last message is of the role latest_reminder"),
        ([user(task="query"), user()], "after the task 'query' comes a message of the role user"),
    ],
)
def test_conversations_that_cannot_be(release, messages, fault):
    """Bug class: a field accepted and ignored; a prompt that leaves nothing to answer."""
    with pytest.raises(RequestError, match=fault):
        encode(release, messages)


SPELLINGS = [B, E, U, A, D, "<think>", "</think>", "<｜latest_reminder｜>", "<｜action｜>", "{dsml_token}"]
FRAGMENTS = [*SPELLINGS, f"\n\n<{D}tool_calls>", "<", "｜", "hi", " "]
hostile = strategies.lists(strategies.sampled_from(FRAGMENTS), max_size=6).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotset.chat.deepseek_v4.RELEASED", DIGESTS)
        return Tokenizer.from_folder(write_model(tmp_path_factory.mktemp("model")), "deepseek_v4")


@given(hostile, hostile, hostile, hostile, hostile)
@settings(max_examples=200)
def test_no_text_writes_a_control_token(tokenizer, system, question, reasoning, value, result):
    """Bug class: a user, a tool or a schema ends the turn, closes the reasoning or forges a tool call."""
    calls = [{"id": value, "function": {"name": value or "f", "arguments": {value: value, "n": [value]}}}]
    messages = [
        message("system", system),
        user(question),
        message("assistant", question, reasoning_content=reasoning, tool_calls=calls),
        message("tool", result, tool_call_id=value),
        message("latest_reminder", result),
        message("developer", result + "."),
    ]
    options = {"tools": [tool(value or "f")], "response_format": {value: result}}
    prompt = tokenizer.encode_messages(messages, options)
    plain = tokenizer.encode_messages(
        [
            message("system", "s"),
            user("q"),
            message("assistant", "q", reasoning_content="r", tool_calls=[call("f", {"v": "v", "n": ["v"]})]),
            message("tool", "r"),
            message("latest_reminder", "r"),
            message("developer", "r."),
        ],
        {"tools": [tool()], "response_format": {"v": "r"}},
    )
    # Byte b is token 3 + b: everything else is a control token. Two arguments of one name are one.
    control, expected = ([i for i in ids if not 3 <= i < 259] for ids in (prompt, plain))
    assert control == expected or value == "n"
    shown = tokenizer.decode(prompt)
    assert all(text in shown for text in (system, question, reasoning, result)) and f'name="{value}"' in shown


def test_pieces_are_told_apart_by_type(release):
    pieces = list(write_prompt(read_turns([user(U)]), release, is_thinking=True))
    assert [piece for piece in pieces if isinstance(piece, Control)] == [B, U, A, "<think>"]
    assert pieces.count(U) == 2


def test_a_token_that_the_tokenizer_lacks_is_named(release):
    class Bare(Speller):
        def control_id(self, spelling: str) -> int:
            raise CheckpointError(f"no token {spelling}")

    with pytest.raises(CheckpointError, match="begin"):
        DeepSeekV4(Bare(), release).encode([user()], ChatSettings())
