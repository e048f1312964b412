"""Text as it grows: pieces that never split a character, and strings that end it."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Protocol

from cupyattn import Rotary
from cupyattn.distributed import Group
from cupyattn.models.config import Config
from cupyattn.models.forward import Attend
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array

INCOMPLETE = "\ufffd"
"""The character that a decoder writes for bytes that are not a whole character."""
CONTEXT = 10
"""Tokens of a prompt that are decoded before its continuation: some decoders drop a leading space,
and a character has up to 4 bytes."""


class TextTokenizer(Protocol):
    """From text to ids and back, as a model's tokenizer does it."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of ids."""


class TokenModel(Protocol):
    """The members of `Model` that a generator uses."""

    config: Config
    xp: ModuleType
    group: Group | None
    positions: int

    def rotary_of(self, layer: int) -> Rotary | None:
        """Return the rotary tables of a layer."""

    def attention_options(self, layer: int) -> Keywords:
        """Return the options of attention in a layer."""

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """From text to ids and back."""

    def hidden(self, ids: Array, positions: Array, attend: Attend) -> Array:
        """Return the hidden states after the last norm."""

    def head(self, hidden: Array) -> Array:
        """Return the logits of hidden states."""


class TextStream:
    r"""The text of tokens that come one by one, up to the first of some strings.

    A token may end within a character, and a string may begin in one token and end in another. So
    `push` returns the text that is certain, and holds back what the next token may change.

    Examples
    --------
    >>> class Bytes:
    ...     def encode(self, text): return list(text.encode())
    ...     def decode(self, ids): return bytes(ids).decode(errors="replace")
    >>> stream = TextStream(Bytes(), b"Un ", stop=["\n\n"])
    >>> [stream.push(token) for token in "é au\n lait\n\nNo".encode()][:8]
    ['', 'é', ' ', 'a', 'u', '', '\n ', 'l']
    >>> stream.stopped, stream.text
    (True, 'é au\n lait')
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt: Iterable[int], stop: Iterable[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)[-CONTEXT:]
        self._begin = 0  # the text is decoded from this token on
        begun = self._begun()
        self._done = len(tokenizer.decode(self._ids[: len(self._ids) - begun]))
        self._clean = 0 if begun else len(self._ids)  # so many tokens are whole characters
        self._stop = tuple(stop)
        self._held = ""  # perhaps the beginning of a string that ends the text
        self._pieces: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """The text that has been returned so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Take a token; return the text that is certain now, none after the end."""
        if self.stopped:
            return ""
        self._ids.append(token)
        decoded = self._decoded()
        certain = decoded.rstrip(INCOMPLETE)
        piece, self._done = certain[self._done :], max(self._done, len(certain))
        if certain == decoded:
            self._begin, self._clean = self._clean, len(self._ids)
            self._done = len(self._decoded())
        return self._passed(piece)

    def finish(self) -> str:
        """Return what was held back: no token follows."""
        if self.stopped:
            return ""
        piece = self._passed(self._decoded()[self._done :])
        held, self._held = self._held, ""
        if held:
            self._pieces.append(held)
        self.stopped = True
        return piece + held

    def _begun(self) -> int:
        """Return how many tokens at the end of the prompt are part of an unfinished character."""
        for tokens in range(min(3, len(self._ids)) + 1):
            whole = self._ids[: len(self._ids) - tokens]
            if not self._tokenizer.decode(whole).endswith(INCOMPLETE):
                return tokens
        return 0

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids[self._begin :])

    def _passed(self, piece: str) -> str:
        """Return the part of new and held text that cannot belong to a stop string."""
        text = self._held + piece
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            passed, self._held, self.stopped = text[: min(ends)], "", True
        else:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
            passed, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if passed:
            self._pieces.append(passed)
        return passed


def _overlap(text: str, stop: str) -> int:
    r"""Return how many characters at the end of a text are the beginning of a string."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
