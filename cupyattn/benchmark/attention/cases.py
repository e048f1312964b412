"""What the attention benchmarks call: shapes, options, and the work that each of them is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Array, dtype_of
from cupyattn.functional.attention.modifiers import ScoreMod
from cupyattn.functional.layers.rope_tables import rope_tables

PLAIN = "plain"
_DROPOUT_P = 0.1
_SOFTCAP = 50.0
_MASKED = 0.1  # share of the scores that the mask takes out
_DRAWN = 4_194_319  # a prime: no two heads, tokens or sequences are equal


@dataclass(frozen=True)
class Case:
    """Self-attention of `batch` sequences of `seqlen` tokens; causal if all its calls are.

    With `queries` the last so many tokens alone are queries.
    """

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    window: int
    queries: int | None = None

    @property
    def labels(self) -> dict[str, Any]:
        """What a row says of it."""
        found = asdict(self)
        if self.queries is None:
            del found["queries"]
        return found

    @property
    def sq(self) -> int:
        """How many queries a sequence has."""
        return self.seqlen if self.queries is None else self.queries

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """The shape of q, (B, Sq, H, D)."""
        return self.batch, self.sq, self.heads, self.head_dim

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        """The shape of k, (B, S, H, D)."""
        return self.batch, self.seqlen, self.heads, self.head_dim

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """The shape of v, (B, S, H, Dv)."""
        return self.batch, self.seqlen, self.heads, self.head_dim_v

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """The shape of the result, (B, Sq, H, Dv)."""
        return self.batch, self.sq, self.heads, self.head_dim_v

    @property
    def bytes(self) -> int:
        """What q, k, v and the result have together.

        Examples
        --------
        >>> Case(1, 8, 65536, 128, 128, "float16", causal=False, window=0, queries=64).bytes / 2**20
        256.25
        """
        shapes = (self.q_shape, self.k_shape, self.v_shape, self.out_shape)
        return sum(map(math.prod, shapes)) * dtype_of(self.dtype).itemsize

    def scores(self, option: str) -> float:
        """Return how many scores a head has: Sq * S, less Sq**2 / 2 if causal, or the window's."""
        causal = self.causal or option == "causal"
        if option == "window":
            rows = np.arange(self.seqlen - self.sq, self.seqlen)
            first = np.maximum(rows - self.window, 0)
            last = rows if causal else np.minimum(rows + self.window, self.seqlen - 1)
            return float((last - first + 1).sum())
        return self.sq * self.seqlen - (self.sq**2 / 2 if causal else 0)

    def flops(self, option: str) -> float:
        """Return the floating-point operations of the two products over those scores.

        Examples
        --------
        >>> case = Case(4, 32, 4096, 64, 64, "float16", causal=False, window=512)
        >>> case.flops("plain") == 4 * 4 * 32 * 4096**2 * 64 == 2 * case.flops("causal")
        True
        """
        products = 2 * (self.head_dim + self.head_dim_v)
        return products * self.batch * self.heads * self.scores(option)

    def backward_flops(self, option: str) -> float:
        """Return the operations of the backward's five products, 2.5 forwards where D = Dv.

        They are q k, dout v, p dout, ds k and ds q over those scores (Dao, arXiv:2307.08691,
        section 4.1): three over D, two over Dv, however often a kernel computes one again.

        Examples
        --------
        >>> case = Case(4, 32, 4096, 64, 64, "float16", causal=False, window=512)
        >>> case.backward_flops("plain") == 10 * 4 * 32 * 4096**2 * 64
        True
        """
        products = 2 * (3 * self.head_dim + 2 * self.head_dim_v)
        return products * self.batch * self.heads * self.scores(option)


Arguments = dict[str, Any]

# Each makes the keyword arguments of one option; arrays by the array library `xp`.
_ARGUMENTS: Mapping[str, Callable[[Case, Any], Arguments]] = {
    PLAIN: lambda case, xp: {},
    "causal": lambda case, xp: {"causal": True},
    "window": lambda case, xp: {"window_size": (case.window, 0 if case.causal else case.window)},
    "softcap": lambda case, xp: {"softcap": _SOFTCAP},
    "bias": lambda case, xp: {"bias": _bias(case, xp)},
    "mask": lambda case, xp: {"mask": _mask(case, xp)},
    "alibi": lambda case, xp: {"alibi_slopes": _slopes(case, xp)},
    "score_mod": lambda case, xp: {"score_mod": _alibi(case, xp)},
    "sinks": lambda case, xp: {"sinks": xp.zeros(case.heads, np.float32)},
    "dropout": lambda case, xp: {"dropout_p": _DROPOUT_P, "seed": 1},
    "rotary": lambda case, xp: {"rotary": _tables(case, xp)},
}
OPTIONS = tuple(name for name in _ARGUMENTS if name != PLAIN)
FEWER_SCORES = ("causal", "window")
"""Options that leave scores out: how much faster they are is the question, not how much slower."""


