"""Test cases of softmax, norms, linear layers and products; the strategies that draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import cupyattn
from cupyattn.runtime.arrays import dtype_of
from cupyattn.testing.arrays import SEEDS, NumpyArray, PastableCase, lay_out, normal

ROW_LENGTHS = (0, 1, 2, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025)
SIZES = (1, 2, 7, 8, 13, 24, 31, 32, 33, 40, 63, 64, 65, 72, 97, 128, 129)
"""Sizes of products: around the tiles of kernels, primes, multiples of a vector."""
GATED = ("swiglu", "geglu", "geglu_tanh")
DTYPES = ("float16", "float32")
MATRIX_VIEWS = ("contiguous", "transposed", "sliced", "padded", "strided", "broadcast")


@dataclass(frozen=True, repr=False)
class SoftmaxCase(PastableCase):
    """A call of `cupyattn.softmax`, `cupyattn.log_softmax` or `cupyattn.logsumexp`.

    The fields determine the arrays.

    Parameters
    ----------
    shape : tuple of int
        The shape of x; rows are along the last axis.
    dtype : str
        "float16", "bfloat16", "float32" or "float64".
    spread : float
        The standard deviation of x.
    masked : bool
        Whether some items of x, and all items of some rows, are -inf.
    seed : int
        What the numbers in the arrays depend on.
    view : str
        The strides of x and dout, as of `lay_out`.
    scale : float
        The option of that name.
    causal : bool
        The option of that name.
    mask : tuple of int, optional
        The shape of a mask, which broadcasts to x. All of some rows is hidden.
    bias : (tuple of int, str), optional
        The shape and dtype of a bias, which broadcasts to x.

    Examples
    --------
    >>> case = SoftmaxCase((3, 33), "float16", masked=True, mask=(33,))
    >>> (x,) = case.arrays()
    >>> x.shape, case.keywords()["mask"].shape
    ((3, 33), (33,))
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    spread: float = 1.0
    masked: bool = False
    seed: int = 0
    view: str = "contiguous"
    scale: float = 1.0
    causal: bool = False
    mask: tuple[int, ...] | None = None
    bias: tuple[tuple[int, ...], str] | None = None

    def arrays(self) -> tuple[NumpyArray]:
        """Return x."""
        rng = np.random.default_rng(self.seed)
        x = rng.standard_normal(self.shape) * self.spread
        if self.masked:
            x[rng.random(self.shape) < 0.3] = -np.inf
            x[rng.random(self.shape[:-1]) < 0.2] = -np.inf
        return (lay_out(x.astype(dtype_of(self.dtype)), self.view),)

    def dout(self) -> NumpyArray:
        """Return a gradient of the output of softmax or log_softmax."""
        return lay_out(normal(self.seed, "dout", self.shape, self.dtype), self.view)

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments."""
        options: dict[str, Any] = {}
        if self.scale != 1:
            options["scale"] = self.scale
        if self.causal:
            options["causal"] = True
        if self.mask is not None:
            mask = normal(self.seed, "mask", self.mask) > -1
            mask[normal(self.seed, "hidden rows", self.mask[:-1]) > 1] = False
            options["mask"] = mask
        if self.bias is not None:
            options["bias"] = normal(self.seed, "bias", *self.bias)
        return options


@dataclass(frozen=True, repr=False)
class NormCase(PastableCase):
    """A call of `cupyattn.layer_norm` or `cupyattn.rms_norm`. The fields determine the arrays.

    Parameters
    ----------
    shape : tuple of int
        The shape of x; rows are along the last axis.
    dtype : str
        "float16", "bfloat16", "float32" or "float64".
    centred : bool
        True for layer_norm, False for rms_norm.
    given : tuple of str
        The optional arrays that the call has: "weight", "bias" (of layer_norm) and "residual".
    view : str
        The strides of x, the residual and dout, as of `lay_out`.
    mean, spread : float
        The mean and the standard deviation of x.
    eps, weight_offset : float
        The options of these names; weight_offset is rms_norm's.
    seed : int
        What the numbers in the arrays depend on.

    Examples
    --------
    >>> case = NormCase((2, 3, 40), "float16", centred=False, given=("weight",))
    >>> out = case.function(*case.arrays(), **case.keywords())
    >>> out.shape
    (2, 3, 40)
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    centred: bool = True
    given: tuple[str, ...] = ()
    view: str = "contiguous"
    mean: float = 0.0
    spread: float = 1.0
    eps: float = 1e-5
    weight_offset: float = 0.0
    seed: int = 0

    @property
    def function(self) -> Callable[..., Any]:
        """The function that is called: layer_norm or rms_norm."""
        return cupyattn.layer_norm if self.centred else cupyattn.rms_norm

    def array(self, name: str) -> NumpyArray | None:
        """Return x, weight, bias, residual, dout or dtotal; None if the case is without it."""
        needs = {"dtotal": "residual"}.get(name, name)
        if needs in ("residual", "weight", "bias") and needs not in self.given:
            return None
        if name in ("weight", "bias"):
            return normal(self.seed, name, self.shape[-1:], self.dtype)
        values = normal(self.seed, name, self.shape)
        if name == "x":
            values = values * self.spread + self.mean
        return lay_out(values.astype(dtype_of(self.dtype)), self.view)

    def arrays(self) -> tuple[NumpyArray | None, ...]:
        """Return the positional arguments: x, weight, and of layer_norm bias."""
        names = ("x", "weight", "bias") if self.centred else ("x", "weight")
        return tuple(map(self.array, names))

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments."""
        options = {"eps": self.eps, "residual": self.array("residual")}
        return options if self.centred else {**options, "weight_offset": self.weight_offset}


@dataclass(frozen=True, repr=False)
class LinearCase(PastableCase):
    """A call of `cupyattn.linear` or `cupyattn.linear_backward`. The fields determine the arrays.

    Parameters
    ----------
    M : tuple of int
        The shape of the rows of x.
    K, N : int
        Columns of x, and of the result. A gated activation's w has 2 N columns.
    dtype : str
        "float16", "bfloat16", "float32" or "float64".
    activation : str, optional
        The option of that name.
    transposed : bool
        Whether w is the transpose of an array in C order.
    view : str
        The strides of rows: "contiguous", "padded" or "sliced", as of `lay_out`.
    biased, residual : bool
        Whether there is a b, and a residual.
    spread : float
        The standard deviation of all numbers.
    seed : int
        What the numbers in the arrays depend on.

    Examples
    --------
    >>> case = LinearCase(M=(2, 5), K=24, N=33, dtype="float16", activation="swiglu")
    >>> [array.shape for array in case.arrays()]
    [(2, 5, 24), (24, 66), (66,)]
    """

    M: tuple[int, ...]
    K: int
    N: int
    dtype: str = "float32"
    activation: str | None = None
    transposed: bool = False
    view: str = "contiguous"
    biased: bool = True
    residual: bool = False
    spread: float = 1.0
    seed: int = 0

    @property
    def width(self) -> int:
        """Columns of w."""
        return self.N * (2 if self.activation in GATED else 1)

    def normal(self, name: str, *shape: int, view: str | None = None) -> NumpyArray:
        """Return normal numbers that depend on the seed and the array's name."""
        numbers = normal(self.seed, name, shape) * self.spread
        return lay_out(numbers.astype(dtype_of(self.dtype)), view or self.view)

    def weight(self, name: str = "w") -> Any:
        """Return w, or another array with its shape and strides."""
        shape = (self.width, self.K) if self.transposed else (self.K, self.width)
        weight = self.normal(name, *shape)
        return weight.T if self.transposed else weight

    def arrays(self) -> tuple[NumpyArray, Any, NumpyArray | None]:
        """Return x, w and b."""
        b = self.normal("b", self.width, view="contiguous") if self.biased else None
        return self.normal("x", *self.M, self.K), self.weight(), b

    def dout(self) -> NumpyArray:
        """Return a gradient of the output."""
        return self.normal("dout", *self.M, self.N)

    def keywords(self) -> dict[str, Any]:
        """Return the options of `cupyattn.linear` as keyword arguments."""
        options: dict[str, Any] = {"activation": self.activation}
        if self.residual:
            options["residual"] = self.normal("residual", *self.M, self.N)
        return options


