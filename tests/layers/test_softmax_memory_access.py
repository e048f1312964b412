"""What the kernels over logits and scores do to global memory, as the emulator counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn.emulator import Report
from cupyattn.emulator.report import Access

pytestmark = pytest.mark.nvrtc

RNG = np.random.default_rng(0)
ROWS, WIDTH = 3, 4096
X = RNG.standard_normal((ROWS, WIDTH)).astype(np.float16)
MASK = RNG.random((ROWS, WIDTH)) < 0.7
BIAS = RNG.standard_normal((1, WIDTH)).astype(np.float16)
LABELS = np.array([5, 4095, -100], np.int32)
LSE = cupyattn.logsumexp(X)
OUT = cupyattn.softmax(X)
ONES = np.ones(ROWS, np.float32)


def accesses(call: Callable[[], Any]) -> list[Access]:
    """Those to global memory."""
    report = Report()
    with cupyattn.backend("emulator", report=report):
        call()
    assert report.bank_conflict_ways == 1.0
    return [access for access in report.accesses if access.space == "global"]


# the call; what it reads and writes in vectors of 16 bytes, in arrays of the size of X
CALLS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "softmax": (lambda: cupyattn.softmax(X), 1, 1),
    "log_softmax": (lambda: cupyattn.log_softmax(X, mask=MASK, bias=BIAS), 2, 1),
    "softmax_backward": (lambda: cupyattn.softmax_backward(X, OUT), 2, 1),
    "logsumexp": (lambda: cupyattn.logsumexp(X, mask=MASK), 1, 0),
    "logsumexp_backward": (lambda: cupyattn.logsumexp_backward(ONES, X, LSE), 1, 1),
    "cross_entropy": (
        lambda: cupyattn.cross_entropy(X, LABELS, return_lse=True, label_smoothing=0.1), 1, 0,
    ),
    "cross_entropy_backward": (
        lambda: cupyattn.cross_entropy_backward(ONES[0, ...], X, LABELS, LSE), 1, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_rows_come_and_go_once_in_whole_vectors(name):
    """16 bytes a thread, every sector that is touched is needed, and rows of half floats once."""
    call, reads, writes = CALLS[name]
    found = accesses(call)
    for write, count in ((False, reads), (True, writes)):
        whole = [a for a in found if a.write == write and a.instruction.opcode.endswith("v4.u32")]
        ignored = WIDTH * 2 * (name == "cross_entropy_backward" and not write)
        assert sum(access.bytes for access in whole) == count * X.nbytes - ignored
        assert all(access.efficiency == 1.0 for access in found if access.write == write)


def test_broadcast_arrays_come_in_vectors_too():
    found = accesses(lambda: cupyattn.softmax(X, mask=MASK, bias=BIAS))
    reads = [access for access in found if not access.write]
    assert sum(access.bytes for access in reads) == X.nbytes + MASK.nbytes + ROWS * BIAS.nbytes
    assert {access.instruction.opcode.rsplit(".", 2)[-2] for access in reads} == {"v4"}


def test_causal_rows_are_read_as_far_as_they_are_seen():
    x = RNG.standard_normal((64, 64)).astype(np.float32)
    found = accesses(lambda: cupyattn.softmax(x, causal=True))
    vectors = sum(-(-(row + 1) // 4) for row in range(64))
    assert sum(access.bytes for access in found if not access.write) == 16 * vectors
    assert sum(access.bytes for access in found if access.write) == x.nbytes


def test_logits_of_ignored_rows_are_not_read_where_nobody_asks_for_lse():
    found = accesses(lambda: cupyattn.cross_entropy(X, LABELS, reduction="none"))
    large = sum(access.bytes for access in found if access.instruction.opcode.endswith("v4.u32"))
    assert large == 2 * WIDTH * 2


def test_scalar_loads_are_whole_sectors():
    """Rows of an odd number of items cannot come in vectors; neighbours read neighbours."""
    odd = RNG.standard_normal((2, 3001)).astype(np.float32)
    found = accesses(lambda: cupyattn.logsumexp(odd))
    # 128 bytes a warp, which lie in five sectors where they do not begin with one.
    assert max(access.sectors_per_request for access in found) <= 5
