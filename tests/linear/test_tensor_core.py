"""Products on tensor cores, against the reference and its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import KERNELS

import cupyattn
from cupyattn import reference

pytestmark = pytest.mark.nvrtc


def normal(seed: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape, dtype=np.float32).astype(np.float16)


def weight(inner: int, columns: int, along: bool) -> np.ndarray:
    """(K, W), its columns contiguous where its lines run along the sum."""
    scale = np.float16(max(inner, 1) ** -0.5)
    return normal(1, columns, inner).T * scale if along else normal(1, inner, columns) * scale


def error_ratios(rows, outer, inner, *, along, activation=None, bias=True, residual=True):
    """Of out, and of the preactivation where there is one."""
    columns = outer * (2 if activation in ("swiglu", "geglu") else 1)
    x, w = normal(0, rows, inner), weight(inner, columns, along)
    b = normal(2, columns) if bias else None
    added = normal(3, rows, outer) if residual else None
    with KERNELS.running():
        results = cupyattn.linear(
            *(None if array is None else KERNELS.put(array) for array in (x, w, b)),
            residual=None if added is None else KERNELS.put(added),
            activation=activation,
            return_preactivation=activation is not None,
        )
    found = results if activation else (results,)
    exact = reference.linear(
        *(None if array is None else array.astype(np.float64) for array in (x, w, b, added)),
        activation=activation,
    )
    bound = reference.linear_bound(x, w, b, added, activation=activation, dtype="float16")
    return [
        reference.error_ratio(KERNELS.get(one), *rest)
        for one, *rest in zip(found, exact, bound, strict=False)
    ]


@pytest.mark.parametrize("along", [True, False])
@pytest.mark.parametrize(
    ("rows", "outer", "inner", "activation"),
    [
        (257, 136, 72, "silu"),
        (129, 40, 8, "swiglu"),
        (127, 33, 31, "gelu"),
        (70, 65, 33, "geglu"),
    ],
)
def test_forward_is_within_its_bound(rows, outer, inner, activation, along):
    ratios = error_ratios(rows, outer, inner, along=along, activation=activation)
    assert max(ratios) <= 1
