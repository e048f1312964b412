"""Tokenizers from a model's files: tokenizer.json, vocab.json with merges.txt, or GGUF.

Byte-level BPE (Radford et al., 2019, section 2.2) is the tokenizer of GPT-2 and its successors,
made from a vocabulary and merges. Models cut text into words in different ways before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cupyattn.models.extras import extra
from cupyattn.models.tokenizer.text import MOST_TEMPLATE, Tokenizer, panics_as_errors
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.reading import read_bytes, read_json, read_text

_WORDS_OF_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF_QWEN2 = _WORDS_OF_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

KINDS = ("gpt-2", "phi-2", "smollm", "llama-bpe", "qwen2")
"""Ways to cut text into words, by their names in GGUF files."""


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[str],
    kind: str,
    *,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
) -> Any:
    """Return a tokenizers.Tokenizer, or raise ValueError if a merge has unknown tokens.

    Tokens of `vocab` are written as GPT-2 writes bytes. A merge is two tokens with a space between;
    the first of `merges` is merged first. `kind` is one of `KINDS`. Tokens of `special` and `added`
    are found in text as they are; special ones are left out of decoded text.
    """
    tokenizers = extra("tokenizers", "makes ids of text")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"the merge {wrong[0]!r} is not of two tokens")
    try:
        # In Llama 3 a word that is a token stays whole, whatever the merges are.
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


def _words(tokenizers: Any, kind: str) -> object:
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


_END = "<|endoftext|>"
_MOST_BYTES = 256 << 20
"""Largest tokenizer.json: those of 260,000 tokens have 35 MB."""
_MOST_OTHER_BYTES = 32 << 20
"""Largest other file of a tokenizer: they have up to 5 MB."""


def tokenizer_of_folder(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a folder; None if the folder has no file of one."""
    config = _settings(folder)
    special = config.get("special_tokens", {})
    where = folder / "tokenizer.json"
    if where.exists():
        tokenizers = extra("tokenizers", "makes ids of text")
        content = read_bytes(where, _MOST_BYTES, _damaged)
        try:
            with panics_as_errors():
                inner = tokenizers.Tokenizer.from_buffer(content)
        except Exception as failure:  # the package raises no other
            raise _damaged(where, failure) from failure
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        inner, where = _gpt2(folder), folder / "vocab.json"
        special = {"bos_token": _END, "eos_token": _END, **special}
    elif (folder / "tokenizer.model").is_file():
        raise error(
            NotImplementedError,
            f"{folder} has tokenizer.model, a sentencepiece file, but no tokenizer.json",
            "a tokenizer must be tokenizer.json, vocab.json with merges.txt, or in a GGUF file",
            "convert it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    else:
        return None
    return Tokenizer(
        inner,
        config.get("chat_template"),
        special,
        where=str(where),
        template_where=config["template_where"],
    )


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, from which `tokenizer_of_folder` makes it."""
    settings: Json = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.named_tokens}
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    for name, text in (
        ("tokenizer.json", tokenizer.inner.to_str()),
        ("tokenizer_config.json", json.dumps(settings, indent=2) + "\n"),
    ):
        (folder / name).write_text(text, encoding="utf-8")


def _settings(folder: Path) -> Json:
    """Return the chat template and the named tokens of tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    given: Any = {}
    if path.exists():
        given = read_json(path, _MOST_OTHER_BYTES, _damaged)
        if not isinstance(given, dict):
            raise _damaged(path, "it is not a JSON object")
    special = {}
    for name, token in given.items():
        if name.endswith("_token"):
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                special[name] = content
    template = given.get("chat_template")
    if isinstance(template, list):  # several by name, of which one is for plain chats
        try:
            template = {each["name"]: each["template"] for each in template}.get("default")
        except (KeyError, TypeError):
            raise _damaged(
                path, f"chat_template is {shown(template)}, not objects of name and template"
            ) from None
    if not isinstance(template, str | None):
        raise _damaged(path, f"chat_template is {shown(template)}, which is not a text")
    if (folder / "chat_template.jinja").is_file():
        path = folder / "chat_template.jinja"
        template = read_text(path, 4 * MOST_TEMPLATE, _damaged)
    return {"chat_template": template, "template_where": str(path), "special_tokens": special}


def _gpt2(folder: Path) -> Any:
    vocab = read_json(folder / "vocab.json", _MOST_OTHER_BYTES, _damaged)
    lines = read_text(folder / "merges.txt", _MOST_OTHER_BYTES, _damaged).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    if not isinstance(vocab, dict):
        raise _damaged(folder / "vocab.json", "it is not a JSON object")
    try:
        return byte_level(vocab, merges, "gpt-2", special=[_END] if _END in vocab else [])
    except ValueError as failure:
        raise _damaged(f"{folder / 'vocab.json'} and merges.txt", failure) from failure


def _damaged(path: Path | str, failure: object) -> ValueError:
    return error(
        ValueError,
        f"{path}: {failure}",
        "a tokenizer is read from complete files as they were published",
        "download the file again",
    )


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_PREFIX = "tokenizer.ggml."


class _ValueType(NamedTuple):
    """The type of a value, or of the items of a list."""

    type: Any
    text: str
    in_list: bool = False


_KINDS = {
    "tokens": _ValueType(str, "a list of texts", in_list=True),
    "merges": _ValueType(str, "a list of texts", in_list=True),
    "token_type": _ValueType(int, "a list of integers", in_list=True),
    "scores": _ValueType((int, float), "a list of numbers", in_list=True),
    **{
        f"{name}_token_id": _ValueType(int, "an integer of 0 or more")
        for name in ("bos", "eos", "unknown", "padding")
    },
    **{
        name: _ValueType(bool, "true or false")
        for name in ("add_bos_token", "add_eos_token", "add_space_prefix")
    },
}
_SPACE = "\u2581"  # how sentencepiece writes a space


def tokenizer_of_gguf(metadata: Json, where: str) -> Tokenizer | None:
    """Return the tokenizer that the metadata of a file describe; None if there is none."""
    kind = metadata.get(f"{_PREFIX}model")
    tokens = metadata.get(f"{_PREFIX}tokens")
    if kind is None or tokens is None:
        return None
    _require_kinds(metadata, where)
    types = metadata.get(f"{_PREFIX}token_type") or [_NORMAL] * len(tokens)
    try:
        if kind == "gpt2":
            inner = _byte_level_of(metadata, tokens, types, where)
        elif kind == "llama":
            inner = _sentencepiece(metadata, tokens, types)
        else:
            raise _unknown(where, f"a tokenizer of the kind {shown(kind)}", ("gpt2", "llama"))
        _begin_and_end(inner, metadata, tokens, starts=kind == "llama")
    except (ValueError, KeyError, IndexError) as failure:
        raise error(
            ValueError,
            f"{where}: its tokenizer does not fit together ({failure})",
            "tokens, merges and scores must be of one tokenizer",
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
            f"{where}: tokenizer.chat_template is {shown(template)}",
            "it must be a text, a template of Jinja",
            "convert the model again",
        )
    return Tokenizer(inner, template, named, where=where, template_where=where)


def _require_kinds(metadata: Json, where: str) -> None:
    """Raise ValueError for a value of the wrong type."""
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
                f"it must be {kind.text}",
                "convert the model again",
            )


def _of_type(tokens: list[str], types: list[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]


def _byte_level_of(metadata: Json, tokens: list[str], types: list[int], where: str) -> object:
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


def _sentencepiece(metadata: Json, tokens: list[str], types: list[int]) -> object:
    """Make BPE from sentencepiece's scores: the pair with the best token is merged first."""
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


def _begin_and_end(inner: Any, metadata: Json, tokens: list[str], starts: bool) -> None:
    """Add the tokens that begin and end a text, as the metadata request."""
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
