"""README's transformer block: equal to a twin in plain NumPy, and its gradients to differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices import KERNELS
from support.readme import examples
from support.search import deep

import cupyattn

PAGE: dict[str, Any] = {}
(BLOCK,) = (example for example in examples() if "def block(" in example)
exec(BLOCK.partition("x, target =")[0], PAGE)  # without the training
S, E, H, G, D = (PAGE[name] for name in "SEHGD")
STEP = 1e-5


def twin(x, w, cos, sin):
    """The block in float64, from its formulas, sharing no code with the library."""

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(x):
        first, second = x[..., : D // 2], x[..., D // 2 :]
        c, s = cos[:, None], sin[:, None]
        return np.concatenate((first * c - second * s, second * c + first * s), axis=-1)

    heads = (norm(x, w["norm"]) @ w["qkv"]).reshape(*x.shape[:2], H + 2 * G, D)
    q, k, v = turned(heads[:, :, :H]), turned(heads[:, :, H : H + G]), heads[:, :, H + G :]
    k, v = (np.repeat(array, H // G, axis=2) for array in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(D)
    scores = np.where(np.tri(S, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = x + np.einsum("bhij,bjhd->bihd", p, v).reshape(*x.shape[:2], H * D) @ w["mix"]
    gate, up = np.split(norm(y, w["norm_2"]) @ w["gate_up"], 2, axis=-1)
    return y + (gate / (1 + np.exp(-gate)) * up) @ w["down"]


def problem(dtype):
    rng = np.random.default_rng(3)
    x, dout = rng.standard_normal((2, 2, S, E))
    w = {name: 1 + rng.standard_normal(shape) / 4 for name, shape in PAGE["SHAPES"].items()}
    for name in ("qkv", "mix", "gate_up", "down"):
        w[name] = rng.standard_normal(w[name].shape) / np.sqrt(len(w[name]))
    as_given = {name: array.astype(dtype) for name, array in w.items()}
    return x.astype(dtype), as_given, dout.astype(dtype)


def differences(x, w, dout, cos, sin, directions):
    """Central differences of <dout, block> along a direction of each array."""

    def loss(step, name):
        moved = {**w, "x": x}
        moved[name] = moved[name] + step * directions[name]
        return float((dout * twin(moved.pop("x"), moved, cos, sin)).sum())

    return {name: (loss(STEP, name) - loss(-STEP, name)) / (2 * STEP) for name in directions}


def compare(x, w, dout, put, get, tolerance, gradient_tolerance):
    cos, sin = cupyattn.rope_tables(S, D)
    exact = {name: array.astype(np.float64) for name, array in w.items()}
    wide_x, wide_dout, *tables = (a.astype(np.float64) for a in (x, dout, cos, sin))
    on_side = {name: put(array) for name, array in w.items()}
    out, pullback = cupyattn.vjp(PAGE["block"], put(x), on_side, put(cos), put(sin))
    expected = twin(wide_x, exact, *tables)
    error = np.abs(get(out).astype(np.float64) - expected).max() / np.abs(expected).max()
    assert error < tolerance, error
    dx, dw, *_ = pullback(put(dout))
    gradients = {"x": dx, **dw}
    rng = np.random.default_rng(4)
    directions = {name: rng.choice([-1.0, 1.0], get(g).shape) for name, g in gradients.items()}
    slopes = differences(wide_x, exact, wide_dout, *tables, directions)
    for name, slope in slopes.items():
        gradient = get(gradients[name]).astype(np.float64)
        found = float((gradient * directions[name]).sum())
        size = float(np.sqrt((gradient**2).sum()))  # what such a sum is, but for its sign
        assert abs(found - slope) < gradient_tolerance * size, (name, found, slope)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "gradient_tolerance"),
    [("float64", 1e-6, 1e-4), ("float32", 1e-5, 1e-3), ("float16", 5e-3, 5e-2)],
)
def test_on_numpy_arrays(dtype, tolerance, gradient_tolerance):
    compare(*problem(dtype), np.asarray, np.asarray, tolerance, gradient_tolerance)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("dtype", "tolerance", "gradient_tolerance"),
    [("float16", 5e-3, 5e-2), *deep(("float32", 1e-5, 1e-3))],
)
def test_through_the_kernels(dtype, tolerance, gradient_tolerance, monkeypatch):
    monkeypatch.setitem(PAGE, "np", KERNELS.xp)
    compare(*problem(dtype), KERNELS.put, KERNELS.get, tolerance, gradient_tolerance)
