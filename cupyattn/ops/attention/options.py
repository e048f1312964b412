"""The options of attention that are no arrays: how they are given, and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyattn.ops.attention.modifiers import UserFunction, UserFunctions
from cupyattn.runtime.checks import integer, real, require_bool
from cupyattn.runtime.errors import error, shown

TEACHING_OPTIONS = frozenset({"causal", "softmax_scale"})
"""Every kernel has these options. The kernels that are there to be read have no others."""
POSITION_OPTIONS = frozenset({"window_size", "q_offset", "seqused_k"})
"""These options, with causal, decide which keys a query sees."""
SCORE_OPTIONS = frozenset({"mask", "bias", "alibi_slopes", "softcap", "sinks", "dropout_p"})
"""These options change single scores."""
USER_FUNCTIONS = frozenset({"score_mod", "mask_mod"})
"""The user's own expressions: the kernels of decoding do not have them."""
ROTARY = frozenset({"rotary"})
"""This option rotates q and k before the scores."""
SUMS = frozenset({"accumulator"})
"""This option allows less accurate sums."""
DECODE_OPTIONS = POSITION_OPTIONS | {"alibi_slopes", "softcap", "sinks"} | ROTARY | SUMS
"""The decode kernels have these options; before them a launch rotates q and k.

They accumulate in float32 in any case: memory limits them.
"""
ALL_OPTIONS = TEACHING_OPTIONS | POSITION_OPTIONS | SCORE_OPTIONS | USER_FUNCTIONS | ROTARY | SUMS

INT8_OPTIONS = ALL_OPTIONS - {"dropout_p"} - ROTARY
"""The kernel over int8 keys has these options, but no block mask."""

IMPLEMENTATIONS = ("flash", "tiled", "naive", "int8")
ACCUMULATORS = ("float32", "float16")
MAX_INT8_HEAD_DIM = 256
"""The largest D of `QuantizedKeys`, and Dv of attention over them."""
MAX_HALF_SUM_VALUE = 250.0
"""The largest |v| whose float16 sums fit: cuda_src/attention/tensor_core/output_sums.cuh.

The weights of a row in a tile of keys add up to at most 256 there. 256 * 250 is 64,000, to which
the roundings of 32 sums add at most 1.6 %: below 65,520, where a float16 becomes infinite.
"""
MAX_SCALE = 1e26  # with products of 512 float16 numbers a score is still a float32
_MAX_FACTOR = 1e38  # times log2(e) it is still a float32
MAX_SOFTCAP = 10_000.0  # where a kernel errs by 1e-3 in a score
MAX_OFFSET = 2**60  # a position plus a window side stays within 64 bits


class DropoutSeed(NamedTuple):
    """A seed of dropout, and where in a larger call the scores of a call are.

    Attention computed in parts draws the mask of the whole by it: queries i and keys j of a call,
    batch element b, drop what ``(b + batch, h, i + query, j + key)`` of the whole drop. A number
    alone as seed= is for a call that begins where the whole does.

    Attributes
    ----------
    seed : int
        0 to 2**64 - 1.
    batch, query, key : int
        Of the whole, what the call's first batch element, query and key are. Key is a multiple
        of 32: so many are drawn together.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 2, 8), dtype=np.float32)
    >>> whole = cupyattn.attention(q, k, v, dropout_p=0.5, seed=7)
    >>> parts = [
    ...     cupyattn.attention(
    ...         q, k[:, keys : keys + 32], v[:, keys : keys + 32], dropout_p=0.5,
    ...         seed=cupyattn.DropoutSeed(7, key=keys), return_lse=True,
    ...     )
    ...     for keys in (0, 32)
    ... ]
    >>> np.allclose(cupyattn.merge_attention(*parts[0], *parts[1])[0], whole, atol=1e-6)
    True
    """

    seed: int
    batch: int = 0
    query: int = 0
    key: int = 0


