"""What has no kernel is refused by name, with the way that has it; nothing is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.attention_options import RUN_TIME_OPTIONS
from support.base_problem import BASE, DV, EVERY_OPTION, SQ, B, D, H
from support.devices import CUPY, SENTINEL, kernels_only, placed

from cupyattn import AttentionGrads, attention, attention_backward, reference
from cupyattn import softmax as softmax_forward


def backward_arrays(**options: Any) -> tuple[Any, ...]:
    """dout, q, k, v, out and lse of the base problem."""
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    out, lse = reference.attention(*arrays, **options)
    return dout, *arrays, out.astype(np.float32), lse.astype(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(EVERY_OPTION) - {*RUN_TIME_OPTIONS, "q_offset array"}))
def test_options_without_a_kernel_say_so(name):
    """By name, with the way that has them; nothing is written."""
    arrays = [CUPY.put(array) for array in BASE.arrays()]
    out = CUPY.put(np.full((B, SQ, H, DV), SENTINEL, np.float32))
    options = {key: placed(CUPY, value) for key, value in EVERY_OPTION[name].items()}
    only_reference = name in ("rotary", "mask_mod")
    for implementation in ("flash", "tiled", "naive") if only_reference else ("tiled", "naive"):
        with pytest.raises(NotImplementedError) as failure:
            attention(*arrays, **options, implementation=implementation, out=out)
        said, _, fix = str(failure.value).partition("; ")
        assert name in said
        assert "the CPU path has every option; pass NumPy arrays" in fix
    assert (CUPY.get(out) == SENTINEL).all()


@kernels_only
def test_backward_without_a_kernel_names_another(side):
    moved = [side.put(array) for array in backward_arrays()]
    with pytest.raises(NotImplementedError, match=r"'tiled'.*'naive'.*NumPy"):
        attention_backward(*moved, causal=True, implementation="tiled")


@kernels_only
@pytest.mark.parametrize("name", ["rotary", "mask_mod"])
def test_backward_options_without_a_kernel_say_so(side, name):
    options = {key: placed(side, value) for key, value in EVERY_OPTION[name].items()}
    dq = side.put(np.full((B, SQ, H, D), SENTINEL, np.float32))
    grads = AttentionGrads(dq)
    with pytest.raises(NotImplementedError, match=rf"{name} in attention_backward.*CPU path"):
        attention_backward(
            *map(side.put, backward_arrays()), **options, implementation="naive", grads=grads
        )
    assert (side.get(dq) == SENTINEL).all()


@pytest.mark.gpu
def test_softmax_of_too_many_axes_that_lie_apart():
    """Five axes with gaps between them; on NumPy, and without the gaps, any number will do."""
    import cupy

    x = np.random.default_rng(0).standard_normal((3, 3, 3, 3, 3, 4), "f4")
    bound = reference.softmax_bound(x, dtype="float32")
    actual = CUPY.get(softmax_forward(CUPY.put(x)))
    assert reference.error_ratio(actual, reference.softmax(x), bound) <= 1
    gaps = cupy.zeros((6, 6, 6, 6, 6, 4), np.float32)[::2, ::2, ::2, ::2, ::2]
    with pytest.raises(ValueError, match=r"leave 5 axes apart; .*at most 4 axes.*; copy"):
        softmax_forward(gaps)
