"""Streams, allocations and graphs: calls are queued, wait for nothing, and can be captured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import dtype_of

import cupyattn
from cupyattn import (
    AttentionGrads,
    LinearCrossEntropyGrads,
    attention,
    attention_backward,
    softmax,
    softmax_backward,
)

SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""
LONG = 400_000_000  # ns; a call takes some tens of thousands


@pytest.fixture(scope="module")
def spin() -> Callable[[int], None]:
    """Keep the current stream busy for some nanoseconds."""
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.uint64(0),))  # compiled and loaded before anything is timed
    cupy.cuda.Device().synchronize()
    return lambda nanoseconds: kernel((1,), (1,), (np.uint64(nanoseconds),))


FUNCTIONS = (
    *("attention flash", "attention tiled", "attention naive", "attention_backward"),
    *("softmax", "softmax_backward"),
)


class Work:
    """Every function that has a kernel, called on arrays made once."""

    def __init__(self) -> None:
        import cupy

        rng = np.random.default_rng(0)

        def normal(*shape: int) -> Any:
            return cupy.asarray((rng.standard_normal(shape) / 8).astype(np.float16))

        self.q, self.dout = normal(2, 40, 4, 64), normal(2, 40, 4, 64)
        self.k = normal(2, 50, 2, 64)
        self.out = tuple(cupy.empty_like(self.q) for _ in FUNCTIONS)
        self.lse = cupy.empty((2, 4, 40), np.float32)
        self.dk, self.dv = cupy.empty_like(self.k), cupy.empty_like(self.k)
        self.workspace = cupy.empty(2**20, np.uint8)
        self.used = cupy.asarray(np.array([50, 33]))
        self.forward = attention(
            self.q, self.k, self.k, causal=True, seqused_k=self.used, return_lse=True
        )
        self.calls = {name: partial(self._call, name) for name in FUNCTIONS}
        for function in self.calls.values():  # compiled, loaded, planned
            function(True)
            function(False)
        cupy.cuda.Device().synchronize()

    def _call(self, name: str, given: bool) -> Any:
        """Call a function, with out= or grads= if `given`."""
        out = self.out[FUNCTIONS.index(name)] if given else None
        if name == "softmax":
            return softmax(self.q, out=out)
        if name == "softmax_backward":
            return softmax_backward(self.dout, self.q, grads=out)
        options = {"causal": True}
        if name not in ("attention tiled", "attention naive"):
            options["seqused_k"] = self.used
        if name == "attention_backward":
            grads = attention_backward(
                self.dout,
                *(self.q, self.k, self.k, *self.forward),
                **options,
                deterministic=True,
                grads=AttentionGrads(out, self.dk, self.dv) if given else None,
                workspace=self.workspace,
            )
            return grads.dq, grads.dk, grads.dv
        return attention(
            *(self.q, self.k, self.k),
            **options,
            return_lse=True,
            implementation=name.removeprefix("attention "),
            out=(out, self.lse) if given else None,
        )

    def results(self) -> list[np.ndarray]:
        """Return the results of all functions for the current contents of q."""
        import cupy

        for function in self.calls.values():
            function(True)
        cupy.cuda.Device().synchronize()
        return [cupy.asnumpy(out) for out in self.out]


@pytest.fixture(scope="module")
def work() -> Work:
    return Work()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_work_is_queued_on_the_current_stream(work, spin, stream, name):
    """The call runs after the stream's earlier work, which writes new contents of q."""
    import cupy

    old = work.q.copy()
    fresh = -2 * old
    try:
        work.q[...] = fresh
        expected = dict(zip(FUNCTIONS, work.results(), strict=True))[name]
        work.q[...] = old
        stale = dict(zip(FUNCTIONS, work.results(), strict=True))[name]
        assert (stale != expected).any()
        with stream:
            work.calls[name](False)  # the stream's own memory pool has what it needs
            stream.synchronize()
            spin(LONG // 4)
            work.q[...] = fresh
            result = work.calls[name](False)
        assert not stream.done, "the call waited for the stream"
        stream.synchronize()
        result = result[0] if isinstance(result, tuple) else result
        assert_array_equal(cupy.asnumpy(result), expected)
    finally:
        cupy.cuda.Device().synchronize()
        work.q[...] = old
        cupy.cuda.Device().synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("given_out", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_waits_for_the_device(work, spin, stream, name, given_out):
    """A call returns while its own stream, and another one, are still busy."""
    import cupy

    other = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work.calls[name](given_out)  # the stream's own memory pool has what it needs
        stream.synchronize()
        spin(LONG)
    with other:
        spin(LONG)
    with stream:
        result = work.calls[name](given_out)
    assert not stream.done
    assert not other.done
    stream.synchronize()
    other.synchronize()
    del result


@contextmanager
def count_allocations() -> Iterator[list[int]]:
    """The sizes of allocations from CuPy's memory pool during the block."""
    import cupy

    sizes: list[int] = []

    class Count(cupy.cuda.MemoryHook):
        name = "count_allocations"

        def malloc_preprocess(self, **kwargs: Any) -> None:
            sizes.append(kwargs["size"])

    with Count():
        yield sizes


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_results_are_allocated(work, name):
    import cupy

    pool = cupy.get_default_memory_pool()
    gc.collect()
    used = pool.used_bytes()
    with count_allocations() as sizes:
        work.calls[name](True)
    assert sizes == []
    assert pool.used_bytes() == used
    with count_allocations() as sizes:
        result = work.calls[name](False)
    results = result if isinstance(result, tuple) else (result,)
    assert sizes == [array.nbytes for array in results]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_captured_call_is_replayed_with_new_contents(work, stream, name):
    import cupy

    old = work.q.copy()
    index = FUNCTIONS.index(name)
    try:
        with stream:
            stream.begin_capture()
            try:
                work.calls[name](True)
            finally:
                graph = stream.end_capture()
        for factor in (1.0, -2.0):
            work.q[...] = factor * old
            expected = work.results()[index]
            work.out[index].fill(0)
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert_array_equal(cupy.asnumpy(work.out[index]), expected)
    finally:
        work.q[...] = old
        cupy.cuda.Device().synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "dtype"), [("naive", "float16"), ("flash", "float16"), ("flash", "float32")]
)
def test_a_backward_can_be_captured_and_allocates_nothing(stream, implementation, dtype):
    """With grads and a workspace. Bias and sinks, which naive does not have, use every kernel."""
    import cupy

    rng = np.random.default_rng(0)
    q, k, v, dout = (
        cupy.asarray(rng.standard_normal((2, 70, 2, 32)).astype(dtype_of(dtype))) for _ in range(4)
    )
    bias, sinks = (cupy.asarray(rng.standard_normal(n, "f4")) for n in (70, 2))
    options = {"causal": True}
    if implementation == "flash":
        options |= {"bias": bias, "sinks": sinks}
    results = attention(q, k, v, **options, return_lse=True, implementation="flash")
    options |= {"implementation": implementation, "deterministic": True}
    expected = attention_backward(dout, q, k, v, *results, **options)
    targets = [None if gradient is None else cupy.empty_like(gradient) for gradient in expected]
    options["grads"] = AttentionGrads(*targets)
    options["workspace"] = cupy.empty(2**20, np.uint8)
    attention_backward(dout, q, k, v, *results, **options)
    cupy.cuda.Device().synchronize()
    with stream, count_allocations() as sizes:
        stream.begin_capture()
        try:
            attention_backward(dout, q, k, v, *results, **options)
        finally:
            graph = stream.end_capture()
    assert sizes == []
    written = [gradient for gradient in targets if gradient is not None]
    for gradient in written:
        gradient.fill(7)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for gradient, wanted in zip(written, filter(_is_array, expected), strict=True):
        assert_array_equal(cupy.asnumpy(gradient), cupy.asnumpy(wanted))


