"""Byte-level BPE, the tokenizer of GPT-2 and its successors, from a vocabulary and merges.

Radford et al., 2019, section 2.2. How text is cut into words before it differs from model to model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupyattn.models.extras import extra

_WORDS_OF_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF_QWEN2 = _WORDS_OF_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

KINDS = ("gpt-2", "phi-2", "smollm", "llama-bpe", "qwen2")
"""Ways to cut text into words, as GGUF files call them."""


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[str],
    kind: str,
    *,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
) -> Any:
    """Return a tokenizers.Tokenizer.

    Parameters
    ----------
    vocab : mapping from str to int
        Tokens, whose bytes are written as GPT-2 writes them, and their ids.
    merges : sequence of str
        Two tokens with a space between, the first to be merged first.
    kind : str
        One of `KINDS`.
    special, added : sequence of str
        Tokens of the vocabulary that are found in text as they are; special ones are left out of
        decoded text.

    Raises
    ------
    ValueError
        If a merge is of tokens that are not in the vocabulary.
    """
    tokenizers = extra("tokenizers", "makes ids of text")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"the merge {wrong[0]!r} is not of two tokens")
    try:
        # Llama 3 takes a word that is a token as it is, whatever the merges make of it.
        model = tokenizers.models.BPE(dict(vocab), pairs, ignore_merges=kind == "llama-bpe")
    except Exception as failure:  # the package raises no other
        raise ValueError(str(failure)) from failure
    inner = tokenizers.Tokenizer(model)
    if kind == "qwen2":
        inner.normalizer = tokenizers.normalizers.NFC()
    inner.pre_tokenizer = _words(tokenizers, kind)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    inner.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    return inner


def _words(tokenizers: Any, kind: str) -> Any:
    cut = tokenizers.pre_tokenizers
    if kind in ("gpt-2", "phi-2"):
        return cut.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        return cut.Sequence(
            [cut.Digits(individual_digits=True), cut.ByteLevel(add_prefix_space=False)]
        )
    words = tokenizers.Regex(_WORDS_OF_QWEN2 if kind == "qwen2" else _WORDS_OF_LLAMA3)
    return cut.Sequence(
        [
            cut.Split(words, behavior="isolated"),
            cut.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
