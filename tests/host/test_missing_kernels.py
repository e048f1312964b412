"""What has no kernel is refused by name, with the way that has it; nothing is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.base_problem import BASE, DV, EVERY_OPTION, SQ, B, D, H
from support.devices import CUPY, SENTINEL, kernels_only, placed
from support.recording_device import device_array

import cupyattn
from cupyattn import (
    AttentionGrads,
    GatedGrads,
    attention,
    attention_backward,
    cross_entropy_backward,
    reference,
    rms_norm,
    rms_norm_backward,
    softmax_backward,
)
from cupyattn import softmax as softmax_forward


def backward_arrays(**options: Any) -> tuple[Any, ...]:
    """dout, q, k, v, out and lse of the base problem."""
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    out, lse = reference.attention(*arrays, **options)
    return dout, *arrays, out.astype(np.float32), lse.astype(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", sorted(set(EVERY_OPTION) - {"causal", "softmax_scale", "q_offset array"})
)
def test_options_without_a_kernel_say_so(name):
    """By name, with the way that has them; nothing is written."""
    arrays = [CUPY.put(array) for array in BASE.arrays()]
    out = CUPY.put(np.full((B, SQ, H, DV), SENTINEL, np.float32))
    options = {key: placed(CUPY, value) for key, value in EVERY_OPTION[name].items()}
    no_kernel = name == "mask_mod"  # a function of Python's, and no expression
    for implementation in ("flash", "tiled", "naive") if no_kernel else ("tiled", "naive"):
        with pytest.raises(NotImplementedError) as failure:
            attention(*arrays, **options, implementation=implementation, out=out)
        said, _, fix = str(failure.value).partition("; ")
        assert name in said
        assert "the CPU path has every option" in fix
        assert "pass NumPy arrays" in fix
    assert (CUPY.get(out) == SENTINEL).all()


@kernels_only
def test_backward_without_a_kernel_names_another(side):
    moved = [side.put(array) for array in backward_arrays()]
    with pytest.raises(NotImplementedError, match=r"'tiled'.*pass implementation='flash'.*NumPy"):
        attention_backward(*moved, causal=True, implementation="tiled")


@kernels_only
def test_a_backward_option_without_a_kernel_says_so(side):
    name = "mask_mod"
    options = {key: placed(side, value) for key, value in EVERY_OPTION[name].items()}
    dq = side.put(np.full((B, SQ, H, D), SENTINEL, np.float32))
    grads = AttentionGrads(dq)
    with pytest.raises(NotImplementedError, match=rf"{name} in attention_backward.*CPU path"):
        attention_backward(
            *map(side.put, backward_arrays()), **options, implementation="naive", grads=grads
        )
    assert (side.get(dq) == SENTINEL).all()


def test_arrays_that_leave_too_many_axes_apart_are_named(recorder):
    """Before anything is launched; without gaps, and on NumPy's arrays, any number of axes do."""
    gaps = device_array((6, 6, 6, 6, 6, 8))[::2, ::2, ::2, ::2, ::2]
    whole, labels = device_array((3, 3, 3, 3, 3, 8)), device_array((6,) * 5, int)
    labels = labels[::2, ::2, ::2, ::2, ::2]
    one, weight, rows = device_array((), "f4"), device_array((8,)), device_array((3,) * 5, "f4")
    refused = {
        "x": lambda: softmax_forward(gaps),
        "grads": lambda: softmax_backward(whole, whole, grads=gaps),
        "x, residual": lambda: rms_norm(gaps, residual=gaps),
        "dtotal": lambda: rms_norm_backward(whole, whole, weight, rows, dtotal=gaps),
        "gate": lambda: cupyattn.swiglu(gaps),
        "grads.dgate": lambda: cupyattn.swiglu_backward(
            whole, whole, whole, grads=GatedGrads(gaps)
        ),
        "labels": lambda: cross_entropy_backward(one, whole, labels, rows),
        "ids": lambda: cupyattn.embedding(weight[None], labels),
        "dout": lambda: cupyattn.embedding_backward(
            gaps, weight[None], device_array((3,) * 5, int)
        ),
    }
    for name, call in refused.items():
        with pytest.raises(
            ValueError, match=rf"the strides of {name} leave \d axes apart; at most 4"
        ):
            call()
    mask = device_array((3, 1, 3, 1, 3, 1), bool)
    with pytest.raises(ValueError, match=r"strides of mask leave 5 .*whole shape what broadcasts"):
        softmax_forward(whole, mask=mask)
    turned = device_array((3, 3, 3, 3, 8)).transpose(1, 0, 3, 2, 4), device_array((3, 3, 3, 3, 8))
    softmax_forward(turned[0], out=turned[1])
    assert len(recorder.started) == 1


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
