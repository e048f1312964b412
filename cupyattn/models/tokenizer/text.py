"""A model's tokenizer: text, ids and chats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from cupyattn.errors import error, shown
from cupyattn.models.tokenizer.chat_template import rendered


class Tokenizer:
    """What makes ids of text, and text of ids: `Model.tokenizer`.

    Attributes
    ----------
    inner : tokenizers.Tokenizer
        Which does the work.
    chat_template : str, or None
        The Jinja template that makes one text of a chat's messages.
    named_tokens : dict from str to str
        What the template calls ``bos_token``, ``eos_token`` and so on.
    """

    def __init__(
        self, inner: Any, chat_template: str | None, named_tokens: Mapping[str, str]
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens)

    def __repr__(self) -> str:
        chats = "with" if self.chat_template else "without"
        return f"<Tokenizer of {self.vocab_size} tokens, {chats} a chat template>"

    @property
    def vocab_size(self) -> int:
        """How many tokens it knows; a model's vocabulary may be padded beyond."""
        return self.inner.get_vocab_size()

    def encode(self, text: str, /, *, special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Parameters
        ----------
        text : str
            What is written in it as a special token, such as ``<|endoftext|>``, becomes that token.
        special_tokens : bool
            Add what the model begins a text with, if it does; a chat template writes that itself.

        Raises
        ------
        TypeError
            If text is no string.
        ValueError
            If it has halves of surrogate pairs, as Python reads bytes that are no UTF-8.
        """
        if isinstance(text, str) and any("\ud800" <= each <= "\udfff" for each in text):
            raise error(
                ValueError,
                f"text is {shown(text)}",
                "it has characters, and no surrogates",
                "decode its bytes by their own encoding, or with errors='replace'",
            )
        if not isinstance(text, str):
            raise error(
                TypeError,
                f"text is {shown(text)}, a {type(text).__name__}",
                "it is a str",
                "encode several texts one by one",
            )
        return self.inner.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Iterable[int], /, *, special_tokens: bool = False) -> str:
        """Return the text of ids.

        Parameters
        ----------
        ids : iterable of int
            Those that the tokenizer does not know, of a padded vocabulary, are left out. Bytes that
            are no whole character give U+FFFD.
        special_tokens : bool
            Write special tokens too.
        """
        numbers = [index(each) for each in ids]
        return self.inner.decode(numbers, skip_special_tokens=not special_tokens)

    def id_of(self, token: str, /) -> int | None:
        """Return the id of one token as the vocabulary has it, None if there is none."""
        return self.inner.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Write a chat as the one text that the model was trained on.

        Parameters
        ----------
        messages : sequence of mapping
            ``{"role": "user", "content": "Hello"}`` and so on; roles are "system", "user" and
            "assistant".
        add_generation_prompt : bool
            End with what an answer of the assistant begins with.
        **variables
            What else the template knows.

        Returns
        -------
        str
            For ``encode(text, special_tokens=False)``.

        Raises
        ------
        ValueError
            If the model has no chat template, or its template refuses the messages.
        RuntimeError
            If the package jinja2 is not installed.
        """
        if self.chat_template is None:
            raise error(
                ValueError,
                "no chat template in the model's files",
                "models that were trained on chats have one",
                "pass the text that the model is to continue",
            )
        return rendered(
            self.chat_template,
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **self.named_tokens,
            **variables,
        )
