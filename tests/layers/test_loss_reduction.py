"""The mean of so many losses that a thread's count of labels takes both halves of its number."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import KERNELS

from cupyattn.arrays import adopt
from cupyattn.ops.layers.cross_entropy import reduce_losses

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

IGNORED = -100


def test_the_mean_of_eight_million_rows():
    """A thread counts 8191 labels: all bits of its number's lower half, and one of the other."""
    labels = np.zeros(8191 * 1024 + 5, np.int32)
    labels[[0, 77, -1]] = IGNORED
    given = {"dloss": np.asarray(len(labels) - 3, np.float32), "labels": labels}
    placed = adopt({name: KERNELS.put(array) for name, array in given.items()})
    assert KERNELS.get(reduce_losses(KERNELS.device, placed, IGNORED, mean=True)) == 1
