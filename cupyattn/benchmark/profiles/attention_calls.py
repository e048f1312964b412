"""The calls of attention whose kernels are profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import cupyattn
from cupyattn.benchmark import block_mask, prefill, varlen
from cupyattn.benchmark.attention.cases import (
    PLAIN,
    Arguments,
    Case,
    arguments_of,
    arrays_of,
    inputs_of,
)
from cupyattn.benchmark.attention.contenders import backward_contenders, forward_contenders
from cupyattn.benchmark.frame.subjects import Gauge

Prepare = Callable[[Any], Callable[[], Any]]


def attention_calls() -> Iterator[tuple[str, Prepare]]:
    """Yield names, and what makes the arrays and returns the call."""
    yield from _dense()
    yield "attention_backward, 4 x 2048 x 16 x 64, bfloat16", _rounded
    yield from _packed()
    yield "paged_attention, 1024 of 4096 tokens", partial(_chunk, "float16")
    yield "paged_attention, 1024 of 4096 tokens, float32", partial(_chunk, "float32")
    yield "merge_attention, 2 x 4096 tokens", _merged
    yield "block_mask, 32 documents in 8192 tokens", _documents
    yield "attention, block_mask, 32 documents in 8192 tokens", _by_documents


def _dense() -> Iterator[tuple[str, Prepare]]:
    flash, tiled, naive = (partial(_forward, name) for name in ("flash", "tiled", "naive"))
    one_pass, fixed_order = (partial(_backward, "flash", mode) for mode in (False, True))
    naive_backward = partial(_backward, "naive", False)
    usual = Case(4, 16, 2048, 64, 64, "float16", False, 0)
    wide = Case(2, 8, 2048, 160, 160, "float16", False, 0)
    short = Case(16, 4, 256, 64, 64, "float16", False, 0)
    less = Case(1, 8, 1024, 64, 64, "float16", False, 0)
    less_broadcast = replace(less, batch=2)  # dbias is summed over both sequences
    few = Case(1, 8, 16384, 128, 128, "float16", False, 0, queries=256)
    usual_float32, few_float32, less_float32 = (
        replace(case, dtype="float32") for case in (usual, few, less_broadcast)
    )
    for make, case, option, what in (
        (flash, usual, PLAIN, "attention"),
        (flash, usual, "rotary", "attention, rotary"),
        (flash, few, PLAIN, "attention, few queries"),
        (tiled, usual, PLAIN, "attention, tiled"),
        (naive, less, PLAIN, "attention, naive"),
        (flash, usual_float32, PLAIN, "attention"),
        (flash, few_float32, PLAIN, "attention, few queries"),
        (one_pass, usual, PLAIN, "attention_backward"),
        (one_pass, wide, PLAIN, "attention_backward"),
        (fixed_order, usual, "bias", "attention_backward, deterministic"),
        (one_pass, short, "bias", "attention_backward"),
        (one_pass, usual, "sinks", "attention_backward, sinks"),
        (naive_backward, less, PLAIN, "attention_backward, naive"),
        (one_pass, usual_float32, PLAIN, "attention_backward"),
        (one_pass, less_float32, "bias", "attention_backward"),
        (one_pass, less_float32, "sinks", "attention_backward, sinks"),
        (fixed_order, usual_float32, PLAIN, "attention_backward, deterministic"),
    ):
        yield _named(what, case, option), partial(make, case, option)


def _named(what: str, case: Case, option: str) -> str:
    of = "" if option in what or option == PLAIN else f", {option}"
    return (
        f"{what}{of}, {case.batch} x {case.sq} x {case.heads} x {case.head_dim}"
        + (f" of {case.seqlen} keys" if case.queries else "")
        + ("" if case.dtype == "float16" else f", {case.dtype}")
    )


def _forward(implementation: str, case: Case, option: str, xp: Any) -> Callable[[], Any]:
    inputs = inputs_of(case, option, xp)
    (contender,) = forward_contenders([implementation], inputs, Gauge.idle(xp))
    return contender.prepare()[0]


def _backward(
    implementation: str, deterministic: bool, case: Case, option: str, xp: Any
) -> Callable[[], Any]:
    inputs = inputs_of(case, option, xp)
    modes = [deterministic]
    (contender,) = backward_contenders([implementation], modes, inputs, Gauge.idle(xp))
    return contender.prepare()[0]


def _rounded(xp: Any) -> Callable[[], Any]:
    """Return a backward whose dq is summed in float32 and rounded behind it."""
    case = Case(4, 16, 2048, 64, 64, "bfloat16", False, 0)
    q, k, v, dout, _, _ = arrays_of(case, xp)
    results = cupyattn.attention(q, k, v, return_lse=True)
    return partial(cupyattn.attention_backward, dout, q, k, v, *results)


def _packed() -> Iterator[tuple[str, Prepare]]:
    rows: tuple[tuple[str, int, tuple[str, ...], Arguments | None], ...] = (
        ("float16", 64, (), {}),
        ("float16", 64, ("rotary",), None),
        ("float16", 160, (), {}),
        ("float16", 64, (), {"deterministic": True}),
        ("float32", 64, (), {}),
        ("float32", 64, ("sinks",), {"deterministic": True}),
        ("float16", 64, ("bias",), {}),
    )
    for dtype, head_dim, options, backward in rows:
        case = varlen.Case(8192, 512, 16, 16, head_dim, True, dtype)
        of = f"16 ragged sequences of 512, 16 x {head_dim}"
        what = ", ".join((*options, *(backward or ()), of))
        dtype = "" if dtype == "float16" else f", {dtype}"
        yield f"attention_varlen, {what}{dtype}", partial(_ragged, case, options, None)
        if backward is not None:
            name = f"attention_varlen_backward, {what}{dtype}"
            yield name, partial(_ragged, case, options, backward)


def _ragged(
    case: varlen.Case, options: tuple[str, ...], backward: Arguments | None, xp: Any
) -> Callable[[], Any]:
    """Return the forward; with options of the backward that."""
    *inputs, dout = case.arrays(xp)
    lengths = case.lengths("ragged")
    bounds = xp.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    most = int(lengths.max())
    of_lengths = (bounds, bounds, most, most)
    dense = Case(1, case.heads, most, case.head_dim, case.head_dim, case.dtype, True, 0)
    common: Arguments = {"causal": True}
    for option in options:
        common |= arguments_of(option, dense, xp)
    attend: Callable[..., Any] = cupyattn.attention_varlen
    forward = partial(attend, *inputs, *of_lengths, return_lse=True, **common)
    if backward is None:
        return forward
    gradients: Callable[..., Any] = cupyattn.attention_varlen_backward
    arrays = (dout, *inputs, *forward(), *of_lengths)
    return partial(gradients, *arrays, **common, **backward)


def _chunk(dtype: str, xp: Any) -> Callable[[], Any]:
    case = prefill.Case(4, 4096, 1024, 32, 8, 128, 16, dtype)
    q, k, v = case.dense(xp)
    return partial(cupyattn.paged_attention, q, *case.paged(xp, k, v), causal=True)


def _merged(xp: Any) -> Callable[[], Any]:
    case = Case(1, 32, 4096, 128, 128, "float16", False, 0)
    arrays = arrays_of(case, xp)
    one = cupyattn.attention(arrays.q, arrays.k, arrays.v, return_lse=True)
    return partial(cupyattn.merge_attention, *one, *one)


def _documents(xp: Any) -> Callable[[], Any]:
    case = block_mask.Case(8192, 32, 16, 64, "float16")
    return partial(cupyattn.block_mask, case.mask(xp), case.length, case.length)


def _by_documents(xp: Any) -> Callable[[], Any]:
    case = block_mask.Case(8192, 32, 16, 64, "float16")
    masks, arrays = block_mask.masks_of(case, xp), case.arrays(xp)
    call: Callable[[], Any] = block_mask.calls_of("block_mask", masks, arrays, "forward")
    return call
