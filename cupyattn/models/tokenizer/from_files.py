"""Tokenizers from a model's files: tokenizer.json, vocab.json with merges.txt, or GGUF."""

from __future__ import annotations

import json
import re
import warnings
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from cupyattn.models.extras import extra
from cupyattn.models.tokenizer.byte_level import KINDS, Words, byte_level
from cupyattn.models.tokenizer.text import MOST_TEMPLATE, Tokenizer, panics_as_errors
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.reading import read_bytes, read_json, read_text

_MOST_BYTES = 256 << 20
"""Largest tokenizer.json: those of 260,000 tokens have 35 MB."""
_MOST_OTHER_BYTES = 32 << 20
"""Largest other file of a tokenizer: they have up to 5 MB."""
_LARGEST_ID = 10**9 - 1
_END = "<|endoftext|>"


class _Class(NamedTuple):
    """How a class of transformers reads vocab.json and merges.txt.

    `named` has the tokens that tokenizer_config.json does not need to name.
    """

    words: Words
    named: dict[str, str]


_AS_GPT2 = _Class(KINDS["gpt-2"], dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END))
_AS_QWEN2 = _Class(KINDS["qwen2"], dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END))
_CLASSES = {
    "GPT2Tokenizer": _AS_GPT2,
    "CodeGenTokenizer": _AS_GPT2,
    "GPTNeoXTokenizer": _Class(
        KINDS["gpt-2"]._replace(composed=True), {**_AS_GPT2.named, "pad_token": "<|padding|>"}
    ),
    "Qwen2Tokenizer": _AS_QWEN2,
}
_OF_MODELS: dict[str | None, str] = {
    None: "GPT2Tokenizer",
    **dict.fromkeys(("gpt2", "phi"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
}
"""The class of a model_type, if the files name none."""


def tokenizer_of_folder(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a folder; None if the folder has no file of one."""
    settings = _Settings.read(folder)
    named = settings.named
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
        where = folder / "vocab.json"
        inner, named = _by_class(folder, settings)
    elif (folder / "tokenizer.model").is_file():
        raise error(
            NotImplementedError,
            f"{folder} has tokenizer.model, a sentencepiece file, but no tokenizer.json",
            "a tokenizer must be tokenizer.json, vocab.json with merges.txt, or in a GGUF file",
            "convert it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    else:
        return None
    begins = settings.given.get("add_bos_token")
    return Tokenizer(
        inner,
        settings.template,
        {name: token for name, token in named.items() if token is not None},
        where=str(where),
        template_where=settings.template_where,
        # It counts more than the post-processor of tokenizer.json, as in transformers before 5 for
        # Llama's classes. Published folders agree in both.
        add_bos_token=begins if isinstance(begins, bool) else None,
    )


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, from which `tokenizer_of_folder` makes it."""
    settings: Json = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.named_tokens}
    if "bos_token" in tokenizer.named_tokens:
        begin = tokenizer.id_of(tokenizer.named_tokens["bos_token"])
        settings["add_bos_token"] = begin in tokenizer.begin_ids
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    for name, text in (
        ("tokenizer.json", tokenizer.inner.to_str()),
        ("tokenizer_config.json", json.dumps(settings, indent=2) + "\n"),
    ):
        (folder / name).write_text(text, encoding="utf-8")


class _Settings(NamedTuple):
    """The settings of a folder's tokenizer.

    Attributes
    ----------
    given : dict
        tokenizer_config.json, with the names of special_tokens_map.json in files of before 2023.
    named : dict from str to str or None
        The special tokens by their names; None is a name that has no token.
    template, template_where : str or None, and str
        The chat template, and its file.
    where : str
        The path of tokenizer_config.json.
    """

    given: Json
    named: dict[str, str | None]
    template: str | None
    template_where: str
    where: str

    @classmethod
    def read(cls, folder: Path) -> _Settings:
        path = folder / "tokenizer_config.json"
        given = _object(path)
        if "added_tokens_decoder" not in given:
            given |= _object(folder / "special_tokens_map.json")
        named: dict[str, str | None] = {}
        for name, token in given.items():
            if name.endswith("_token"):
                content = token.get("content") if isinstance(token, dict) else token
                if content is None or isinstance(content, str):
                    named[name] = content
        return cls(given, named, *_template_of(folder, given), str(path))


def _template_of(folder: Path, given: Json) -> tuple[str | None, str]:
    path = folder / "tokenizer_config.json"
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
    return template, str(path)


def _object(path: Path) -> Json:
    """Read a JSON object, an empty one if there is no such file."""
    given = read_json(path, _MOST_OTHER_BYTES, _damaged) if path.exists() else {}
    if not isinstance(given, dict):
        raise _damaged(path, "it is not a JSON object")
    return given


def _by_class(folder: Path, settings: _Settings) -> tuple[Any, dict[str, str | None]]:
    """Make a tokenizer of vocab.json and merges.txt as its class does; also its named tokens."""
    kind = _class_of(folder, settings)
    vocab = _object(folder / "vocab.json")
    for text, number in vocab.items():
        if type(number) is not int or not 0 <= number <= _LARGEST_ID:
            raise _damaged(folder / "vocab.json", f"{shown(text)} has the number {shown(number)}")
    lines = read_text(folder / "merges.txt", _MOST_OTHER_BYTES, _damaged).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    added = _added_tokens(folder, settings)
    texts = {number: text for text, number in vocab.items()}
    for number, options in added.items():
        text = options["content"]
        if vocab.setdefault(text, number) != number or texts.setdefault(number, text) != text:
            have = f"{shown(text)} is {vocab[text]}, and {number} is {shown(texts.get(number))}"
            raise _damaged(settings.where, f"{shown(text)} is the added token {number}, but {have}")
    named = {name: token for name, token in kind.named.items() if token in vocab} | settings.named
    special = _special_texts(settings, named)
    following = count(max(vocab.values(), default=-1) + 1)
    for text in special:  # as transformers: a token without a number gets the next one
        if text not in vocab:
            vocab[text] = next(following)
    try:
        "".join(vocab).encode("utf-8")
    except UnicodeEncodeError as failure:
        where = f"{folder / 'vocab.json'} or the added tokens"
        raise _damaged(where, f"half of a surrogate pair ({failure})") from failure
    prefix = settings.given.get("add_prefix_space") is True
    try:
        inner = byte_level(vocab, merges, kind.words, add_prefix_space=prefix)
    except ValueError as failure:
        raise _damaged(f"{folder / 'vocab.json'} and merges.txt", failure) from failure
    _add_tokens(inner, added, special)
    return inner, named


def _special_texts(settings: _Settings, named: dict[str, str | None]) -> list[str]:
    """Return the special tokens, each once."""
    given = settings.given
    more = given.get("additional_special_tokens") or given.get("extra_special_tokens")
    listed = [
        each.get("content") if isinstance(each, dict) else each
        for each in (more if isinstance(more, list) else [])
    ]
    if wrong := [each for each in listed if not isinstance(each, str | None)]:
        raise _damaged(settings.where, f"the special token {shown(wrong[0])} is no text")
    return [*dict.fromkeys(each for each in (*named.values(), *listed) if each)]


def _add_tokens(inner: Any, added: dict[int, Json], special: list[str]) -> None:
    tokenizers = extra("tokenizers", "makes ids of text")
    known = {
        options["content"]: tokenizers.AddedToken(
            **{"normalized": options["content"] not in special, **options}
        )
        for options in added.values()
    }
    inner.add_tokens([token for text, token in known.items() if text not in special])
    inner.add_special_tokens([known.get(text, text) for text in special])


def _class_of(folder: Path, settings: _Settings) -> _Class:
    config = _object(folder / "config.json")
    name = settings.given.get("tokenizer_class") or config.get("tokenizer_class")
    model = config.get("model_type")
    what = f"its tokenizer_class is {shown(name)}"
    if name is None and isinstance(model, str | None):
        what = f"no tokenizer_class is named, and model_type is {shown(model)}"
        name = _OF_MODELS.get(model)
    kind = _CLASSES.get(name.removesuffix("Fast")) if isinstance(name, str) else None
    if kind is not None:
        return kind
    raise error(
        NotImplementedError,
        f"{folder} has vocab.json and merges.txt, and {what}",
        f"these two files are read as {', '.join(_CLASSES)}",
        "add tokenizer.json: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
    )


_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _added_tokens(folder: Path, settings: _Settings) -> dict[int, Json]:
    """Return the options of tokenizers.AddedToken for the tokens that vocab.json lacks, by id.

    Tokens of added_tokens.json have no options; it counts if there is no added_tokens_decoder.
    """
    where, given = settings.where, settings.given.get("added_tokens_decoder")
    if given is None:
        where = str(folder / "added_tokens.json")
        plain = _object(Path(where)).items()
        pairs: list[tuple[Any, Any]] = [(number, {"content": token}) for token, number in plain]
    elif isinstance(given, dict):
        pairs = [*given.items()]
    else:
        raise _damaged(where, f"added_tokens_decoder is {shown(given)}, which is not a JSON object")
    found: dict[int, Json] = {}
    for key, token in pairs:
        number = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,9}", key) else key
        text = token.get("content") if isinstance(token, dict) else None
        sound = type(number) is int and number >= 0 and number not in found
        if not sound or not isinstance(text, str) or not text:
            raise _damaged(where, f"the added token {shown(key)} is {shown(token)}")
        flags = {name: token[name] for name in _FLAGS if type(token.get(name)) is bool}
        found[number] = {"content": text, **flags}
    return found


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


def require_known_tokenizer(metadata: Json, where: str) -> None:
    """Raise NotImplementedError for a GGUF file's tokenizer of a kind without code."""
    kind, words = metadata.get(f"{_PREFIX}model"), metadata.get(f"{_PREFIX}pre")
    if kind is None or metadata.get(f"{_PREFIX}tokens") is None:
        return
    if kind not in ("gpt2", "llama"):
        raise _unknown(where, f"a tokenizer of the kind {shown(kind)}", ("gpt2", "llama"))
    if kind == "gpt2" and words is not None and not (isinstance(words, str) and words in KINDS):
        raise _unknown(where, f"byte-level BPE of the kind {shown(words)}", tuple(KINDS))


def tokenizer_of_gguf(metadata: Json, where: str) -> Tokenizer | None:
    """Return the tokenizer that the metadata of a file describe; None if there is none."""
    kind = metadata.get(f"{_PREFIX}model")
    tokens = metadata.get(f"{_PREFIX}tokens")
    if kind is None or tokens is None:
        return None
    require_known_tokenizer(metadata, where)
    _require_kinds(metadata, where)
    types = metadata.get(f"{_PREFIX}token_type") or [_NORMAL] * len(tokens)
    try:
        if kind == "gpt2":
            words = _words_of(metadata, where)
            inner, starts = _byte_level_of(metadata, tokens, types, words), words.begun
        else:
            inner, starts = _sentencepiece(metadata, tokens, types), True
        _begin_and_end(inner, metadata, tokens, starts)
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


def _words_of(metadata: Json, where: str) -> Words:
    kind = metadata.get(f"{_PREFIX}pre")
    if kind is None:
        warnings.warn(
            f"{where} does not name the way to cut text into words (tokenizer.ggml.pre), as files "
            "from before May 2024; 'default' is used, as in llama.cpp, and answers may be worse; "
            "convert the model again",
            stacklevel=2,
        )
    return KINDS[kind or "default"]


def _byte_level_of(metadata: Json, tokens: list[str], types: list[int], words: Words) -> object:
    return byte_level(
        {token: number for number, token in enumerate(tokens)},
        metadata[f"{_PREFIX}merges"],
        words,
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
        "load the folder that the file was made from, with its tokenizer.json",
    )
