"""The tokenizer of a folder: tokenizer.json, or GPT-2's vocab.json and merges.txt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cupyattn.errors import error, shown
from cupyattn.models.extras import extra
from cupyattn.models.tokenizer.byte_level import byte_level
from cupyattn.models.tokenizer.chat_template import MOST_TEMPLATE
from cupyattn.models.tokenizer.panics import panics_as_errors
from cupyattn.models.tokenizer.text import Tokenizer

_END = "<|endoftext|>"


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
    if where.is_file():
        tokenizers = extra("tokenizers", "makes ids of text")
        try:
            with panics_as_errors():
                inner = tokenizers.Tokenizer.from_file(str(where))
        except Exception as failure:  # the package raises no other
            raise _damaged(where, failure) from failure
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
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
    if path.is_file():
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as failure:
            raise _damaged(path, failure) from failure
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
        template = _template(path)
    return {"chat_template": template, "template_where": str(path), "special_tokens": special}


def _template(path: Path) -> str:
    with path.open("rb") as file:
        read = file.read(4 * MOST_TEMPLATE + 1)  # UTF-8 has at most four bytes a character
    if len(read) > 4 * MOST_TEMPLATE:
        raise _damaged(path, f"it has more than the {MOST_TEMPLATE} characters that are read")
    try:
        return read.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as failure:
        raise _damaged(path, f"it is not UTF-8 ({failure})") from failure


def _gpt2(folder: Path) -> Any:
    try:
        vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        if not isinstance(vocab, dict):
            raise ValueError("no JSON object")
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        return byte_level(vocab, merges, "gpt-2", special=[_END] if _END in vocab else [])
    except ValueError as failure:
        raise _damaged(folder / "vocab.json", failure) from failure


def _damaged(path: Path, failure: object) -> ValueError:
    return error(
        ValueError,
        f"{path}: {failure}",
        "a tokenizer is read from whole files as they were published",
        "download the file again",
    )