_MAX_PLACE = 2**31  # places are 32-bit integers of kernels
_KEYS_OF_A_DRAW = 32
_PLACES = DropoutSeed._fields[1:]


class AttentionOptions(NamedTuple):
    """The options of attention that are no arrays: as the caller gave them, or checked.

    Calls hand them down as a plain tuple in this order, of which checks make this once a problem:
    made in each call it would take longer than the plan is looked up.
    """

    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    seeded: bool = False
    """Whether there is a seed: calls that differ in it alone share their checks."""
    implementation: str = "flash"
    accumulator: str = "float32"
    """Type of the sums of weights times v within a tile of keys, where kernels have it."""
    q_offset: int | None = None
    """None too where q_offset is an array, which is among the arrays then."""
    interleaved: bool = False
    """Whether rotary, whose tables are arrays, pairs neighbouring features."""
    score_mod: UserFunction | None = None
    mask_mod: UserFunction | None = None

    def checked(self, head_dim: int) -> AttentionOptions:
        """Return them with defaults in the place of None, and causality in the window."""
        _require_one_of("implementation", self.implementation, IMPLEMENTATIONS)
        _require_one_of("accumulator", self.accumulator, ACCUMULATORS)
        softmax_scale = checked_softmax_scale(self.softmax_scale, head_dim)
        return self._replace(
            softmax_scale=softmax_scale,
            q_offset=checked_q_offset(self.q_offset),
            window_size=checked_window(self.window_size, self.causal),
            softcap=checked_softcap(self.softcap, softmax_scale),
            dropout_p=checked_dropout_p(self.dropout_p, self.seeded),
        )

    @property
    def of_scores(self) -> dict[str, Any]:
        """The options that decide the scores, once checked, as the reference takes them."""
        names = ("softmax_scale", "window_size", "softcap", "dropout_p")
        return {name: getattr(self, name) for name in names}

    @property
    def functions(self) -> UserFunctions:
        """The user's own expressions."""
        return UserFunctions(self.score_mod, self.mask_mod)

    @property
    def used(self) -> set[str]:
        """The names of those, once checked, that some kernels do not have."""
        used = {
            "softcap": self.softcap is not None,
            "dropout_p": self.dropout_p > 0,
            "score_mod": self.score_mod is not None,
            "mask_mod": self.mask_mod is not None,
            "window_size": self.window_size not in ((None, None), (None, 0)),
            "q_offset": self.q_offset is not None,
            "accumulator": self.accumulator != "float32",
        }
        return {name for name, given in used.items() if given}


def checked_softmax_scale(given: Any, head_dim: int) -> float:
    """Return softmax_scale, or its default."""
    if given is None:
        return float(head_dim**-0.5)
    scale = real("softmax_scale", given)
    if not abs(scale) <= MAX_SCALE:
        raise error(
            ValueError,
            f"softmax_scale = {scale}",
            f"it is a finite number up to {MAX_SCALE:g}, beyond which scores overflow; the default "
            "is D ** -0.5",
            "pass a smaller number, or None",
        )
    return scale


def checked_q_offset(given: Any, *, array: bool = True) -> int | None:
    """Return the key position of query 0; None is its default, which depends on the batch.

    `array` says that the function takes one too.
    """
    if given is None:
        return None
    q_offset = integer(
        "q_offset",
        given,
        "it is an integer" + (", or an int32 or int64 array (B,)" if array else ""),
        "convert it with int(...)" + (", or pass an array of NumPy or CuPy" if array else ""),
    )
    if abs(q_offset) > MAX_OFFSET:
        raise error(
            ValueError,
            f"q_offset = {shown(q_offset)}",
            f"it is between -{MAX_OFFSET} and {MAX_OFFSET}",
            "pass the key position of query 0",
        )
    return q_offset


