"""The interactive conversation of ``hotset run``: answers stream, and lines that begin with / are commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.cli.answer import Answer, stream_answer
from hotset.errors import HotsetError, RequestError
from hotset.log import note

if TYPE_CHECKING:
    from hotset.engine.engine import Engine
    from hotset.engine.sampling import Sampling

PROMPT = "> "

HELP = """\
/help         show this list
/reset        forget the conversation, keep the system message
/save FILE    write the conversation as JSON
/stats        show tokens and speed of the last answer
/system TEXT  set the system message (without TEXT: remove it)
/exit         leave (or Ctrl-D)
Ctrl-C stops an answer. A message that begins with / is written with two: //"""


class Chat:
    """A conversation: its messages, and the last answer."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        sampling: Sampling,
        system: str | None,
        *,
        show_stats: bool = False,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.sampling = sampling
        self.system = system
        self.show_stats = show_stats
        self.chat_options = dict(chat_options or {})
        self.turns: list[dict[str, Any]] = []
        self.last: Answer | None = None
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: note(HELP),
            "reset": self._reset,
            "save": self._save,
            "stats": self._stats,
            "system": self._set_system,
        }

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as the model gets it."""
        head: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def run(self, read_line: Callable[[str], str]) -> None:
        """Read lines until /exit or the end of input."""
        note(f"{self.model}: /help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        while True:
            try:
                line = read_line(PROMPT).strip()
            except EOFError:
                note("")
                return
            except KeyboardInterrupt:  # Ctrl-C at the prompt drops the line
                note("")
                continue
            except UnicodeDecodeError:
                note("error: that line is not UTF-8 text")
                continue
            if line == "/exit":
                return
            try:
                self._take(line)
            except HotsetError as error:
                # The conversation goes on after any error of one turn.
                note(f"error: {error.message}" + (f"\n\nhint: {error.hint}" if error.hint else ""))

    def _take(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            name, _, rest = line[1:].partition(" ")
            if name not in self._commands:
                raise RequestError(f"no such command: /{name}", "/help shows the commands")
            self._commands[name](rest.strip())
        elif line:
            self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def _answer(self, text: str) -> None:
        question = {"role": "user", "content": text}
        messages = [*self.messages, question]
        answer = stream_answer(self.engine, messages, self.sampling, _write, chat_options=self.chat_options)
        _write("\n")
        answer.note_oddities()
        # Also a stopped answer stays in the conversation, as the person saw it.
        self.turns += [question, answer.message()]
        self.last = answer
        if answer.is_interrupted:
            note("[stopped]")
        elif answer.finished.finish_reason == "length":
            note(f"[cut after {answer.num_tokens} tokens; --max-tokens or --context allows more]")
        if self.show_stats:
            note(answer.stats())

    def _reset(self, rest: str) -> None:
        self.turns.clear()
        note("the conversation is forgotten")

    def _stats(self, rest: str) -> None:
        note(self.last.stats() if self.last else "no answer yet")

    def _set_system(self, rest: str) -> None:
        self.system = rest or None
        note("the system message is set" if rest else "the system message is removed")

    def _save(self, rest: str) -> None:
        if not rest:
            raise RequestError("/save needs a file name", "/save chat.json")
        path = Path(rest).expanduser().absolute()
        if path.exists() and path not in self._saved:
            raise RequestError(f"{path} exists and was not written by this chat", "choose another name")
        try:
            path.write_text(json.dumps({"model": self.model, "messages": self.messages}, indent=2, ensure_ascii=False))
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}", "choose another place") from None
        self._saved.add(path)
        note(f"saved: {path}")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
