"""Constants of a checkpoint's Python file: read without running it, and only the released ones."""

from contextlib import suppress

import pytest
from encoder_files import ABSOLUTE, BEYOND, DIGESTS, PREVIEW, RELEASE, RESPONSE, TOOLS, texts, write_encoder
from hypothesis import given, settings, strategies

from hotset.chat.deepseek_v4 import RELEASED, read_texts
from hotset.chat.literals import MAX_BYTES, read_literals, require_text, sha256
from hotset.errors import CheckpointError


def test_the_texts_of_a_release(tmp_path):
    found = texts(tmp_path)
    assert (found.tools, found.response) == (TOOLS, RESPONSE)
    assert found.efforts == {"low": "", "high": ABSOLUTE, "max": BEYOND}


def test_the_preview_knows_one_effort(tmp_path):
    assert texts(tmp_path, PREVIEW).efforts == {"max": ABSOLUTE}


def test_the_file_is_parsed_and_not_run(tmp_path):
    """Bug class: a downloaded file runs on the user's machine."""
    marker = tmp_path / "ran"
    source = (
        f"open({str(marker)!r}, 'w').close()\nA = 'x' if open({str(marker)!r}, 'w') else 'y'\nB = f'{{A}}'\nC = 'c'\n"
    )
    assert read_literals(write_encoder(tmp_path, source)) == {"C": "c"}
    assert not marker.exists()


def test_what_counts_as_a_constant(tmp_path):
    source = "a = 'x' 'y'\nb: str = 'z'\nc = d = 'no'\ne.f = 'no'\ng = {'k': 'v'}\nh = {'k': 1}\ni = {**g}\n"
    source += "j = b'no'\nk: str\n"
    source += "def f():\n  l = 'no'\nif 1:\n  m = 'no'\na = 'later'\nn = 'a' + 'b'\n"
    assert read_literals(write_encoder(tmp_path, source)) == {"a": "later", "b": "z", "g": {"k": "v"}}


def test_a_renamed_text_is_found_by_its_digest(tmp_path):
    """Bug class: the preview's only text taken for the release's ``max``."""
    assert texts(tmp_path, RELEASE.replace("REASONING_EFFORT_PROMPTS", "LEVELS")) == texts(tmp_path)
    assert texts(tmp_path, RELEASE.replace("TOOLS_TEMPLATE", "PREAMBLE")).tools == TOOLS
    path = write_encoder(tmp_path)
    assert require_text(read_literals(path), "GONE", DIGESTS.beyond, path) == BEYOND


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("## How", "## Why", r"the text of TOOLS_TEMPLATE is not the released one \(SHA-256"),
        ("## Form", "## From", "the text of response_format_template is not"),
        ("harder", "softer", "the text of effort max is not"),
        ('"low": ""', '"low": "x"', "the text of effort low is not"),
        ('"high"', '"medium"', "REASONING_EFFORT_PROMPTS has other levels"),
        ("REASONING_EFFORT_PROMPTS: Dict[str, str] = {", "REASONING_EFFORT_PROMPTS = 'x' #", "has other levels"),
        (
            "REASONING_EFFORT_PROMPTS: Dict[str, str] = {",
            "A = {'a': f'', ",
            "assigns no string to REASONING_EFFORT_MAX",
        ),
        ("TOOLS_TEMPLATE = ", "TOOLS_TEMPLATE = 1 or ", "assigns no string to TOOLS_TEMPLATE"),
        (
            "response_format_template: str = ",
            "response_format_template = {}\nx = 1 or ",
            "is a dictionary, expected a text",
        ),
    ],
)
def test_a_missing_or_different_text_is_refused(tmp_path, old, new, message):
    """Bug class: a model is prompted with a text it was not trained with, and nobody is told."""
    source = RELEASE.replace(old, new)
    assert source != RELEASE
    with pytest.raises(CheckpointError, match=message):
        texts(tmp_path, source)


def test_the_released_digests_are_the_default(tmp_path):
    assert RELEASED.tools.startswith("09b7269d") and RELEASED.beyond.startswith("53fb31b8")
    with pytest.raises(CheckpointError, match="not the released one"):
        read_texts(write_encoder(tmp_path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff = 1", "not UTF-8 text at byte 0"),
        (b"a = ", "not Python that can be parsed"),
        (b"a = 'x\0'", "not Python that can be parsed"),
        (b"a = " + b"(" * 50_000 + b")" * 50_000, "nested too deeply|not Python"),
        (b"a = " + b"-" * 200_000 + b"1", "nested too deeply|not Python"),
        (b"#" * (MAX_BYTES + 1), f"more than {MAX_BYTES} bytes"),
    ],
)
def test_a_damaged_or_hostile_file_is_named(tmp_path, data, message):
    path = write_encoder(tmp_path)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_literals(path)
    assert str(path) in caught.value.message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*nothing: No such file"):
        read_literals(tmp_path / "nothing")


@settings(max_examples=60)
@given(strategies.binary(max_size=60))
def test_nothing_but_a_checkpoint_error_comes_out(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "encoding.py"
    path.write_bytes(b"TOOLS_TEMPLATE = '" + data)
    with suppress(CheckpointError):
        read_literals(path)


def test_sha256_takes_any_string():
    assert len(sha256("\ud800")) == 64
