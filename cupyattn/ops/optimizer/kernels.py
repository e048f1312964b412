"""AdamW, also with 8-bit running means, and the global norm: kernels, checks and plans."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    is_contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    Overlaps,
    factor,
    integer,
    real,
    require_arrays,
    require_dtype,
    require_item_alignment,
    require_kernel_dtype,
    require_output,
    require_own_items,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.elements import ElementKernel
from cupyattn.runtime.errors import error, made_beforehand, shown
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import Record, T, given_of
from cupyattn.runtime.spec import (
    KernelSpec,
    Pointer,
    Scalar,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import merge_axes, new_struct

NUMBERS = (
    *("scale", "beta1", "rest1", "beta2", "rest2"),
    *("step_size", "inverse_bias2", "eps", "decay"),
)
"""The numbers that both kernels of AdamW take by value."""


@dataclass(slots=True)
class AdamwArrays(Record[T]):
    """Arrays of one step; param, m and v are changed in place."""

    param: T
    grad: T
    m: T
    v: T
    grad_scale: T | None = None


ADAMW = ElementKernel(
    "adamw",
    "optimizer/adamw.cu",
    updated=("param", "m", "v"),
    inputs=("grad",),
    float32=("m", "v"),
    numbers=("grad_scale",),
    scalars=dict.fromkeys(NUMBERS, np.float32),
)


class AdamwNumbers(NamedTuple):
    """The checked options of a step of AdamW."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float

    @classmethod
    def of(
        cls,
        step: object,
        lr: object,
        betas: object,
        eps: object,
        weight_decay: object,
        grad_scale: object,
    ) -> AdamwNumbers:
        """Check the options of a step."""
        count = integer("step", step)
        _require(count >= 1, f"step = {count}", "steps count from 1", "pass 1 in the first step")
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise error(
                TypeError,
                f"betas is {shown(betas)}",
                "it is a tuple of two numbers",
                "pass for example betas=(0.9, 0.999)",
            )
        beta1, beta2 = (real(f"betas[{i}]", beta) for i, beta in enumerate(betas))
        for i, beta in enumerate((beta1, beta2)):
            _require(
                0 <= beta < 1,
                f"betas[{i}] = {beta}",
                "it is at least 0 and below 1",
                "pass for example betas=(0.9, 0.999)",
            )
        rates = {
            name: factor(name, value, least=0.0)
            for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay))
        }
        scale = real("grad_scale", grad_scale)
        _require(
            math.isfinite(scale),
            f"grad_scale = {scale}",
            "it is finite: if it comes from a norm that is not, the gradients are not finite",
            "skip this step, and lower the loss scale if there is one",
        )
        scale = factor("grad_scale", scale)
        return cls(count, rates["lr"], beta1, beta2, rates["eps"], rates["weight_decay"], scale)

    @property
    def scalars(self) -> dict[str, float]:
        """The numbers that the kernels take by value."""
        return {
            "scale": self.grad_scale,
            "beta1": self.beta1,
            "rest1": 1 - self.beta1,
            "beta2": self.beta2,
            "rest2": 1 - self.beta2,
            "step_size": self.lr / (1 - self.beta1**self.step),
            "inverse_bias2": 1 / math.sqrt(1 - self.beta2**self.step),
            "eps": self.eps,
            "decay": 1 - self.lr * self.weight_decay,
        }


def _require(holds: bool, passed: str, allowed: str, fix: str) -> None:
    if not holds:
        raise error(ValueError, passed, allowed, fix)


@dataclass(slots=True)
class EightBitArrays(Record[T]):
    """Arrays of one step with 8-bit running means; all but grad and grad_scale are changed."""

    param: T
    grad: T
    m: T
    v: T
    m_scales: T
    v_scales: T
    grad_scale: T | None = None


BLOCK = 256
"""Items that share a scale: one warp's."""
EIGHT_BIT_THREADS = 128
"""As for element-wise kernels, which load in the same way: four blocks a CTA."""
WARP = 32
WRITTEN = ("param", "m", "v", "m_scales", "v_scales")

ADAMW_8BIT = KernelSpec(
    "adamw_8bit",
    "optimizer/adamw_8bit.cu",
    (
        *map(Pointer, WRITTEN),
        *inputs("grad"),
        *inputs("grad_scale", optional=True),
        *(Scalar(name, np.dtype(np.float32)) for name in NUMBERS),
        Scalar("count", np.dtype(np.int64)),
    ),
)


