"""Problems of linear and its backward, and their runs by kernels of the tests' choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.devices import EMULATED, KERNELS
from support.quantised_weights import moved, of_usual_size

import cupyattn
from cupyattn import LinearGrads, QuantizedWeight, reference
from cupyattn.ops.linear import kernels_quantised_tile, kernels_tensor_core, plan
from cupyattn.ops.linear.plan import forward_call, forward_plan
from cupyattn.ops.linear.problem import LinearArrays, weight_fields
from cupyattn.ops.linear.tiles import Shape, TensorCoreProduct, Tiling
from cupyattn.ops.linear.weight_formats import FORMATS
from cupyattn.reference import error_ratio
from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.plan import Step
from cupyattn.testing import LinearCase, expected, lay_out, linear_cases
from cupyattn.testing.layers import GATED, SIZES

Array = NDArray[Any]
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu", *GATED)


@dataclass(frozen=True)
class LinearProblem(LinearCase):
    """A call of linear or of its backward, run by the kernels."""

    given: bool = True
    """The backward is given the preactivation."""
    accumulate: bool = False
    weights: str | None = None
    """The format of w where it is quantised: its rows of codes are columns of w, or rows if it is
    transposed."""
    block_size: int | None = None
    rotation: int | None = None

    def weight(self, name: str = "w") -> Any:
        """w, or an array of its shape that lies as it does."""
        if self.weights is None:
            return super().weight(name)
        outer, inner = (self.K, self.width) if self.transposed else (self.width, self.K)
        block_size = self.block_size or math.gcd(FORMATS[self.weights].block_size or 0, inner)
        weight = of_usual_size(self.weights, outer, inner, block_size, seed=self.seed)
        weight = replace(weight, rotation=self.rotation)
        return weight.T if self.transposed else weight

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


def forward_ratio(case: LinearProblem) -> tuple[float, Array | None]:
    """The largest error of a forward over its bound, and the preactivation."""
    arrays = case.arrays()
    options = {**case.keywords(), "return_preactivation": True}
    options["residual"] = options.get("residual")
    with EMULATED.running():  # bounds of kernels, also where results are of a GPU
        want = expected(cupyattn.linear, *arrays, **options)
    options["residual"] = put(options["residual"])
    found = [
        None if each is None else KERNELS.get(each)
        for each in cupyattn.linear(*map(put, arrays), **options)
    ]
    ratios = [
        reference.error_ratio(*each)
        for each in zip(found, *want, strict=True)
        if each[0] is not None
    ]
    return max(ratios), found[1]


def backward_ratio(case: LinearProblem) -> float:
    """The largest error of a backward over its bound."""
    x, w, b = case.arrays()
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
def linear_problems(
    draw: Any,
    kinds: Sequence[tuple[str, str | None]],
    rows: Sequence[int] = (0, *SIZES),
) -> LinearProblem:
    """Draw a problem of a (dtype, activation) of `kinds`."""
    dtype, activation = draw(st.sampled_from(kinds))
    case = draw(linear_cases(dtypes=[dtype], activations=[activation], rows=rows))
    given, accumulate = draw(st.booleans()), draw(st.booleans())
    return LinearProblem(**vars(case), given=given, accumulate=accumulate)


def forget_plans() -> None:
    plan.forward_plan.cache_clear()
    plan.backward_plan.cache_clear()


def always(shape: Shape, splits: int = 1) -> Callable[..., Tiling]:
    """Return a `TensorCoreProduct.tiling` that chooses a tile, whatever the sizes.

    From sm_80 on arrays that this tile does not take have the last one of theirs.
    """

    def tiling(product: TensorCoreProduct, traits: DeviceTraits, **_: object) -> Tiling:
        shapes = product.shapes(traits.arch)
        return Tiling(shapes[-1] if traits.native and shape not in shapes else shape, splits)

    return tiling


@contextmanager
def tensor_core_alone(shape: Shape | None = None, splits: int = 1) -> Iterator[None]:
    """Inside, small arrays too go to these kernels, whatever tile they would be given.

    With a shape, a tile's sum is that of so many parts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PLANS", kernels_tensor_core.PLANS)
        patch.setattr(plan, "QUANTISED_PLANS", kernels_quantised_tile.PLANS)
        if shape is not None:
            patch.setattr(TensorCoreProduct, "tiling", always(shape, splits))
        forget_plans()
        yield
    forget_plans()
