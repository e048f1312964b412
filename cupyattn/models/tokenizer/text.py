"""A model's tokenizer: text, ids and chats.

Chat templates are Jinja, run as transformers runs it, in its sandbox and within limits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import takewhile
from operator import index
from typing import Any, NamedTuple

from cupyattn.models.extras import extra
from cupyattn.models.tokenizer.template_budget import budget
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.fork import no_fork


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic of the Rust code within the block as a ValueError."""
    try:
        yield
    except Exception:
        raise
    except BaseException as failure:  # pyo3 cannot be imported for its PanicException
        if type(failure).__name__ != "PanicException":
            raise
        raise ValueError(str(failure)) from None


MOST_TEMPLATE = 1 << 17
"""The most characters of a template; the longest in published models have some 40,000."""


class Rendered(NamedTuple):
    """The text that a template makes.

    Attributes
    ----------
    text : str
        All of it.
    answers : list of (int, int)
        Where its ``{% generation %}`` blocks begin and end, which are answers of the model. Blocks
        within macros, or within blocks whose text is captured, are left out.
    """

    text: str
    answers: list[tuple[int, int]]


def rendered(template: str, where: str | None = None, /, **variables: object) -> Rendered:
    """Return the text that a template makes of its variables, or raise ValueError.

    A template is a program that came with the weights: it may be damaged or malicious. It runs in
    Jinja's sandbox, and within a `TemplateBudget`: 10 seconds, texts of 4 million characters or 8
    times the size of the variables, integers of 1024 bits. `where` is the file that it was read
    from.
    """
    extra("jinja2", "runs chat templates")
    try:
        return _rendered(template, variables)
    except Exception as failure:  # it may raise whatever Python raises, MemoryError as well
        file = f"{where}: " if where else ""
        raise error(
            ValueError,
            f"{file}the chat template failed: {_reason(failure)}",
            "messages must be dicts of 'role' and 'content', mostly of user and "
            "assistant by turns, and the result little more than their text",
            "pass messages that the model's template allows, or set tokenizer.chat_template",
        ) from failure


def _rendered(template: str, variables: dict[str, Any]) -> Rendered:
    if len(template) > MOST_TEMPLATE:
        raise ValueError(f"it has {len(template)} characters, and at most {MOST_TEMPLATE} are read")
    with budget(variables) as left:
        parts = []
        for part in _compiled(template).generate(**variables):
            parts.append(part)
            left.write(part)
    text = "".join(parts)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it writes halves of surrogate pairs, which are not characters") from None
    return Rendered(text, left.answers)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    with no_fork():
        from cupyattn.models.tokenizer.template_sandbox import Sandbox
    return Sandbox().from_string(template)


def _reason(failure: Exception) -> str:
    text = str(failure).encode("utf-8", "backslashreplace").decode()
    kind = type(failure).__name__
    return text if text and type(failure).__module__ != "builtins" else f"{kind} {text}".rstrip()


class Encoded(NamedTuple):
    """The tokens of a text.

    Attributes
    ----------
    ids : list of int
    spans : list of (int, int)
        The first character of the text that each token is made of, and the one after the last.
        They are those of the package tokenizers: bytes of one character have the same, and tokens
        that begin the text have (0, 0).
    begun : int
        How many tokens begin the text and are not of it.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    begun: int


def _begin_ids(state: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that a post-processor of the package tokenizers puts before a text."""
    if state.get("type") == "TemplateProcessing":
        names = [each.get("SpecialToken", {}).get("id") for each in state["single"]]
        known = state["special_tokens"]
        return tuple(token for name in takewhile(bool, names) for token in known[name]["ids"])
    if state.get("type") == "Sequence":  # the last is applied to what the others have made
        parts = [_begin_ids(each) for each in reversed(state["processors"])]
        return tuple(token for part in parts for token in part)
    return (state["cls"][1],) if "cls" in state else ()


_CHAT = ({"role": "user", "content": "A question"}, {"role": "assistant", "content": "An answer"})


