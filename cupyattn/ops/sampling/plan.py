"""Sampling, on a device: a token of each row of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.sampling import kernels as configs
from cupyattn.ops.sampling.kernels import OPTIONS, SAMPLE_PARAMS, SampleConfig
from cupyattn.ops.sampling.options import DTYPES, SampleNumbers, require_values
from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.by_name import (
    Description,
    Operands,
    Overlaps,
    Plan,
    Step,
    lay_out_scratch,
    layouts_of,
    run,
    starts_of,
)
from cupyattn.runtime.checks import (
    FLOATS,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_item_alignment,
    require_output,
    require_rank,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output
from cupyattn.runtime.spec import Scalar, Specialisation
from cupyattn.runtime.storage import VECTOR_BYTES
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.value_checks import checks_values

MOST_TOKENS = 2**18
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, eq=False)
class SampleProblem:
    """A valid call."""

    layouts: dict[str, Layout]
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    overlaps: Overlaps

    @property
    def rows(self) -> int:
        """Rows of logits."""
        return self.layouts["logits"].shape[0]

    @property
    def output(self) -> Output:
        """The ids."""
        return Output((self.rows,), _INT32)

    @property
    def aligned(self) -> bool:
        """Whether each row of logits starts where a vector may."""
        stride = self.layouts["logits"].strides[0] if self.rows > 1 else 0
        return not self.starts["logits"] and stride % VECTOR_BYTES == 0


class Asks(NamedTuple):
    """What rows may ask for, as far as it is known without looking at arrays."""

    sampled: bool
    """A draw: a temperature above 0."""
    cut: bool
    """Top-k or top-p."""
    filtered: bool
    """One of these, or min-p."""


def sample_problem(operands: Operands, numbers: SampleNumbers) -> SampleProblem:
    """Check the arrays of a call, or find that they were checked before; their values each time.

    Raises
    ------
    TypeError, ValueError
        As `sample` documents.
    """
    problem = _cached_problem(operands.description)
    problem.overlaps.check(operands)
    penalised = numbers.repetition_penalty != 1 or "repetition_penalty" in problem.layouts
    if penalised and "previous" not in problem.layouts:
        raise error(
            TypeError,
            "repetition_penalty was given without previous",
            "it weakens the tokens in previous",
            "pass previous=, ids (rows, width) with -1 where there is none",
        )
    if checks_values(operands):
        require_values(operands.arrays, problem.layouts["logits"].shape[1])
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(description: Description) -> SampleProblem:
    layouts = layouts_of(description)
    require_arrays(layouts, ("logits",))
    logits = layouts["logits"]
    require_dtype("logits", logits, FLOATS)
    require_rank("logits", logits, "rows V")
    require_contiguous_rows("logits", logits)
    rows, vocabulary = logits.shape
    if not 1 <= vocabulary <= MOST_TOKENS:
        raise error(
            ValueError,
            f"logits has V = {vocabulary}",
            f"a row has 1 to {MOST_TOKENS:,} tokens",
            "pass logits (rows, V)",
        )
    for name, allowed in DTYPES.items():
        if name in layouts:
            require_dtype(name, layouts[name], allowed)
            require_shape(name, layouts[name], (rows,), "a number, or an array (rows,)")
            require_whole_item_strides(name, layouts[name])
    if "previous" in layouts:
        previous = layouts["previous"]
        require_dtype("previous", previous, ("int32",))
        require_rank("previous", previous, "rows width")
        require_shape("previous", previous, (rows, previous.shape[1]), "(rows, width)")
        require_whole_item_strides("previous", previous)
    problem = SampleProblem(
        layouts, starts_of(description), Overlaps.of(layouts, ("out", "workspace"))
    )
    if "out" in layouts:
        require_output("out", layouts["out"], *problem.output)
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    return problem


def run_sample(
    device: Device, problem: SampleProblem, numbers: SampleNumbers, operands: Operands
) -> Array:
    """Draw."""
    plan = _told(problem, numbers._replace(seed=0, step=0))
    if plan.steps:  # the last one draws: what differs from call to call is told to it alone
        *before, draw = plan.steps
        values = (np.uint64(numbers.seed), np.int64(numbers.step), *draw.values[2:])
        plan = plan._replace(steps=(*before, draw._replace(values=values)))
    return run(device, plan, operands)["out"]


@lru_cache(maxsize=4096)
def _told(problem: SampleProblem, numbers: SampleNumbers) -> Plan:
    """Return the plan with the numbers that its kernels are told."""
    given = problem.layouts
    sampled = "temperature" in given or numbers.temperature > 0
    cut = sampled and (
        "top_k" in given or "top_p" in given or numbers.top_k > 0 or numbers.top_p < 1
    )
    filtered = cut or (sampled and ("min_p" in given or numbers.min_p > 0))
    plan = _plan(problem, Asks(sampled, cut, filtered))
    steps = [
        step._replace(values=(*_typed(step.specialisation, numbers), step.values[-1]))
        for step in plan.steps
    ]
    return plan._replace(steps=tuple(steps))


def _typed(specialisation: Specialisation, numbers: SampleNumbers) -> list[Any]:
    """Return the numbers that a kernel is told, as its C types."""
    return [
        parameter.dtype.type(getattr(numbers, parameter.name.removesuffix("_value")))
        for parameter in specialisation.spec.parameters
        if isinstance(parameter, Scalar)
    ]


@lru_cache(maxsize=4096)
def _plan(problem: SampleProblem, asks: Asks) -> Plan:
    layouts, rows = problem.layouts, problem.rows
    require_item_alignment(layouts, problem.starts)
    outputs = (("out", problem.output),)
    if rows == 0:
        return Plan((), outputs)
    vocabulary = layouts["logits"].shape[1]
    parts = -(-vocabulary // configs.PART)
    params = _params(layouts, parts)
    penalised = "previous" in layouts and layouts["previous"].shape[1] > 0
    config = SampleConfig(layouts["logits"].dtype.name, problem.aligned, penalised)

    def step(specialisation: Specialisation) -> Step:
        unset = [
            kind.dtype.type(0)
            for kind in specialisation.spec.parameters
            if isinstance(kind, Scalar)
        ]
        return Step.of(specialisation, rows * parts, *unset, params)

    steps = [step(configs.specialise_draw(config, asks.filtered))]
    scratch: dict[str, int] = {}
    if asks.filtered or parts > 1:
        scratch |= {"counters": 2 * rows, "best": 2 * rows * parts}
    if asks.cut:
        steps.insert(0, step(configs.specialise(configs.COUNTS, config)))
    if asks.sampled:
        steps.insert(0, step(configs.specialise(configs.MAXIMA, config)))
        scratch |= {"maxima": rows * parts}
    if asks.filtered:
        scratch |= {
            "bins": rows * configs.SUMS * configs.BINS,
            "candidates": rows * configs.CANDIDATES * configs.CANDIDATE_WORDS,
        }
    # Otherwise the first step zeroes the counters.
    zero_first = ("counters",) if parts > 1 and not asks.sampled else ()
    plan = Plan(tuple(steps), outputs, lay_out_scratch(scratch), zero_first)
    return plan.for_arrays(layouts)


def _params(layouts: Mapping[str, Layout], parts: int) -> Any:
    params = new_struct(SAMPLE_PARAMS)
    logits = layouts["logits"]
    params["logits_stride"] = logits.strides[0] // logits.dtype.itemsize
    for name in OPTIONS:
        if name in layouts:
            layout = layouts[name]
            params[f"{name}_stride"] = layout.strides[0] // layout.dtype.itemsize
    for name in ("step", "top_k"):
        params[f"{name}_is_int64"] = name in layouts and layouts[name].dtype.itemsize == 8
    if "previous" in layouts:
        previous = layouts["previous"]
        strides = [stride // previous.dtype.itemsize for stride in previous.strides]
        params["previous_stride"], params["previous_step"] = strides
        params["width"] = previous.shape[1]
    params["vocabulary"], params["parts"] = logits.shape[1], parts
    return params[()]
