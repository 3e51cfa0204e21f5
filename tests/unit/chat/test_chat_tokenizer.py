"""Tokenizers from GGUF metadata and from a folder, against slow judges of the two algorithms."""

import json

import pytest
from hypothesis import given, settings, strategies
from tiny_tokenizers import (
    CONTROL,
    LETTERS,
    MERGES,
    WORDS,
    byte_fallback_metadata,
    byte_level_metadata,
    byte_level_vocab,
    sentencepiece,
    write_folder,
)

from hotset.chat.pretokenizers import find_cut, make_pre_tokenizer
from hotset.chat.tokenizer import Tokenizer
from hotset.chat.vocabulary import byte_of_character
from hotset.errors import CheckpointError, RequestError

SAMPLE = "Hello, World!  12345 don't\n\n\tnaïve 日本語テスト ２３ ½ 🙂🙂 x+=1; __init__ <a|b> it'S\r\n  end   "

byte_level = Tokenizer.from_gguf(byte_level_metadata())
byte_fallback = Tokenizer.from_gguf(byte_fallback_metadata())


@given(strategies.text())
def test_byte_level_round_trip(text):
    """Bug class: a byte lost between text and tokens."""
    assert byte_level.decode(byte_level.encode(text, parses_control=False)) == text


@given(strategies.text())
def test_byte_fallback_round_trip(text):
    assert byte_fallback.decode(byte_fallback.encode(text, parses_control=False)) == text.replace("▁", " ")


def test_byte_level_merges_by_rank():
    tokens = byte_level_vocab()
    words = [tokens[i] for i in byte_level.encode("hello wolle")]
    assert words == ["hello", "Ġwo", "ll", "e"]


SCORES = WORDS | {letter: -20.0 - i for i, letter in enumerate(LETTERS)}


@settings(max_examples=300)
@given(strategies.one_of(strategies.text("helo wa", max_size=25), strategies.text(" a", max_size=45)))
def test_byte_fallback_joins_as_sentencepiece_does(text):
    """Bug class: merges rebuilt from scores in another order; runs of spaces cut differently."""
    tokens = byte_fallback_metadata()["tokenizer.ggml.tokens"]
    expected = sentencepiece("▁" + text.replace(" ", "▁"), SCORES) if text else []
    assert [tokens[i] for i in byte_fallback.encode(text)] == expected


