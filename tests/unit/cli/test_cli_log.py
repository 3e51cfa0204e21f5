"""Talk to the terminal: on standard error, a line for each step where there is no terminal."""

from __future__ import annotations

import io

import pytest

from hotset.log import note, progress, warn


def test_notes_and_warnings_leave_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    note("one")
    warn("two")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "one\nwarning: two\n")


def test_plain_progress_is_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2) as step:
        step("first")
        step("second")
    assert capsys.readouterr().err == "[1/2] first\n[2/2] second\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", ["", "1"])
def test_bar_on_a_terminal_honours_no_color(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    """Colour codes in spite of NO_COLOR made logs unreadable."""
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress(2) as step:
        step("first")
        step("second")
    text = terminal.getvalue()
    assert "second" in text
    # Colours are "\x1b[...m" with a number of 30 and above; cursor movements are not colours.
    has_colour = any(f"\x1b[{code}" in text for code in ("3", "9", "1;3", "38"))
    assert has_colour == (not no_color)
