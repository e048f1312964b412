"""Validation of the options of a generation."""

from __future__ import annotations

import math
from operator import index as as_int
from secrets import randbits
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.generation.text import TextTokenizer, TokenModel
from cupyattn.runtime.errors import error, shown

SEED_BITS = 63
MOST_TOP_K = 2**31 - 1
"""The largest int32, more than any vocabulary."""
MOST_SEQUENCES = 1 << 16
"""Samples of a prompt, and sequences of a step: far more than a GPU's memory holds."""
_CHARACTERS = 64
"""Characters per position of the model: of a longer text only this beginning is encoded first."""


class Sampling(NamedTuple):
    """The options of `cupyattn.sample` for a next token; None is off."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    @property
    def used(self) -> frozenset[str]:
        """The options that matter: none if the largest logit is taken."""
        names = set()
        if self.repetition_penalty != 1.0:
            names |= {"temperature", "repetition_penalty"}
        if self.temperature > 0:
            limits = ("top_k", "top_p", "min_p")
            names |= {"temperature", *(each for each in limits if getattr(self, each) is not None)}
        return frozenset(names)


class Prompt(NamedTuple):
    """A prompt that was encoded by the caller, for example from a chat.

    Attributes
    ----------
    ids : tuple of int
        The tokens to continue.
    is_text : bool
        Whether the results are text; otherwise they are ids.
    """

    ids: tuple[int, ...]
    is_text: bool = False


class Ends(NamedTuple):
    """Tokens, and strings in its text, that end a sample."""

    ids: frozenset[int]
    strings: tuple[str, ...]

    def of(self, prompt: Prompt, model: TokenModel) -> Ends:
        """Add the tokens that end a text for the model's tokenizer, if the prompt is one."""
        if not prompt.is_text:
            return self
        tokenizer = tokenizer_for(model, "a prompt of text")
        return self._replace(ids=self.ids | frozenset(getattr(tokenizer, "end_ids", ())))


def as_sampling(
    temperature: object, top_k: object, top_p: object, min_p: object, repetition_penalty: object
) -> Sampling:
    """Return how tokens are drawn, or raise."""
    return Sampling(
        _number("temperature", temperature, "0 or more (0 is greedy)", 0, math.inf),
        None if top_k is None else min(as_count("top_k", top_k, 1), MOST_TOP_K),
        None if top_p is None else _number("top_p", top_p, "above 0, up to 1", 0, 1, open_=True),
        None if min_p is None else _number("min_p", min_p, "0 to 1", 0, 1),
        _number(
            "repetition_penalty", repetition_penalty, "more than 0 (1 is off)", 0, math.inf,
            open_=True,
        ),
    )  # fmt: skip


def as_count(name: str, value: Any, lowest: int, highest: int | None = None) -> int:
    """Return an integer within limits, or raise; a bool is not an integer here."""
    allowed = f"{lowest} or more" if highest is None else f"{lowest} to {highest:,}"
    try:
        number = None if isinstance(value, bool) else as_int(value)
    except TypeError:
        number = None
    if number is None or number < lowest or (highest is not None and number > highest):
        raise error(
            TypeError if number is None else ValueError,
            f"got {name} = {shown(value)}",
            f"it must be an integer, {allowed}",
            f"pass for example {name}={max(lowest, 1)}",
        )
    return number


def as_lengths(given: Any) -> list[int]:
    """Return how long sequences will be, or raise."""
    if not _is_iterable(given) or isinstance(given, str | bytes):
        raise error(
            TypeError, f"got lengths = {shown(given)}",
            "lengths must be integers: how many tokens each sequence will have", "pass a list",
        )  # fmt: skip
    return [as_count("lengths", each, 1) for each in given]


def as_seed(seed: object) -> int:
    """Return a seed, drawn if none is given."""
    return randbits(SEED_BITS) if seed is None else as_count("seed", seed, 0, 2**SEED_BITS - 1)


def as_prompts(prompts: object, model: Any) -> list[Prompt]:
    """Return prompts: text or ids, one or several."""
    return [_prompt(each, model) for each in _listed(prompts)]


def as_cache_dtype(given: object, dtype: str) -> str:
    """Return the dtype or format of keys and values, for a model of this dtype."""
    if given is None or given == dtype:
        return dtype
    if given in ("int8", "int4"):
        return str(given)
    raise error(
        TypeError, f"got cache_dtype = {shown(given)}",
        f"keys and values must be in the model's dtype, {dtype!r}, or quantised",
        "pass 'int8' or 'int4', or leave it out",
    )  # fmt: skip


def as_ends(stop: Any, model: TokenModel) -> Ends:
    """Return what ends a sample, with the tokens that end every text."""
    if stop is None:
        stop = ()
    if isinstance(stop, bytes | bytearray):
        raise error(
            TypeError,
            f"got stop = {shown(stop)}",
            "it has token ids and strings",
            "decode it first",
        )
    given = [stop] if isinstance(stop, str) or not _is_iterable(stop) else list(stop)
    strings = tuple(each for each in given if isinstance(each, str))
    if "" in strings:
        raise error(
            ValueError, "got an empty string in stop", "every text contains it",
            "leave it out, or pass the string that ends the text",
        )  # fmt: skip
    if strings:
        tokenizer_for(model, f"stop = {shown(stop)}")
    ids = []
    for each in given:
        if not isinstance(each, str):
            try:
                ids.append(as_int(each))
            except TypeError:
                raise error(
                    TypeError, f"got {shown(each)} in stop", "it has token ids and strings",
                    "pass for example stop=['\\n\\n'], or stop=()",
                ) from None  # fmt: skip
    return Ends(frozenset(ids) | frozenset(model.config.eos_ids), strings)


