"""Launch-configuration tables: the one place where tile sizes live.

Each module holds the tables of one family of kernels for sm_75 (a row is a key, a configuration and
one line of why) and turns a row into a specialisation. `catalogue` lists them all: what
``python -m cupyattn compile`` builds and what the resource gates of the tests check.
"""

from __future__ import annotations

from collections.abc import Iterator

from cupyattn.kernels.configs import (
    attention,
    attention_backward,
    attention_backward_f32,
    attention_backward_naive,
    attention_backward_passes,
    attention_teaching,
    softmax,
)
from cupyattn.kernels.spec import Specialisation

__all__ = [
    "attention",
    "attention_backward",
    "attention_backward_f32",
    "attention_backward_naive",
    "attention_backward_passes",
    "attention_teaching",
    "catalogue",
    "softmax",
]


def catalogue() -> Iterator[Specialisation]:
    """Yield every row of every table, in each dtype, with vector and with scalar loads."""
    yield from attention_teaching.catalogue()
    yield from attention.catalogue()
    yield from attention_backward.catalogue()
    yield from attention_backward_passes.catalogue()
    yield from attention_backward_f32.catalogue()
    yield from attention_backward_naive.catalogue()
    yield from softmax.catalogue()
