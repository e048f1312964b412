"""Rotary embedding of attention's q and k before its kernels, and of their gradients after them.

Kernels of attention are then those of a call without rotary, whose q and k are scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from cupyattn.ops.attention.kernels import rotary
from cupyattn.ops.attention.params import AttentionPlanner, forward_params, row_strides, step_of
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.structs import ROTARY_PARAMS
from cupyattn.ops.rope.kernels import rope_config, slot_items, specialise_rotation
from cupyattn.runtime.arrays import Layout, contiguous
from cupyattn.runtime.checks import require_kernel_dtype
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import SCRATCH_DTYPE, Step
from cupyattn.runtime.structs import new_struct

_MOST_THREADS = 2**32 - 1


class Rotated(NamedTuple):
    """An array that a launch rotates: from where to where."""

    source: Layout
    source_start: int
    source_slot: int
    target: Layout
    target_start: int
    target_slot: int


def in_scratch(
    problem: AttentionProblem, names: Iterable[str], without: tuple[str, ...] = ("cos", "sin")
) -> AttentionProblem:
    """Return the call whose `names` (q, k, dq, dk) are contiguous arrays in scratch memory.

    It is `without` some of its other arrays.
    """
    arrays = {}
    for name in names:
        of: Layout = getattr(problem.given, name.removeprefix("d"))
        arrays[name] = contiguous(of.shape, of.dtype)
    moved: AttentionProblem = problem.moved(arrays, without)
    return moved


def take_scratch(
    planner: AttentionPlanner, problem: AttentionProblem, names: Iterable[str]
) -> None:
    """Have the kernels take these arrays, which are in scratch memory, from there."""
    for name in names:
        shape, _, dtype = getattr(problem.given, name)
        size = math.prod(shape) * dtype.itemsize
        setattr(planner.slots, name, planner.scratch(-(-size // SCRATCH_DTYPE.itemsize)))


def rotate_inputs(
    problem: AttentionProblem,
    inner: AttentionProblem,
    given: Mapping[str, int],
    planner: AttentionPlanner,
    arch: int,
) -> Step:
    """Return the launch that rotates q and k to scratch memory, or k alone.

    `given` has their slots before they were moved. Of k alone the launch has no query token.
    """
    arrays = [
        Rotated(
            getattr(problem.layouts, name),
            getattr(problem.starts, name),
            slot,
            getattr(inner.layouts, name),
            0,
            getattr(planner.slots, name),
        )
        for name, slot in given.items()
    ]
    return _step(problem, arch, arrays, planner, None)


def rotate_gradients(
    problem: AttentionProblem,
    arrays: Iterable[Rotated],
    planner: AttentionPlanner,
    arch: int,
    accumulate: bool,
) -> Step:
    """Return the launch that rotates dq and dk back, or adds them so to what is there."""
    return _step(problem, arch, [*arrays], planner, accumulate)


def _step(
    problem: AttentionProblem,
    arch: int,
    arrays: list[Rotated],
    planner: AttentionPlanner,
    accumulate: bool | None,
) -> Step:
    """Return a launch: of q and k, or k, forwards, where `accumulate` is None; of dq and dk back.

    Queries come first.
    """
    inverse = accumulate is not None
    layouts, starts = problem.layouts, problem.starts
    cos, sin = layouts.cos, layouts.sin
    assert cos is not None
    assert sin is not None
    for name, table in (("cos", cos), ("sin", sin)):
        require_kernel_dtype(f"rotary's {name}", table.dtype)
    half, dim = cos.shape[1], problem.head_dim
    aligned = [(starts.cos or 0, cos), (starts.sin or 0, sin)]
    for each in arrays:
        aligned += [(each.source_start, each.source), (each.target_start, each.target)]
    interleaved = problem.options.interleaved
    vec = slot_items(arrays[0].source, half, interleaved, aligned)
    pairs = max(vec // 2, 1) if interleaved else vec
    copied = 0 if inverse and not accumulate else dim - 2 * half
    slots = half // pairs + -(-copied // (2 * pairs))
    heads = problem.heads, problem.kv_heads
    config = rope_config(arch, max(heads[-len(arrays) :]))
    groups = [-(-count // config.heads) for count in heads]
    tokens = (problem.total_q, problem.total_k) if problem.batch else (0, 0)
    if len(arrays) == 1:
        tokens = 0, tokens[1]
    threads = [count * group * slots for count, group in zip(tokens, groups, strict=True)]
    if sum(threads) > _MOST_THREADS - config.threads:
        raise error(
            ValueError,
            f"{tokens[0]} queries of {heads[0]} heads and {tokens[1]} keys of {heads[1]}",
            f"a launch that rotates them has at most {_MOST_THREADS} threads, here {sum(threads)}",
            "split the batch over several calls",
        )
    params = new_struct(ROTARY_PARAMS)
    places: dict[str, int | None] = {}
    for i, each in enumerate([*arrays, *arrays][:2]):
        params["x"][i] = row_strides(each.source.strides, each.source.dtype.itemsize)
        params["out"][i] = row_strides(each.target.strides, each.target.dtype.itemsize)
        places |= {f"x{i}": each.source_slot, f"out{i}": each.target_slot}
    for name, table in (("cos", cos), ("sin", sin)):
        params[f"{name}_stride"] = table.strides[0] // table.dtype.itemsize
    params["table_length"], params["query_threads"] = cos.shape[0], threads[0]
    params["tokens"], params["heads"], params["groups"] = tokens, heads, groups
    params["slots"], params["rotated_slots"] = slots, half // pairs
    params["half"], params["dim"], params["sign"] = half, dim, -1 if inverse else 1
    kernel = specialise_rotation(
        rotary.VARLEN if problem.packed else rotary.DENSE,
        config,
        problem.dtype.name,
        vec,
        cos.dtype.name,
        interleaved,
        bool(accumulate),
    )
    ctas = -(-sum(threads) // config.threads)
    positions = forward_params(problem, replace(layouts, out=layouts.q, lse=None))
    return step_of(kernel, ctas, planner.slots, positions, params[()], **places)
