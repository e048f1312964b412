"""Folders of vocab.json and merges.txt: tokenizers of each class, as transformers makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from cupyattn.models.tokenizer import tokenizer_of_folder, write_tokenizer

PRINT = [*range(33, 127), *range(161, 173), *range(174, 256)]
MERGES = [
    "h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "12 3", "Ġ Ġ", "ĠĠ ĠĠ", "Ã ©",
    "Ċ Ċ", "' s",
]  # fmt: skip
BYTES = [*map(chr, PRINT), *map(chr, range(256, 256 + 256 - len(PRINT)))]
VOCAB = {token: at for at, token in enumerate([*BYTES, *(m.replace(" ", "") for m in MERGES)])}
NEXT = len(VOCAB)


def added(content: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "normalized", "rstrip", "single_word")
    return {"content": content, **dict.fromkeys(names, False), "special": True, **flags}


def numbered(*tokens: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {str(number): token for number, token in enumerate(tokens, NEXT)}


QWEN = [
    added("<|endoftext|>"), added("<|im_start|>"), added("<|im_end|>"),
    added("<tool>", special=False),
]  # fmt: skip
TURNS = ["<|im_start|>", "<|im_end|>"]
FOLDERS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "config.json": {"model_type": "qwen2"},
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": numbered(*QWEN),
            "eos_token": "<|im_end|>", "bos_token": None, "pad_token": "<|endoftext|>",
            "unk_token": None, "add_prefix_space": False, "additional_special_tokens": TURNS,
        },
    },
    "qwen2 of 2024": {
        "config.json": {"model_type": "qwen2"},
        "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"},
        "added_tokens.json": {token["content"]: NEXT + at for at, token in enumerate(QWEN)},
        "special_tokens_map.json": {
            "eos_token": added("<|im_end|>"), "additional_special_tokens": TURNS,
        },
    },
    "qwen2 with a space first": {
        "config.json": {"model_type": "qwen2"},
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2TokenizerFast", "added_tokens_decoder": numbered(*QWEN),
            "add_prefix_space": True,
        },
    },
    "model_type alone": {
        "config.json": {"model_type": "qwen2"}, "added_tokens.json": {"<|endoftext|>": NEXT},
    },
    "phi": {
        "config.json": {"model_type": "phi"},
        "tokenizer_config.json": {"tokenizer_class": "CodeGenTokenizer"},
        "added_tokens.json": {
            "<|endoftext|>": NEXT, "  ": NEXT + 1, "    ": NEXT + 2, "\t\t": NEXT + 3,
        },
    },
    "gpt2 with more tokens": {
        "config.json": {"model_type": "gpt2"},
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<s>", "add_prefix_space": True, "add_bos_token": True,
        },
    },
    "flags": {
        "config.json": {"model_type": "gpt2"},
        "tokenizer_config.json": {
            "added_tokens_decoder": numbered(
                added("<|endoftext|>"), added("<m>", lstrip=True, rstrip=True),
                added("éx", normalized=True, special=False),
                added("for", single_word=True, special=False),
            ),
        },
    },
    "neox": {
        "config.json": {"model_type": "gpt_neox"},
        "tokenizer_config.json": {"tokenizer_class": "GPTNeoXTokenizerFast"},
        "added_tokens.json": {"<|endoftext|>": NEXT, "<|padding|>": NEXT + 1},
    },
}  # fmt: skip
TEXTS = [
    "hello wor 1234 it's IT'S we'll",
    "e\u0301 \u00e9x  a\n\n\n  b \u00bd \u0663",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|><tool> wor",
    "  \t\t     x  <m> for forx\r\n",
    "\u65e5\U0001f642 a <s></s>",
    "",
]


def written(folder: Path, name: str, **changes: Any) -> Path:
    """Write the files of a folder; `changes` are of tokenizer_config.json."""
    files = {"vocab.json": VOCAB, **FOLDERS[name]}
    files["tokenizer_config.json"] = {**files.get("tokenizer_config.json", {}), **changes}
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    lines = "\n".join(["#version: 0.2", *MERGES, ""])
    (folder / "merges.txt").write_text(lines, encoding="utf-8")
    return folder


EXPECTED = {
    "qwen2": [
        [259, 262, 220, 16, 17, 18, 19, 220, 72, 83, 269, 220, 40, 51, 6, 50, 260, 68, 6, 257],
        [267, 220, 267, 87, 220, 220, 64, 268, 198, 220, 220, 65, 220, 126, 121, 220, 149, 96],
        [271, 84, 82, 68, 81, 198, 259, 272, 198, 270, 273, 262],
        [
            265, 197, 197, 266, 220, 87, 220, 220, 27, 76, 29, 220, 69, 261, 220, 69, 261, 87,
            201, 198,
        ],
        [162, 245, 98, 172, 253, 247, 224, 220, 64, 220, 27, 82, 29, 27, 14, 82, 29],
        [],
    ],
    "qwen2 of 2024": [
        [259, 262, 220, 16, 17, 18, 19, 220, 72, 83, 269, 220, 40, 51, 6, 50, 260, 68, 6, 257],
        [267, 220, 267, 87, 220, 220, 64, 268, 198, 220, 220, 65, 220, 126, 121, 220, 149, 96],
        [271, 84, 82, 68, 81, 198, 259, 272, 198, 270, 273, 262],
        [
            265, 197, 197, 266, 220, 87, 220, 220, 27, 76, 29, 220, 69, 261, 220, 69, 261, 87,
            201, 198,
        ],
        [162, 245, 98, 172, 253, 247, 224, 220, 64, 220, 27, 82, 29, 27, 14, 82, 29],
        [],
    ],
    "qwen2 with a space first": [
        [
            220, 259, 262, 220, 220, 16, 220, 17, 220, 18, 220, 19, 220, 72, 83, 220, 269, 220,
            40, 51, 220, 6, 50, 260, 68, 220, 6, 257,
        ],
        [
            220, 267, 220, 267, 87, 220, 220, 64, 220, 268, 198, 220, 220, 65, 220, 220, 126,
            121, 220, 220, 149, 96,
        ],
        [271, 220, 84, 82, 68, 81, 220, 198, 220, 259, 272, 220, 198, 270, 273, 262],
        [
            265, 197, 197, 266, 220, 87, 220, 220, 27, 220, 76, 220, 29, 220, 69, 261, 220, 69,
            261, 87, 220, 201, 198,
        ],
        [
            220, 162, 245, 98, 220, 172, 253, 247, 224, 220, 64, 220, 27, 220, 82, 220, 29, 27,
            14, 220, 82, 220, 29,
        ],
        [],
    ],
    "model_type alone": [
        [259, 262, 220, 16, 17, 18, 19, 220, 72, 83, 269, 220, 40, 51, 6, 50, 260, 68, 6, 257],
        [267, 220, 267, 87, 220, 220, 64, 268, 198, 220, 220, 65, 220, 126, 121, 220, 149, 96],
        [
            27, 91, 72, 76, 62, 82, 83, 64, 81, 83, 91, 29, 84, 82, 68, 81, 198, 259, 27, 91,
            72, 76, 62, 68, 77, 67, 91, 29, 198, 270, 27, 83, 78, 78, 75, 29, 262,
        ],
        [
            265, 197, 197, 266, 220, 87, 220, 220, 27, 76, 29, 220, 69, 261, 220, 69, 261, 87,
            201, 198,
        ],
        [162, 245, 98, 172, 253, 247, 224, 220, 64, 220, 27, 82, 29, 27, 14, 82, 29],
        [],
    ],
    "phi": [
        [259, 262, 220, 264, 19, 220, 72, 83, 269, 220, 40, 51, 6, 50, 260, 68, 6, 257],
        [68, 136, 223, 220, 267, 87, 271, 64, 268, 198, 271, 65, 220, 126, 121, 220, 149, 96],
        [
            27, 91, 72, 76, 62, 82, 83, 64, 81, 83, 91, 29, 84, 82, 68, 81, 198, 259, 27, 91,
            72, 76, 62, 68, 77, 67, 91, 29, 198, 270, 27, 83, 78, 78, 75, 29, 262,
        ],
        [271, 273, 272, 220, 87, 271, 27, 76, 29, 220, 69, 261, 220, 69, 261, 87, 201, 198],
        [162, 245, 98, 172, 253, 247, 224, 220, 64, 220, 27, 82, 29, 27, 14, 82, 29],
        [],
    ],
    "gpt2 with more tokens": [
        [
            270, 220, 259, 262, 220, 264, 19, 220, 72, 83, 269, 220, 40, 51, 6, 50, 260, 68, 6,
            257,
        ],
        [
            270, 220, 68, 136, 223, 220, 267, 87, 220, 220, 64, 268, 198, 220, 220, 65, 220,
            126, 121, 220, 149, 96,
        ],
        [
            270, 220, 27, 91, 72, 76, 62, 82, 83, 64, 81, 83, 91, 29, 84, 82, 68, 81, 198, 259,
            27, 91, 72, 76, 62, 68, 77, 67, 91, 29, 198, 27, 91, 68, 77, 67, 78, 69, 83, 68, 87,
            83, 91, 29, 27, 83, 78, 78, 75, 29, 262,
        ],
        [
            270, 265, 197, 197, 266, 220, 87, 220, 220, 27, 76, 29, 220, 69, 261, 220, 69, 261,
            87, 201, 198,
        ],
        [270, 220, 162, 245, 98, 172, 253, 247, 224, 220, 64, 220, 270, 271],
        [270],
    ],
    "flags": [
        [259, 262, 220, 264, 19, 220, 72, 83, 269, 220, 40, 51, 6, 50, 260, 68, 6, 257],
        [
            68, 136, 223, 220, 272, 220, 220, 64, 268, 198, 220, 220, 65, 220, 126, 121, 220,
            149, 96,
        ],
        [
            27, 91, 72, 76, 62, 82, 83, 64, 81, 83, 91, 29, 84, 82, 68, 81, 198, 259, 27, 91,
            72, 76, 62, 68, 77, 67, 91, 29, 198, 270, 27, 83, 78, 78, 75, 29, 262,
        ],
        [265, 197, 197, 266, 220, 87, 271, 273, 220, 69, 261, 87, 201, 198],
        [162, 245, 98, 172, 253, 247, 224, 220, 64, 220, 27, 82, 29, 27, 14, 82, 29],
        [],
    ],
    "neox": [
        [259, 262, 220, 264, 19, 220, 72, 83, 269, 220, 40, 51, 6, 50, 260, 68, 6, 257],
        [267, 220, 267, 87, 220, 220, 64, 268, 198, 220, 220, 65, 220, 126, 121, 220, 149, 96],
        [
            27, 91, 72, 76, 62, 82, 83, 64, 81, 83, 91, 29, 84, 82, 68, 81, 198, 259, 27, 91,
            72, 76, 62, 68, 77, 67, 91, 29, 198, 270, 27, 83, 78, 78, 75, 29, 262,
        ],
        [
            265, 197, 197, 266, 220, 87, 220, 220, 27, 76, 29, 220, 69, 261, 220, 69, 261, 87,
            201, 198,
        ],
        [162, 245, 98, 172, 253, 247, 224, 220, 64, 220, 27, 82, 29, 27, 14, 82, 29],
        [],
    ],
}  # fmt: skip
"""The ids of AutoTokenizer of transformers 5.24.0 for each folder and text."""
NAMED = {
    "qwen2": {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
    "qwen2 of 2024": {"eos": "<|im_end|>", "unk": "<|endoftext|>", "pad": "<|endoftext|>"},
    "qwen2 with a space first": dict.fromkeys(("eos", "unk", "pad"), "<|endoftext|>"),
    "model_type alone": dict.fromkeys(("eos", "unk", "pad"), "<|endoftext|>"),
    "phi": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "gpt2 with more tokens": {"bos": "<s>", "eos": "</s>", "unk": "<s>"},
    "flags": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "neox": {**dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"), "pad": "<|padding|>"},
}
"""Its special_tokens_map."""


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_of_a_class_are_those_of_transformers(tmp_path, name):
    tokenizer = tokenizer_of_folder(written(tmp_path, name))
    for text, ids in zip(TEXTS, EXPECTED[name], strict=True):
        assert tokenizer.encode(text) == ids, text
    assert tokenizer.named_tokens == {f"{key}_token": token for key, token in NAMED[name].items()}
    known = tokenizer.id_of("<|im_end|>") is not None
    assert ("<|im_end|>" in tokenizer.decode(tokenizer.encode(TEXTS[2]))) != known


@pytest.mark.parametrize("name", FOLDERS)
def test_a_tokenizer_of_a_class_is_written_as_tokenizer_json(tmp_path, name):
    tokenizer = tokenizer_of_folder(written(tmp_path, name))
    (tmp_path / "new").mkdir()
    write_tokenizer(tokenizer, tmp_path / "new")
    again = tokenizer_of_folder(tmp_path / "new")
    assert [again.encode(text) for text in TEXTS] == EXPECTED[name]


def test_a_token_keeps_the_number_that_the_files_give(tmp_path):
    """Numbers may have gaps, which transformers closes: then tokens are not the model's."""
    tokens = {str(NEXT + 5): added("<m>"), str(NEXT + 9): added("<|endoftext|>")}
    folder = written(tmp_path, "flags", added_tokens_decoder=tokens, pad_token="<pad>")
    tokenizer = tokenizer_of_folder(folder)
    assert tokenizer.encode("<m><pad><|endoftext|>") == [NEXT + 5, NEXT + 10, NEXT + 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, "its tokenizer_class is 'LlamaTokenizer'; "),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "is 'PreTrainedTokenizerFast'; these two"),
        (
            {"tokenizer_class": ["x"]},
            r"its tokenizer_class is \['x'\]; these two files are read as",
        ),
        ({"model_type": "llama"}, "no tokenizer_class is named, and model_type is 'llama'; these"),
        ({"model_type": 5}, "its tokenizer_class is None; "),
        ({"tokenizer_class": "XTokenizer", "model_type": "gpt2"}, "tokenizer_class is 'XTokenizer"),
    ],
)
def test_an_unknown_class_is_refused_by_name(tmp_path, changes, message):
    config = {key: value for key, value in changes.items() if key == "model_type"}
    written(tmp_path, "phi", tokenizer_class=changes.get("tokenizer_class"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match=message) as caught:
        tokenizer_of_folder(tmp_path)
    assert "save_pretrained(folder)" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("vocab.json", {**VOCAB, "a": "x"}),
        ("vocab.json", {**VOCAB, "a": -1}),
        ("vocab.json", {**VOCAB, "a": 1 << 32}),
        ("vocab.json", {**VOCAB, "\ud800": NEXT}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<a>", 5]}),
        ("tokenizer_config.json", {"added_tokens_decoder": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": added("<a>")}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(NEXT): "<a>"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(NEXT): {"content": 5}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": added("<a>")}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(NEXT): added("hello")}}),
        ("added_tokens.json", ["<a>"]),
        ("added_tokens.json", {"<a>": "x"}),
        ("added_tokens.json", {"<a>": NEXT, "<b>": NEXT}),
        ("special_tokens_map.json", []),
        ("config.json", []),
    ],
)
def test_files_of_a_class_that_are_damaged(tmp_path, file, content):
    written(tmp_path, "phi", tokenizer_class="GPT2Tokenizer")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"\.json.*: .*download the file again"):
        tokenizer_of_folder(tmp_path)