@dataclass(frozen=True, repr=False)
class MatmulCase(PastableCase):
    """A call of `cupyattn.matmul`. The fields determine the arrays.

    Parameters
    ----------
    M, K, N : int
        a has matrices (M, K) and b (K, N). Without M, a is a vector (K,), and without N b is.
    a_batch, b_batch : tuple of int
        The shapes of the batches, which broadcast.
    dtype : str
        "float16", "bfloat16", "float32", "float64" or "int8".
    a_view, b_view : str
        The strides of matrices. "contiguous": C order. "transposed": their transposes are in C
        order. "sliced": rows are slices of longer rows, and start at any item. "padded": rows have
        padding, and start at multiples of 16 items. "strided": every second item of every second
        row, backwards. "broadcast": the first row is repeated with stride 0.
    seed : int
        What the numbers in the arrays depend on.

    Examples
    --------
    >>> case = MatmulCase(5, 24, 33, a_batch=(2, 1), b_batch=(3,), b_view="transposed")
    >>> [array.shape for array in case.arrays()]
    [(2, 1, 5, 24), (3, 24, 33)]
    """

    M: int | None
    K: int
    N: int | None
    a_batch: tuple[int, ...] = ()
    b_batch: tuple[int, ...] = ()
    dtype: str = "float32"
    a_view: str = "contiguous"
    b_view: str = "contiguous"
    seed: int = 0

    def arrays(self) -> tuple[NumpyArray, NumpyArray]:
        """Return a and b."""
        return self._array("a"), self._array("b")

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments: there are none."""
        return {}

    def _array(self, name: str) -> NumpyArray:
        matrix: tuple[int | None, int | None] = (self.M, self.K)
        batch, view = self.a_batch, self.a_view
        if name == "b":
            batch, view, matrix = self.b_batch, self.b_view, (self.K, self.N)
        shape = (*batch, *(1 if extent is None else extent for extent in matrix))
        if self.dtype == "int8":
            rng = np.random.default_rng([self.seed, *name.encode()])
            numbers = rng.integers(-128, 128, shape).astype(np.int8)
        else:
            numbers = normal(self.seed, name, shape, self.dtype)
        numbers = _lay_out_matrices(numbers, view)
        return numbers.reshape(self.K) if None in matrix else numbers


def _lay_out_matrices(x: NumpyArray, view: str) -> NumpyArray:
    """Return matrices with other strides. Memory between and around them must not be read."""
    if view == "broadcast":
        return np.broadcast_to(x[..., :1, :], x.shape)
    if view == "transposed":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if view == "contiguous":
        return x
    *batch, rows, columns = x.shape
    other = 127 if x.dtype == np.int8 else np.nan
    if view == "sliced":
        result = np.full((*batch, rows, columns + 3), other, x.dtype)[..., 1 : columns + 1]
    elif view == "padded":
        result = np.full((*batch, rows, columns + 16 + -columns % 16), other, x.dtype)
        result = result[..., :columns]
    else:
        result = np.full((*batch, 2 * rows, 2 * columns), other, x.dtype)[..., ::-2, ::-2]
    result[...] = x
    return result


@st.composite
def softmax_cases(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = DTYPES,
    row_lengths: Sequence[int] | None = None,
    views: Sequence[str] = ("contiguous",),
    options: Sequence[str] = (),
) -> SoftmaxCase:
    """Draw calls of `cupyattn.softmax`: up to two leading axes, row lengths around powers of two.

    Parameters
    ----------
    dtypes, views : sequences of str
        Values to draw from.
    row_lengths : sequence of int, optional
        Row lengths to draw from, where they are not any up to 300 and some up to 1025.
    options : sequence of str
        What may be drawn: "scale", "causal", "mask" and "bias".

    Returns
    -------
    hypothesis strategy of SoftmaxCase
    """
    if unknown := set(options) - {"scale", "causal", "mask", "bias"}:
        raise ValueError(f"unknown options {sorted(unknown)}; there are scale, causal, mask, bias")
    leading = draw(st.lists(st.integers(0, 4), min_size=0, max_size=2))
    any_length = st.one_of(st.sampled_from(ROW_LENGTHS), st.integers(0, 300))
    row = draw(any_length if row_lengths is None else st.sampled_from(tuple(row_lengths)))
    shape, dtype = (*leading, row), draw(st.sampled_from(tuple(dtypes)))
    broadcast = st.tuples(*(st.sampled_from(sorted({1, n})) for n in shape))
    values: dict[str, st.SearchStrategy[Any]] = {
        "scale": st.sampled_from((0.5, -2.0, 0.0)),
        "causal": st.just(True),
        "mask": broadcast,
        "bias": st.tuples(broadcast, st.sampled_from(sorted({dtype, "float32"}))),
    }
    return SoftmaxCase(
        shape=shape,
        dtype=dtype,
        spread=draw(st.sampled_from((1.0, 8.0))),
        masked=draw(st.booleans()),
        seed=draw(SEEDS),
        view=draw(st.sampled_from(tuple(views))),
        **{name: draw(values[name]) for name in options if draw(st.booleans())},
    )


@st.composite
def norm_cases(
    draw: st.DrawFn,
    *,
    row_lengths: Sequence[int] = ROW_LENGTHS[1:],
    dtypes: Sequence[str] = DTYPES,
    centred: Sequence[bool] = (True, False),
    given: Sequence[str] = ("weight", "bias", "residual"),
    views: Sequence[str] = ("contiguous", "sliced", "transposed", "reversed", "broadcast"),
) -> NormCase:
    """Draw calls of `cupyattn.layer_norm` and `cupyattn.rms_norm`.

    Some rows have a large mean, or items that are all equal.

    Parameters
    ----------
    row_lengths, dtypes, views : sequences
        Values to draw from. Each row length may be a kernel to compile.
    centred : sequence of bool
        True for layer_norm, False for rms_norm.
    given : sequence of str
        The optional arrays: each case has some of them.

    Returns
    -------
    hypothesis strategy of NormCase
    """
    norm = draw(st.sampled_from(tuple(centred)))
    names = [name for name in given if norm or name != "bias"]
    return NormCase(
        shape=(
            draw(st.integers(0, 4)),
            draw(st.integers(1, 3)),
            draw(st.sampled_from(row_lengths)),
        ),
        dtype=draw(st.sampled_from(tuple(dtypes))),
        centred=norm,
        given=tuple(name for name in names if draw(st.booleans())),
        view=draw(st.sampled_from(tuple(views))),
        mean=draw(st.sampled_from((0.0, 100.0, -3.0))),
        spread=draw(st.sampled_from((1.0, 1e-3, 0.0))),
        eps=draw(st.sampled_from((1e-5, 1e-12))),
        weight_offset=0.0 if norm else draw(st.sampled_from((0.0, 1.0))),
        seed=draw(SEEDS),
    )


@st.composite
def linear_cases(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = DTYPES,
    activations: Sequence[str | None] = (None, "gelu_tanh", "silu", "swiglu"),
    rows: Sequence[int] = (0, *SIZES),
    views: Sequence[str] = ("contiguous", "padded", "sliced"),
) -> LinearCase:
    """Draw calls of `cupyattn.linear`: sizes around the tiles of kernels, and primes.

    Parameters
    ----------
    dtypes, activations, views : sequences
        Values to draw from. Each dtype and activation is a kernel to compile.
    rows : sequence of int
        Numbers of rows of x to draw from.

    Returns
    -------
    hypothesis strategy of LinearCase
    """
    lead: tuple[int, ...] = (draw(st.sampled_from(tuple(rows))),)
    if draw(st.booleans()):
        lead = (draw(st.integers(1, 3)), *lead)
    return LinearCase(
        M=lead,
        K=draw(st.sampled_from(SIZES)),
        N=draw(st.sampled_from(SIZES)),
        dtype=draw(st.sampled_from(tuple(dtypes))),
        activation=draw(st.sampled_from(tuple(activations))),
        transposed=draw(st.booleans()),
        view=draw(st.sampled_from(tuple(views))) if len(lead) == 1 else "contiguous",
        biased=draw(st.booleans()),
        residual=draw(st.booleans()),
        seed=draw(SEEDS),
    )


@st.composite
def matmul_cases(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[int] = (0, *SIZES),
    views: Sequence[str] = MATRIX_VIEWS,
) -> MatmulCase:
    """Draw calls of `cupyattn.matmul`: sizes around the tiles of kernels, primes, and vectors.

    Parameters
    ----------
    dtypes, views : sequences of str
        Values to draw from.
    sizes : sequence of int
        Values of M, K and N to draw from.

    Returns
    -------
    hypothesis strategy of MatmulCase
    """
    size = st.sampled_from(tuple(sizes))
    rows, columns = draw(st.one_of(st.none(), size)), draw(st.one_of(st.none(), size))
    batch = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))

    def own(extent: int | None) -> tuple[int, ...]:
        """Draw the batch of one operand: some of its axes are 1, and the first ones absent."""
        if extent is None:
            return ()
        broadcast = [draw(st.sampled_from((n, n, 1))) for n in batch]
        return tuple(broadcast[draw(st.integers(0, len(batch))) :])

    return MatmulCase(
        rows,
        draw(size),
        columns,
        own(rows),
        own(columns),
        draw(st.sampled_from(tuple(dtypes))),
        draw(st.sampled_from(tuple(views))),
        draw(st.sampled_from(tuple(views))),
        draw(SEEDS),
    )