def checked_window(window_size: Any, causal: Any) -> tuple[int | None, int | None]:
    """Return the window's sides with causality in them; None is unbounded."""
    left: int | None = None
    right: int | None = None
    if window_size is not None:
        if not isinstance(window_size, tuple) or len(window_size) != 2:
            raise error(
                TypeError,
                f"window_size = {shown(window_size)}",
                "it is a tuple (left, right) of integers or None",
                "pass for example window_size=(1024, 0)",
            )
        left, right = (
            None if side is None else integer("each side of window_size", side)
            for side in window_size
        )
        if (left is not None and left < 0) or (right is not None and right < 0):
            raise error(
                ValueError,
                f"window_size = {shown(window_size)}",
                "each side counts keys, 0 or more; None is unbounded",
                "use None where -1 meant unbounded",
            )
    require_bool("causal", causal)
    if causal:
        right = 0  # 0 is the smallest right side, so causal and window together are just that
    return left, right


def checked_softcap(given: Any, softmax_scale: float) -> float | None:
    """Return softcap as a float, or None; kernels multiply by softmax_scale / softcap."""
    if given is None:
        return None
    softcap = real("softcap", given)
    if not 0 < softcap <= MAX_SOFTCAP:
        raise error(
            ValueError,
            f"softcap = {softcap}",
            f"it is above 0 and at most {MAX_SOFTCAP:g}: beyond, float32 arithmetic has no digits "
            "for softcap * tanh(s / softcap)",
            "pass None for none",
        )
    if abs(softmax_scale) / softcap > _MAX_FACTOR:
        raise error(
            ValueError,
            f"softcap = {softcap} with softmax_scale = {softmax_scale}",
            f"softmax_scale is at most {_MAX_FACTOR:g} times softcap",
            "pass a larger softcap: scores come to lie between -softcap and softcap",
        )
    return softcap


def checked_dropout_p(given: Any, seeded: bool) -> float:
    """Return dropout_p as a float; above 0 it needs a seed."""
    probability = real("dropout_p", given)
    if not 0.0 <= probability < 1.0:
        raise error(
            ValueError,
            f"dropout_p = {probability}",
            "it is at least 0 and below 1",
            "pass the share of probabilities to drop, 0.1 for a tenth",
        )
    if probability > 0.0 and not seeded:
        raise error(
            ValueError,
            f"dropout_p = {probability} without a seed",
            "dropout draws its mask from seed= alone, so that the backward can draw it again",
            "pass an integer seed=, another one each training step",
        )
    return probability


def checked_seed(given: Any) -> DropoutSeed:
    """Return the seed, and where the call begins in what it draws for."""
    if not isinstance(given, DropoutSeed):
        given = DropoutSeed(given)
    seed = integer("seed", given.seed)
    if not 0 <= seed < 2**64:
        raise error(
            ValueError,
            f"seed = {shown(seed)}",
            "it is an integer from 0 to 2**64 - 1",
            "reduce it modulo 2**64",
        )
    batch, query, key = (
        integer(f"{name} of a DropoutSeed", getattr(given, name)) for name in _PLACES
    )
    for name, place in zip(_PLACES, (batch, query, key), strict=True):
        if not 0 <= place < _MAX_PLACE or (name == "key" and place % _KEYS_OF_A_DRAW):
            raise error(
                ValueError,
                f"{name} of a DropoutSeed = {shown(place)}",
                f"it is from 0 to {_MAX_PLACE - 1}"
                + (f", and a multiple of {_KEYS_OF_A_DRAW}" if name == "key" else ""),
                "pass the number of the call's first one in the whole",
            )
    return DropoutSeed(seed, batch, query, key)


def _require_one_of(name: str, chosen: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(chosen, str) or chosen not in allowed:
        fix = "fastest" if name == "implementation" else "most accurate sums"
        raise error(
            ValueError,
            f"{name} = {shown(chosen)}",
            f"allowed are {', '.join(map(repr, allowed))}",
            f"leave it out for the {fix}",
        )
