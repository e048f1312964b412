"""Launches before attention's kernels: rotary embedding of q and k, and codes of keys.

After a rotation the kernels are those of a call without rotary, whose q and k are scratch memory.
Gradients of both are rotated after their kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from cupyattn.ops.attention.kernels import prepare
from cupyattn.ops.attention.params import (
    AttentionPlanner,
    batch_integers,
    forward_params,
    item_strides,
    row_strides,
    step_of,
)
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.attention.structs import (
    CENTRES_PARAMS,
    HEAD_ROTATION,
    KEYS_PARAMS,
    ROTARY_PARAMS,
    filled,
)
from cupyattn.ops.rope.kernels import rope_config, slot_items, specialise_rotation
from cupyattn.runtime.arrays import Layout, contiguous
from cupyattn.runtime.checks import Overlaps, require_item_alignment, require_kernel_dtype
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import SCRATCH_DTYPE, Output, Plan, Planner, Step
from cupyattn.runtime.records import Record, T, given_of
from cupyattn.runtime.storage import rows_aligned

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


@dataclass(slots=True)
class KeysArrays(Record[T]):
    """Arrays of a call of quantize_keys; it writes codes and scales, and a centre unless given."""

    SHOWN_AS: ClassVar = MappingProxyType(
        {"codes": "out.codes", "scales": "out.scales", "centre_out": "out.centre"}
    )

    k: T
    cu_seqlens: T | None = None
    seqused_k: T | None = None
    cos: T | None = None
    sin: T | None = None
    positions: T | None = None
    centre: T | None = None
    centre_out: T | None = None
    codes: T | None = None
    scales: T | None = None
    q: T | None = None


@dataclass(frozen=True, eq=False)
class KeysProblem:
    """A valid call of quantize_keys; equal calls share one object."""

    layouts: KeysArrays[Layout]
    starts: KeysArrays[int]
    outputs: dict[str, Output]
    overlaps: Overlaps
    interleaved: bool

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        shape, bounds = self.layouts.k.shape, self.layouts.cu_seqlens
        if bounds is not None:
            return bounds.shape[0] - 1
        return shape[0] if len(shape) == 4 else 1


@lru_cache(maxsize=4096)
def keys_plan(problem: KeysProblem) -> Plan:
    """Plan a call of quantize_keys: the centres unless given, then codes and scales."""
    layouts, starts = problem.layouts, problem.starts
    require_item_alignment(given_of(layouts), given_of(starts), layouts.SHOWN_AS)
    planner = Planner(KeysArrays, layouts, problem.outputs)
    slots, outputs, k = planner.slots, problem.outputs, layouts.k
    given = layouts.centre is not None
    centre = layouts.centre or layouts.centre_out or contiguous(*outputs["centre_out"])
    centre_slot = slots.centre if given else slots.centre_out
    places = _token_strides(item_strides(centre)[:-1])
    heads, dim = k.shape[-2:]
    common = {
        "k": _token_strides(item_strides(k)[:-1]),
        "centre_batch": places[1],
        "centre_head": places[2],
        "bounds": batch_integers(layouts.cu_seqlens),
        "rotation": _head_rotation(layouts),
        "seq": k.shape[-3],
        "heads": heads,
        "dim": dim,
        "sequences": problem.sequences,
    }
    table, half = "void", 0
    if layouts.cos is not None:
        require_kernel_dtype("rotary's cos", layouts.cos.dtype)
        table, half = layouts.cos.dtype.name, layouts.cos.shape[1]
    read = (k, starts.k), (layouts.cos, starts.cos), (layouts.sin, starts.sin)
    turned = 2 * half if problem.interleaved else half
    whole = dim % prepare.ITEMS == turned % prepare.ITEMS == 0 and rows_aligned(read)
    packed = layouts.cu_seqlens is not None
    launch = prepare.KeyLaunch(k.dtype.name, whole, packed, table, problem.interleaved)
    keys, rest = (slots.k, slots.cu_seqlens), (slots.cos, slots.sin, slots.positions, centre_slot)
    steps = []
    if not given:
        kernel = prepare.specialise_centres(launch)
        ctas = problem.sequences * heads * -(-dim // prepare.CENTRE_COLUMNS)
        of_centres = filled(CENTRES_PARAMS, **common, seqused_k=batch_integers(layouts.seqused_k))
        steps.append(Step.of(kernel, ctas, (*keys, slots.seqused_k, *rest), of_centres))
    groups = -(-k.shape[-3] // prepare.KEYS) * (k.shape[0] if len(k.shape) == 4 else 1)
    q_heads = layouts.q.shape[-2] if layouts.q is not None and half else 0
    if groups * (heads + q_heads) > _MOST_THREADS - prepare.KEY_THREADS:
        raise error(
            ValueError,
            f"k has shape {k.shape}" + (f", q {layouts.q.shape}" if layouts.q is not None else ""),
            f"a launch has at most {_MOST_THREADS - prepare.KEY_THREADS} groups of {prepare.KEYS} "
            "tokens of a head",
            "split the tokens over several calls, with the centre of the first",
        )
    params = filled(
        KEYS_PARAMS,
        **common,
        codes=_token_strides(item_strides(layouts.codes or contiguous(*outputs["codes"]))[:-1]),
        scales=_token_strides(item_strides(layouts.scales or contiguous(*outputs["scales"]))),
        q=_token_strides(item_strides(layouts.q)[:-1] if layouts.q is not None else ()),
        groups=-(-k.shape[-3] // prepare.KEYS),
        key_rows=groups * heads,
        rows=groups * (heads + q_heads),
        q_heads=q_heads,
    )
    centre_start = starts.centre if given else starts.centre_out
    launch = launch._replace(
        whole=whole and rows_aligned([(centre, centre_start), (layouts.q, starts.q)]),
        packed=packed and (len(centre.shape) == 3 or bool(half and layouts.positions is None)),
    )
    lanes = prepare.lanes_of(dim)
    ctas = -(-groups * (heads + q_heads) // (prepare.KEY_THREADS // lanes))
    written = slots.codes, slots.scales, slots.q
    step = Step.of(prepare.specialise_keys(lanes, launch), ctas, (*keys, *rest, *written), params)
    return planner.plan(*steps, step)


def _head_rotation(layouts: KeysArrays[Layout]) -> tuple[int, ...]:
    """Return the fields of the C struct HeadRotationParams."""
    cos, sin, positions = layouts.cos, layouts.sin, layouts.positions
    if cos is None or sin is None:
        return (0,) * len(HEAD_ROTATION.names or ())
    batch, seq, wide = 0, 0, False
    if positions is not None:
        batch, seq = (0, *item_strides(positions))[-2:]
        wide = positions.dtype.itemsize == 8
    of_tables = item_strides(cos)[0], item_strides(sin)[0], cos.shape[0]
    return (*of_tables, batch, seq, cos.shape[1], wide)


def _token_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of (batch, token, head); packed tokens are one batch element."""
    return (0, 0, 0, *strides)[-3:]
