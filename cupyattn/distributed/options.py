"""The options of a ring's calls, cut for each call, and their description for other ranks.

Masks and biases have a number for each score. A rank passes the rows of its own queries and the
columns of all keys; a call takes a part of both. An expression counts queries and keys from the
beginning of a call, and gets the offsets of both in the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from cupyattn import BlockMask, MaskMod, ScoreMod
from cupyattn.distributed.group import fingerprint
from cupyattn.distributed.placement import Placement
from cupyattn.distributed.plan import AttentionCall
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy

_AT = "ring_at"


def with_four_axes(array: Array) -> Array:
    """Return a mask or a bias as (B, H, S, Sk), with 1 where it does not vary."""
    return array[(None,) * (4 - array.ndim)]


def place_of(array: Array, call: AttentionCall, placement: Placement) -> tuple[slice, ...]:
    """Return the index of a call's scores in a mask or a bias of four axes."""
    start, count = call.key_starts[0], call.keys.stop - call.keys.start
    columns = slice(start, start + count * placement.step, placement.step)
    return (
        slice(None),
        slice(None),
        call.queries.slice if array.shape[2] > 1 else slice(None),
        columns if array.shape[3] > 1 else slice(None),
    )


def blocks_of(
    of_whole: BlockMask, mask_mod: object, call: AttentionCall, placement: Placement
) -> Any:
    """Return the block mask of a call; `mask_mod` has the call's offsets already.

    A tile that reaches beyond a piece is still valid within it. Where a piece begins inside a tile,
    and for striped tokens, the mask_mod alone decides.
    """
    rows, keys = (part.stop - part.start for part in (call.queries, call.keys))
    starts = call.query_starts[0], call.key_starts[0]
    if placement.step > 1 or any(start % of_whole.tile[0] for start in starts):
        return mask_mod
    down, across = (
        slice(start // side, -(-(start + count) // side))
        for start, count, side in zip(starts, (rows, keys), of_whole.tile, strict=True)
    )
    tiles = of_whole.tiles[:, :, down, across]
    xp = np if isinstance(tiles, np.ndarray) else load_cupy()
    batch, heads = of_whole.shape[:2]
    blocks = of_whole.blocks._replace(shape=(batch, heads, rows, keys), q_offset=None)
    return BlockMask(mask_mod, blocks, xp.ascontiguousarray(tiles))


class ScoreOffsets(NamedTuple):
    """The position of a call's scores in the whole."""

    at: Array
    """(3, n): sequence, position of the first query and of the first key; n is 1, or for packed
    sequences how many there are."""
    packed: bool
    step: int
    """How many positions lie between two neighbours."""

    def __call__(self, b: object, q_idx: Any, k_idx: Any) -> tuple[Any, Any, Any]:
        """Return the indices of scores in the whole from those in the call."""
        batch, query, key = (row[b if self.packed else 0] for row in self.at)
        return b + batch, query + self.step * q_idx, key + self.step * k_idx


def moved(given: Any, places: ScoreOffsets) -> Any:
    """Return the score_mod or mask_mod of a call from that of the whole sequences.

    In C++ the expression is the body of a function of the names that it has, so that these mean
    the whole. What of it changes from call to call is an array: kernels are compiled once.
    """
    if not isinstance(given, ScoreMod | MaskMod):
        return None if given is None else _moved_function(given, places)
    name = _AT
    while name in given.arrays:
        name += "_"
    item = "b" if places.packed else "0"
    arguments = (
        f"b + {name}[0][{item}]",
        f"{name}[1][{item}] + {places.step} * q_idx",
        f"{name}[2][{item}] + {places.step} * k_idx",
    )

    def expression(text: str, shown_as: str) -> str:
        return (
            "[&](const int b, const int q_idx, const int k_idx) { return\n"
            f'#line 1 "{shown_as}"\n{text}\n;}}({", ".join(arguments)})'
        )

    def function(of_whole: Callable[..., Any]) -> object:
        return _moved_function(of_whole, places, name)

    return given._rewritten(expression, function, {**given.arrays, name: places.at})


def _moved_function(
    of_whole: Callable[..., object], places: ScoreOffsets, unknown: str = ""
) -> object:
    """Return a Python function of a call's scores; `unknown` is an array that it does not take."""

    @wraps(of_whole)  # errors name the user's
    def of_call(*operands: object, **arrays: object) -> object:
        *others, b, h, q_idx, k_idx = operands
        arrays.pop(unknown, None)
        b, q_idx, k_idx = places(b, q_idx, k_idx)
        return of_whole(*others, b, h, q_idx, k_idx, **arrays)

    return of_call


ARRAYS = ("seqused_k", "mask", "bias", "alibi_slopes", "sinks")
"""The options that are arrays, apart from tables and from what expressions name."""
OF_ROWS = ("mask", "bias")
"""The options of which each rank has the rows of its own queries."""


@dataclass(frozen=True)
class RingOptions:
    """The options of a ring's calls, as `attention` takes them."""

    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    seqused_k: Array | None = None
    mask: Array | None = None
    bias: Array | None = None
    alibi_slopes: Array | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout_p: float = 0.0
    seed: int | None = None
    rotary: Any = None
    score_mod: ScoreMod | Callable[..., object] | None = None
    mask_mod: MaskMod | BlockMask | Callable[..., object] | None = None

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays that were given, by name."""
        given = {name: getattr(self, name) for name in ARRAYS}
        return {name: array for name, array in given.items() if array is not None}

    @property
    def expressions(self) -> Keywords:
        """score_mod and mask_mod that were given, by name; of a block mask its mask_mod."""
        mask_mod = self.mask_mod.mask_mod if isinstance(self.mask_mod, BlockMask) else self.mask_mod
        given = {"score_mod": self.score_mod, "mask_mod": mask_mod}
        return {name: option for name, option in given.items() if option is not None}

    @property
    def uses_positions(self) -> bool:
        """Whether anything but the causal or window mask depends on positions."""
        names = (*OF_ROWS, "seqused_k", "alibi_slopes")
        given = any(getattr(self, name) is not None for name in names)
        return self.dropout_p > 0 or given or bool(self.expressions)

    @property
    def of_scores(self) -> Keywords:
        """The options that are the same in every call, by name."""
        names = ("softmax_scale", "alibi_slopes", "softcap")
        return {name: getattr(self, name) for name in names}

    def of_no_tokens(self) -> Keywords:
        """Return the options of a call without tokens, which checks the rest of its arguments."""
        return {
            "causal": self.causal,
            "window_size": self.window_size,
            "mask": _of_no_scores(self.mask),
            "bias": _of_no_scores(self.bias),
            **self.of_scores,
            "sinks": self.sinks,
            "dropout_p": self.dropout_p,
            "seed": self.seed,
            "rotary": self.rotary,
        }

    def description(self, *, longest: int, each_time: bool) -> list[str]:
        """Describe the options that all ranks have to pass alike, without those left out.

        NumPy arrays are described by their contents (of tables the rows in use), arrays of a GPU by
        shape. The seed changes from call to call: it is included only where every call is compared,
        because a new description makes a rank wait for the others.
        """
        parts = ["causal=True"] if self.causal else []
        parts += [f"window_size={self.window_size}"] if self.window_size is not None else []
        numbers = {
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p or None,
        }
        parts += [f"{name}={float(x)}" for name, x in numbers.items() if x is not None]
        if self.dropout_p and each_time:
            parts.append(f"seed={self.seed}")
        parts += [
            f"{name} {_described(array, values=name not in OF_ROWS)}"
            for name, array in self.arrays.items()
        ]
        if self.rotary is not None:
            cos, sin, interleaved = (*self.rotary, False)[:3]
            tables = " and ".join(_described(table[:longest]) for table in (cos, sin))
            parts.append(f"rotary {tables}{' interleaved' if interleaved else ''}")
        for name, given in self.expressions.items():
            if isinstance(given, ScoreMod | MaskMod):
                named = [f" {x} {_described(array)}" for x, array in given.arrays.items()]
                parts.append(f"{name} {given.expression}; {given.gradient}{''.join(named)}")
            else:
                parts.append(f"{name} is a function")
        return parts


def _described(array: Array, *, values: bool = True) -> str:
    content = f" {fingerprint(array)}" if values and isinstance(array, np.ndarray) else ""
    return f"{array.dtype} {array.shape}{content}"


def _of_no_scores(array: Array | None) -> Array | None:
    if array is None:
        return None
    scores = with_four_axes(array)
    rows, columns = (slice(0 if extent != 1 else None) for extent in scores.shape[-2:])
    return scores[..., rows, columns]
