"""Which dialect a checkpoint gets, what its settings are called, and the tokens of DeepSeek-V4 both ways."""

import json

import pytest
from encoder_files import DIGESTS, write_encoder, write_model
from tiny_tokenizers import TEMPLATE, byte_level_metadata, write_folder

from hotset.chat.dialect import ChatSettings, PlainParser
from hotset.chat.events import ContentText, ReasoningText, ToolCallStart, join_events
from hotset.chat.random_tokenizer import CONTROL, EOS
from hotset.chat.tokenizer import Tokenizer
from hotset.errors import CheckpointError, RequestError

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def known_texts(monkeypatch):
    monkeypatch.setattr("hotset.chat.deepseek_v4.RELEASED", DIGESTS)


def test_family_and_files_choose(tmp_path):
    """Bug class: a model prompted in another model's format."""
    folder = write_model(tmp_path)
    assert Tokenizer.from_folder(folder, "deepseek_v4").dialect.name == "DeepSeek-V4"
    assert Tokenizer.from_folder(folder, "llama").dialect is None
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert Tokenizer.from_folder(folder, "llama").dialect.name == "chat template"
    # Where the family has an encoder, a template beside it is somebody else's.
    assert Tokenizer.from_folder(folder, "deepseek_v4").dialect.name == "DeepSeek-V4"
    (folder / "encoding" / "encoding_dsv4.py").unlink()
    assert Tokenizer.from_folder(folder, "deepseek_v4").dialect.name == "chat template"


def test_without_a_dialect_messages_are_refused(tmp_path):
    folder = write_model(tmp_path)
    (folder / "encoding" / "encoding_dsv4.py").unlink()
    for family, error, message in (
        ("llama", RequestError, "no chat template"),
        ("deepseek_v4", CheckpointError, r"encoding_dsv4.py is missing"),
    ):
        tokenizer = Tokenizer.from_folder(folder, family)
        assert tokenizer.encode_prompt("x") == [3 + ord("x")]
        for ask in (tokenizer.encode_messages, tokenizer.answer_parser):
            with pytest.raises(error, match=message):
                ask(HELLO, {})


def test_a_different_encoder_is_told_when_the_model_is_loaded(tmp_path):
    folder = write_model(tmp_path)
    write_encoder(folder, "TOOLS_TEMPLATE = 'mine'")
    with pytest.raises(CheckpointError, match="TOOLS_TEMPLATE is not the released one"):
        Tokenizer.from_folder(folder, "deepseek_v4")


@pytest.mark.parametrize("special", [None, True, False])
@pytest.mark.parametrize("vocab_size", [400, 129280])
def test_prompt_tokens_have_the_ids_of_the_file(tmp_path, special, vocab_size):
    """Bug class: control tokens spelled letter by letter, or dependent on what tokenizer.json calls special."""
    tokenizer = Tokenizer.from_folder(write_model(tmp_path, vocab_size=vocab_size, special=special), "deepseek_v4")
    ids = {token: tokenizer.encode(token)[0] for token in CONTROL}
    if vocab_size == 129280:
        assert ids == CONTROL
    prompt = tokenizer.encode_messages([{"role": "user", "content": "<think>"}], {})
    text = [3 + byte for byte in b"<think>"]
    assert prompt == [0, ids["<｜User｜>"], *text, ids["<｜Assistant｜>"], ids["<think>"]]
    # A prompt that its caller writes whole means what it says.
    assert tokenizer.encode_prompt("<think>") == [ids["<think>"]]


@pytest.mark.parametrize("special", [True, False])
def test_markup_of_an_answer_reaches_the_parser(tmp_path, special):
    """Bug class: </think> and the DSML token are control tokens of the file, so the parser never sees them."""
    tokenizer = Tokenizer.from_folder(write_model(tmp_path, special=special), "deepseek_v4")
    answer = (
        'why</think>so\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    )
    stream, parser = tokenizer.stream(), tokenizer.answer_parser(HELLO, {})
    events = [event for token in tokenizer.encode(answer) for event in parser.feed(stream.feed(token))]
    events = join_events([*events, *parser.feed(stream.finish()), *parser.finish()])
    assert events[:3] == [ReasoningText("why"), ContentText("so"), ToolCallStart(0, "f")]
    assert tokenizer.eos_ids == {1} and tokenizer.encode(EOS) == [1]


def test_a_tokenizer_without_the_tokens_is_named(tmp_path):
    folder = write_model(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != "<｜User｜>"]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="no token <｜User｜>, which the model's prompt needs"):
        Tokenizer.from_folder(folder, "deepseek_v4").encode_messages(HELLO, {})


def test_the_parser_starts_where_the_prompt_ends(tmp_path):
    tokenizer = Tokenizer.from_folder(write_model(tmp_path), "deepseek_v4")
    task = [{"role": "user", "content": "x", "task": "query"}]
    for messages, options, kind in (
        (HELLO, {}, ReasoningText),
        (HELLO, {"thinking": False}, ContentText),
        (task, {}, ContentText),
    ):
        parser = tokenizer.answer_parser(messages, options)
        assert parser.feed("text") == [kind("text")]


def test_bare_calls_need_a_declared_tool(tmp_path):
    tokenizer = Tokenizer.from_folder(write_model(tmp_path), "deepseek_v4")
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = '</think><｜DSML｜invoke name="f">\n</｜DSML｜invoke>'
    own = [{"role": "system", "content": "", "tools": tools}, *HELLO]
    for messages, options, is_call in ((HELLO, {"tools": tools}, True), (own, {}, True), (HELLO, {}, False)):
        parser = tokenizer.answer_parser(messages, options)
        events = [*parser.feed(answer), *parser.finish()]
        assert (ToolCallStart(0, "f") in events) is is_call


def test_half_a_character_is_the_callers(tmp_path):
    """Bug class: a message from broken JSON ends in an internal error."""
    tokenizer = Tokenizer.from_folder(write_model(tmp_path), "deepseek_v4")
    with pytest.raises(RequestError, match="half a character at 1"):
        tokenizer.encode_messages([{"role": "user", "content": "a\ud83d"}], {})


def template(source: str) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata(chat_template=source))


def shown(tokenizer: Tokenizer, **options: object) -> str:
    return tokenizer.decode(tokenizer.encode_messages(HELLO, options))


def test_templates_get_settings_under_their_own_names():
    """Bug class: a setting is passed under a name that the template ignores."""
    assert shown(template("{{ enable_thinking }}"), thinking=False) == "False"
    assert shown(template("{{ thinking }}{{ enable_thinking }}"), thinking=True) == "True"
    assert shown(template("{{ reasoning_effort }}"), effort="high") == "high"
    assert shown(template("{{ tools | length }}{{ mood }}"), tools=[1, 2], mood="x") == "2x"
    assert shown(template("{{ tools is defined }}")) == "False"


@pytest.mark.parametrize(("name", "value"), [("thinking", True), ("effort", "max"), ("response_format", {"a": 1})])
def test_templates_refuse_settings_they_do_not_have(name, value):
    with pytest.raises(RequestError, match=f"does not read {name}"):
        shown(template("{{ messages }}"), **{name: value})


def test_answers_of_templates_are_content(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path))
    parser = tokenizer.answer_parser(HELLO, {})
    assert isinstance(parser, PlainParser)
    assert parser.feed("<think>") == [ContentText("<think>")] and parser.feed("") == parser.finish() == []


def test_options_are_sorted_by_name():
    settings = ChatSettings.from_options({"thinking": False, "effort": None, "x": 1})
    assert (settings.named, settings.variables) == ({"thinking": False}, {"x": 1})
