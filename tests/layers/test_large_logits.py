"""Backwards that are given lse: weights stay at most 1 where rounding lse to float32 is visible."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import KERNELS, everywhere

import cupyattn
from cupyattn import reference

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

LARGE = (1e7, 3e8, 1e30)


def lowered_lse(lse: np.ndarray) -> np.ndarray:
    """The next float32 below lse: what rounding may give."""
    return np.nextafter(lse.astype(np.float32), np.float32(-np.inf))


@pytest.mark.parametrize("large", LARGE)
def test_cross_entropy_gradient_of_large_logits_is_at_most_dloss(large):
    logits = np.float32([[large, large, 0, -large], [-large, -large, -large, -large]])
    labels = np.array([1, 2], np.int32)
    lse = lowered_lse(logits.max(-1))
    dloss = np.ones(2, np.float32)
    arrays = [KERNELS.put(each) for each in (dloss, logits, labels, lse)]
    found = KERNELS.get(cupyattn.cross_entropy_backward(*arrays, reduction="none"))
    assert (np.abs(found) <= 1).all()
    exact = reference.cross_entropy_backward(dloss, logits, labels, lse, reduction="none")
    bound = reference.cross_entropy_backward_bound(
        dloss, logits, labels, lse, dtype="float32", reduction="none"
    )
    assert np.isfinite(bound).all()
    assert reference.error_ratio(found, exact, bound) <= 1


@pytest.mark.parametrize("large", LARGE)
def test_logsumexp_gradient_of_large_scores_is_at_most_dout(large):
    x = np.float32([[large, large, 0, -large], [-large, -large, -large, -large]])
    out, dout = lowered_lse(x.max(-1)), np.ones(2, np.float32)
    arrays = [KERNELS.put(each) for each in (dout, x, out)]
    found = KERNELS.get(cupyattn.logsumexp_backward(*arrays))
    assert (found >= 0).all()
    assert (found <= 1).all()
    exact = reference.logsumexp_backward(dout, x, out)
    bound = reference.logsumexp_backward_bound(dout, x, out, dtype="float32")
    assert np.isfinite(bound).all()
    assert reference.error_ratio(found, exact, bound) <= 1


@everywhere
def test_nan_logits_give_nan_gradients(side):
    logits, labels = np.float32([[np.nan, 1], [0, 1]]), np.zeros(2, np.int32)
    lse = np.float32([np.nan, 1.3])
    with side.running():
        arrays = map(side.put, (np.ones(2, np.float32), logits, labels, lse))
        found = side.get(cupyattn.cross_entropy_backward(*arrays, reduction="none"))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()
