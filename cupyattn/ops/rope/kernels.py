"""Rotary position embedding: its kernel, and the checks and plans of calls.

A call rotates one array, or two in one launch, with heads of any strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    Overlaps,
    most_tokens,
    require_contiguous_rows,
    require_dtype,
    require_given,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import Record, T, given_of, values_of
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, StructParameter, inputs
from cupyattn.runtime.storage import STORAGE, rows_aligned, vector_items
from cupyattn.runtime.structs import TOKEN_STRIDES, new_struct
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for
from cupyattn.runtime.value_checks import checks_values, require_within


@dataclass(slots=True)
class RopeArrays(Record[T]):
    """Arrays of rope of one array, in the order of the kernel's parameters."""

    SHOWN_AS: ClassVar = MappingProxyType({"x0": "x", "out0": "out"})

    x0: T
    x1: T | None
    cos: T
    sin: T
    positions: T | None = None
    out0: T | None = None
    out1: T | None = None


@dataclass(slots=True)
class RopePairArrays(RopeArrays[T]):
    """Arrays of rope of two arrays."""

    SHOWN_AS: ClassVar = MappingProxyType(
        {"x0": "x[0]", "x1": "x[1]", "out0": "out[0]", "out1": "out[1]"}
    )


@dataclass(slots=True)
class RopeBackwardArrays(RopeArrays[T]):
    """Arrays of the backward of rope of one array."""

    SHOWN_AS: ClassVar = MappingProxyType({"x0": "dout", "out0": "grads"})


@dataclass(slots=True)
class RopePairBackwardArrays(RopeArrays[T]):
    """Arrays of the backward of rope of two arrays."""

    SHOWN_AS: ClassVar = MappingProxyType(
        {"x0": "dout[0]", "x1": "dout[1]", "out0": "grads[0]", "out1": "grads[1]"}
    )


# RopeParams in cuda_src/rope/rotate.cu
ROPE_PARAMS = np.dtype(
    [
        *((array, TOKEN_STRIDES, (2,)) for array in ("x", "out")),
        *((f"{table}_stride", np.int64) for table in ("cos", "sin")),
        *((f"positions_{axis}", np.int64) for axis in ("batch", "seq")),
        ("table_length", np.int64),
        *((field, np.uint32) for field in ("tokens", "seq")),
        *((field, np.uint32, (2,)) for field in ("heads", "groups")),
        *((field, np.uint32) for field in ("slots", "rotated_slots", "half", "dim")),
        ("sign", np.float32),
    ],
    align=True,
)


ROPE_STRUCT = StructParameter("params", ROPE_PARAMS, "RopeParams")


ROPE = KernelSpec(
    "rope",
    "rope/rotate.cu",
    (
        *inputs("x0"),
        *inputs("x1", optional=True),
        *inputs("cos", "sin"),
        *inputs("positions", optional=True),
        Pointer("out0"),
        Pointer("out1", optional=True),
        ROPE_STRUCT,
    ),
)
KERNELS = (ROPE,)

POSITIONS = {"int32": "int", "int64": "int64"}
"""Dtypes of positions, with their names in C."""


@dataclass(frozen=True)
class RopeConfig:
    """The size of a CTA, and how many heads share a thread's cosines and sines."""

    threads: int
    heads: int
    reason: str


# The key is the most heads of an array that a configuration takes; None takes the rest. Timed on an
# H200 as compute_75 code by `python -m cupyattn.benchmark layers --operation rope`, 2026-11-22:
# 8192 tokens, float16.
TABLE: Mapping[int, Mapping[int | None, RopeConfig]] = {
    75: {
        1: RopeConfig(256, 1, "one head: with two, half of the threads' heads would not exist"),
        None: RopeConfig(128, 2, "two heads a thread: 32 x 128 take 39 us, with four 40, one 41"),
    }
}


def rope_config(arch: int, heads: int) -> RopeConfig:
    """Return the configuration for arrays of at most `heads` heads."""
    rows = rows_for(TABLE, arch).items()
    return next(row for limit, row in rows if limit is None or heads <= limit)


@cache
def specialise_rotation(
    spec: KernelSpec,
    config: RopeConfig,
    dtype: str,
    vec: int,
    table: str,
    interleaved: bool,
    accumulate: bool,
    **macros: Any,
) -> Specialisation:
    """Specialise a kernel that rotates by tables of the dtype `table`.

    `vec` is the number of items a load: 1, or 16 bytes of them.
    """
    return spec.specialise(
        threads=config.threads,
        reason=config.reason,
        DTYPE=dtype,
        HEADS=config.heads,
        VEC=vec,
        TABLE=table,
        **macros,
        INTERLEAVED=cpp_bool(interleaved),
        ACCUMULATE=cpp_bool(accumulate),
    )


