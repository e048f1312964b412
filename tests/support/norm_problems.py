"""Problems of the norms: fields that determine their arrays, and how far results are from right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.devices import KERNELS, dtype_of

import cupyattn
from cupyattn import reference
from cupyattn.ops.norms.api import LayerNormGrads, RMSNormGrads
from cupyattn.ops.norms.reference import rounded_sum

VIEWS = ("contiguous", "sliced", "transposed", "reversed", "broadcast")

Array = NDArray[Any]


def lay_out(x: Array, view: str) -> Array:
    """Return x (B, S, N) in an array with the strides of a kind of view, surrounded by NaN.

    "broadcast" repeats the first of the outer axis with stride 0, and is read-only.
    """
    outer, inner, length = x.shape
    if view == "contiguous":
        return np.ascontiguousarray(x)
    if view == "sliced":  # rows that are aligned to an item only
        result = np.full((outer, inner, length + 3), np.nan, x.dtype)[..., 1 : length + 1]
    elif view == "transposed":
        result = np.full((inner, outer, length), np.nan, x.dtype).transpose(1, 0, 2)
    elif view == "reversed":
        result = np.full((outer, 2 * inner, length), np.nan, x.dtype)[:, ::-2]
    else:
        return np.broadcast_to(x[:1].copy(), x.shape)
    result[...] = x
    return result


@dataclass(frozen=True)
class NormProblem:
    """x has standard normal items times `spread`, plus `mean`; `arrays` names the optional ones."""

    shape: tuple[int, int, int]
    dtype: str = "float32"
    centred: bool = True
    arrays: tuple[str, ...] = ()
    view: str = "contiguous"
    mean: float = 0.0
    spread: float = 1.0
    eps: float = 1e-5
    weight_offset: float = 0.0
    seed: int = 0

    def array(self, name: str) -> Array | None:
        """One of the arrays, None if the problem is without it."""
        needs = {"dtotal": "residual"}.get(name, name)
        if needs in ("residual", "weight", "bias") and needs not in self.arrays:
            return None
        rng = np.random.default_rng([self.seed, *name.encode()])
        if name in ("weight", "bias"):
            return rng.standard_normal(self.shape[-1]).astype(dtype_of(self.dtype))
        values = rng.standard_normal(self.shape)
        if name == "x":
            values = values * self.spread + self.mean
        return lay_out(values.astype(dtype_of(self.dtype)), self.view)

    def forward(self) -> tuple[Array, ...]:
        """Return the kernels' out, the sum or x, mean (None if not centred) and rstd."""
        put = {name: _put(self.array(name)) for name in ("x", "weight", "bias", "residual")}
        options = {"residual": put["residual"], "eps": self.eps, "return_stats": True}
        if self.centred:
            found = cupyattn.layer_norm(put["x"], put["weight"], put["bias"], **options)
        else:
            options["weight_offset"] = self.weight_offset
            out, *rest = cupyattn.rms_norm(put["x"], put["weight"], **options)
            found = (out, *rest[:-1], None, rest[-1])
        if put["residual"] is None:
            found = (found[0], put["x"], *found[1:])
        return tuple(None if array is None else KERNELS.get(array) for array in found)

    def backward(self, total: Array, mean: Array | None, rstd: Array, **options: Any) -> Any:
        """The gradients that the kernels give."""
        dout, weight, bias, more = map(self.array, ("dout", "weight", "bias", "dtotal"))
        options["dtotal"] = _put(more)
        start = _put(dout), _put(total), _put(weight)
        if self.centred:
            options["bias"] = _put(bias)
            return cupyattn.layer_norm_backward(*start, _put(mean), _put(rstd), **options)
        options["weight_offset"] = self.weight_offset
        return cupyattn.rms_norm_backward(*start, _put(rstd), **options)


def _put(array: Array | None) -> Any:
    return None if array is None else KERNELS.put(array)


def forward_ratios(problem: NormProblem, found: tuple[Array, ...]) -> dict[str, float]:
    """The largest error of each result of the forward, over its bound."""
    out, total, mean, rstd = found
    options = {"centred": problem.centred, "eps": float(np.float32(problem.eps))}
    options["weight_offset"] = problem.weight_offset
    weight, bias = problem.array("weight"), problem.array("bias")
    exact_out, _, exact_mean, exact_rstd = reference.norm(total, None, weight, bias, **options)
    bounds = reference.norm_bound(total, weight, bias, dtype=problem.dtype, **options)
    ratios = {
        "out": reference.error_ratio(out, exact_out, bounds[0]),
        "rstd": reference.error_ratio(rstd, exact_rstd, bounds[2]),
    }
    if mean is not None:
        ratios["mean"] = reference.error_ratio(mean, exact_mean, bounds[1])
    if (residual := problem.array("residual")) is not None:
        exact = rounded_sum(problem.array("x"), residual)
        ratios["total"] = 0.0 if np.array_equal(total, exact, equal_nan=True) else np.inf
    return ratios


def backward_ratios(
    problem: NormProblem, total: Array, mean: Array | None, rstd: Array, found: Any
) -> dict[str, float]:
    """Return the error of each gradient divided by its bound, for the backward's arguments."""
    names = ("dout", "dtotal", "weight", "bias")
    dout, dtotal, weight, bias = map(problem.array, names)
    given = (dout, total, dtotal, weight, bias, mean, rstd)
    exact = reference.norm_backward(*given, weight_offset=problem.weight_offset)
    bounds = reference.norm_backward_bound(
        *given, dtype=problem.dtype, weight_offset=problem.weight_offset
    )
    kind = LayerNormGrads if problem.centred else RMSNormGrads
    assert type(found) is kind
    ratios = {}
    for name, gradient, right, bound in zip(kind._fields, found, exact, bounds, strict=False):
        assert (gradient is None) == (right is None), name
        if gradient is not None:
            ratios[name] = reference.error_ratio(KERNELS.get(gradient), right, bound)
    return ratios


def ratios(problem: NormProblem) -> dict[str, float]:
    """Return errors divided by bounds of forward and backward: at most 1 for correct kernels."""
    forward = problem.forward()
    gradients = problem.backward(*forward[1:])
    return forward_ratios(problem, forward) | backward_ratios(problem, *forward[1:], gradients)


@st.composite
def norm_problems(
    draw: st.DrawFn,
    *,
    kinds: tuple[tuple[str, bool, tuple[str, ...]], ...],
    lengths: Any,
    views: tuple[str, ...] = VIEWS,
) -> NormProblem:
    """Problems of these kinds (dtype, centred, optional arrays), of few and many rows."""
    dtype, centred, arrays = draw(st.sampled_from(kinds))
    outer = draw(st.one_of(st.integers(0, 3), st.integers(0, 40)))
    return NormProblem(
        shape=(outer, draw(st.integers(0, 4)), draw(lengths)),
        dtype=dtype,
        centred=centred,
        arrays=arrays,
        view=draw(st.sampled_from(views if outer else ("contiguous",))),
        mean=draw(st.sampled_from((0.0, 100.0))),
        spread=draw(st.sampled_from((1.0, 8.0, 1e-3))),
        weight_offset=0.0 if centred else draw(st.sampled_from((0.0, 1.0))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
