"""The text of one answer: characters made whole, then stop strings."""

from __future__ import annotations

from hotset.chat.detokenize import Detokenizer
from hotset.chat.stop import StopScanner


class AnswerStream:
    """Implements ``hotset.engine.text.TextStream``."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)

    @property
    def is_stopped(self) -> bool:
        """A stop string was completed: no more text will come."""
        return self._scanner.is_stopped

    def feed(self, token_id: int) -> str:
        """Take the next token and return the text that became certain."""
        return self._scanner.feed(self._detokenizer.feed(token_id))

    def finish(self) -> str:
        """Return the text that was held back; ``""`` after a stop string."""
        # The last bytes may complete a stop string, when it holds U+FFFD.
        return self._scanner.feed(self._detokenizer.finish()) + self._scanner.finish()
