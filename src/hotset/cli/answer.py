"""One answer on a terminal: streamed, stopped by Ctrl-C without harm to the engine, and summed up in one line."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from hotset.log import note

if TYPE_CHECKING:
    from hotset.chat.dialect import AnswerParser
    from hotset.chat.events import ChatEvent
    from hotset.engine.engine import Engine
    from hotset.engine.events import Finished
    from hotset.engine.prompt import Prompt
    from hotset.engine.sampling import Sampling


@dataclass
class ToolCall:
    """A tool call; ``arguments`` is JSON unless the call was cut. ``is_sound`` as in ``ToolCallEnd``."""

    name: str
    arguments: str = ""
    is_sound: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments, "is_sound": self.is_sound}


@dataclass(frozen=True)
class Answer:
    """The text of an answer and how it came about."""

    text: str
    finished: Finished
    is_interrupted: bool
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    notes: tuple[str, ...] = ()

    def note_oddities(self) -> None:
        """Tell the person at the terminal about tool calls and about what was wrong with the answer."""
        for call in self.calls:
            note(f"[the model calls {call.name} {call.arguments}]")
        for text in self.notes:
            note(f"note: {text}")

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation; reasoning and calls only where there are some."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(self.calls)
            ]
        return message

    @property
    def num_tokens(self) -> int:
        return len(self.finished.token_ids)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens computed per second."""
        computed = self.finished.num_prompt_tokens - self.finished.cached_tokens
        return _rate(computed, self.finished.timings.prefill_s)

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first, which the prefill brings."""
        return _rate(self.num_tokens - 1, self.finished.timings.decode_s)

    def stats(self) -> str:
        """Say in one line how many tokens there were and how fast."""
        done = self.finished
        again = f", {done.recomputed_tokens} computed again" if done.recomputed_tokens else ""
        return (
            f"prompt {done.num_prompt_tokens} tokens ({done.cached_tokens} cached{again}), "
            f"prefill {_show(self.prefill_rate)}, answer {self.num_tokens} tokens, decode {_show(self.decode_rate)}"
        )

    def to_json(self) -> dict[str, Any]:
        """The answer for ``--json``; rates are ``null`` when there was nothing to time."""
        done = self.finished
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": [call.to_json() for call in self.calls],
            "finish_reason": done.finish_reason,
            "seed": done.seed,
            "usage": {
                "prompt_tokens": done.num_prompt_tokens,
                "cached_tokens": done.cached_tokens,
                "recomputed_tokens": done.recomputed_tokens,
                "completion_tokens": self.num_tokens,
            },
            "timings": {
                "prefill_s": done.timings.prefill_s,
                "decode_s": done.timings.decode_s,
                "prefill_tokens_per_s": self.prefill_rate,
                "decode_tokens_per_s": self.decode_rate,
            },
        }


def stream_answer(
    engine: Engine,
    prompt: Prompt,
    sampling: Sampling,
    write: Callable[[str], object],
    *,
    chat_options: Mapping[str, Any] | None = None,
    shows_reasoning: bool = True,
) -> Answer:
    """Answer ``prompt`` and pass text to ``write`` as it becomes certain; reasoning goes to standard error.

    Ctrl-C ends the answer within one step and is told in the result; a second one ends the program. Raises the
    error of a request that failed.
    """
    request = engine.submit(prompt, sampling, chat_options=chat_options)
    reader = _Reader(_parser(engine, prompt, chat_options or {}), write, shows_reasoning)
    finished: Finished | None = None
    with _cancel_on_interrupt(request.cancel) as is_interrupted:
        for event in request:
            if event.text:
                reader.take(reader.parser.feed(event.text))
            finished = _terminal(event) or finished
    if finished is None:
        from hotset.errors import InternalError

        raise InternalError("an answer ended without its terminal event")
    reader.take(reader.parser.finish(is_cut=finished.finish_reason != "stop"))
    reader.end_line()
    if finished.error is not None:
        raise finished.error
    return Answer(
        reader.text,
        finished,
        is_interrupted(),
        reader.reasoning,
        tuple(reader.calls),
        tuple(dict.fromkeys(reader.notes)),
    )


def _parser(engine: Engine, prompt: Prompt, chat_options: Mapping[str, Any]) -> AnswerParser:
    from hotset.chat.dialect import PlainParser, ReadsAnswers

    if isinstance(prompt, list) and isinstance(engine.codec, ReadsAnswers):
        return engine.codec.answer_parser(prompt, chat_options)
    return PlainParser()


class _Reader:
    """Shows the events of an answer and puts its parts together."""

    def __init__(self, parser: AnswerParser, write: Callable[[str], object], shows_reasoning: bool) -> None:
        self.parser = parser
        self.text = self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.notes: list[str] = []
        self._write = write
        self._shows_reasoning = shows_reasoning
        self._is_line_open = False

    def take(self, events: Iterable[ChatEvent]) -> None:
        from hotset.chat.events import ContentText, ReasoningText, ToolCallArguments, ToolCallEnd, ToolCallStart

        for event in events:
            match event:
                case ContentText(text):
                    self.text += text
                    self.end_line()
                    self._write(text)
                case ReasoningText(text):
                    self.reasoning += text
                    self._show(text)
                case ToolCallStart(_, name):
                    self.calls.append(ToolCall(name))
                case ToolCallArguments(index, text):
                    self.calls[index].arguments += text
                case ToolCallEnd(index, is_sound):
                    self.calls[index].is_sound = is_sound
            if isinstance(event, ContentText | ReasoningText | ToolCallEnd) and event.note:
                self.notes.append(event.note)

    def _show(self, text: str) -> None:
        if self._shows_reasoning and text:
            sys.stderr.write(text)
            sys.stderr.flush()
            self._is_line_open = not text.endswith("\n")

    def end_line(self) -> None:
        """End the line of reasoning on the terminal, before something else comes."""
        if self._is_line_open:
            note("")
        self._is_line_open = False


def _terminal(event: Any) -> Finished | None:
    from hotset.engine.events import Finished

    return event if isinstance(event, Finished) else None


@contextmanager
def _cancel_on_interrupt(cancel: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT into ``cancel()``; yields a function that tells whether it came."""
    was_interrupted = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if was_interrupted:
            raise KeyboardInterrupt
        was_interrupted = True
        # The handler may have stopped the engine while it holds its lock, so another thread does the cancelling.
        threading.Thread(target=cancel, daemon=True).start()

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: was_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _rate(amount: int, seconds: float) -> float | None:
    return amount / seconds if amount > 0 and seconds > 0 else None


def _show(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f} tok/s"
