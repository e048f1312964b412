"""float64 NumPy arrays run on the CPU path, exactly enough to check gradients; kernels refuse."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import KERNELS

import cupyattn

RNG = np.random.default_rng(0)


def arrays() -> list[np.ndarray]:
    shapes = ((2, 5, 4, 6), (2, 7, 2, 6), (2, 7, 2, 3))
    return [RNG.standard_normal(shape) for shape in shapes]


def test_results_and_gradients_are_float64():
    q, k, v = arrays()
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == lse.dtype == np.float64
    grads = cupyattn.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    assert {grads.dq.dtype, grads.dk.dtype, grads.dv.dtype} == {np.dtype(np.float64)}
    x = RNG.standard_normal((3, 9))
    assert cupyattn.softmax(x).dtype == np.float64


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_gradients_are_those_of_finite_differences(name):
    """To 1e-8, which float32 results could not show."""
    options = {"bias": RNG.standard_normal((4, 5, 7)), "sinks": RNG.standard_normal(4)}
    given = dict(zip("qkv", arrays(), strict=True)) | options
    dout = RNG.standard_normal((2, 5, 4, 3))

    def loss(**changed: np.ndarray) -> float:
        q, k, v, *others = (given | changed).values()
        named = dict(zip(options, others, strict=True))
        return float((dout * cupyattn.attention(q, k, v, causal=True, **named)).sum())

    q, k, v = given["q"], given["k"], given["v"]
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True, **options)
    grads = cupyattn.attention_backward(dout, q, k, v, out, lse, causal=True, **options)
    direction = RNG.standard_normal(given[name].shape)
    step = 1e-5
    ahead = loss(**{name: given[name] + step * direction})
    behind = loss(**{name: given[name] - step * direction})
    slope = (getattr(grads, f"d{name}") * direction).sum()
    assert abs((ahead - behind) / (2 * step) - slope) <= 1e-8 * (1 + abs(slope))


def test_softmaxs_gradient_is_that_of_finite_differences():
    x, dout, direction = RNG.standard_normal((3, 4, 9))
    dx = cupyattn.softmax_backward(dout, cupyattn.softmax(x))
    step = 1e-5
    moved = cupyattn.softmax(x + step * direction) - cupyattn.softmax(x - step * direction)
    assert abs((dout * moved).sum() / (2 * step) - (dx * direction).sum()) <= 1e-9


def test_an_option_may_be_float64_only_beside_float64_arrays():
    q, k, v = (array.astype(np.float32) for array in arrays())
    with pytest.raises(TypeError, match=r"bias has dtype float64; allowed are float16, float32"):
        cupyattn.attention(q, k, v, bias=np.zeros((5, 7)))


@pytest.mark.nvrtc
def test_kernels_refuse_and_say_what_to_do():
    q, k, v = map(KERNELS.put, arrays())
    with KERNELS.running():
        with pytest.raises(TypeError, match=r"q has dtype float64 on a GPU.*astype\('float32'\)"):
            cupyattn.attention(q, k, v)
        with pytest.raises(TypeError, match=r"x has dtype float64 on a GPU.*NumPy arrays"):
            cupyattn.softmax(KERNELS.put(RNG.standard_normal((3, 9))))
