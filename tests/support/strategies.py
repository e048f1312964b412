"""Attention cases for the library's own kernels: which specialisations a search compiles.

The lists of attention's options are here only, and few combinations of several lists in which any
two values of different lists meet. Also one small case with every option in a form that makes a
difference to it, and cases with rotary embedding in each form that kernels tell apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.devices import KERNELS, dtype_of, placed
from support.search import Search

import cupyattn
from cupyattn import Rotary, ScoreMod
from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.tables import pairs
from cupyattn.testing import AttentionCase, attention_cases
from cupyattn.testing.attention import HEAD_DIMS, OPTION_VIEWS, VIEWS

RUN_TIME_OPTIONS = ("causal", "softmax_scale", "window_size", "q_offset", "seqused_k")
"""Arguments of every kernel but the teaching ones: they cost no compilation."""

SCORE_OPTIONS = ("mask", "bias", "alibi_slopes", "softcap", "sinks", "dropout_p")
"""Compiled into the flash kernels: each combination is a specialisation."""

REFERENCE_OPTIONS = ("rotary", "mask_mod")
"""Options that no kernel has in this form: mask_mod is a Python function."""

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
"""Any two score options: both, either alone, and neither are in some set."""

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


def attention_kernels(
    head_dims: Sequence[Any],
    dtypes: Sequence[str],
    option_sets: Sequence[Any],
    views: Sequence[str],
    option_views: Sequence[str],
) -> list[tuple[Any, ...]]:
    """Which specialisations a search draws from: one of each list, of views all of one load.

    A GPU, and a search of as many examples as were asked for, go through all combinations.
    """
    loads = _groups(views, "sliced"), _groups(option_views, "padded")
    combine = itertools.product if device_count() or Search.examples else pairs
    return list(combine(head_dims, dtypes, option_sets, *loads))


def _groups(views: Sequence[str], other: str) -> list[tuple[str, ...]]:
    """The views but one, and that one, which needs another load: those that there are."""
    groups = (tuple(v for v in views if (v == other) == is_other) for is_other in (False, True))
    return [group for group in groups if group]


LONGEST = 300
"""Past two tiles of every kernel: only there do options cut tiles between others."""
_EVERYTHING = Search.deep or device_count() > 0
FRUGAL: dict[str, Any] = {
    "views": VIEWS if _EVERYTHING else tuple(view for view in VIEWS if view != "sliced"),
    "option_views": OPTION_VIEWS if _EVERYTHING else ("strided",),
    "crowd": 3 if _EVERYTHING else 2,
}
"""Arguments of `attention_problems` for kernels on the emulator: arrays that one specialisation
serves, and fewer CTAs. Rows of single items and scores of four keys are specialisations of their
own; each has tests of its own, and with ``--deep`` every test has both."""


@st.composite
def attention_problems(
    draw: st.DrawFn,
    *,
    head_dims: Sequence[tuple[int, int]] = HEAD_DIMS,
    dtypes: Sequence[str] = ("float16", "float32"),
    options: Iterable[str] = OPTIONS,
    option_sets: Sequence[OptionSet] = ({},),
    views: Sequence[str] = VIEWS,
    option_views: Sequence[str] = OPTION_VIEWS,
    **more: Any,
) -> AttentionCase:
    """Draw `attention_cases` of the specialisations that this run searches.

    For a kernel, `option_sets` names the options that are compiled into it: subsets of them would
    be a specialisation each.
    """
    kernels = attention_kernels(head_dims, dtypes, option_sets, views, option_views)
    head_dim, dtype, of_set, views, option_views = draw(st.sampled_from(kernels))
    return draw(
        attention_cases(
            head_dims=[head_dim],
            dtypes=[dtype],
            options=options,
            required=of_set,
            views=views,
            option_views=option_views,
            **more,
        )
    )


B, SQ, SK, H, G, D, DV = 2, 5, 7, 4, 2, 8, 6
BASE = AttentionCase(B=B, Sq=SQ, Sk=SK, H=H, G=G, D=D, Dv=DV)
ANGLES = np.outer(np.arange(20), [1.0, 0.3]).astype(np.float32)
POSITIONS = np.arange(SQ)[:, None] + SK - SQ
EVERY_OPTION: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "softmax_scale": {"softmax_scale": 0.9},
    "window_size": {"window_size": (2, 1)},
    "q_offset": {"q_offset": 1, "window_size": (3, None)},
    "q_offset array": {"q_offset": np.array([0, 3]), "window_size": (3, None)},
    "seqused_k": {"seqused_k": np.array([6, SQ])},
    "mask": {"mask": BASE.normal("mask", (H, SQ, SK)) > -0.5},
    "bias": {"bias": BASE.normal("bias", (B, 1, SQ, SK))},
    "alibi_slopes": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": BASE.normal("sinks", (H,))},
    "dropout_p": {"dropout_p": 0.3, "seed": 5},
    "rotary": {"rotary": (np.cos(ANGLES), np.sin(ANGLES))},
    "score_mod": {
        "score_mod": ScoreMod(
            "1.5f * score + turn[h] * (q_idx - k_idx)",
            python=(
                lambda score, b, h, i, j, turn: 1.5 * score + turn[h] * (i - j),
                lambda score, grad, b, h, i, j, turn: 1.5 * grad,
            ),
            turn=np.array([0.5, -0.25, 0.125, 0.5], np.float32),
        )
    },
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j + h + b) % 4 != 0},
}


CHUNK = 8
"""Items of float16 in a vector: the tensor-core kernel rotates whole ones itself."""


@dataclass(frozen=True)
class RotaryProblem(AttentionCase):
    """A problem whose rotary option, if it was drawn, is a `Rotary` of this kind."""

    interleaved: bool = False
    table: str = "float32"
    spare: int = 0
    """Columns of NaN after those of each table: from 1 on rows are aligned to items only."""

    def _option(self, name: str, value: Any) -> dict[str, Any]:
        option = super()._option(name, value)
        if name != "rotary":
            return option
        return {name: Rotary(*map(self._table, option[name]), self.interleaved)}

    def _table(self, table: np.ndarray) -> np.ndarray:
        columns = table.shape[1]
        wide = np.full((len(table), columns + self.spare), np.nan, dtype_of(self.table))
        wide[:, :columns] = table
        return wide[:, :columns]

    def turned(self) -> tuple[np.ndarray, np.ndarray]:
        """Rotated q and k, by `rope` on the device."""
        q, k, _ = self.arrays()
        options = self.keywords()
        used = options.get("seqused_k", np.full(self.B, self.Sk))
        offset = np.broadcast_to(options.get("q_offset", used - self.Sq), (self.B,))
        turned = []
        for x, first in ((q, offset), (k, np.zeros_like(offset))):
            positions = np.arange(x.shape[1]) + np.asarray(first)[:, None]
            with KERNELS.running():
                result = cupyattn.rope(
                    KERNELS.put(x), *placed(KERNELS, tuple(options["rotary"][:2])),
                    positions=KERNELS.put(positions), interleaved=self.interleaved,
                )  # fmt: skip
            turned.append(KERNELS.get(result))
        return turned[0], turned[1]
