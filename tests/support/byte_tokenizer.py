"""A tokenizer whose tokens are bytes: most of them are parts of characters."""

from __future__ import annotations

from collections.abc import Iterable


class ByteTokenizer:
    """Ids are the bytes of UTF-8; `begin`, if given, is put before each text and has no text."""

    def __init__(self, begin: int | None = None) -> None:
        self.begin = begin

    def encode(self, text: str) -> list[int]:
        return [*([] if self.begin is None else [self.begin]), *text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")
