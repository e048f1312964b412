"""Rotary embedding of attention's q and k, around any plan: rotated copies first, gradients back.

Kernels of attention are then those of a call without rotary, whose q and k are scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cupyattn.ops.attention.kernels import rotary
from cupyattn.ops.attention.params import forward_params, row_strides
from cupyattn.ops.attention.problem import AttentionProblem, PackedProblem
from cupyattn.ops.attention.structs import ROTARY_PARAMS
from cupyattn.ops.rope.kernels import rope_config, specialise_rotation
from cupyattn.ops.rope.plan import slot_items
from cupyattn.runtime.arrays import Layout, contiguous
from cupyattn.runtime.by_name import Plan, Scratch, Step
from cupyattn.runtime.checks import require_kernel_dtype
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import SCRATCH_ALIGNMENT, SCRATCH_DTYPE
from cupyattn.runtime.structs import new_struct

_MOST_THREADS = 2**32 - 1
_TABLES = ("cos", "sin")
_TURNED = {name: f"{name}_turned" for name in ("q", "k", "dq", "dk")}
"""What scratch arrays are called that stand for an array of the call."""


def rotated(
    problem: AttentionProblem,
    arch: int,
    plan_of: Callable[[AttentionProblem], Plan],
    *,
    keys_alone: bool = False,
) -> Plan:
    """Plan a forward call by what `plan_of` plans of one without rotary.

    keys_alone: its kernel rotates queries itself, and is told of the tables.
    """
    if "cos" not in problem.layouts:
        return plan_of(problem)
    scratch = _scratch_layouts(problem, ("k",) if keys_alone else ("q", "k"))
    inner = problem.moved(scratch, () if keys_alone else _TABLES)
    plan = _in_scratch(plan_of(inner), scratch)
    return plan._replace(steps=(_turn_inputs(problem, inner, arch, keys_alone), *plan.steps))


def rotated_backward(
    problem: AttentionProblem,
    arch: int,
    accumulate: bool,
    plan_of: Callable[[AttentionProblem], Plan],
) -> Plan:
    """Plan a backward call likewise: dq and dk are turned back in place.

    Where they are added to what is there, they are made in scratch memory.
    """
    if "cos" not in problem.layouts:
        return plan_of(problem)
    apart = ("dq", "dk") if accumulate else ()
    scratch = _scratch_layouts(problem, ("q", "k", *apart))
    inner = problem.moved(scratch, _TABLES)
    plan = _in_scratch(plan_of(inner), scratch)
    made = {
        name: inner.layouts.get(name) or problem.placed(name, contiguous(*dict(plan.outputs)[name]))
        for name in ("dq", "dk")
    }
    results = {name: problem.layouts.get(name) or made[name] for name in made}
    names = {name: _TURNED[name] if accumulate else name for name in made}
    back = _step(problem, arch, made, results, names, {n: n for n in made}, accumulate)
    return plan._replace(
        steps=(_turn_inputs(problem, inner, arch), *plan.steps, back),
        zero_first=(*plan.zero_first, *(_TURNED[name] for name in apart)),
    )


def _scratch_layouts(problem: AttentionProblem, names: tuple[str, ...]) -> dict[str, Layout]:
    """Return contiguous layouts of arrays of the call, as the caller would give them."""
    return {
        name: contiguous(of.shape, of.dtype)
        for name in names
        if (of := problem.given(name.removeprefix("d"))) is not None
    }


def _in_scratch(plan: Plan, layouts: Mapping[str, Layout]) -> Plan:
    """Return a plan whose kernels take these arrays from scratch memory behind its own."""
    pieces, end = [*plan.scratch], plan.workspace_bytes
    for name, layout in layouts.items():
        offset = -(-end // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        size = math.prod(layout.shape) * layout.dtype.itemsize
        pieces.append(Scratch(_TURNED[name], offset, -(-size // SCRATCH_DTYPE.itemsize)))
        end = pieces[-1].end

    turned = {name: _TURNED[name] for name in layouts}
    return plan._replace(
        steps=tuple(step.renamed(turned) for step in plan.steps),
        scratch=tuple(pieces),
        zero_first=tuple(turned.get(name, name) for name in plan.zero_first),
    )


def _turn_inputs(
    problem: AttentionProblem, inner: AttentionProblem, arch: int, keys_alone: bool = False
) -> Step:
    """Return the launch that rotates q and k, or k alone: then it has k for q too, of no token."""
    names = {"k": "k"} if keys_alone else {"q": "q", "k": "k"}
    turned = {name: _TURNED[name] for name in names}
    return _step(problem, arch, problem.layouts, inner.layouts, names, turned, None)


def _step(
    problem: AttentionProblem,
    arch: int,
    sources: Mapping[str, Layout],
    targets: Mapping[str, Layout],
    names: Mapping[str, str],
    target_names: Mapping[str, str],
    accumulate: bool | None,
) -> Step:
    """Return a launch: of q and k, or k, forwards, where `accumulate` is None; of dq and dk back.

    Both names go by those of the layouts, queries first.
    """
    inverse = accumulate is not None
    cos, sin = problem.layouts["cos"], problem.layouts["sin"]
    for name in _TABLES:
        require_kernel_dtype(f"rotary's {name}", problem.layouts[name].dtype)
    half, dim = cos.shape[1], problem.head_dim
    arrays = [(problem.starts["cos"], cos), (problem.starts["sin"], sin)]
    for name in names:
        arrays += [(_start(problem, names[name]), sources[name])]
        arrays += [(_start(problem, target_names[name]), targets[name])]
    first = sources[next(iter(names))]
    vec = slot_items(first, half, problem.interleaved, arrays)
    pairs = max(vec // 2, 1) if problem.interleaved else vec
    copied = 0 if inverse and not accumulate else dim - 2 * half
    slots = half // pairs + -(-copied // (2 * pairs))
    both = 2 * [*names] if len(names) == 1 else [*names]
    heads = problem.heads, problem.kv_heads
    config = rope_config(arch, max(heads[-len(names) :]))
    groups = [-(-count // config.heads) for count in heads]
    tokens = _tokens(problem) if len(names) > 1 else (0, _tokens(problem)[1])
    threads = [count * group * slots for count, group in zip(tokens, groups, strict=True)]
    if sum(threads) > _MOST_THREADS - config.threads:
        raise error(
            ValueError,
            f"{tokens[0]} queries of {heads[0]} heads and {tokens[1]} keys of {heads[1]}",
            f"a launch that rotates them has at most {_MOST_THREADS} threads, here {sum(threads)}",
            "split the batch over several calls",
        )
    params = new_struct(ROTARY_PARAMS)
    for i, name in enumerate(both):
        for field, layout in (("x", sources[name]), ("out", targets[name])):
            params[field][i] = row_strides(layout.strides, layout.dtype.itemsize)
    for name, table in (("cos", cos), ("sin", sin)):
        params[f"{name}_stride"] = table.strides[0] // table.dtype.itemsize
    params["table_length"], params["query_threads"] = cos.shape[0], threads[0]
    params["tokens"], params["heads"], params["groups"] = tokens, heads, groups
    params["slots"], params["rotated_slots"] = slots, half // pairs
    params["half"], params["dim"], params["sign"] = half, dim, -1 if inverse else 1
    packed = isinstance(problem, PackedProblem)
    kernel = specialise_rotation(
        rotary.VARLEN if packed else rotary.DENSE,
        config,
        problem.dtype.name,
        vec,
        cos.dtype.name,
        problem.interleaved,
        bool(accumulate),
    )
    renamed = {f"x{i}": names[name] for i, name in enumerate(both)}
    renamed |= {f"out{i}": target_names[name] for i, name in enumerate(both)}
    ctas = -(-sum(threads) // config.threads)
    return Step.of(kernel, ctas, _positions(problem), params[()], renamed=renamed)


def _start(problem: AttentionProblem, name: str) -> int:
    """Return by how many bytes an array misses a vector's alignment: none, in scratch memory."""
    return problem.starts.get(name, 0)


def _tokens(problem: AttentionProblem) -> tuple[int, int]:
    """Return how many queries and keys there are, of all sequences."""
    if problem.batch == 0:
        return 0, 0
    if isinstance(problem, PackedProblem):
        return problem.total_q, problem.total_k
    return problem.batch * problem.sq, problem.batch * problem.sk


def _positions(problem: AttentionProblem) -> Any:
    """Fill the C struct that says where tokens stand: AttentionParams, or VarlenParams."""
    return forward_params(problem, {"out": problem.layouts["q"]})