def test_byte_fallback_spells_unknown_characters_as_bytes():
    tokens = byte_fallback_metadata()["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in byte_fallback.encode("aé語")] == ["▁", "a", "é", "<0xE8>", "<0xAA>", "<0x9E>"]


def test_space_prefix_is_a_setting():
    tokens = byte_fallback_metadata()["tokenizer.ggml.tokens"]
    bare = Tokenizer.from_gguf(byte_fallback_metadata(ggml__add_space_prefix=False))
    assert [tokens[i] for i in bare.encode("he")] == ["he"] and bare.decode(bare.encode(" he")) == " he"


def test_control_tokens_are_parsed_only_where_allowed():
    """Bug class: text that spells a control token becomes one."""
    assert byte_level.encode("a<|im_end|>")[-1] == 2
    plain = byte_level.encode("a<|im_end|>", parses_control=False)
    assert 2 not in plain and byte_level.decode(plain) == "a<|im_end|>"
    assert 2 not in byte_fallback.encode("</s>", parses_control=False)
    assert byte_fallback.encode("</s>") == [2]


def test_control_tokens_stand_for_no_text_and_literal_ones_for_theirs():
    ids = byte_level.encode("<|im_start|>x<think><｜User｜>")
    assert byte_level.decode(ids) == "x<think><｜User｜>" and len(ids) == 4
    assert byte_level.token_bytes(10**6) == b"" and byte_fallback.token_bytes(0) == b""


def test_end_tokens_are_the_named_one_and_the_known_ones():
    """Bug class: an instruct model runs on because its file names only the end of a document."""
    assert byte_level.eos_ids == {0, 2}
    assert Tokenizer.from_gguf(byte_level_metadata(ggml__eos_token_id=None)).eos_ids == {0, 2}
    assert Tokenizer.from_gguf(byte_level_metadata(ggml__eot_token_id=9)).eos_ids == {0, 2, 9}
    assert byte_fallback.eos_ids == {2}


def test_prefix_is_there_once():
    """Bug class: two beginning-of-text tokens, or none."""
    assert byte_fallback.encode_prompt("he")[0] == 1
    assert byte_fallback.encode_prompt("<s>he").count(1) == 1
    assert byte_level.encode_prompt("he") == byte_level.encode("he")
    told = Tokenizer.from_gguf(byte_level_metadata(ggml__add_bos_token=True))
    assert told.encode_prompt("he") == [1, *byte_level.encode("he")]
    assert Tokenizer.from_gguf(byte_level_metadata(ggml__pre="llama-bpe", ggml__add_bos_token=None)).encode_prompt("")


@pytest.mark.parametrize(
    "name", ["gpt-2", "default", "smollm", "llama-bpe", "qwen2", "glm4", "deepseek-v3", "command-r"]
)
def test_every_cut_keeps_every_byte(name):
    """Bug class: an expression that drops what it does not match."""
    table = byte_of_character()
    pieces = [piece for piece, _ in make_pre_tokenizer(find_cut(name)).pre_tokenize_str(SAMPLE)]
    assert bytes(table[c] for piece in pieces for c in piece).decode() == SAMPLE


def cut(name, text):
    table = byte_of_character()
    pieces = make_pre_tokenizer(find_cut(name)).pre_tokenize_str(text)
    return [bytes(table[c] for c in piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("default", "a12345=b", ["a", "123", "45", "=", "b"]),
        ("llama-bpe", "I'LL go 12345\n\n x", ["I", "'LL", " go", " ", "123", "45", "\n\n", " x"]),
        ("glm4", "x.y12345", ["x", ".y", "123", "45"]),
        ("qwen2", "a12 (b", ["a", "1", "2", " (", "b"]),
        ("deepseek-v3", "漢字abc 12345 x_y!ok", ["漢字", "abc", " ", "123", "45", " x", "_y", "!ok"]),
        ("joyai-llm", "漢字abc 12345 x_y!ok", ["漢字", "abc", " ", "123", "45", " x", "_y", "!ok"]),
    ],
)
def test_cuts_by_example(name, text, expected):
    assert cut(name, text) == expected


@given(strategies.text())
def test_smollm_cut_is_digits_then_the_librarys_own_gpt2(text):
    """An independent judge: the pre-tokenizer that SmolLM's tokenizer.json names."""
    from tokenizers import pre_tokenizers

    judge = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = make_pre_tokenizer(find_cut("smollm"))
    assert [p for p, _ in ours.pre_tokenize_str(text)] == [p for p, _ in judge.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__model": None}, "tokenizer.ggml.model is missing"),
        ({"ggml__model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"ggml__pre": None}, "tokenizer.ggml.pre is missing"),
        ({"ggml__pre": "mystery"}, "tokenizer.ggml.pre is 'mystery'"),
        ({"ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"ggml__tokens": ["a", "a"]}, "holds 'a' twice"),
        ({"ggml__token_type": [1]}, "1 entries for"),
        ({"ggml__token_type": [9] * len(byte_level_vocab())}, "holds 9, expected 0 to 6"),
        ({"ggml__merges": ["ab"]}, "merges holds 'ab'"),
        ({"ggml__merges": ["zz qq"]}, "merges do not fit the tokens"),
        ({"ggml__eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"ggml__add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        ({"ggml__add_bos_token": True, "ggml__bos_token_id": None}, "no tokenizer.ggml.bos_token_id"),
        ({"chat_template": 3}, "chat_template is not a string"),
        ({"chat_template": "{% for %}"}, "chat template of the checkpoint is not valid"),
    ],
)
def test_damaged_metadata_is_named(changes, message):
    """Bug class: a damaged file gives other tokens in silence, or a traceback."""
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


def test_damaged_scores_are_named():
    with pytest.raises(CheckpointError, match="scores is missing"):
        Tokenizer.from_gguf(byte_fallback_metadata(ggml__scores=[0.0]))
    with pytest.raises(CheckpointError, match="remove_extra_whitespaces"):
        Tokenizer.from_gguf(byte_fallback_metadata(ggml__remove_extra_whitespaces=True))


def test_folder_gives_the_tokens_of_the_same_gguf(tmp_path):
    folder = Tokenizer.from_folder(write_folder(tmp_path))
    gguf = Tokenizer.from_gguf(byte_level_metadata(ggml__pre="gpt-2"))
    messages = [{"role": "user", "content": "hello <|im_end|> 12 <｜User｜>"}]
    for text in (SAMPLE, "hello wolle", "<|im_start|>x<think><｜User｜>"):
        assert folder.encode(text) == gguf.encode(text)
        assert folder.decode(folder.encode(text)) == gguf.decode(gguf.encode(text))
    ids = folder.encode_messages(messages, {})
    assert ids == gguf.encode_messages(messages, {}) and folder.encode("<｜User｜>")[0] not in ids
    assert (folder.vocab_size, folder.bos_id, folder.eos_ids) == (gguf.vocab_size, gguf.bos_id, gguf.eos_ids)


def test_folder_settings(tmp_path):
    write_folder(tmp_path, add_bos_token=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_ids == {0, 2, 7, 9} and tokenizer.encode_prompt("x")[0] == 1
    assert tokenizer.template.render([{"role": "user", "content": "x"}]) == "<|im_start|>|<|im_end|>|x"


def test_post_processor_names_the_prefix(tmp_path):
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    write_folder(tmp_path, tokenizer={"post_processor": processor})
    assert Tokenizer.from_folder(tmp_path).encode_prompt("x")[0] == 1
    write_folder(tmp_path, tokenizer={"post_processor": processor}, add_bos_token=False)
    assert Tokenizer.from_folder(tmp_path).encode_prompt("x")[0] != 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "holds no tokenizer.json"),
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer.json", "[]", "is not a JSON object"),
        ("tokenizer.json", '{"decoder": {"type": "WordPiece"}}', "its decoder \\(WordPiece\\)"),
        ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}, "model": {"type": "Nope"}}', "cannot be used"),
        ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}, "added_tokens": [{"id": 1}]}', "added_tokens is not"),
        ("tokenizer_config.json", "nope", "not valid JSON"),
        ("generation_config.json", '{"eos_token_id": ["x"]}', "eos_token_id holds 'x'"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is neither"),
    ],
)
def test_damaged_folder_is_named(tmp_path, name, content, message):
    write_folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_named_templates_in_the_config(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert Tokenizer.from_folder(write_folder(tmp_path, chat_template=named)).template.source == "yes"


def test_no_template_is_the_users_to_know():
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(chat_template=None))
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_messages([{"role": "user", "content": "x"}], {})


def test_merges_and_control_tokens_of_the_fixture_are_real():
    assert set(CONTROL) <= set(byte_level_vocab()) and all(a + b in byte_level_vocab() for a, b in MERGES)
