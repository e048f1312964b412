"""The kernels for few rows and a quantised weight against float64 of the exact weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from linear.test_thin import GATED, normal
from support.devices import KERNELS
from support.search import deep

import cupyattn
from cupyattn import reference
from cupyattn.arrays import adopt
from cupyattn.functional.linear.weights import weight_arrays
from cupyattn.ops.card import Card
from cupyattn.ops.linear.checks import forward_problem
from cupyattn.ops.linear.choice import launches_for
from cupyattn.quantized_weight import QuantizedWeight, pieces

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# One of each kind of kernel: blocks that a span has four, two and one of, and longer ones.
BLOCKS = {"nf4": 64, "int4": 128, "int8": None, "q4_1": 32, "q4_k": 32}
OTHER_BLOCKS = (
    ("nf4", 32), ("nf4", 128), ("nf4", 256), ("int4", 32), ("int4", 64), ("int8", 32), ("int8", 64),
)  # fmt: skip
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)


def weight_of(
    kind: str, block_size: int | None, inner: int, outer: int, *, seed: int = 0, scale: float = 0.05
) -> QuantizedWeight:
    """Return a weight (K, N) of any codes, and scales of all sizes up to about `scale`."""
    rng = np.random.default_rng(seed)
    block_size = block_size or inner
    arrays: dict[str, Any] = {}
    for name, (shape, dtype) in pieces(kind, outer, inner, block_size).items():
        if name == "codes":
            info = np.iinfo(dtype)
            arrays[name] = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
        elif dtype == np.uint8:
            arrays[name] = rng.integers(0, 64, shape, dtype)
        else:
            size = {"int8": 16, "q4_k": 32}.get(kind, 1)
            arrays[name] = (rng.uniform(-scale, scale, shape) / size).astype(dtype)
    if kind == "int4":
        arrays["scales"][..., 1] = rng.uniform(0, 15, arrays["scales"].shape[:-1])
    return QuantizedWeight(kind, **arrays, block_size=block_size)


class Case(NamedTuple):
    """Arrays of a call, and what is asked of it."""

    x: np.ndarray
    w: QuantizedWeight
    b: np.ndarray | None
    residual: np.ndarray | None
    activation: str | None

    def run(self, **options: Any) -> Any:
        """Call the public function on the device."""
        x, b, residual = (None if a is None else KERNELS.put(a) for a in (self.x, *self[2:4]))
        arrays = {name: KERNELS.put(array) for name, array in self.w.arrays.items()}
        weight = replace(self.w, **arrays)
        options = {"activation": self.activation, "residual": residual, **options}
        return cupyattn.linear(x, weight, b, **options)

    def require_right(self) -> None:
        """Out and preactivation are within their bounds."""
        out, preactivation = self.run(return_preactivation=True)
        dtype = self.x.dtype.name
        exact, z = reference.linear(*self[:4], activation=self.activation)
        bounds = reference.linear_bound(*self[:4], activation=self.activation, dtype=dtype)
        assert reference.error_ratio(KERNELS.get(out), exact, bounds[0]) <= 1
        if self.activation is not None:
            assert reference.error_ratio(KERNELS.get(preactivation), z, bounds[1]) <= 1


def case(
    rows: int,
    weight: QuantizedWeight,
    *,
    activation: str | None = None,
    biased: bool = True,
    added: bool = True,
    start: int = 0,
    padding: int = 0,
    seed: int = 0,
    dtype: str = "float16",
) -> Case:
    """x and residual lie within wider arrays of NaN."""
    rng = np.random.default_rng(seed)
    inner, columns = weight.shape
    outer = columns // (2 if activation in GATED else 1)
    apart = {"start": start, "padding": padding}
    return Case(
        normal(rng, rows, inner, **apart).astype(dtype) if dtype != "float16" else
        normal(rng, rows, inner, **apart),
        weight,
        rng.standard_normal(columns).astype(dtype) if biased else None,
        normal(rng, rows, outer, **apart).astype(dtype, copy=False) if added else None,
        activation,
    )  # fmt: skip


def steps_of(problem: Case) -> tuple[str, ...]:
    """The kernels of a call."""
    arrays, form = weight_arrays(problem.w)
    operands = adopt({"x": problem.x, **arrays, "b": problem.b})
    described = forward_problem(operands, problem.activation, False, form)
    steps = launches_for("forward", described, Card.of(KERNELS.device)).steps
    return tuple(step.specialisation.spec.entry for step in steps)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("rows", [1, 5, *deep(*ROWS)])
def test_every_format(rows, kind):
    """Two turns of K, the second with a tail of half a span; tails of N, and all else there is."""
    inner = 4096 + (256 if kind == "q4_k" else BLOCKS[kind] or 64)
    problem = case(rows, weight_of(kind, BLOCKS[kind], inner, 76), activation="swiglu")
    assert steps_of(problem) == ("linear_quantised_thin",)
    problem.require_right()
