"""Problems of linear and its backward: hypothesis draws them, and every kernel is tested on them.

The fields of a problem determine its arrays, so that a failing example can be pasted. Dtypes,
activations and how arrays lie come from lists, because each combination is a specialisation of a
kernel to compile; sizes and data are free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.devices import KERNELS, dtype_of
from support.quantised_weights import moved, of_usual_size

import cupyattn
from cupyattn import LinearGrads, QuantizedWeight, reference
from cupyattn.ops.linear.plan import forward_call, forward_plan
from cupyattn.ops.linear.problem import LinearArrays, weight_fields
from cupyattn.ops.linear.weight_formats import FORMATS
from cupyattn.reference import error_ratio
from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.plan import Step

Array = NDArray[Any]
GATED = ("swiglu", "geglu")
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu", *GATED)
SIZES = (1, 2, 7, 8, 13, 24, 31, 32, 33, 40, 63, 64, 65, 72, 97, 128, 129)
"""Of M, K and N: around the tiles of kernels, primes, multiples of a vector."""
VIEWS = ("contiguous", "padded", "odd")
"""The strides of rows: contiguous; at whole vectors, with NaN between them; one item on."""


def lay_out(x: Array, view: str) -> Array:
    """x (..., columns) in an array of the strides of a kind of view."""
    if view == "contiguous":
        return np.ascontiguousarray(x)
    before, beyond = (0, 8 + -x.shape[-1] % 8) if view == "padded" else (1, 2)
    memory = np.full((*x.shape[:-1], before + x.shape[-1] + beyond), np.nan, x.dtype)
    result = memory[..., before : before + x.shape[-1]]
    result[...] = x
    return result


@dataclass(frozen=True)
class LinearCase:
    """One problem; letters as in the public API."""

    M: tuple[int, ...]
    K: int
    N: int
    dtype: str = "float32"
    activation: str | None = None
    turned: bool = False
    """w is the transpose of an array (W, K), and dw too."""
    view: str = "contiguous"
    biased: bool = True
    residual: bool = False
    given: bool = True
    """The backward is given the preactivation."""
    accumulate: bool = False
    spread: float = 1.0
    seed: int = 0
    weights: str | None = None
    """The format of w where it is quantised: its rows of codes are columns of w, or rows if it is
    turned."""
    block_size: int | None = None

    @property
    def width(self) -> int:
        """Columns of w, W."""
        return self.N * (2 if self.activation in GATED else 1)

    def normal(self, name: str, *shape: int, view: str | None = None) -> Array:
        """Normal numbers that depend on the seed and the array's name."""
        rng = np.random.default_rng([self.seed, *name.encode()])
        numbers = rng.standard_normal(shape) * self.spread
        return lay_out(numbers.astype(dtype_of(self.dtype)), view or self.view)

    def weight(self, name: str) -> Any:
        """w, or an array of its shape that lies as it does."""
        if self.weights is not None:
            outer, inner = (self.K, self.width) if self.turned else (self.width, self.K)
            block_size = self.block_size or math.gcd(FORMATS[self.weights].block_size or 0, inner)
            weight = of_usual_size(self.weights, outer, inner, block_size, seed=self.seed)
            return weight.T if self.turned else weight
        shape = (self.width, self.K) if self.turned else (self.K, self.width)
        weight = self.normal(name, *shape)
        return weight.T if self.turned else weight

    def inputs(self) -> tuple[Array, Any, Array | None]:
        """x, w and b."""
        b = self.normal("b", self.width, view="contiguous") if self.biased else None
        return self.normal("x", *self.M, self.K), self.weight("w"), b

    def given_grads(self) -> LinearGrads | None:
        """The arrays that the backward adds to."""
        if not self.accumulate:
            return None
        db = self.normal("db", self.width, view="contiguous") if self.biased else None
        dw = None if self.weights else self.weight("dw")
        return LinearGrads(self.normal("dx", *self.M, self.K), dw, db)


