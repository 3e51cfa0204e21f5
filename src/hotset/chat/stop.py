"""Stop strings, which may begin in one token and end in another."""

from __future__ import annotations


class StopScanner:
    """Passes text on until a stop string is complete, and holds back only what could still become one.

    The first stop string to be *completed* ends the text; of those completed by the same character, the longest. This
    is what reading one character at a time gives, so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """``stops`` are not empty strings."""
        self._stops = stops
        self._held = ""
        #: A stop string was completed.
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """Take the next text and return what is certain to be before any stop string."""
        if not self._stops:
            return text
        if self.is_stopped or not text:
            return ""
        held = self._held + text
        border = self._completed_at(held)
        if border is not None:
            self.is_stopped = True
            self._held = ""
            return held[:border]
        border = len(held) - self._held_length(held)
        self._held = held[border:]
        return held[:border]

    def finish(self) -> str:
        """Return the text held back; no more will come."""
        held, self._held = self._held, ""
        return held

    def _completed_at(self, held: str) -> int | None:
        """Where the stop string begins that is completed first."""
        found = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _held_length(self, held: str) -> int:
        """Length of the longest end of ``held`` with which a stop string begins."""
        longest = min(max(map(len, self._stops)) - 1, len(held))
        for length in range(longest, 0, -1):
            end = held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