class Tokenizer:
    """The tokenizer of a model (`Model.tokenizer`): from text to ids and back, and chats.

    Attributes
    ----------
    inner : tokenizers.Tokenizer
        The tokenizer of the package tokenizers.
    chat_template : str, or None
        The Jinja template that makes one text from the messages of a chat.
    named_tokens : dict from str to str
        The tokens ``bos_token``, ``eos_token`` and so on of the template.
    begin_ids : tuple of int
        The tokens that begin a text for this model.
    """

    def __init__(
        self,
        inner: Any,
        chat_template: str | None,
        named_tokens: Mapping[str, str],
        *,
        where: str | None = None,
        template_where: str | None = None,
        add_bos_token: bool | None = None,
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens)
        self._where = where
        self._read_template = chat_template, template_where  # the caller may set another
        self._answer_end: tuple[str | None, int | None] = None, None
        post = inner.post_processor
        self.begin_ids = _begin_ids(json.loads(post.__getstate__())) if post is not None else ()
        begin = self._id_named("bos_token")
        if begin is not None and add_bos_token is not None:
            self.begin_ids = tuple(token for token in self.begin_ids if token != begin)
            if add_bos_token:
                self.begin_ids = begin, *self.begin_ids

    def __repr__(self) -> str:
        chats = "with" if self.chat_template else "without"
        return f"<Tokenizer of {self.vocab_size} tokens, {chats} a chat template>"

    @property
    def vocab_size(self) -> int:
        """The number of tokens; the vocabulary of the model may be padded to more."""
        return self.inner.get_vocab_size()

    def encode(self, text: str, /, *, special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Parameters
        ----------
        text : str
            A special token written in it, such as ``<|endoftext|>``, becomes that token.
        special_tokens : bool
            Begin with ``begin_ids``; a chat template writes them itself. A token that the tokenizer
            adds to the end of texts is left out, for a model continues them.

        Raises
        ------
        TypeError
            If text is not a string.
        ValueError
            If it has halves of surrogate pairs, as Python reads bytes that are not UTF-8, or if
            the tokenizer lacks a token, such as that for unknown characters.
        """
        ids = self._encoding(text).ids
        return [*self.begin_ids, *ids] if special_tokens else ids

    def encode_with_spans(self, text: str, /, *, special_tokens: bool = True) -> Encoded:
        """Return the ids of a text as `encode`, and the characters of the text that each is of."""
        found, begin = self._encoding(text), self.begin_ids if special_tokens else ()
        spans = [(0, 0)] * len(begin) + found.offsets
        return Encoded([*begin, *found.ids], spans, len(begin))

    def _encoding(self, text: str) -> Any:
        if isinstance(text, str) and any("\ud800" <= each <= "\udfff" for each in text):
            raise error(
                ValueError,
                f"text is {shown(text)}",
                "a text must have no surrogates",
                "decode its bytes by their own encoding, or with errors='replace'",
            )
        if not isinstance(text, str):
            raise error(
                TypeError,
                f"text is {shown(text)} of type {type(text).__name__}",
                "it must be a str",
                "encode several texts one by one",
            )
        with self._explained(f"the text {shown(text)}"):
            return self.inner.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], /, *, special_tokens: bool = False) -> str:
        """Return the text of ids.

        Parameters
        ----------
        ids : iterable of int
            Unknown ids, of a padded vocabulary, are left out. Bytes that are not a whole character
            become U+FFFD.
        special_tokens : bool
            Write special tokens too.

        Raises
        ------
        ValueError
            If the tokenizer's decoder fails on them.
        """
        numbers = [index(each) for each in ids]
        with self._explained(f"the ids {shown(numbers)}"):
            return self.inner.decode(numbers, skip_special_tokens=not special_tokens)

    @contextmanager
    def _explained(self, passed: str) -> Iterator[None]:
        try:
            with panics_as_errors():
                yield
        except Exception as failure:  # the package raises no other
            where = f"{self._where}: " if self._where else ""
            raise error(
                ValueError,
                f"{where}the tokenizer fails on {passed} ({failure})",
                "the vocabulary must have all tokens of the rules, such as the unknown token",
                "download the tokenizer's files again, or pass token ids",
            ) from failure

    def id_of(self, token: str, /) -> int | None:
        """Return the id of one token, or None if the vocabulary does not have it."""
        return self.inner.token_to_id(token)

    def _id_named(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.id_of(token)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: ``eos_token``, and what the chat template writes last.

        The latter is the token after an answer. There is none if the template refuses a chat of a
        question and an answer, or writes no token of its own after it.
        """
        if self.chat_template is not None and self._answer_end[0] != self.chat_template:
            self._answer_end = self.chat_template, self._token_after_an_answer()
        found = self._id_named("eos_token"), self._answer_end[1]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def _token_after_an_answer(self) -> int | None:
        try:
            text = self.render_chat(_CHAT).text
        except (ValueError, RuntimeError):  # also if jinja2 is not installed
            return None
        _, written, after = text.rpartition(_CHAT[-1]["content"])
        after = after.lstrip()
        known = self.inner.get_added_tokens_decoder().items()
        fits = {token.content: number for number, token in known if after.startswith(token.content)}
        return fits[max(fits, key=len)] if fits and written else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Write a chat as one text, in the form that the model was trained on.

        Parameters
        ----------
        messages : sequence of mapping
            ``{"role": "user", "content": "Hello"}`` and so on; roles are "system", "user" and
            "assistant". Values of None are left out, as transformers does.
        add_generation_prompt : bool
            End with the beginning of an answer of the assistant.
        **variables
            More variables of the template; ``tools`` and ``documents`` are None by default.

        Returns
        -------
        str
            For ``encode(text, special_tokens=False)``.

        Raises
        ------
        ValueError
            If the model has no chat template, or the template refuses the messages, fails, or
            exceeds its limits of time and memory.
        RuntimeError
            If the package jinja2 is not installed.
        """
        variables["add_generation_prompt"] = add_generation_prompt
        return self.render_chat(messages, **variables).text

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], /, **variables: object
    ) -> Rendered:
        """Write a chat as `apply_chat_template`, and find the answers that its template marks.

        ``add_generation_prompt`` is one of the variables, False by default. Returns the text, and
        where the answers are. Raises as `apply_chat_template`.
        """
        if self.chat_template is None:
            raise error(
                ValueError,
                "there is no chat template in the model's files",
                "only models that were trained on chats have one",
                "generate from a text instead",
            )
        template, where = self._read_template
        given = [{key: each[key] for key in each if each[key] is not None} for each in messages]
        usual = {"tools": None, "documents": None, "add_generation_prompt": False}
        return rendered(
            self.chat_template,
            where if self.chat_template is template else None,
            **{**usual, **self.named_tokens, **variables, "messages": given},
        )
