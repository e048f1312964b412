"""A process for each rank, on a communicator that is the user's own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.pipe_ranks import on_processes
from support.ring import CLOSE, case, one_device


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"sizes": (3, 0, 5), "dropout_p": 0.0}),
        (3, {"causal": True, "sinks": np.array([0.5, -1.0, 2.0, 0.0])}),
    ],
)
def test_processes_give_what_one_device_gives(ranks, options):
    problem = case(ranks, "zigzag", **options)
    found, codes = on_processes(problem)
    assert codes == [0] * ranks
    out, lse, grads = one_device(problem)
    np.testing.assert_allclose(problem.unshard([f[0] for f in found]), out, **CLOSE)
    np.testing.assert_allclose(problem.unshard([f[1] for f in found], of_rows=True), lse, **CLOSE)
    for name in ("dq", "dk", "dv"):
        whole = problem.unshard([getattr(f[2], name) for f in found])
        np.testing.assert_allclose(whole, getattr(grads, name), **CLOSE)


def test_a_process_that_dies_ends_the_others():
    """Their own errors, of the pipes: a communicator of the user's own has no other way."""
    begun = time.monotonic()
    found: list[Any]
    found, codes = on_processes(case(3, "zigzag", causal=True), ends=2)
    assert found == [None] * 3
    assert codes[2] == 9
    assert all(code not in (0, None) for code in codes)
    assert time.monotonic() - begun < 100