def specialise_rope(
    config: RopeConfig,
    dtype: str,
    vec: int,
    table: str,
    position: str,
    interleaved: bool,
    accumulate: bool,
) -> Specialisation:
    """Specialise the kernel of `rope`, for positions of the dtype `position`."""
    pairing = interleaved, accumulate
    return specialise_rotation(
        ROPE, config, dtype, vec, table, *pairing, POSITION=POSITIONS[position]
    )


_MOST_THREADS = 2**32 - 1


@dataclass(frozen=True, eq=False)
class RopeProblem:
    """A valid call of rope, or of its backward."""

    arrays: RopeArrays[Layout]
    starts: RopeArrays[int]
    """How many bytes each array starts after a multiple of a vector's size."""
    interleaved: bool
    inverse: bool
    accumulate: bool
    overlaps: Overlaps

    @property
    def rotated(self) -> list[tuple[Layout, Layout]]:
        """Each array that is rotated, with its result."""
        arrays = self.arrays
        found = [(arrays.x0, arrays.out0 or contiguous(*self.outputs["out0"]))]
        if arrays.x1 is not None:
            found.append((arrays.x1, arrays.out1 or contiguous(*self.outputs["out1"])))
        return found

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the arrays that are rotated."""
        return self.arrays.x0.dtype

    @property
    def half(self) -> int:
        """How many pairs of features of a head are rotated."""
        return self.arrays.cos.shape[1]

    @property
    def outputs(self) -> dict[str, Output]:
        """The results by field."""
        found = {"out0": Output(self.arrays.x0.shape, self.dtype)}
        if self.arrays.x1 is not None:
            found["out1"] = Output(self.arrays.x1.shape, self.dtype)
        return found


def rope_problem(
    operands: Operands[RopeArrays[Array]],
    *,
    interleaved: bool,
    inverse: bool,
    accumulate: bool = False,
) -> RopeProblem:
    """Check the arrays of a call; a call that was checked before is found in a cache."""
    kind: Any = type(operands.arrays)
    problem = _cached_problem(kind, operands.description, interleaved, inverse, accumulate)
    problem.overlaps.check(operands)
    arrays = operands.arrays
    if arrays.positions is not None and checks_values(operands):
        fix = "pass longer tables, or other positions"
        require_within("positions", arrays.positions, len(arrays.cos), "cos and sin have", fix)
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(
    kind: type[RopeArrays[Layout]],
    description: Description,
    interleaved: bool,
    inverse: bool,
    accumulate: bool,
) -> RopeProblem:
    arrays = layouts_of(kind, description)
    shown_as = kind.SHOWN_AS
    needed = [name for name in ("x0", "x1", "cos", "sin") if name != "x1" or name in shown_as]
    for name in needed:
        require_given(shown_as.get(name, name), getattr(arrays, name))
    rotated = {shown_as["x0"]: arrays.x0}
    if arrays.x1 is not None:
        rotated[shown_as["x1"]] = arrays.x1
    for name, layout in rotated.items():
        require_dtype(name, layout, CPU_FLOATS)
        require_rank(name, layout, "B S H D")
        require_contiguous_rows(name, layout)
    require_same_dtype(rotated)
    first, *others = rotated
    batch, length, _, dim = arrays.x0.shape
    for name in others:
        expected = (batch, length, rotated[name].shape[2], dim)
        require_shape(name, rotated[name], expected, f"(B, S, heads, D) as {first} has them")
    _check_tables(arrays, first)
    problem = RopeProblem(
        arrays,
        starts_of(RopeArrays[int], description),
        interleaved,
        inverse,
        accumulate,
        Overlaps.of(arrays, ("out0", "out1"), in_place={"out0": "x0", "out1": "x1"}),
    )
    for name, output in problem.outputs.items():
        layout = getattr(arrays, name)
        if layout is not None:
            require_output(shown_as[name], layout, *output)
    return problem


def _check_tables(arrays: RopeArrays[Layout], name: str) -> None:
    """Check the tables and positions for the array that errors call `name`."""
    cos, sin, positions = arrays.cos, arrays.sin, arrays.positions
    batch, length, _, dim = arrays.x0.shape
    for table, layout in (("cos", cos), ("sin", sin)):
        require_dtype(table, layout, CPU_FLOATS)
        require_rank(table, layout, "positions R/2")
        require_contiguous_rows(table, layout)
    require_shape("sin", sin, cos.shape, "shaped like cos")
    require_same_dtype({"cos": cos, "sin": sin})
    if 2 * cos.shape[1] > dim:
        raise error(
            ValueError,
            f"cos has {cos.shape[1]} columns, which rotate {2 * cos.shape[1]} features",
            f"there are D = {dim} in {name}",
            f"pass tables of at most {dim // 2} columns",
        )
    if positions is not None:
        require_dtype("positions", positions, INTEGERS)
        require_whole_item_strides("positions", positions)
        if positions.shape not in ((length,), (batch, length)):
            raise error(
                ValueError,
                f"positions has shape {positions.shape}",
                f"it is (S,) or (B, S), here ({length},) or ({batch}, {length})",
                "pass a position for each token, or none for 0 to S - 1",
            )
    elif batch and length > cos.shape[0]:
        raise error(
            ValueError,
            f"{name} has S = {length} tokens, at positions 0 to {length - 1}",
            f"cos and sin have {cos.shape[0]} rows",
            "pass longer tables, or positions=",
        )


def run_rope(
    device: Device, problem: RopeProblem, operands: Operands[RopeArrays[Array]]
) -> RopeArrays[Array]:
    """Rotate; return the arrays with the results. In place, features beyond R are not touched."""
    x0, x1, *_, out0, out1 = operands.places
    plan = _plan(problem, device.arch.number, x0 == out0 and x1 == out1)
    return run(device, plan, operands)


@lru_cache(maxsize=4096)
def _plan(problem: RopeProblem, arch: int, in_place: bool) -> Plan:
    arrays, dtype = problem.arrays, problem.dtype.name
    shown_as = arrays.SHOWN_AS
    require_item_alignment(given_of(arrays), given_of(problem.starts), shown_as)
    require_kernel_dtype(shown_as["x0"], problem.dtype)
    require_kernel_dtype("cos", arrays.cos.dtype)
    planner = Planner(RopeArrays, arrays, problem.outputs)
    batch, length, _, dim = arrays.x0.shape
    heads = [x.shape[2] for x, _ in problem.rotated]
    vec = _vector(problem)
    per_slot = vec if not problem.interleaved else max(vec // 2, 1)
    rotated_slots = problem.half // per_slot
    copied = 0 if in_place and not problem.accumulate else dim - 2 * problem.half
    slots = rotated_slots + -(-copied // (2 * per_slot))
    config = rope_config(arch, max(heads))
    groups = [-(-count // config.heads) for count in heads]
    threads = batch * length * sum(groups) * slots
    if threads == 0:
        return planner.plan(zero_new=problem.accumulate)
    if threads > _MOST_THREADS - config.threads:
        raise error(
            ValueError,
            f"{batch} * {length} tokens of {sum(heads)} heads",
            most_tokens("rope", _MOST_THREADS // (sum(groups) * slots)),
            "split the batch or the heads over several calls",
        )
    positions = arrays.positions
    specialisation = specialise_rope(
        config,
        dtype,
        vec,
        arrays.cos.dtype.name,
        "int32" if positions is None else positions.dtype.name,
        problem.interleaved,
        problem.accumulate,
    )
    params = new_struct(ROPE_PARAMS)
    for i, pair in enumerate(problem.rotated):
        for field, layout in zip(("x", "out"), pair, strict=True):
            size = layout.dtype.itemsize
            params[field][i] = tuple(stride // size for stride in layout.strides[:3])
        params["heads"][i], params["groups"][i] = heads[i], groups[i]
    params["cos_stride"] = arrays.cos.strides[0] // arrays.cos.dtype.itemsize
    params["sin_stride"] = arrays.sin.strides[0] // arrays.sin.dtype.itemsize
    if positions is not None:
        strides = [stride // positions.dtype.itemsize for stride in positions.strides]
        params["positions_batch"], params["positions_seq"] = [0, *strides][-2:]
    params["table_length"] = arrays.cos.shape[0]
    params["tokens"], params["seq"] = batch * length, length
    params["slots"], params["rotated_slots"] = slots, rotated_slots
    params["half"], params["dim"] = problem.half, dim
    params["sign"] = -1 if problem.inverse else 1
    ctas = -(-threads // config.threads)
    step = Step.of(specialisation, ctas, values_of(planner.slots), params[()])
    return planner.plan(step, zero_new=problem.accumulate)


def _vector(problem: RopeProblem) -> int:
    arrays, starts = given_of(problem.arrays), given_of(problem.starts)
    read_or_written = [(starts[n], arrays[n]) for n in arrays if n != "positions"]
    return slot_items(problem.arrays.x0, problem.half, problem.interleaved, read_or_written)


def slot_items(
    x: Layout, half: int, interleaved: bool, arrays: Iterable[tuple[int, Layout]]
) -> int:
    """Return how many items one load has: a vector's if all pieces of all rows start at one, or 1.

    `x` is an array that is rotated, and `half` the number of its pairs. Each of `arrays` comes with
    the number of bytes by which it starts after a multiple of a vector's size.
    """
    items = vector_items(x.dtype.name)
    rotated = 2 * half if interleaved else half
    rest = x.shape[-1] - 2 * half
    aligned = rows_aligned((layout, start) for start, layout in arrays)
    return items if aligned and rotated % items == 0 and rest % items == 0 else 1


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield pairwise combinations of configurations, dtypes, loads and options."""
    rows, flags = rows_for(TABLE, arch), (False, True)
    axes = STORAGE, rows, flags, STORAGE, POSITIONS, flags, flags
    for dtype, limit, whole, table, position, interleaved, accumulate in pairs(*axes):
        vec = vector_items(dtype) if whole else 1
        yield specialise_rope(rows[limit], dtype, vec, table, position, interleaved, accumulate)
