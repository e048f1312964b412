"""The options of attention that the tests go through: each list stands here only."""

from __future__ import annotations

from typing import Any

RUN_TIME_OPTIONS = ("causal", "softmax_scale", "window_size", "q_offset", "seqused_k")
"""Arguments of every kernel but the teaching ones: they cost no compilation."""

SCORE_OPTIONS = ("mask", "bias", "alibi_slopes", "softcap", "sinks", "dropout_p")
"""Compiled into the flash kernels: each combination is a specialisation."""

REFERENCE_OPTIONS = ("rotary", "mask_mod")
"""What no kernel has: nor of mask_mod a Python function, which stands for it here."""

OPTIONS = (*RUN_TIME_OPTIONS, *SCORE_OPTIONS, *REFERENCE_OPTIONS)

OptionSet = dict[str, str]
"""Score options by name; for those that are arrays of numbers, which dtype: the problem's own
("own") or "float32"."""

OPTION_SETS: tuple[OptionSet, ...] = (
    {},
    {"mask": "", "bias": "own", "alibi_slopes": "float32", "dropout_p": ""},
    {"mask": "", "alibi_slopes": "own", "softcap": "", "dropout_p": ""},
    {"mask": "", "softcap": "", "sinks": "own"},
    {"bias": "float32", "alibi_slopes": "float32", "sinks": "float32"},
    {"bias": "own", "softcap": "", "sinks": "float32", "dropout_p": ""},
)
"""Of every two score options: both, either alone, and neither stand in some set."""

ALL_AT_ONCE: tuple[OptionSet, ...] = (
    {"mask": "", "bias": "own", "alibi_slopes": "float32", "softcap": "", "sinks": "own",
     "dropout_p": ""},
    {"mask": "", "bias": "float32", "alibi_slopes": "own", "softcap": "", "sinks": "float32",
     "dropout_p": ""},
)  # fmt: skip
"""Every score option, compiled into one specialisation; the two differ in the dtypes of arrays."""

EITHER_HALF = tuple(((every,), OPTION_SETS) for every in ALL_AT_ONCE)
"""Arguments of `search.wider`: all options at once, and the sets of ``--deep``."""


def every_option(
    dtype: str, heads: int, sq: int, sk: int, bias: tuple[tuple[int, ...], str] | None = None
) -> tuple[tuple[str, Any], ...]:
    """Draw all of the first set of `ALL_AT_ONCE`, for kernels that searches compile anyway.

    Their arrays have to be strided, as those of the searches are.
    """
    return (
        *(("mask", (sq, sk)), ("bias", bias or ((sq, sk), dtype)), ("softcap", 15.0)),
        *(("alibi_slopes", ((heads,), "float32", 1)), ("sinks", dtype), ("dropout_p", 0.1)),
    )
