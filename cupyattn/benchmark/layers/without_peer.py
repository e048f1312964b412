"""Calls of layers that the benchmark does not time, as PyTorch has none: they are modelled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import cupyattn
from cupyattn.benchmark.layers.operation import Source

ITEMS_OF_A_SCALE = 256
"""Of the running means of AdamW in eight bits."""


def eight_bit_step(rows: int, width: int, xp: Any) -> Callable[[], Any]:
    """Return a first step of AdamW whose means are kept in eight bits."""
    source, items = Source(xp, 0), rows * width
    param, grad = (source.normal(items, dtype="float32") for _ in range(2))
    m, v = xp.zeros(items, np.int8), xp.zeros(items, np.uint8)
    scales = [xp.zeros(-(-items // ITEMS_OF_A_SCALE), np.float32) for _ in range(2)]
    return partial(
        cupyattn.adamw_step_8bit, param, grad, m, v, *scales,
        step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1,
    )  # fmt: skip


def biased_softmax_gradient(rows: int, width: int, xp: Any) -> Callable[[], Any]:
    """Return softmax_backward with a bias that all rows share."""
    source = Source(xp, 0)
    x, dout = (source.normal(rows, width, dtype="float16") for _ in range(2))
    bias = source.normal(1, width, dtype="float16")
    out = cupyattn.softmax(x, bias=bias)
    return partial(cupyattn.softmax_backward, dout, out, bias=bias)
