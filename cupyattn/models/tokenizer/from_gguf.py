"""The tokenizer of a GGUF file, from its metadata."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyattn.models.extras import extra
from cupyattn.models.tokenizer.byte_level import KINDS, byte_level
from cupyattn.models.tokenizer.text import Tokenizer
from cupyattn.runtime.errors import error, shown

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_PREFIX = "tokenizer.ggml."


class _Kind(NamedTuple):
    """The type of a value, or of the items of a list."""

    type: Any
    text: str
    in_list: bool = False


_KINDS = {
    "tokens": _Kind(str, "a list of texts", in_list=True),
    "merges": _Kind(str, "a list of texts", in_list=True),
    "token_type": _Kind(int, "a list of integers", in_list=True),
    "scores": _Kind((int, float), "a list of numbers", in_list=True),
    **{
        f"{name}_token_id": _Kind(int, "an integer of 0 or more")
        for name in ("bos", "eos", "unknown", "padding")
    },
    **{
        name: _Kind(bool, "true or false")
        for name in ("add_bos_token", "add_eos_token", "add_space_prefix")
    },
}
_SPACE = "\u2581"  # how sentencepiece writes a space


def tokenizer_of_gguf(metadata: dict[str, Any], where: str) -> Tokenizer | None:
    """Make the tokenizer that a file's metadata describes; None if they describe none.

    Raises
    ------
    NotImplementedError
        If it is of another kind than byte-level BPE and sentencepiece's BPE.
    ValueError
        If tokens or merges do not fit together.
    """
    kind = metadata.get(f"{_PREFIX}model")
    tokens = metadata.get(f"{_PREFIX}tokens")
    if kind is None or tokens is None:
        return None
    _require_kinds(metadata, where)
    types = metadata.get(f"{_PREFIX}token_type") or [_NORMAL] * len(tokens)
    try:
        if kind == "gpt2":
            inner = _byte_level(metadata, tokens, types, where)
        elif kind == "llama":
            inner = _sentencepiece(metadata, tokens, types)
        else:
            raise _unknown(where, f"a tokenizer of the kind {shown(kind)}", ("gpt2", "llama"))
        _begin_and_end(inner, metadata, tokens, starts=kind == "llama")
    except (ValueError, KeyError, IndexError) as failure:
        raise error(
            ValueError,
            f"{where}: its tokenizer does not fit together ({failure})",
            "tokens, merges and scores are those of one tokenizer",
            "convert the model again",
        ) from failure
    named = {
        f"{name}_token": tokens[metadata[f"{_PREFIX}{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if metadata.get(f"{_PREFIX}{key}_token_id", len(tokens)) < len(tokens)
    }
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise error(
            ValueError,
            f"{where}: tokenizer.chat_template is {shown(template)}, which is no text",
            "it is a template of Jinja",
            "convert the model again",
        )
    return Tokenizer(inner, template, named, where=where, template_where=where)


def _require_kinds(metadata: dict[str, Any], where: str) -> None:
    """Raise ValueError for a value of another type than tokenizers have there."""
    for name, value in metadata.items():
        kind = _KINDS.get(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
        if kind is None:
            continue
        if kind.in_list:
            fits = isinstance(value, list) and all(isinstance(each, kind.type) for each in value)
        else:
            fits = type(value) is kind.type and (kind.type is not int or value >= 0)
        if not fits:
            raise error(
                ValueError,
                f"{where}: {name} is {shown(value)}",
                f"it is {kind.text}",
                "convert the model again",
            )


def _of_type(tokens: list[str], types: list[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int], where: str) -> Any:
    kind = metadata.get(f"{_PREFIX}pre", "default")
    if kind not in KINDS:
        raise _unknown(where, f"byte-level BPE of the kind {shown(kind)}", KINDS)
    return byte_level(
        {token: number for number, token in enumerate(tokens)},
        metadata[f"{_PREFIX}merges"],
        kind,
        special=_of_type(tokens, types, _CONTROL),
        added=_of_type(tokens, types, _USER_DEFINED),
    )


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Any:
    """Make BPE of sentencepiece's scores: the pair of the best token is merged first."""
    tokenizers = extra("tokenizers", "makes ids of text")
    vocab = {token: number for number, token in enumerate(tokens)}
    unknown = _of_type(tokens, types, _UNKNOWN)
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab,
            _merges(vocab, tokens, types, metadata[f"{_PREFIX}scores"]),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    begins = metadata.get(f"{_PREFIX}add_space_prefix", True)
    normal, decode = tokenizers.normalizers, tokenizers.decoders
    spaces = normal.Replace(" ", _SPACE)
    inner.normalizer = normal.Sequence([normal.Prepend(_SPACE), spaces]) if begins else spaces
    steps = [decode.Replace(_SPACE, " "), decode.ByteFallback(), decode.Fuse()]
    inner.decoder = decode.Sequence([*steps, *([decode.Strip(" ", 1, 0)] if begins else [])])
    inner.add_special_tokens([*unknown, *_of_type(tokens, types, _CONTROL)])
    added = _of_type(tokens, types, _USER_DEFINED)
    inner.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    return inner


def _merges(
    vocab: dict[str, int], tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    found = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind == _NORMAL:
            cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
            known = [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
            known.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
            found += [(score, cut) for cut in known]
    found.sort(key=lambda each: -each[0])  # stable: of equal scores the first token's
    return [cut for _, cut in found]


def _begin_and_end(inner: Any, metadata: dict[str, Any], tokens: list[str], starts: bool) -> None:
    """Have a text begin, and end, with the tokens that the metadata say."""
    starts = starts or metadata.get(f"{_PREFIX}pre") == "llama-bpe"
    parts, used = ["$A"], []
    for name, place, default in (("bos", 0, starts), ("eos", 2, False)):
        number = metadata.get(f"{_PREFIX}{name}_token_id")
        if metadata.get(f"{_PREFIX}add_{name}_token", default) and number is not None:
            parts.insert(place, tokens[number])
            used.append((tokens[number], number))
    if used:
        tokenizers = extra("tokenizers", "makes ids of text")
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=parts, special_tokens=used
        )


def _unknown(where: str, passed: str, known: tuple[str, ...]) -> NotImplementedError:
    return error(
        NotImplementedError,
        f"{where}: {passed}",
        f"there is code for {', '.join(map(repr, known))}",
        "pass token ids, or load the folder that the file was made from, with its tokenizer.json",
    )