def _is_array(gradient: Any) -> bool:
    return gradient is not None


@pytest.mark.gpu
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_a_loss_and_its_gradient_can_be_captured_and_allocate_nothing(stream, function):
    """With out, grads and a workspace, and with several chunks of logits."""
    import cupy

    rng = np.random.default_rng(0)
    x, w = (
        cupy.asarray(rng.standard_normal(shape).astype(np.float16))
        for shape in ((300, 64), (64, 520))
    )
    labels = cupy.asarray(rng.integers(0, 520, 300))
    loss, lse = cupy.empty((), np.float32), cupy.empty(300, np.float32)
    workspace = cupy.empty(2**22, np.uint8)
    more: dict[str, Any] = {"workspace": workspace}
    if function == "cross_entropy":
        logits = cupy.asarray(rng.standard_normal((300, 520)).astype(np.float16))
        arrays: tuple[Any, ...] = (logits, labels)
        results: tuple[Any, ...] = (cupy.empty_like(arrays[0]),)
        into: dict[str, Any] = {"dlogits": results[0]}
    else:
        arrays = (x, w, labels)
        results = (cupy.empty_like(x), cupy.empty_like(w))
        into = {"grads": LinearCrossEntropyGrads(*results)}
        more["logits_bytes"] = 2 * 520 * 128
    forward, backward = (getattr(cupyattn, function + suffix) for suffix in ("", "_backward"))
    dloss = cupy.ones((), np.float32)

    def call() -> None:
        forward(*arrays, return_lse=True, out=(loss, lse), **more)
        backward(dloss, *arrays, lse, **into, **more)

    call()
    cupy.cuda.Device().synchronize()
    expected = [cupy.asnumpy(result) for result in (loss, lse, *results)]
    with stream, count_allocations() as sizes:
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()
    assert sizes == []
    for result in (loss, lse, *results):
        result.fill(7)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for result, wanted in zip((loss, lse, *results), expected, strict=True):
        assert_array_equal(cupy.asnumpy(result), wanted)


@pytest.mark.gpu
def test_first_call_in_a_capture_error_has_the_fix(stream):
    """After a call outside, the same call works in a capture."""
    import cupy

    q = cupy.ones((1, 3, 1, 239), np.float32)  # head dims that nothing else here has
    v, out = cupy.ones((1, 3, 1, 197), np.float32), cupy.empty((1, 3, 1, 197), np.float32)
    cupy.cuda.Device().synchronize()

    def run() -> None:
        attention(q, q, v, out=out, implementation="naive")

    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"attention_naive.*; .*; call once first"):
                run()
        finally:
            stream.end_capture()
        run()
        stream.synchronize()
        expected = cupy.asnumpy(out)
        stream.begin_capture()
        try:
            run()
        finally:
            graph = stream.end_capture()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert_array_equal(cupy.asnumpy(out), expected)
    assert_allclose(expected, 1, rtol=1e-6)


@pytest.fixture
def stream() -> Iterator[Any]:
    """A stream that does not synchronise with the default stream."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    yield stream
    stream.synchronize()
