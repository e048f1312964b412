"""Rotary position embedding, on a device: one array or two, heads of any strides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from cupyattn.ops.rope.kernels import ROPE_PARAMS, rope_config, specialise_rope
from cupyattn.runtime.arrays import Array, Layout, contiguous
from cupyattn.runtime.by_name import (
    Description,
    Operands,
    Overlaps,
    Plan,
    Step,
    layouts_of,
    run,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    most_tokens,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
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
from cupyattn.runtime.plan import Output
from cupyattn.runtime.storage import VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.value_checks import checks_values, require_within

_MOST_THREADS = 2**32 - 1


@dataclass(frozen=True, eq=False)
class RopeProblem:
    """A valid call: arrays x by the names in `rotated`, each with the name of its result."""

    rotated: Mapping[str, str]
    layouts: dict[str, Layout]
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    interleaved: bool
    inverse: bool
    accumulate: bool
    overlaps: Overlaps

    @property
    def first(self) -> Layout:
        """The first array's layout: all have its batch, length, head dim and dtype."""
        return self.layouts[next(iter(self.rotated))]

    @property
    def half(self) -> int:
        """Pairs of features that are rotated."""
        return self.layouts["cos"].shape[1]

    @property
    def outputs(self) -> dict[str, Output]:
        """What is written."""
        return {
            out: Output(self.layouts[x].shape, self.first.dtype) for x, out in self.rotated.items()
        }


def rope_problem(
    operands: Operands,
    rotated: tuple[tuple[str, str], ...],
    *,
    interleaved: bool,
    inverse: bool,
    accumulate: bool = False,
) -> RopeProblem:
    """Check the arrays of a call, or find that they were checked before.

    Raises
    ------
    TypeError, ValueError
        As `rope` documents.
    """
    flags = interleaved, inverse, accumulate
    problem = _cached_problem(operands.description, rotated, *flags)
    problem.overlaps.check(operands)
    if "positions" in operands.arrays and checks_values(operands):
        positions, rows = operands.arrays["positions"], len(operands.arrays["cos"])
        fix = "pass longer tables, or other positions"
        require_within("positions", positions, rows, "cos and sin have", fix)
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(
    description: Description,
    rotated: tuple[tuple[str, str], ...],
    interleaved: bool,
    inverse: bool,
    accumulate: bool,
) -> RopeProblem:
    layouts = layouts_of(description)
    names = [name for name, _ in rotated]
    require_arrays(layouts, (*names, "cos", "sin"))
    for name in names:
        require_dtype(name, layouts[name], CPU_FLOATS)
        require_rank(name, layouts[name], "B S H D")
        require_contiguous_rows(name, layouts[name])
    require_same_dtype(layouts, names)
    batch, length, _, dim = layouts[names[0]].shape
    for name in names[1:]:
        heads = layouts[name].shape[2]
        expected = (batch, length, heads, dim)
        require_shape(name, layouts[name], expected, f"(B, S, heads, D) as {names[0]} has them")
    _check_tables(layouts, names[0], batch, length, dim)
    in_place = {out: name for name, out in rotated}
    problem = RopeProblem(
        dict(rotated),
        layouts,
        starts_of(description),
        interleaved,
        inverse,
        accumulate,
        Overlaps.of(layouts, tuple(in_place), in_place=in_place),
    )
    for name, output in problem.outputs.items():
        if name in layouts:
            require_output(name, layouts[name], *output)
    return problem


def _check_tables(layouts: dict[str, Layout], name: str, batch: int, length: int, dim: int) -> None:
    cos = layouts["cos"]
    for table in ("cos", "sin"):
        require_dtype(table, layouts[table], CPU_FLOATS)
        require_rank(table, layouts[table], "positions R/2")
        require_contiguous_rows(table, layouts[table])
    require_shape("sin", layouts["sin"], cos.shape, "shaped like cos")
    require_same_dtype(layouts, ("cos", "sin"))
    if 2 * cos.shape[1] > dim:
        raise error(
            ValueError,
            f"cos has {cos.shape[1]} columns, which rotate {2 * cos.shape[1]} features",
            f"there are D = {dim} in {name}",
            f"pass tables of at most {dim // 2} columns",
        )
    if "positions" in layouts:
        positions = layouts["positions"]
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