def _number(
    name: str, value: Any, allowed: str, lowest: float, highest: float, *, open_: bool = False
) -> float:
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise error(
            TypeError,
            f"got {name} = {shown(value)}",
            f"it must be a number: {allowed}",
            "pass a float",
        ) from None
    with np.errstate(over="ignore", under="ignore"):
        kept = float(np.float32(number))  # what a kernel reads
    inside = lowest < kept <= highest if open_ else lowest <= kept <= highest
    if not inside or math.isinf(kept):
        raise error(
            ValueError, f"got {name} = {number:g}", f"it must be {allowed}", "pass such a number"
        )
    return number


def _listed(prompts: Any) -> list[object]:
    """Return the prompts one by one: a string, or a list of integers, is one prompt."""
    if isinstance(prompts, str | Prompt):
        return [prompts]
    if isinstance(prompts, bytes | bytearray):
        raise error(
            TypeError, f"got prompts = {shown(prompts)}",
            "a prompt is a string or a list of token ids", "decode it, or pass list(prompt) as ids",
        )  # fmt: skip
    values = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not _is_iterable(values):
        raise error(
            TypeError, f"got prompts = {shown(prompts)}",
            "a prompt is a string or a list of token ids, and prompts are a list of those",
            "pass for example 'Once upon a time', or [[1, 2, 3]]",
        )  # fmt: skip
    items = list(values)
    return items if items and all(_is_prompt(item) for item in items) else [items]


def _is_prompt(item: object) -> bool:
    return isinstance(item, str) or _is_iterable(item)


def _is_iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True


def _prompt(given: Any, model: TokenModel) -> Prompt:
    ids, is_text = given if isinstance(given, Prompt) else (given, isinstance(given, str))
    if is_text:
        tokenizer = tokenizer_for(model, f"the prompt {shown(given)}")
        positions = model.config.max_positions
        ids = _encoded(tokenizer, given, positions) if isinstance(given, str) else ids
    if hasattr(ids, "__len__"):  # before each token is read
        require_positions(len(ids), 1, model.config.max_positions)
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    try:
        tokens = tuple(as_int(token) for token in ids)
    except TypeError:
        raise error(
            TypeError, f"got the prompt {shown(given)}",
            "a prompt is a string or a list of token ids", "pass integers",
        ) from None  # fmt: skip
    if not tokens:
        raise error(
            ValueError, f"the prompt {shown('' if is_text else [])} has no tokens",
            "a prompt must have at least one token",
            "pass for example the token that begins a text (config.bos_id)",
        )  # fmt: skip
    for token in tokens:
        if not 0 <= token < model.config.vocab_size:
            raise error(
                ValueError, f"got token id {token} in a prompt",
                f"the model's ids are 0 to {model.config.vocab_size - 1}",
                "encode the text with the tokenizer of this model",
            )  # fmt: skip
    return Prompt(tokens, is_text)


def _encoded(tokenizer: TextTokenizer, text: str, positions: int) -> list[int]:
    """Return the tokens of a text; refuse one that is far too long from its beginning."""
    most = _CHARACTERS * positions
    if len(text) > most and len(tokenizer.encode(text[:most])) > 2 * positions:
        raise error(
            ValueError, f"got a prompt of {len(text)} characters, more than {positions} tokens",
            f"the model has {positions} positions", "pass a shorter prompt",
        )  # fmt: skip
    return tokenizer.encode(text)


def tokenizer_for(model: TokenModel, what: str) -> TextTokenizer:
    """Return the model's tokenizer, which may load now, or raise."""
    tokenizer: TextTokenizer | None = model.tokenizer
    if tokenizer is None:
        raise error(
            ValueError, f"got {what}, and the model has no tokenizer",
            "text needs one; token ids do not",
            "pass token ids, or load a model with its tokenizer",
        )  # fmt: skip
    return tokenizer


def as_captured(captured: bool | None, model: TokenModel) -> bool:
    """Return whether steps of decoding are CUDA graphs: by default if possible."""
    if captured and model.group is not None:
        raise error(
            NotImplementedError,
            "captured=True with a model over several ranks",
            "sums over ranks cannot be captured",
            "leave captured out",
        )
    can_be = model.xp.__name__ == "cupy" and model.group is None
    return can_be if captured is None else captured


def require_positions(tokens: int, new_tokens: int, positions: int) -> None:
    """Refuse a prompt whose continuation would leave the model's positions."""
    if tokens > positions:
        raise error(
            ValueError, f"got a prompt of {tokens} tokens", f"the model has {positions} positions",
            "pass a shorter prompt",
        )  # fmt: skip
    if tokens + new_tokens - 1 > positions:  # the last new token is not computed
        raise error(
            ValueError,
            f"got a prompt of {tokens} tokens and max_new_tokens = {new_tokens}",
            f"the model has {positions} positions",
            f"pass at most {positions - tokens + 1} new tokens, or a shorter prompt",
        )
