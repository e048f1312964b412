"""Which processes of a group have not come to a transfer: one asks in a folder, all others answer.

A rank that waits knows which rank is its neighbour, not which one keeps all of them waiting. It
leaves a question; every rank whose watch runs answers with the number of transfers that it has
begun. A rank that is stopped does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cupyattn.runtime.reading import read_text

_QUESTION = "question"
_MOST_BYTES = 100
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_ANSWER = 2.0


class Presence:
    """One rank's questions and answers.

    Parameters
    ----------
    folder : path
        One that all ranks see.
    rank, size : int
        Which rank this is, of how many.
    write : callable
        ``write(path, content)`` writes a file at once.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, write: Callable[[Path, bytes], None]
    ) -> None:
        self._folder, self._rank, self._size, self._write = folder, rank, size, write
        self._next_look = 0.0
        self._answered = -1

    def answer(self, begun: int) -> None:
        """Answer if a rank asks; call it as often as you like.

        Parameters
        ----------
        begun : int
            The transfers that this rank has begun.
        """
        now = time.monotonic()
        if now < self._next_look or begun == self._answered:
            return
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        if (self._folder / _QUESTION).exists():
            self._say(begun)

    def ask(
        self, number: int, begun: int, stop: Callable[[], bool]
    ) -> list[tuple[int, int | None]]:
        """Return the ranks that have not begun a transfer, each with those that it has begun.

        Parameters
        ----------
        number : int
            The transfer, counted from 1.
        begun : int
            The transfers that this rank has begun.
        stop : callable
            Whether it is no use to wait for answers any longer.

        Returns
        -------
        list of (int, int or None)
            None for a rank that gives no answer.
        """
        self._say(begun)
        self._write(self._folder / _QUESTION, b"")
        until = time.monotonic() + _SECONDS_TO_ANSWER
        while True:
            answers = [(rank, self._answer_of(rank)) for rank in range(self._size)]
            behind = [each for each in answers if each[1] is None or each[1] < number]
            silent = any(answer is None for _, answer in behind)
            if not behind or stop() or time.monotonic() > until:
                with suppress(OSError):  # another rank has asked and taken it away
                    (self._folder / _QUESTION).unlink()
                # A rank that answers and is behind may itself wait for one that gives no answer.
                return [each for each in behind if each[1] is None] if silent else behind
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def leave(self) -> None:
        """Take this rank's answer away."""
        with suppress(OSError):
            self._file(self._rank).unlink()

    def _say(self, begun: int) -> None:
        self._write(self._file(self._rank), str(begun).encode())
        self._answered = begun

    def _answer_of(self, rank: int) -> int | None:
        try:
            return int(read_text(self._file(rank), _MOST_BYTES, _no_answer))
        except (OSError, ValueError):
            return None

    def _file(self, rank: int) -> Path:
        return self._folder / f"begun-{rank}"


def _no_answer(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}")
