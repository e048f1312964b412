"""Windows that end at and within tiles, beyond the second one: both edges, every kernel.

An edge that is wrong by one key is seen only where a tile lies wholly inside the window and the
next one is cut: lengths past two tiles of a kernel, and windows of about as many keys.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.backward_runs import check as check_backward
from support.backward_runs import placed, run
from support.devices import KERNELS
from support.forward_runs import check
from support.search import deep, mostly_deep

import cupyattn
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# Whatever the size of a tile: by the first two all of its rows but one see a key, or a row all of
# its keys but one; by the last just one row or key lies in the next tile.
SIDES = [(126, None), (None, 126), (129, 127)]


NARROW = (24, 40)
"""Head dims for float32: half the time of 64 on the emulator, and other tests compile them."""


def problem(dtype: str, head_dim: int | tuple[int, int], sq: int, sk: int, **drawn):
    head_dim, head_dim_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    return AttentionCase(
        B=1, Sq=sq, Sk=sk, H=1, G=1, D=head_dim, Dv=head_dim_v, dtype=dtype,
        options=(("q_offset", 0), *drawn.items()),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "window_size", "deterministic"),
    mostly_deep(
        itertools.product((64, 128, 256), [*SIDES, (150, None), (None, 20)], (False, True)),
        [
            *itertools.product((64,), SIDES, (False, True)),
            *zip((256,) * 2, SIDES[1:], (False, True), strict=True),
        ],
    ),
    ids=str,
)
def test_backward_on_tensor_cores(head_dim: int, window_size, deterministic: bool):
    of_window = problem("float16", head_dim, 300, 256, window_size=window_size)
    check_backward(of_window, "flash", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("sq", "window_size"), [(70, (10, None)), (70, (None, 10)), (140, (65, 63))], ids=str
)
@pytest.mark.parametrize("head_dim", [NARROW, *deep(64, 256)], ids=str)
def test_backward_in_float32(head_dim, sq, window_size, deterministic):
    of_window = problem("float32", head_dim, sq, 70, window_size=window_size)
    check_backward(of_window, "flash", deterministic=deterministic)


@pytest.mark.parametrize("window_size", SIDES, ids=str)
@pytest.mark.parametrize(
    ("implementation", "dtype", "head_dim"),
    [
        *(("flash", "float16", head_dim) for head_dim in (64, 256)),
        ("flash", "float32", NARROW),
        *deep(("flash", "float32", 64), ("flash", "float16", 128)),
    ],
)
def test_forward(implementation: str, dtype: str, head_dim, window_size):
    of_window = problem(dtype, head_dim, 300, 256, window_size=window_size)
    check(of_window, implementation)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("implementation", "dtype", "head_dims"),
    [
        ("flash", "float16", (64, 64)),
        ("flash", "float32", NARROW),
        *deep(("flash", "float32", (64, 64))),
    ],
)
@pytest.mark.parametrize("dout_of_nothing", [np.nan, *deep(np.inf)])
def test_no_gradient_of_a_row_without_keys_whatever_its_dout(
    implementation: str,
    dtype: str,
    head_dims: tuple[int, int],
    deterministic: bool,
    dout_of_nothing: float,
):
    """seqused_k = 0 in one sequence of two: its dout and keys reach nothing."""
    two = AttentionCase(2, 40, 70, 2, 1, *head_dims, dtype=dtype, options=(("seqused_k", (0, 70)),))
    arrays, options = two.arrays(), two.keywords()
    dout, _ = two.gradients()
    dout[0] = dout_of_nothing
    out, lse = cupyattn.attention(*map(KERNELS.put, arrays), **placed(options), return_lse=True)
    results = KERNELS.get(out), KERNELS.get(lse)
    grads = run((dout, *arrays, *results), options, implementation, deterministic=deterministic)
    for name, gradient in grads.items():
        assert (gradient[0] == 0).all(), name
        assert np.isfinite(gradient[1]).all() and gradient[1].any(), name