def exact(array: Any) -> Any:
    """The array in float64; a quantised weight as it is."""
    if array is None or isinstance(array, QuantizedWeight):
        return array
    return array.astype(np.float64)


def put(array: Any) -> Any:
    """The array, or those of a quantised weight, where kernels run."""
    if isinstance(array, QuantizedWeight):
        return moved(array, KERNELS.put)
    return None if array is None else KERNELS.put(array)


def forward_steps(
    x: Any, w: Any, b: Any, activation: str | None, traits: DeviceTraits
) -> tuple[Step, ...]:
    """Return the launches of a forward on a device."""
    weight, form = weight_fields(w)
    call = forward_call(adopt(LinearArrays(x, *weight, b=b)), activation, False, form)
    return forward_plan(call, traits).steps


def forward_ratio(case: LinearCase) -> tuple[float, Array | None]:
    """The largest error of a forward over its bound, and the preactivation."""
    x, w, b = case.inputs()
    residual = case.normal("residual", *case.M, case.N) if case.residual else None
    out, z = cupyattn.linear(
        *map(put, (x, w, b)),
        residual=put(residual),
        activation=case.activation,
        return_preactivation=True,
    )
    out, z = KERNELS.get(out), None if z is None else KERNELS.get(z)
    options: Any = {"activation": case.activation}
    results = reference.linear(*map(exact, (x, w, b, residual)), **options)
    bounds = reference.linear_bound(x, w, b, residual, dtype=case.dtype, **options)
    ratio = error_ratio(out, results[0], bounds[0])
    if z is not None:
        ratio = max(ratio, error_ratio(z, results[1], bounds[1]))
    return ratio, z


def backward_ratio(case: LinearCase) -> float:
    """The largest error of a backward over its bound."""
    x, w, b = case.inputs()
    dout = case.normal("dout", *case.M, case.N)
    z = None
    if case.given and case.activation is not None:
        z = reference.linear(*map(exact, (x, w, b)))[1].astype(x.dtype)
        z = lay_out(z, case.view)
    given = case.given_grads()
    placed = None if given is None else LinearGrads(*map(put, given))
    grads = cupyattn.linear_backward(
        *map(put, (dout, x, w, b)),
        activation=case.activation,
        preactivation=put(z),
        grads=placed,
        accumulate=case.accumulate,
    )
    options: Any = {"activation": case.activation}
    results = reference.linear_backward(
        *map(exact, (dout, x, w, b)), preactivation=exact(z), **options
    )
    bounds = reference.linear_backward_bound(
        dout, x, w, b, preactivation=z, given=given, dtype=case.dtype, **options
    )
    worst = 0.0
    for name, gradient, result, bound in zip(grads._fields, grads, results, bounds, strict=True):
        if gradient is None:
            assert result is None, name
            continue
        if given is not None:
            assert gradient is getattr(placed, name)
            result = result + exact(getattr(given, name))
        worst = max(worst, error_ratio(KERNELS.get(gradient), result, bound))
    return worst


@st.composite
def linear_cases(
    draw: Any,
    kinds: Sequence[tuple[str, str | None]],
    rows: Sequence[int] = (0, *SIZES),
) -> LinearCase:
    """Draw a problem of a (dtype, activation) of `kinds`."""
    dtype, activation = draw(st.sampled_from(kinds))
    lead: tuple[int, ...] = (draw(st.sampled_from(rows)),)
    if draw(st.booleans()):
        lead = (draw(st.integers(1, 3)), *lead)
    return LinearCase(
        M=lead,
        K=draw(st.sampled_from(SIZES)),
        N=draw(st.sampled_from(SIZES)),
        dtype=dtype,
        activation=activation,
        turned=draw(st.booleans()),
        view=draw(st.sampled_from(VIEWS)) if len(lead) == 1 else "contiguous",
        biased=draw(st.booleans()),
        residual=draw(st.booleans()),
        given=draw(st.booleans()),
        accumulate=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
