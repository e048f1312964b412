"""Byte-level BPE (Radford et al., 2019, section 2.2), the tokenizer of GPT-2 and its successors.

A text is cut into words, and merges join the bytes of each word to tokens. Models cut text in
different ways: by the patterns of their tokenizer.json, which GGUF files only name, as
llama.cpp's llama-vocab.cpp lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cupyattn.models.extras import extra

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TITLE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{0}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{0}"
)
"""A word ends where a capital follows a small letter; {0} is a suffix."""
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _TITLE.replace("{0}", "") + r"|\p{N}" + _REST
_GPT4O = _TITLE.replace("{0}", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _REST


class Words(NamedTuple):
    """How text is cut into words.

    Attributes
    ----------
    patterns : tuple of str
        Regular expressions. Each cuts the pieces that those before it have left: its matches, and
        what is between them.
    as_gpt2 : bool
        Whether GPT-2's own pattern cuts last.
    composed : bool
        Whether characters are composed first (Unicode's NFC).
    whole : bool
        Whether a word that is a token stays whole, whatever the merges are.
    begun : bool
        Whether texts of a GGUF file begin with a token if the file does not say.
    """

    patterns: tuple[str, ...] = ()
    as_gpt2: bool = False
    composed: bool = False
    whole: bool = False
    begun: bool = False


_AS_GPT2 = Words(as_gpt2=True)
_DIGITS = Words((r"\p{N}",), as_gpt2=True)
_AS_LLAMA3 = Words((_LLAMA3,), whole=True, begun=True)
_AS_QWEN2 = Words((_QWEN2,), composed=True)
_AS_GPT4O = Words((_GPT4O,))
KINDS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "mellum", "trillion"), _AS_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _AS_LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Words((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _AS_QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _AS_GPT4O),
    "tekken": Words((_TEKKEN,), whole=True, begun=True),
    "default": Words(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
}
"""Ways to cut text into words, by their names in GGUF files."""


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[str],
    words: Words,
    *,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    add_prefix_space: bool = False,
) -> Any:
    """Return a tokenizers.Tokenizer, or raise ValueError if a merge has unknown tokens.

    Tokens of `vocab` are written as GPT-2 writes bytes. A merge is two tokens with a space between;
    the first of `merges` is merged first. Tokens of `special` and `added` are found in text as they
    are; special ones are left out of decoded text.
    """
    tokenizers = extra("tokenizers", "makes ids of text")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"the merge {wrong[0]!r} is not of two tokens")
    try:
        model = tokenizers.models.BPE(dict(vocab), pairs, ignore_merges=words.whole)
    except Exception as failure:  # the package raises no other
        raise ValueError(str(failure)) from failure
    inner = tokenizers.Tokenizer(model)
    if words.composed:
        inner.normalizer = tokenizers.normalizers.NFC()
    cut = tokenizers.pre_tokenizers
    steps = [cut.Split(tokenizers.Regex(each), behavior="isolated") for each in words.patterns]
    as_bytes = cut.ByteLevel(add_prefix_space=add_prefix_space, use_regex=words.as_gpt2)
    inner.pre_tokenizer = cut.Sequence([*steps, as_bytes]) if steps else as_bytes
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    inner.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    return inner
