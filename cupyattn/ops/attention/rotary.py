"""Rotary embedding of attention's q and k before its kernels, and of their gradients after them.

Kernels of attention are then those of a call without rotary, whose q and k are scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from cupyattn.ops.attention.kernels import prepare
from cupyattn.ops.attention.params import (
    AttentionPlanner,
    forward_params,
    item_strides,
    row_strides,
    step_of,
)
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.structs import ROTARY_PARAMS, filled
from cupyattn.ops.rope.kernels import rope_config, slot_items, specialise_rotation
from cupyattn.runtime.arrays import Layout, contiguous
from cupyattn.runtime.checks import require_kernel_dtype
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import SCRATCH_DTYPE, Step

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
    return rotation_step(problem, arrays, planner, arch)


def rotation_step(
    problem: AttentionProblem,
    arrays: list[Rotated],
    planner: AttentionPlanner,
    arch: int,
    accumulate: bool | None = None,
) -> Step:
    """Return a launch that rotates q and k, or k; or with `accumulate` dq and dk, back.

    Arrays of queries come first. With `accumulate` True the gradients are added to the targets.
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
    first, last = arrays[0], arrays[-1]
    params = filled(
        ROTARY_PARAMS,
        x=[row_strides(first.source), row_strides(last.source)],
        out=[row_strides(first.target), row_strides(last.target)],
        cos_stride=item_strides(cos)[0],
        sin_stride=item_strides(sin)[0],
        table_length=cos.shape[0],
        query_threads=threads[0],
        tokens=tokens,
        heads=heads,
        groups=groups,
        slots=slots,
        rotated_slots=half // pairs,
        half=half,
        dim=dim,
        sign=-1 if inverse else 1,
    )
    kernel = specialise_rotation(
        prepare.VARLEN if problem.packed else prepare.DENSE,
        config,
        problem.dtype.name,
        vec,
        cos.dtype.name,
        interleaved,
        bool(accumulate),
    )
    ctas = -(-sum(threads) // config.threads)
    positions = forward_params(problem, replace(layouts, out=layouts.q, lse=None))
    places = {"x0": first.source_slot, "x1": last.source_slot}
    places |= {"out0": first.target_slot, "out1": last.target_slot}
    return step_of(kernel, ctas, planner.slots, positions, params, **places)