def run_rope(device: Device, problem: RopeProblem, operands: Operands) -> dict[str, Array]:
    """Run it. Where each result is its array itself, features that are only copied stay."""
    places = operands.places
    in_place = all(places.get(out) == places[x] for x, out in problem.rotated.items())
    plan = _plan(problem, device.arch.number, in_place)
    return run(device, plan, operands)


@lru_cache(maxsize=4096)
def _plan(problem: RopeProblem, arch: int, in_place: bool) -> Plan:
    layouts, dtype = problem.layouts, problem.first.dtype.name
    require_item_alignment(layouts, problem.starts)
    require_kernel_dtype(next(iter(problem.rotated)), problem.first.dtype)
    require_kernel_dtype("cos", layouts["cos"].dtype)
    outputs = tuple(problem.outputs.items())
    batch, length, _, dim = problem.first.shape
    heads = [layouts[name].shape[2] for name in problem.rotated]
    vec = _vector(problem)
    pairs = vec if not problem.interleaved else max(vec // 2, 1)
    rotated_slots = problem.half // pairs
    copied = 0 if in_place and not problem.accumulate else dim - 2 * problem.half
    slots = rotated_slots + -(-copied // (2 * pairs))
    config = rope_config(arch, max(heads))
    groups = [-(-count // config.heads) for count in heads]
    threads = batch * length * sum(groups) * slots
    if threads == 0:
        return Plan((), outputs, zero_new=problem.accumulate)
    if threads > _MOST_THREADS - config.threads:
        raise error(
            ValueError,
            f"{batch} * {length} tokens of {sum(heads)} heads",
            most_tokens("rope", _MOST_THREADS // (sum(groups) * slots)),
            "split the batch or the heads over several calls",
        )
    given = "positions" in layouts
    position = layouts["positions"].dtype.name if given else "int32"
    specialisation = specialise_rope(
        config,
        dtype,
        vec,
        layouts["cos"].dtype.name,
        position,
        problem.interleaved,
        problem.accumulate,
    )
    params = new_struct(ROPE_PARAMS)
    for i, (x, out) in enumerate(problem.rotated.items()):
        result = layouts.get(out) or contiguous(*problem.outputs[out])
        for array, layout in (("x", layouts[x]), ("out", result)):
            size = layout.dtype.itemsize
            params[array][i] = tuple(stride // size for stride in layout.strides[:3])
        params["heads"][i], params["groups"][i] = heads[i], groups[i]
    for table in ("cos", "sin"):
        layout = layouts[table]
        params[f"{table}_stride"] = layout.strides[0] // layout.dtype.itemsize
    if given:
        strides = [s // layouts["positions"].dtype.itemsize for s in layouts["positions"].strides]
        params["positions_batch"], params["positions_seq"] = [0, *strides][-2:]
    params["table_length"] = layouts["cos"].shape[0]
    params["tokens"], params["seq"] = batch * length, length
    params["slots"], params["rotated_slots"] = slots, rotated_slots
    params["half"], params["dim"] = problem.half, dim
    params["sign"] = -1 if problem.inverse else 1
    renamed = {f"x{i}": x for i, x in enumerate(problem.rotated)}
    renamed |= {f"out{i}": out for i, out in enumerate(problem.rotated.values())}
    step = Step.of(specialisation, -(-threads // config.threads), params[()], renamed=renamed)
    plan = Plan((step,), outputs, zero_new=problem.accumulate)
    return plan.for_arrays(layouts)


def _vector(problem: RopeProblem) -> int:
    names = (*problem.rotated, *problem.rotated.values(), "cos", "sin")
    arrays = [
        (problem.starts[name], problem.layouts[name]) for name in names if name in problem.layouts
    ]
    return slot_items(problem.first, problem.half, problem.interleaved, arrays)


def slot_items(
    x: Layout, half: int, interleaved: bool, arrays: Iterable[tuple[int, Layout]]
) -> int:
    """Return how many items one load brings: a vector's if all pieces start at one, or 1.

    `x` is an array that is rotated, `half` its pairs; `arrays` come with what they miss of a
    vector's alignment.
    """
    items = vector_items(x.dtype.name)
    rotated = 2 * half if interleaved else half
    rest = x.shape[-1] - 2 * half
    aligned = all(
        start == 0
        and all(
            stride % VECTOR_BYTES == 0
            for extent, stride in zip(layout.shape[:-1], layout.strides[:-1], strict=True)
            if extent > 1
        )
        for start, layout in arrays
    )
    return items if aligned and rotated % items == 0 and rest % items == 0 else 1
