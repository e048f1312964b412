"""The options of attention that the tests go through: each list stands here only."""

from __future__ import annotations

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

EITHER_HALF = (
    ((OPTION_SETS[1], OPTION_SETS[3]), (*OPTION_SETS[::2], OPTION_SETS[5])),
    ((OPTION_SETS[2], OPTION_SETS[4]), (*OPTION_SETS[:2], *OPTION_SETS[3::2])),
)
"""For `search.wider`, twice: two sets in which each score option stands, and the others."""