@cache
def specialise_eight_bit(vec: int) -> Specialisation:
    """Specialise AdamW with 8-bit running means: `vec` items a load, 4 for aligned arrays, or 1."""
    return ADAMW_8BIT.specialise(threads=EIGHT_BIT_THREADS, VEC=vec, BLOCK=BLOCK)


_DTYPES = {
    "param": "float32",
    "grad": "float32",
    "m": "int8",
    "v": "uint8",
    "m_scales": "float32",
    "v_scales": "float32",
}


@dataclass(frozen=True, eq=False)
class EightBitProblem:
    """A valid call of AdamW with 8-bit running means."""

    arrays: EightBitArrays[Layout]
    starts: EightBitArrays[int]
    """How many bytes each array starts after a multiple of a vector's size."""
    overlaps: Overlaps

    @property
    def count(self) -> int:
        """The number of parameters."""
        return math.prod(self.arrays.param.shape)


def eight_bit_problem(operands: Operands[EightBitArrays[Array]]) -> EightBitProblem:
    """Check the arrays of a call; a call that was checked before is found in a cache."""
    problem = _cached_eight_bit_problem(operands.description)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=1024)
def _cached_eight_bit_problem(description: Description) -> EightBitProblem:
    arrays = layouts_of(EightBitArrays[Layout], description)
    layouts = given_of(arrays)
    require_arrays(layouts, _DTYPES)
    shape = arrays.param.shape
    blocks = (-(-math.prod(shape) // BLOCK),)
    for name, dtype in _DTYPES.items():
        scales = name.endswith("_scales")
        meaning = f"one for each {BLOCK} items of param" if scales else "shaped like param"
        fix = f"make {name} once before the first step, zeros of {dtype}, and keep it"
        fixes = {"param": made_beforehand("param"), "grad": ""}
        require_dtype(name, layouts[name], (dtype,), fixes.get(name, fix))
        require_shape(name, layouts[name], blocks if scales else shape, meaning)
        if not is_contiguous(layouts[name]):
            raise error(
                ValueError,
                f"{name} has strides {layouts[name].strides}",
                "items are side by side in C order: blocks run over all of them",
                f"make {name} contiguous before the call, and keep it so",
            )
        if name in WRITTEN:
            require_own_items(name, layouts[name])
    if arrays.grad_scale is not None:
        require_dtype("grad_scale", arrays.grad_scale, ("float32",))
        require_shape("grad_scale", arrays.grad_scale, (), "an array of one number")
    starts = starts_of(EightBitArrays[int], description)
    return EightBitProblem(arrays, starts, Overlaps.of(arrays, WRITTEN))


def run_eight_bit(
    device: Device,
    problem: EightBitProblem,
    operands: Operands[EightBitArrays[Array]],
    numbers: AdamwNumbers,
) -> None:
    """Run a step."""
    plan = _eight_bit_plan(problem)
    values = tuple(map(np.float32, numbers.scalars.values()))
    steps = tuple(step._replace(values=(*values, step.values[-1])) for step in plan.steps)
    run(device, plan._replace(steps=steps), operands)


@lru_cache(maxsize=1024)
def _eight_bit_plan(problem: EightBitProblem) -> Plan:
    starts = problem.starts
    require_item_alignment(given_of(problem.arrays), given_of(starts))
    planner = Planner(EightBitArrays, problem.arrays, {})
    if not problem.count:
        return planner.plan()
    items = VECTOR_BYTES // 4
    aligned = not (
        starts.param % VECTOR_BYTES
        or starts.grad % VECTOR_BYTES
        or starts.m % items
        or starts.v % items
    )
    blocks = -(-problem.count // BLOCK)
    ctas = -(-blocks // (EIGHT_BIT_THREADS // WARP))
    slots = planner.slots
    arrays = (
        *(slots.param, slots.m, slots.v, slots.m_scales, slots.v_scales),
        *(slots.grad, slots.grad_scale),
    )
    unset = (0.0,) * len(NUMBERS)
    specialisation = specialise_eight_bit(items if aligned else 1)
    return planner.plan(Step.of(specialisation, ctas, arrays, *unset, problem.count))


NORM_ARRAYS = 8
"""How many arrays one launch of norm_partials takes."""


# NormParams in cuda_src/optimizer/norm_partials.cu
NORM_PARAMS = np.dtype(
    [
        *((field, np.int64, (NORM_ARRAYS,)) for field in ("length", "stride", "units", "rows")),
        ("first_cta", np.uint32, (NORM_ARRAYS + 1,)),
        ("first_partial", np.uint32),
    ],
    align=True,
)


NORM_STRUCT = StructParameter("params", NORM_PARAMS, "NormParams")


PARTIALS = KernelSpec(
    "norm_partials",
    "optimizer/norm_partials.cu",
    (
        *inputs("x0"),
        *inputs(*(f"x{i}" for i in range(1, NORM_ARRAYS)), optional=True),
        Pointer("partials"),
        NORM_STRUCT,
    ),
)
ROOT = KernelSpec(
    "global_norm",
    "optimizer/global_norm.cu",
    (*inputs("partials"), Pointer("out"), Scalar("count", np.dtype(np.int64))),
)
# Fastest of 256 or 512 threads, 2, 4 or 8 loads each and 512 to 2,048 CTAs: 10 to 20 % faster than
# 256, 2 and 1,024 (8192 float16 rows of 768 to 4096 items, H200, compute_75 code, 2026-11-22,
# `python -m cupyattn.benchmark layers --operation global_norm`). Loads without a branch, with an
# eviction hint that keeps L1 for others, take 6.67, 11.39 and 18.98 us for widths of 768, 2048 and
# 4096, without them 7.20, 11.88 and 19.49 (H200, 2026-11-24).
NORM_THREADS = 512
MOST_CTAS = 512
"""The most CTAs for one array: with more the second launch has too many partial sums to add."""


def _loads(vec: int) -> int:
    """Return how many loads a thread has in flight: 4 of 16 bytes, or 8 of single items."""
    return 4 if vec > 1 else 8


@cache
def specialise_partials(dtype: str, vec: int) -> Specialisation:
    """Specialise the sums of squares with `vec` items a load: 1, or 16 bytes of them."""
    return PARTIALS.specialise(
        threads=NORM_THREADS, DTYPE=dtype, VEC=vec, VECTORS=_loads(vec), ARRAYS=NORM_ARRAYS
    )


@cache
def specialise_root() -> Specialisation:
    """Specialise the root of the sum of all partial sums."""
    return ROOT.specialise(threads=NORM_THREADS, DTYPE="float32")


@cache
def norm_arrays(count: int) -> type[Any]:
    """Return the record of `global_norm` of `count` arrays: x0, x1 and so on, out, workspace."""
    names = [f"x{i}" for i in range(count)]
    optional = [(name, Any, field(default=None)) for name in ("out", "workspace")]
    shown_as = {name: f"arrays[{i}]" for i, name in enumerate(names)}
    return make_dataclass(
        "GlobalNormArrays",
        [*names, *optional],
        bases=(Record,),
        namespace={"SHOWN_AS": shown_as},
        slots=True,
    )


NORM = Output((), np.dtype(np.float32))
"""The result of `global_norm`."""


class NeighbouringRows(NamedTuple):
    """An array as rows of neighbouring items, in the order of memory, which a norm may use."""

    rows: int
    stride: int
    """Step from row to row, in items."""
    length: int

    @classmethod
    def of(cls, name: str, layout: Layout) -> NeighbouringRows:
        """Merge the axes of an array into rows.

        Raises
        ------
        ValueError
            If two or more axes remain besides that of the items.
        """
        size = layout.dtype.itemsize
        axes = sorted(  # an axis of stride 0 comes first: its rows are one in memory
            zip(layout.strides, layout.shape, strict=True),
            key=lambda axis: (axis[0] != 0, -abs(axis[0])),
        )
        steps = tuple(stride // size for stride, _ in axes)
        shape, (strides,) = merge_axes(tuple(extent for _, extent in axes), [steps])
        length = 1
        if shape and strides[-1] == 1:
            length, shape, strides = shape[-1], shape[:-1], strides[:-1]
        if len(shape) > 1:
            raise error(
                ValueError,
                f"{name} has shape {layout.shape} and strides {layout.strides}",
                "it is rows of neighbouring items, evenly apart",
                "copy it with ascontiguousarray(...)",
            )
        return cls(shape[0], strides[0], length) if shape else cls(1, 0, length)


@dataclass(frozen=True, eq=False)
class GlobalNormProblem:
    """A valid call of `global_norm`."""

    arrays: Record[Layout]
    summed: dict[str, Layout]
    """The arrays whose norm is computed, by field."""
    starts: dict[str, int]
    """How many bytes each array starts after a multiple of a vector's size."""
    overlaps: Overlaps


def norm_problem(operands: Operands[Any]) -> GlobalNormProblem:
    """Check the arrays of a call; a call that was checked before is found in a cache."""
    kind: Any = type(operands.arrays)
    problem = _cached_norm_problem(kind, operands.description)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=1024)
def _cached_norm_problem(kind: Any, description: Description) -> GlobalNormProblem:
    arrays = layouts_of(kind, description)
    shown_as = kind.SHOWN_AS
    summed = {name: layout for name, layout in given_of(arrays).items() if name in shown_as}
    if not summed:
        raise error(
            TypeError,
            "no arrays were given",
            "a norm is that of one array or more",
            "pass arrays, as in global_norm(*gradients)",
        )
    for name, layout in summed.items():
        require_dtype(shown_as[name], layout, CPU_FLOATS)
        require_whole_item_strides(shown_as[name], layout)
    if arrays.out is not None:
        require_output("out", arrays.out, *NORM)
    if arrays.workspace is not None:
        require_workspace(arrays.workspace)
    overlaps = Overlaps.of(arrays, ("out", "workspace"))
    return GlobalNormProblem(arrays, summed, given_of(starts_of(kind, description)), overlaps)


def run_norm(device: Device, problem: GlobalNormProblem, operands: Operands[Any]) -> Array:
    """Compute the norm."""
    result: Array = run(device, _norm_plan(problem), operands).out
    return result


@lru_cache(maxsize=1024)
def _norm_plan(problem: GlobalNormProblem) -> Plan:
    shown_as = problem.arrays.SHOWN_AS
    require_item_alignment(given_of(problem.arrays), problem.starts, shown_as)
    planner: Planner[Any] = Planner(type(problem.arrays), problem.arrays, {"out": NORM})
    # Arrays of one dtype and width of loads share launches.
    alike: defaultdict[tuple[str, int], list[tuple[int, NeighbouringRows]]] = defaultdict(list)
    for name, layout in problem.summed.items():
        require_kernel_dtype(shown_as[name], layout.dtype)
        if 0 in layout.shape:
            continue
        rows = NeighbouringRows.of(shown_as[name], layout)
        items = vector_items(layout.dtype.name)
        aligned = (
            not problem.starts[name] and rows.stride * layout.dtype.itemsize % VECTOR_BYTES == 0
        )
        slot = getattr(planner.slots, name)
        alike[layout.dtype.name, items if aligned else 1].append((slot, rows))
    launches = [
        _PartialSums.of(dtype, vec, arrays[start : start + NORM_ARRAYS])
        for (dtype, vec), arrays in alike.items()
        for start in range(0, len(arrays), NORM_ARRAYS)
    ]
    count = sum(each.ctas for each in launches)
    partials = planner.scratch(max(count, 1))
    steps, before = [], 0
    for each in launches:
        steps.append(each.step(partials, before))
        before += each.ctas
    steps.append(Step.of(specialise_root(), 1, (partials, planner.slots.out), count))
    return planner.plan(*steps)


class _PartialSums(NamedTuple):
    """The launch that sums the squares of up to eight arrays, a partial sum a CTA."""

    specialisation: Specialisation
    slots: list[int]
    params: Any
    ctas: int

    @classmethod
    def of(cls, dtype: str, vec: int, arrays: list[tuple[int, NeighbouringRows]]) -> _PartialSums:
        """Divide CTAs among the arrays, which are slots of the plan."""
        unit = NORM_THREADS * _loads(vec) * vec
        params = new_struct(NORM_PARAMS)
        ends: list[int] = []
        for i, (_, rows) in enumerate(arrays):
            units = -(-rows.length // unit)
            ends.append((ends[-1] if ends else 0) + min(rows.rows * units, MOST_CTAS))
            params["length"][i], params["stride"][i] = rows.length, rows.stride
            params["units"][i], params["rows"][i] = units, rows.rows
        params["first_cta"] = [0, *ends, *[ends[-1]] * (NORM_ARRAYS - len(ends))]
        slots = [slot for slot, _ in arrays]
        return cls(specialise_partials(dtype, vec), slots, params, ends[-1])

    def step(self, partials: int, before: int) -> Step:
        """Return the launch; its first partial sum comes after `before` others."""
        self.params["first_partial"] = before
        absent = [None] * (NORM_ARRAYS - len(self.slots))
        arrays = (*self.slots, *absent, partials)
        return Step.of(self.specialisation, self.ctas, arrays, self.params[()])


KERNELS = (ADAMW.spec, ADAMW_8BIT, PARTIALS, ROOT)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield pairwise combinations for AdamW, and all of them for the other kernels."""
    yield from ADAMW.catalogue(arch)
    yield from map(specialise_eight_bit, (4, 1))
    for dtype in STORAGE:
        for vec in (vector_items(dtype), 1):
            yield specialise_partials(dtype, vec)
    yield specialise_root()