def arguments_of(option: str, case: Case, xp: Any) -> Arguments:
    """Return an option's keyword arguments of a call, with arrays of its size."""
    return {"causal": case.causal, **_ARGUMENTS[option](case, xp)}


def _bias(case: Case, xp: Any) -> Array:
    """One of each head, for all sequences: relative positions, say."""
    numbers = np.random.default_rng(1).standard_normal((case.heads, case.sq, 1), np.float32)
    column = xp.asarray(numbers.astype(dtype_of(case.dtype)))
    return xp.ascontiguousarray(xp.broadcast_to(column, (1, case.heads, case.sq, case.seqlen)))


def _mask(case: Case, xp: Any) -> Array:
    """One for all heads and sequences."""
    numbers = np.random.default_rng(2).random((1, 1, case.sq, case.seqlen), np.float32)
    return xp.asarray(numbers >= _MASKED)


def _slopes(case: Case, xp: Any) -> Array:
    """Press et al., arXiv:2108.12409: powers of two from 2**(-8 / H) to 2**-8."""
    return xp.asarray(2.0 ** (-8.0 * np.arange(1, case.heads + 1, dtype=np.float32) / case.heads))


def _alibi(case: Case, xp: Any) -> ScoreMod:
    """Return the same as an expression, which may take 5 % longer."""
    return ScoreMod(
        "score - slopes[h] * abs(q_idx - k_idx)",
        gradient="grad",
        python=(
            lambda score, b, h, i, j, slopes: score - slopes[h] * abs(i - j),
            lambda score, grad, b, h, i, j, slopes: grad,
        ),
        slopes=_slopes(case, xp),
    )


def _tables(case: Case, xp: Any) -> tuple[Array, Array]:
    """Of every feature, or of all but the last."""
    cos, sin = rope_tables(case.seqlen, case.head_dim // 2 * 2)
    return xp.asarray(cos), xp.asarray(sin)


class Arrays(NamedTuple):
    """The arrays of a case: random q, k, v and dout, and room for the forward's results."""

    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array
    lse: Array


def arrays_of(case: Case, xp: Any) -> Arrays:
    """Return the arrays of a case."""
    rng, dtype = np.random.default_rng(0), dtype_of(case.dtype)

    def drawn(shape: tuple[int, ...]) -> Array:
        count = math.prod(shape)
        # Some million numbers again and again: NumPy takes a second for a hundred million.
        numbers = rng.standard_normal(min(count, _DRAWN), np.float32)
        return xp.resize(xp.asarray(numbers.astype(dtype)), count).reshape(shape)

    return Arrays(
        q=drawn(case.q_shape),
        k=drawn(case.k_shape),
        v=drawn(case.v_shape),
        dout=drawn(case.out_shape),
        out=xp.empty(case.out_shape, dtype),
        lse=xp.empty((case.batch, case.heads, case.sq), np.float32),
    )


def unfilled(case: Case) -> Arrays:
    """Return NumPy arrays of a case's shapes, for calls whose kernels do not run."""
    dtype = dtype_of(case.dtype)
    q, k, v, dout, out = (
        np.empty(shape, dtype)
        for shape in (case.q_shape, case.k_shape, case.v_shape, case.out_shape, case.out_shape)
    )
    return Arrays(q, k, v, dout, out, np.empty((case.batch, case.heads, case.sq), np.float32))


class Inputs(NamedTuple):
    """What every contender of a case is given."""

    case: Case
    option: str
    arrays: Arrays
    arguments: Callable[[], Arguments]
    """Makes the option's keyword arguments, once; raises MemoryError where there is no room."""


def inputs_of(case: Case, option: str, xp: Any) -> Inputs:
    """Make the arrays of a case."""
    return Inputs(case, option, arrays_of(case, xp), cache(partial(arguments_of, option, case, xp)))
