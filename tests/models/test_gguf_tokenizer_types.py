"""The metadata of a GGUF tokenizer, each value as another type: an error that names the file."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tokenizers")

from cupyattn.models.tokenizer import tokenizer_of_gguf

TOKENS = ["<unk>", "<s>", "a", "b", "ab", "\u2581"]
WHOLE = {
    "tokens": TOKENS, "token_type": [2, 3, 1, 1, 1, 1], "merges": ["a b"],
    "scores": [0.0, 0.0, -1.0, -2.0, -3.0, -4.0], "bos_token_id": 1, "eos_token_id": 1,
    "unknown_token_id": 0, "padding_token_id": 0, "add_bos_token": True, "add_eos_token": False,
    "add_space_prefix": False, "pre": "smollm",
}  # fmt: skip
WRONG = [
    None, 5, -1, 1e300, True, "x", [], {}, [1], [None], [[1]], ["a"], ["a"] * 6, 2**40,
]  # fmt: skip


def tokenizer(kind: Any, **changes: Any) -> Any:
    given = {"model": kind, **WHOLE, **changes}
    named = {f"tokenizer.ggml.{name}": value for name, value in given.items()}
    return tokenizer_of_gguf(named, "m.gguf")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("key", [*WHOLE, "model"])
def test_metadata_of_another_type_are_refused_by_name(kind, key):
    assert tokenizer(kind).encode("ab") == [1, 4]
    refused = 0
    for value in WRONG:
        try:
            tokenizer(**{"kind": kind, **{"kind" if key == "model" else key: value}})
        except (ValueError, NotImplementedError) as failure:
            refused += 1
            assert "m.gguf: " in str(failure) and str(failure).count("; ") >= 2  # noqa: PT017
    # Some are of the right type; sentencepiece asks for no kind of words.
    assert refused >= (0 if (kind, key) == ("llama", "pre") else len(WRONG) - 3)
