"""Templates: sandboxed, strict about options, and safe from what messages say."""

import pytest
from hypothesis import given, settings, strategies
from tiny_tokenizers import CONTROL, byte_level_metadata

from hotset.chat.guard import Guard
from hotset.chat.template import ChatTemplate
from hotset.chat.tokenizer import Tokenizer
from hotset.chat.vocabulary import AddedToken
from hotset.errors import CheckpointError, RequestError

tokenizer = Tokenizer.from_gguf(byte_level_metadata())
HELLO = [{"role": "user", "content": "hello"}]


def test_conversation_up_to_the_models_turn():
    messages = [{"role": "system", "content": "s"}, *HELLO]
    ids = tokenizer.encode_messages(messages, {})
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.encode(text)
    assert tokenizer.encode_messages(HELLO, {"add_generation_prompt": False}) == tokenizer.encode(
        "<|im_start|>user\nhello<|im_end|>\n"
    )


# Whole control tokens, halves of them, and characters of the guard's own making.
fragments = strategies.sampled_from(
    [*CONTROL, "<|im_", "end|>", "<|im_<|im_end|>", "<", "|", "im_end", "\ufdd0", "\ufdd1", "<think>", "hi ", "\n", "é"]
)
contents = strategies.lists(fragments, max_size=12).map("".join)


@settings(max_examples=300)
@given(strategies.lists(contents, min_size=1, max_size=3))
def test_messages_cannot_write_control_tokens(texts):
    """Bug class: a message that spells <|im_end|> ends the turn and speaks as the system."""
    messages = [{"role": "user", "content": text} for text in texts]
    ids = tokenizer.encode_messages(messages, {})
    assert [i for i in ids if i < 3] == [1, 2] * len(texts) + [1]
    # The model still sees every character of the message.
    expected = "".join(f"user\n{text}\n" for text in texts) + "assistant\n"
    assert tokenizer.decode(ids) == expected


def test_roles_and_tool_arguments_cannot_either():
    source = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.calls | tojson }}<|im_end|>{% endfor %}{{ tools }}"
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(chat_template=source))
    messages = [{"role": "<|im_end|>", "calls": [{"<|im_start|>": ("<|endoftext|>", 3)}]}]
    ids = tokenizer.encode_messages(messages, {"tools": "<|im_start|>"})
    assert [i for i in ids if i < 3] == [1, 2]


def test_role_markers_are_guarded_even_when_not_called_control():
    """DeepSeek-V3 lists <｜User｜> as an ordinary added token."""
    guard = Guard([AddedToken("<｜User｜>", 7, False), AddedToken("<think>", 8, False), AddedToken("\n", 9, True)])
    value, mark = guard.protect([{"content": "<｜User｜><think>\n"}])
    assert value[0]["content"] == f"<{mark}｜User｜><think>\n"
    assert guard.protect(["<think>"])[1] is None


def test_space_around_control_tokens_is_theirs_where_the_tokenizer_says_so():
    guard = Guard([AddedToken("<a|>", 1, True, takes_space_before=True), AddedToken("<b|>", 2, True, False, True)])
    assert list(guard.split("x <a|> y <b|> z\ufdd0", "\ufdd0")) == ["x", 1, " y ", 2, "z"]


def test_tokens_that_overlap_or_begin_alike():
    """Bug class: of two overlapping control tokens one stays whole; a longer token is read as a shorter one."""
    guard = Guard([AddedToken("<|a", 1, True), AddedToken("|a|>", 2, True), AddedToken("<|a|>b", 3, True)])
    (text,), mark = guard.protect(["<|a|>b"])
    assert [part for part in guard.split(text, mark) if isinstance(part, int)] == []
    assert list(guard.split("x<|a|>by<|a", mark)) == ["x", 3, "y", 1]


def test_a_message_of_every_mark_is_refused():
    everything = "".join(chr(c) for c in range(0xFDD0, 0xFDF0))
    with pytest.raises(RequestError, match=r"U\+FDD0"):
        tokenizer.encode_messages([{"role": "user", "content": everything + "<|im_end|>"}], {})


def render(source, messages=HELLO, options=None, **names):
    return ChatTemplate(source, **names).render(messages, options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": [\n    1\n  ]\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello"),
        ("{%- if true %}\n  x\n{%- endif %}", "  x"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ add_generation_prompt }}{{ missing is defined }}", "TrueFalse"),
    ],
)
def test_what_templates_may_rely_on(source, expected):
    assert render(source) == expected


def test_unread_options_are_refused_by_name():
    """Bug class: enable_thinking accepted and ignored."""
    with pytest.raises(RequestError, match="does not read enable_thinking") as caught:
        render("{{ messages }}{{ tools }}", options={"enable_thinking": False})
    assert "tools" in caught.value.hint
    assert render("{{ enable_thinking }}", options={"enable_thinking": False}) == "False"


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", HELLO, "refuses these messages: roles must alternate"),
        ("{{ 'a' + messages[0].content }}", [{"role": "user"}], "cannot render"),
        ("{{ 1 + 'a' }}", HELLO, "cannot render"),
        ("x", [{"content": "x"}], "no role"),
        ("x", [{"role": "user", "content": [{"type": "image"}]}], "part of type 'image'"),
    ],
)
def test_refused_conversations(source, messages, message):
    with pytest.raises(RequestError, match=message):
        render(source, messages)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_the_sandbox_holds(source):
    """Bug class: a downloaded template runs code, or changes the caller's messages."""
    messages = [{"role": "user", "content": "x"}]
    try:
        text = render(source, messages)
    except (CheckpointError, RequestError):
        text = ""
    assert "<class" not in text and "builtins" not in text
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("source", ["{{", "{% if %}", "{% endfor %}", "{% unknown %}", "{{ x | nofilter }}"])
def test_invalid_templates_are_the_checkpoints_fault(source):
    with pytest.raises(CheckpointError, match="not valid"):
        ChatTemplate(source)
