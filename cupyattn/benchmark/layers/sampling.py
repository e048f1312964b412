"""Sampling in the benchmark of layers: one row, as in decoding, and a batch, each filter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyattn.benchmark.layers import array_code
from cupyattn.benchmark.layers.operation import Arrays, Operation, Size, Source

_VOCABULARY = 128_256  # of Llama 3
_ROWS = (1, 64)
_TOP_K, _TOP_P = 50, 0.9


def _logits(size: Size, source: Source) -> Arrays:
    """Make logits of which top-p keeps some hundred tokens, as it does of a language model's."""
    logits = source.normal(size.rows, size.width, dtype=size.dtype)
    logits *= 4
    return (logits,)


def _drawn(torch: Any, logits: Any) -> Any:
    return torch.multinomial(torch.softmax(logits.float(), -1), 1)[:, 0]


def _drawn_of_top_k(torch: Any, logits: Any) -> Any:
    largest, tokens = torch.topk(logits, min(_TOP_K, logits.shape[-1]), -1)
    return tokens.gather(-1, _drawn(torch, largest)[:, None])[:, 0]


def _drawn_of_top_p(torch: Any, logits: Any) -> Any:
    ordered, tokens = torch.sort(logits.float(), -1, descending=True)
    probabilities = torch.softmax(ordered, -1)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before >= _TOP_P, 0)
    return tokens.gather(-1, torch.multinomial(kept, 1))[:, 0]


def _operation(
    name: str, rows: int, torch: Callable[..., Any], options: Mapping[str, Any]
) -> Operation:
    return Operation(
        f"sample {name}, {rows} row{'s' if rows > 1 else ''}",
        "sample",
        _logits,
        torch,
        1,
        None,
        options=options,
        tolerance=np.inf,  # another generator; and of equal logits PyTorch takes any
        composed=array_code.argmax if name == "greedy" else None,
        shape=(rows, _VOCABULARY),
    )


SAMPLING = tuple(
    _operation(name, rows, torch, {"seed": 1, **options})
    for rows in _ROWS
    for name, torch, options in (
        ("greedy", lambda torch, logits: torch.argmax(logits, -1), {"temperature": 0}),
        ("all", _drawn, {}),
        ("top-k", _drawn_of_top_k, {"top_k": _TOP_K}),
        ("top-p", _drawn_of_top_p, {"top_p": _TOP_P}),
    )
)
"""Beside what others take for it: argmax, multinomial of a softmax, topk, sort."""
