"""A kernel of the library, by its name and some macros."""

from __future__ import annotations

import pytest

from cupyattn import turing


def test_the_row_has_the_macros():
    found = turing.row("attention_tiled", DTYPE="float32", HEAD_DIM=64)
    assert found.spec.entry == "attention_tiled"
    assert {"DTYPE": "float32", "HEAD_DIM": 64}.items() <= found.defines.items()


@pytest.mark.parametrize(
    ("entry", "macros", "message"),
    [
        ("attention_fwd", {}, "no kernel 'attention_fwd'; near it are .*attention"),
        ("x", {}, "no kernel 'x'; .*lists them"),
        ("attention_forward", {"HEAD_DIM": 63}, r"no row with \{'HEAD_DIM': 63\}; .*64"),
    ],
)
def test_what_is_not_there_is_told(entry, macros, message):
    with pytest.raises(ValueError, match=message):
        turing.row(entry, **macros)
