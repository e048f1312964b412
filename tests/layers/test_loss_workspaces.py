"""The workspace of a loss: nothing else is allocated, nothing changes, nothing overlaps it."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.devices import everywhere
from support.recording_device import device_array

import cupyattn
from cupyattn import LinearCrossEntropyGrads


def test_cross_entropy_allocates_nothing_with_everything_given(recorder):
    """The losses of rows, and the gradient of one, are in the workspace."""
    f32 = np.float32
    logits, labels = device_array((5, 60, 40)), device_array((5, 60), int)
    lse, one, out = device_array((5, 60), f32), device_array((), f32), device_array((), f32)
    forward = partial(cupyattn.cross_entropy, logits, labels, return_lse=True, out=(out, lse))
    backward = partial(cupyattn.cross_entropy_backward, one, logits, labels, lse, dlogits=logits)
    for call, needed in ((forward, 4 * 300), (backward, 4)):
        with pytest.raises(ValueError, match=rf"workspace has {needed - 1} bytes; .* {needed},"):
            call(workspace=device_array((needed - 1,), np.uint8))
        assert not recorder.started
        workspace = device_array((needed,), np.uint8)
        call(workspace=workspace)
        assert recorder.allocated == []
        assert len(recorder.started) == 2
        launched = {
            array.data.ptr
            for _, _, given in recorder.started
            for array in given[:9]
            if hasattr(array, "data") and hasattr(array.data, "ptr")
        }
        assert workspace.data.ptr in launched
        recorder.launches.clear()
    for call in (forward, backward):
        with pytest.raises(ValueError, match=r"lse overlaps workspace|workspace overlaps lse"):
            call(workspace=lse)
    forward(reduction="none", out=(device_array((5, 60), f32), lse), workspace=device_array((0,)))
    assert recorder.allocated == []


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_the_same_with_a_workspace(side, reduction):
    logits = side.put(np.random.default_rng(0).standard_normal((7, 40)).astype(np.float32))
    labels = side.put(np.array([3, -100, 0, 39, 5, 5, 1]))
    room = side.put(np.full(64, 255, np.uint8))
    loss, lse = cupyattn.cross_entropy(logits, labels, reduction=reduction, return_lse=True)
    found = cupyattn.cross_entropy(logits, labels, reduction=reduction, workspace=room)
    assert_array_equal(side.get(found), side.get(loss))
    given = (loss, logits, labels, lse)
    expected = cupyattn.cross_entropy_backward(*given, reduction=reduction)
    found = cupyattn.cross_entropy_backward(*given, reduction=reduction, workspace=room)
    assert_array_equal(side.get(found), side.get(expected))


@everywhere
def test_linear_cross_entropy_is_the_same_with_a_workspace(side):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((50, 8), (8, 16)))
    labels = rng.integers(0, 16, 50)
    given = [side.put(array) for array in (x, w, labels)]
    dloss = side.put(np.ones((), np.float32))
    room = {"logits_bytes": 20 * 32, "workspace": side.put(np.full(2**16, 255, np.uint8))}
    expected = cupyattn.linear_cross_entropy(*given, return_lse=True)
    found = cupyattn.linear_cross_entropy(*given, return_lse=True, **room)
    plain = cupyattn.linear_cross_entropy_backward(dloss, *given, expected[1], logits_bytes=20 * 32)
    grads = cupyattn.linear_cross_entropy_backward(dloss, *given, expected[1], **room)
    for result, wanted in zip((*found, *grads), (*expected, *plain), strict=True):
        assert_array_equal(side.get(result), side.get(wanted))


def test_the_logits_of_chunks_are_in_the_workspace(recorder):
    """A thin last chunk and the tensor cores' split products need scratch memory of their own."""
    x, w, labels = device_array((1000, 512)), device_array((512, 520)), device_array((1000,), int)
    f32 = np.float32
    lse, dloss, out = device_array((1000,), f32), device_array((), f32), device_array((), f32)
    grads = LinearCrossEntropyGrads(device_array(x.shape), device_array(w.shape))
    calls = (
        (cupyattn.linear_cross_entropy, (x, w, labels), {"return_lse": True, "out": (out, lse)}),
        (cupyattn.linear_cross_entropy_backward, (dloss, x, w, labels, lse), {"grads": grads}),
    )
    for function, arrays, options in calls:
        options |= {"logits_bytes": 2 * 520 * 384}
        with pytest.raises(ValueError, match=r"workspace has 16 bytes; .* needs \d+") as refused:
            function(*arrays, **options, workspace=device_array((16,), np.uint8))
        needed = int(re.findall(r"needs (\d+)", str(refused.value))[0])
        assert needed >= 2 * 520 * 384
        assert not recorder.started
        function(*arrays, **options, workspace=device_array((needed,), np.uint8))
        assert len(recorder.started) > 6
        assert recorder.allocated == []
        recorder.launches.clear()


def test_a_workspace_may_not_overlap_an_array(recorder):
    x, w, labels = device_array((10, 8)), device_array((8, 16)), device_array((10,), int)
    with pytest.raises(ValueError, match="workspace overlaps x in memory"):
        cupyattn.linear_cross_entropy(x, w, labels, workspace=x)
    lse, dloss = device_array((10,), np.float32), device_array((), np.float32)
    given = (dloss, x, w, labels, lse)
    with pytest.raises(ValueError, match="workspace overlaps lse in memory"):
        cupyattn.linear_cross_entropy_backward(*given, workspace=lse)
    with pytest.raises(ValueError, match=r"grads\.dx overlaps x in memory"):
        cupyattn.linear_cross_entropy_backward(*given, grads=LinearCrossEntropyGrads(x))
    assert recorder.did_nothing
