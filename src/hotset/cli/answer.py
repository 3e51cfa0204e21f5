"""One answer on a terminal: streamed, stopped by Ctrl-C without harm to the engine, and summed up in one line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotset.engine.engine import Engine
    from hotset.engine.events import Finished
    from hotset.engine.prompt import Prompt
    from hotset.engine.sampling import Sampling


@dataclass(frozen=True)
class Answer:
    """The text of an answer and how it came about."""

    text: str
    finished: Finished
    is_interrupted: bool

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
        return (
            f"prompt {done.num_prompt_tokens} tokens ({done.cached_tokens} cached), "
            f"prefill {_show(self.prefill_rate)}, answer {self.num_tokens} tokens, decode {_show(self.decode_rate)}"
        )

    def to_json(self) -> dict[str, Any]:
        """The answer for ``--json``; rates are ``null`` when there was nothing to time."""
        done = self.finished
        return {
            "text": self.text,
            "finish_reason": done.finish_reason,
            "seed": done.seed,
            "usage": {
                "prompt_tokens": done.num_prompt_tokens,
                "cached_tokens": done.cached_tokens,
                "completion_tokens": self.num_tokens,
            },
            "timings": {
                "prefill_s": done.timings.prefill_s,
                "decode_s": done.timings.decode_s,
                "prefill_tokens_per_s": self.prefill_rate,
                "decode_tokens_per_s": self.decode_rate,
            },
        }


def stream_answer(engine: Engine, prompt: Prompt, sampling: Sampling, write: Callable[[str], object]) -> Answer:
    """Answer ``prompt`` and pass text to ``write`` as it becomes certain.

    Ctrl-C ends the answer within one step and is told in the result; a second one ends the program. Raises the
    error of a request that failed.
    """
    request = engine.submit(prompt, sampling)
    parts: list[str] = []
    finished: Finished | None = None
    with _cancel_on_interrupt(request.cancel) as is_interrupted:
        for event in request:
            if event.text:
                parts.append(event.text)
                write(event.text)
            finished = _terminal(event) or finished
    if finished is None:
        from hotset.errors import InternalError

        raise InternalError("an answer ended without its terminal event")
    if finished.error is not None:
        raise finished.error
    return Answer("".join(parts), finished, is_interrupted())


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
