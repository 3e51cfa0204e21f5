"""Tokens to text, one at a time: whole characters only, stop strings wherever tokens end."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies

from hotset.chat.detokenize import Detokenizer, decode
from hotset.chat.stop import StopScanner
from hotset.chat.stream import AnswerStream


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(borders)]


def feed_all(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(pieces.__getitem__)
    return [*(detokenizer.feed(i) for i in range(len(pieces))), detokenizer.finish()]


@given(strategies.text(), strategies.lists(strategies.integers(0, 200)))
def test_valid_text_comes_out_whole_whatever_the_split(text, cuts):
    """Bug class: half of an emoji shown as U+FFFD because its bytes came in two tokens."""
    parts = feed_all(pieces_of(text.encode(), cuts))
    assert "".join(parts) == text and parts[-1] == ""
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@given(strategies.binary(), strategies.lists(strategies.integers(0, 200)))
def test_broken_bytes_give_the_same_text_whatever_the_split(data, cuts):
    """Bug class: text depends on how it was cut into tokens."""
    pieces = pieces_of(data, cuts)
    assert (
        "".join(feed_all(pieces)) == data.decode("utf-8", "replace") == decode(pieces.__getitem__, range(len(pieces)))
    )


def test_unfinished_character_is_held_back_and_replaced_at_the_end():
    assert feed_all([b"a\xf0\x9f", b"\x99"]) == ["a", "", "\ufffd"]
    assert feed_all([b"\xf0\x9f", b"\x99\x82!"]) == ["", "🙂!", ""]


def naive_stop(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Read one character at a time and look at the end of what was read."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


letters = strategies.text("abc", max_size=30)


@given(
    text=letters,
    stops=strategies.lists(strategies.text("abc", min_size=1, max_size=5), max_size=4).map(tuple),
    cuts=strategies.lists(strategies.integers(0, 40)),
)
def test_stop_strings_do_not_depend_on_the_split(text, stops, cuts):
    """Bug class: a stop string over two tokens is missed, or its first half is already on the screen."""
    expected, is_stopped = naive_stop(text, stops)
    scanner, seen, read = StopScanner(stops), "", ""
    for piece in pieces_of(text.encode(), cuts):
        seen += scanner.feed(piece.decode())
        read += piece.decode()
        assert expected.startswith(seen)
        if not scanner.is_stopped:
            # Nothing is held back that could not still become a stop string.
            held = read[len(seen) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert (seen + scanner.finish(), scanner.is_stopped) == (expected, is_stopped)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["a", "b", "c"], ("abc", "b"), "a"),
        (["xab", "c"], ("abc", "bc"), "x"),
        (["xabc"], ("abc", "b"), "xa"),
        (["ab", "ab", "c"], ("abc",), "ab"),
        (["hello"], (), "hello"),
    ],
)
def test_stop_examples(pieces, stops, expected):
    scanner = StopScanner(stops)
    assert "".join(map(scanner.feed, pieces)) + scanner.finish() == expected


def test_answer_stream_stops_on_text_that_only_the_end_completes():
    """U+FFFD from the last, broken bytes can complete a stop string."""
    stream = AnswerStream(Detokenizer([b"ok", b"\xf0"].__getitem__), ("\ufffd",))
    assert stream.feed(0) + stream.feed(1) + stream.finish() == "ok"
    assert stream.is_stopped


def test_nothing_comes_after_a_stop_string():
    stream = AnswerStream(Detokenizer([b"a.", b"b"].__getitem__), (".",))
    assert [stream.feed(0), stream.feed(1), stream.finish()] == ["a", "", ""]
