"""Attention's backward on a device: from a checked problem to launched kernels."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cupyattn.arrays import Array, Layout, address, addresses, alignments
from cupyattn.errors import error
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES
from cupyattn.kernels.device import Device
from cupyattn.kernels.launch import launch, prepare
from cupyattn.ops.attention_backward_f32 import f32_plan
from cupyattn.ops.attention_backward_flash import flash_plan, require_countable_rows
from cupyattn.ops.attention_backward_naive import naive_plan
from cupyattn.ops.attention_backward_steps import Plan
from cupyattn.ops.attention_layouts import require_lengths, require_near_rows
from cupyattn.ops.attention_problem import BACKWARD_RESULTS, SHOWN_AS, AttentionProblem
from cupyattn.ops.checks import require_disjoint, require_item_alignment

_BYTES = np.dtype(np.uint8)
_FLASH_TILE_ROWS = 64  # the most rows of q, k, v or dout that one tile has


def attention_backward(
    device: Device,
    problem: AttentionProblem,
    arrays: dict[str, Array],
    *,
    seed: int,
    deterministic: bool,
    accumulate: bool,
) -> dict[str, Array]:
    """Run the backward of dense attention, into the results and scratch among `arrays`.

    Returns
    -------
    dict
        The gradients by name; dbias and dsinks only where there are bias and sinks.
    """
    _require_kernel(problem)
    places = addresses(arrays)
    require_disjoint((*BACKWARD_RESULTS, "workspace"), arrays, places, problem.spans, SHOWN_AS)

    results = _results(device, problem, arrays, accumulate)
    if problem.batch * problem.heads == 0:
        _fill_with_zeros(results, () if accumulate else tuple(results))
        return results
    strides = tuple([(name, result.strides) for name, result in results.items()])
    starts = alignments(places.values(), VECTOR_BYTES)
    plan = _plan(problem, strides, starts, deterministic, accumulate)
    workspace = _workspace(device, plan, arrays.get("workspace"))
    for step in plan.steps:
        prepare(device, step.specialisation, step.ctas)
    _fill_with_zeros(results, plan.zero_first)

    scratch = {piece.name: piece.within(workspace) for piece in plan.scratch}
    named = {**arrays, **results, **scratch}
    for step in plan.seeded(seed) if problem.dropout_p else plan.steps:
        launch(device, step.specialisation, step.ctas, step.arguments(named))
    return results


@lru_cache(maxsize=4096)
def _require_kernel(problem: AttentionProblem) -> None:
    missing = ["rotary"] if "cos" in problem.layouts else []
    missing += ["mask_mod"] if problem.mask_mod is not None else []
    if missing:
        raise error(
            NotImplementedError,
            f"{', '.join(missing)} in attention_backward on a GPU or the emulator",
            "its kernels do not have it; the CPU path has every option",
            "pass NumPy arrays, for example cupy.asnumpy(q), or leave backend('emulator')",
        )
    if problem.implementation == "tiled":
        raise error(
            NotImplementedError,
            "attention_backward with implementation='tiled' on a GPU or the emulator",
            "kernels are 'flash' and 'naive'; the CPU path has every implementation",
            "pass implementation='naive' or 'flash', or run it on the CPU path: NumPy arrays, "
            "outside of backend('emulator')",
        )
    if problem.implementation == "flash" and problem.dtype == np.float16:
        require_near_rows(problem, ("q", "k", "v", "dout"), _FLASH_TILE_ROWS, "naive")
        require_countable_rows(problem)
    require_lengths(problem)


@lru_cache(maxsize=4096)
def _plan(
    problem: AttentionProblem,
    result_strides: tuple[tuple[str, tuple[int, ...]], ...],
    starts: tuple[int, ...],
    deterministic: bool,
    accumulate: bool,
) -> Plan:
    """Choose the kernels and fill in their parameters.

    `starts` says by how much each array of the problem misses a vector's alignment.
    """
    start_of = dict(zip(problem.layouts, starts, strict=True))
    require_item_alignment(problem.layouts, start_of)
    results = {
        name: Layout((of := problem.layouts[name[1:]]).shape, strides, of.dtype)
        for name, strides in result_strides
    }
    if problem.implementation == "naive":
        return naive_plan(problem, results, accumulate=accumulate)
    if problem.dtype != np.float16:
        return f32_plan(
            problem, results, start_of, deterministic=deterministic, accumulate=accumulate
        )
    return flash_plan(
        problem, results, start_of, deterministic=deterministic, accumulate=accumulate
    )


def _results(
    device: Device, problem: AttentionProblem, arrays: dict[str, Array], accumulate: bool
) -> dict[str, Array]:
    """Take the gradients that were given, and allocate the others."""
    results = {}
    for name in BACKWARD_RESULTS:
        of = problem.layouts.get(name[1:])
        if of is None:
            continue
        result = arrays.get(name)
        if result is None:
            result = device.empty(of.shape, of.dtype)
            if accumulate:
                result.fill(0)
        results[name] = result
    return results


def _fill_with_zeros(results: dict[str, Array], names: tuple[str, ...]) -> None:
    for name in names:
        results[name].fill(0)


def _workspace(device: Device, plan: Plan, given: Array | None) -> Array:
    """Return the scratch memory of a call as flat bytes: what was given, or new."""
    if given is None:
        return device.empty((plan.workspace_bytes,), _BYTES)
    needed, beyond = plan.workspace_bytes, address(given) % VECTOR_BYTES
    if not given.flags.c_contiguous or given.nbytes < needed or beyond:
        order = "" if given.flags.c_contiguous else ", not contiguous in C order"
        start = f", {beyond} beyond a multiple of {VECTOR_BYTES}" if beyond else ""
        library = "numpy" if isinstance(given, np.ndarray) else "cupy"
        raise error(
            ValueError,
            f"workspace has {given.nbytes} bytes{order}{start}",
            f"this call needs {needed}, in C order, starting at a multiple of {VECTOR_BYTES}",
            f"pass for example {library}.empty({needed}, 'uint8'), or none",
        )
    return given.reshape(-1).view(_BYTES)
