"""A tokenizer whose tokens are bytes: most of them are parts of characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ByteTokenizer:
    """Ids are the bytes of UTF-8; `begin`, if given, is put before each text and has no text."""

    def __init__(self, begin: int | None = None) -> None:
        self.begin = begin

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        first = [] if self.begin is None or not special_tokens else [self.begin]
        return [*first, *text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"{each['role'][0]}:{each['content']}\n" for each in messages) + "a:"
