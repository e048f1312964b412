"""The tokenizer of a folder: tokenizer.json, or GPT-2's vocab.json and merges.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cupyattn.models.extras import extra
from cupyattn.models.tokenizer.byte_level import byte_level
from cupyattn.models.tokenizer.chat_template import MOST_TEMPLATE
from cupyattn.models.tokenizer.panics import panics_as_errors
from cupyattn.models.tokenizer.text import Tokenizer
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.reading import read_bytes, read_json, read_text

_END = "<|endoftext|>"
_MOST_BYTES = 256 << 20
"""Largest tokenizer.json: those of 260,000 tokens have 35 MB."""
_MOST_OTHER_BYTES = 32 << 20
"""Largest other file of a tokenizer: they have up to 5 MB."""


def tokenizer_of_folder(folder: Path) -> Tokenizer | None:
    """Read the tokenizer of a folder; None if the folder has no file of one.

    Raises
    ------
    ValueError
        If its files are damaged.
    NotImplementedError
        If it is of a kind that is not read.
    """
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
            f"{folder} has tokenizer.model, a sentencepiece file, and no tokenizer.json",
            "tokenizers are read from tokenizer.json, or vocab.json with merges.txt, or GGUF files",
            "have transformers write it: AutoTokenizer.from_pretrained(folder)"
            ".save_pretrained(folder)",
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


def _settings(folder: Path) -> dict[str, Any]:
    """Return the chat template and the named tokens of tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    given: Any = {}
    if path.exists():
        given = read_json(path, _MOST_OTHER_BYTES, _damaged)
        if not isinstance(given, dict):
            raise _damaged(path, "no JSON object")
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
        raise _damaged(path, f"chat_template is {shown(template)}, which is no text")
    if (folder / "chat_template.jinja").is_file():
        path = folder / "chat_template.jinja"
        template = read_text(path, 4 * MOST_TEMPLATE, _damaged)
    return {"chat_template": template, "template_where": str(path), "special_tokens": special}


def _gpt2(folder: Path) -> Any:
    vocab = read_json(folder / "vocab.json", _MOST_OTHER_BYTES, _damaged)
    lines = read_text(folder / "merges.txt", _MOST_OTHER_BYTES, _damaged).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    if not isinstance(vocab, dict):
        raise _damaged(folder / "vocab.json", "no JSON object")
    try:
        return byte_level(vocab, merges, "gpt-2", special=[_END] if _END in vocab else [])
    except ValueError as failure:
        raise _damaged(f"{folder / 'vocab.json'} and merges.txt", failure) from failure


def _damaged(path: Path | str, failure: object) -> ValueError:
    return error(
        ValueError,
        f"{path}: {failure}",
        "a tokenizer is read from whole files as they were published",
        "download the file again",
    )
