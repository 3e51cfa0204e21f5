"""How a download, or the writing of a large file, tells how far it is: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from hotset.units import format_bytes


class Progress(Protocol):
    """Receives the state of one pull. Methods may be called from several threads."""

    def say(self, text: str) -> None:
        """Print one line of talk."""

    def start(self, total_bytes: int, done_bytes: int) -> None:
        """Say how many bytes there are in all and how many were there already."""

    def advance(self, num_bytes: int) -> None:
        """Count more bytes; negative when some of them have to be fetched again."""


class SilentProgress:
    """Tells nothing: for library use."""

    def say(self, text: str) -> None:
        pass

    def start(self, total_bytes: int, done_bytes: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass


class LineProgress:
    """One plain line for every tenth of the way."""

    def __init__(self, stream: TextIO, verb: str = "fetch") -> None:
        self._stream = stream
        self._verb = verb
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0
        self._next_tenth = 1

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def start(self, total_bytes: int, done_bytes: int) -> None:
        already = f", {format_bytes(done_bytes)} of it already here" if done_bytes else ""
        self.say(f"{format_bytes(total_bytes)} to {self._verb}{already}")
        with self._lock:
            self._total, self._done = total_bytes, done_bytes
            self._next_tenth = done_bytes * 10 // max(1, total_bytes) + 1

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            tenth = self._done * 10 // max(1, self._total)
            if tenth < self._next_tenth:
                return
            self._next_tenth = tenth + 1
            done = self._done
        self.say(f"{tenth * 10:3d} %  {format_bytes(done)} of {format_bytes(self._total)}")


class BarProgress:
    """A bar with rate and time left, by rich. A context manager, so that the terminal is left clean."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        self._progress = Progress(
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task: Any = None

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def start(self, total_bytes: int, done_bytes: int) -> None:
        self._task = self._progress.add_task("", total=total_bytes, completed=done_bytes)
        self._progress.start()

    def advance(self, num_bytes: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
