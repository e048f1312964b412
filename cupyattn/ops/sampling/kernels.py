"""Sampling: its kernels, the options of a call, and the checks and plans of calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import Array, Description, Layout, Operands, layouts_of, starts_of
from cupyattn.runtime.checks import (
    FLOATS,
    Overlaps,
    integer,
    real,
    require_contiguous_rows,
    require_dtype,
    require_given,
    require_item_alignment,
    require_output,
    require_rank,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import Record, T, given_of
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Parameter,
    Pointer,
    Scalar,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.tables import cpp_bool, option_macros, pairs
from cupyattn.runtime.value_checks import checks_values, on_host


class SampleOption(NamedTuple):
    """An option of a row: a number for all rows, or an array with one for each."""

    kind: type[np.generic]
    """The C type of the number."""
    dtypes: tuple[str, ...]
    """Allowed dtypes of the array."""
    holds: Callable[[Any], Any]
    """Returns whether numbers are allowed."""
    allowed: str
    fix: str


OPTIONS = {
    "seed": SampleOption(
        *(np.uint64, ("uint64", "int64")),
        lambda seed: (seed >= 0) & (seed < 2**64),
        "it is an integer from 0 to 2**64 - 1",
        "reduce it modulo 2**64",
    ),
    "step": SampleOption(
        *(np.int64, ("int32", "int64")),
        lambda step: (step >= 0) & (step < 2**63),
        "it is an integer from 0 to 2**63 - 1",
        "count steps from 0",
    ),
    "temperature": SampleOption(
        *(np.float32, ("float32",)),
        lambda temperature: (temperature >= 0) & (temperature < math.inf),
        "it is finite, 0 (greedy) or more",
        "pass 0 for the largest logit, 1 for the logits as they are",
    ),
    "top_k": SampleOption(
        *(np.int64, ("int32", "int64")),
        lambda top_k: (top_k >= 0) & (top_k < 2**63),
        "it is an integer, 1 or more, or 0 for none",
        "pass how many tokens to keep",
    ),
    "top_p": SampleOption(
        *(np.float32, ("float32",)),
        lambda top_p: (top_p > 0) & (top_p <= 1),
        "it is above 0 and at most 1",
        "pass the fraction of the probability to keep, 1 for all of it",
    ),
    "min_p": SampleOption(
        *(np.float32, ("float32",)),
        lambda min_p: (min_p >= 0) & (min_p <= 1),
        "it is 0 to 1",
        "pass the least fraction of the largest probability, 0 for none",
    ),
    "repetition_penalty": SampleOption(
        *(np.float32, ("float32",)),
        lambda penalty: (penalty > 0) & (penalty < math.inf),
        "it is finite and more than 0",
        "pass 1 for none, more to weaken previous tokens",
    ),
}


@dataclass(slots=True)
class SampleArrays(Record[T]):
    """Arrays of a call; an option is None where it is a number."""

    logits: T
    seed: T | None = None
    step: T | None = None
    temperature: T | None = None
    top_k: T | None = None
    top_p: T | None = None
    min_p: T | None = None
    repetition_penalty: T | None = None
    previous: T | None = None
    out: T | None = None
    workspace: T | None = None


# SampleParams in cuda_src/sampling/logits.cuh
SAMPLE_PARAMS = np.dtype(
    [
        *((field, np.int64) for field in ("logits_stride", "previous_stride", "previous_step")),
        *((f"{option}_stride", np.int64) for option in OPTIONS),
        *((field, np.int32) for field in ("vocabulary", "width", "parts")),
        *((f"{option}_is_int64", np.int32) for option in ("step", "top_k")),
    ],
    align=True,
)


SAMPLE_STRUCT = StructParameter("params", SAMPLE_PARAMS, "SampleParams")


THREADS = 256
PART = 4096
"""Tokens of a CTA: a vocabulary of 128,256 has 32 CTAs, for the 40 multiprocessors of a T4.
A thread has 16 of them in registers, and all of its loads in flight at once."""
_PART_REASON = f"{PART:,} tokens a CTA, so that all loads of a thread are in flight at once"
CANDIDATES = 4096
"""Capacity of the list of tokens in bins that contain a cut: it takes 64 KB a row."""
BINS, SUMS = 1024, 4
CANDIDATE_WORDS = 4


def _spec(entry: str, options: tuple[str, ...], scratch: tuple[Pointer, ...]) -> KernelSpec:
    """Return a kernel that takes some options: each as an array or as a number."""
    numbers: list[Parameter] = [
        Scalar(f"{name}_value", np.dtype(OPTIONS[name].kind)) for name in OPTIONS if name in options
    ]
    return KernelSpec(
        entry,
        f"sampling/{entry.removeprefix('sample_')}.cu",
        (
            *inputs("logits"),
            *inputs("previous", optional=True),
            *inputs(*(name for name in OPTIONS if name in options), optional=True),
            *scratch,
            *numbers,
            SAMPLE_STRUCT,
        ),
    )


MAXIMA = _spec(
    "sample_maxima",
    ("repetition_penalty",),
    (Pointer("maxima"), Pointer("bins", optional=True), Pointer("counters", optional=True)),
)
COUNTS = _spec(
    "sample_bins",
    ("temperature", "top_k", "top_p", "repetition_penalty"),
    (*inputs("maxima"), Pointer("bins")),
)
DRAW = _spec(
    "sample",
    tuple(OPTIONS),
    (
        *inputs("maxima", "bins", optional=True),
        *(Pointer(name, optional=True) for name in ("counters", "best", "candidates")),
        Pointer("out"),
    ),
)
KERNELS = (MAXIMA, COUNTS, DRAW)


class SampleConfig(NamedTuple):
    """The compile-time options that all kernels of sampling share."""

    dtype: str
    aligned: bool
    """Whether each row starts at a multiple of a vector's size."""
    penalised: bool
    """Whether there are previous tokens."""


@cache
def specialise(spec: KernelSpec, config: SampleConfig) -> Specialisation:
    """Specialise MAXIMA or COUNTS."""
    used = "a temperature above 0" if spec is MAXIMA else "top-k or top-p"
    reason = f"rows may have {used}; {_PART_REASON}"
    return spec.specialise(threads=THREADS, reason=reason, PART=PART, **option_macros(config))


@cache
def specialise_draw(config: SampleConfig, filtered: bool) -> Specialisation:
    """Specialise the draw; with `filtered` rows may use top-k, top-p or min-p."""
    return DRAW.specialise(
        threads=THREADS,
        gates=Gates(registers=120),
        reason=f"{'rows may' if filtered else 'no row can'} have top-k, top-p or min-p; "
        f"{_PART_REASON}",
        PART=PART,
        CANDIDATES=CANDIDATES,
        FILTERED=cpp_bool(filtered),
        **option_macros(config),
    )


class SampleNumbers(NamedTuple):
    """Checked options that are numbers; one that is an array has a default, which is not read."""

    seed: int = 0
    step: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, given: Mapping[str, object]) -> SampleNumbers:
        """Check options by name, without those that are arrays."""
        values = dict(given)
        drawn = {}  # seed and step mostly differ from call to call: they are not in the cache
        for name in ("seed", "step"):
            if name in values:
                value = values.pop(name)
                if value is not None or name == "step" or given.get("temperature") != 0:
                    drawn[name] = _checked(name, value)
        try:
            others = _numbers(tuple(values), *values.values())
        except TypeError:  # a value that cannot be hashed: its own check raises the right error
            others = _numbers.__wrapped__(tuple(values), *values.values())
        return others._replace(**drawn)


@lru_cache(maxsize=1024, typed=True)
def _numbers(names: tuple[str, ...], *values: object) -> SampleNumbers:
    given = zip(names, values, strict=True)
    return SampleNumbers(
        **{
            name: _checked(name, value)
            for name, value in given
            if value is not None or name not in ("top_k", "top_p", "min_p")
        }
    )


def _checked(name: str, value: object) -> Any:
    number, rule = _number(name, value), OPTIONS[name]
    if not rule.holds(number):
        raise error(ValueError, f"{name} = {shown(value)}", rule.allowed, rule.fix)
    return number


def _number(name: str, value: object) -> Any:
    dtype = OPTIONS[name].dtypes[0]
    if isinstance(value, list | tuple):
        raise error(
            TypeError,
            f"{name} has type {type(value).__name__}",
            "it must be a number for all rows, or an array (rows,)",
            f"pass an array, one a row: numpy.array({name}, {dtype!r})",
        )
    if dtype == "float32":
        return real(name, value)
    if value is None:
        raise error(
            TypeError,
            f"{name} is None",
            "tokens are drawn from the seed alone, so that a draw can be repeated",
            "pass an integer seed, or temperature=0",
        )
    return integer(name, value)


def require_values(arrays: SampleArrays[Array], vocabulary: int) -> None:
    """Raise ValueError for the first of an array's numbers that is out of range.

    The host waits for arrays on a GPU.
    """
    for name, rule in OPTIONS.items():
        option = getattr(arrays, name)
        if option is None:
            continue
        values = on_host(option)
        with np.errstate(invalid="ignore"):
            wrong = ~np.asarray(rule.holds(values), bool)
        if wrong.any():
            row = int(wrong.argmax())
            raise error(ValueError, f"{name}[{row}] = {values[row]}", rule.allowed, rule.fix)
    if arrays.previous is not None:
        previous = on_host(arrays.previous)
        wrong = (previous < -1) | (previous >= vocabulary)
        if wrong.any():
            row, column = (int(i) for i in np.unravel_index(wrong.argmax(), wrong.shape))
            raise error(
                ValueError,
                f"previous[{row}, {column}] is {previous[row, column]}",
                f"logits have tokens 0 to {vocabulary - 1}, and -1 is none",
                "pass the ids of those tokens",
            )


MOST_TOKENS = 2**18
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, eq=False)
class SampleProblem:
    """A valid call of sample."""

    arrays: SampleArrays[Layout]
    starts: SampleArrays[int]
    """How many bytes each array starts after a multiple of a vector's size."""
    overlaps: Overlaps

    @property
    def rows(self) -> int:
        """The number of rows of logits."""
        return self.arrays.logits.shape[0]

    @property
    def output(self) -> Output:
        """The shape and dtype of the ids."""
        return Output((self.rows,), _INT32)

    @property
    def aligned(self) -> bool:
        """Whether each row of logits starts at a multiple of a vector's size."""
        stride = self.arrays.logits.strides[0] if self.rows > 1 else 0
        return not self.starts.logits and stride % VECTOR_BYTES == 0


class SampleWork(NamedTuple):
    """The kernels' work that some row may need, as far as known without reading arrays."""

    sampled: bool
    """Whether a temperature may be above 0."""
    cut: bool
    """Whether there may be a top-k or a top-p."""
    filtered: bool
    """Whether there may be a top-k, a top-p or a min-p."""


def sample_problem(
    operands: Operands[SampleArrays[Array]], numbers: SampleNumbers
) -> SampleProblem:
    """Check a call; layouts that were checked before are found in a cache, values are not."""
    problem = _cached_problem(operands.description)
    problem.overlaps.check(operands)
    arrays = operands.arrays
    penalised = numbers.repetition_penalty != 1 or arrays.repetition_penalty is not None
    if penalised and arrays.previous is None:
        raise error(
            TypeError,
            "repetition_penalty was given without previous",
            "it weakens the tokens in previous",
            "pass previous=, ids (rows, width) with -1 where there is none",
        )
    if checks_values(operands):
        require_values(arrays, problem.arrays.logits.shape[1])
    return problem


@lru_cache(maxsize=4096)
def _cached_problem(description: Description) -> SampleProblem:
    arrays = layouts_of(SampleArrays[Layout], description)
    logits, previous = arrays.logits, arrays.previous
    require_given("logits", logits)
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
    for name, option in OPTIONS.items():
        layout = getattr(arrays, name)
        if layout is not None:
            require_dtype(name, layout, option.dtypes)
            require_shape(name, layout, (rows,), "a number, or an array (rows,)")
            require_whole_item_strides(name, layout)
    if previous is not None:
        require_dtype("previous", previous, ("int32",))
        require_rank("previous", previous, "rows width")
        require_shape("previous", previous, (rows, previous.shape[1]), "(rows, width)")
        require_whole_item_strides("previous", previous)
    starts = starts_of(SampleArrays[int], description)
    problem = SampleProblem(arrays, starts, Overlaps.of(arrays, ("out", "workspace")))
    if arrays.out is not None:
        require_output("out", arrays.out, *problem.output)
    if arrays.workspace is not None:
        require_workspace(arrays.workspace)
    return problem


def run_sample(
    device: Device,
    problem: SampleProblem,
    numbers: SampleNumbers,
    operands: Operands[SampleArrays[Array]],
) -> Array:
    """Draw a token of each row."""
    plan = _plan_with(problem, numbers._replace(seed=0, step=0))
    if plan.steps:  # the last kernel alone takes seed and step, which differ in every call
        *before, draw = plan.steps
        values = (np.uint64(numbers.seed), np.int64(numbers.step), *draw.values[2:])
        plan = plan._replace(steps=(*before, draw._replace(values=values)))
    ids = run(device, plan, operands).out
    assert ids is not None
    return ids


@lru_cache(maxsize=4096)
def _plan_with(problem: SampleProblem, numbers: SampleNumbers) -> Plan:
    """Return the plan with the options that are numbers."""
    given = problem.arrays
    sampled = given.temperature is not None or numbers.temperature > 0
    cuts = given.top_k is not None or given.top_p is not None
    cut = sampled and (cuts or numbers.top_k > 0 or numbers.top_p < 1)
    filtered = cut or (sampled and (given.min_p is not None or numbers.min_p > 0))
    plan = _plan(problem, SampleWork(sampled, cut, filtered))
    steps = [
        step._replace(values=(*_typed(step.specialisation, numbers), step.values[-1]))
        for step in plan.steps
    ]
    return plan._replace(steps=tuple(steps))


def _typed(specialisation: Specialisation, numbers: SampleNumbers) -> list[Any]:
    """Return the numbers that a kernel takes, as its C types."""
    return [
        parameter.dtype.type(getattr(numbers, parameter.name.removesuffix("_value")))
        for parameter in specialisation.spec.parameters
        if isinstance(parameter, Scalar)
    ]


@lru_cache(maxsize=4096)
def _plan(problem: SampleProblem, work: SampleWork) -> Plan:
    arrays, rows = problem.arrays, problem.rows
    require_item_alignment(given_of(arrays), given_of(problem.starts))
    planner = Planner(SampleArrays, arrays, {"out": problem.output})
    if rows == 0:
        return planner.plan()
    logits, previous = arrays.logits, arrays.previous
    parts = -(-logits.shape[1] // PART)
    penalised = previous is not None and previous.shape[1] > 0
    config = SampleConfig(logits.dtype.name, problem.aligned, penalised)
    specialisations = [specialise_draw(config, work.filtered)]
    scratch: dict[str, int] = {}
    if work.filtered or parts > 1:
        scratch |= {"counters": 2 * rows, "best": 2 * rows * parts}
    if work.cut:
        specialisations.insert(0, specialise(COUNTS, config))
    if work.sampled:
        specialisations.insert(0, specialise(MAXIMA, config))
        scratch |= {"maxima": rows * parts}
    if work.filtered:
        scratch |= {"bins": rows * SUMS * BINS, "candidates": rows * CANDIDATES * CANDIDATE_WORDS}
    slots = given_of(planner.slots)
    slots |= {name: planner.scratch(items) for name, items in scratch.items()}
    params = _params(arrays, parts)
    steps = [
        Step.of(
            specialisation,
            rows * parts,
            [slots.get(pointer.name) for pointer in specialisation.spec.pointers],
            *_typed(specialisation, SampleNumbers()),
            params,
        )
        for specialisation in specialisations
    ]
    # With a temperature above 0 the first launch zeroes the counters.
    zero_first = (slots["counters"],) if parts > 1 and not work.sampled else ()
    return planner.plan(*steps, zero_first=zero_first)


def _params(arrays: SampleArrays[Layout], parts: int) -> Any:
    """Return the C struct SampleParams."""
    params = new_struct(SAMPLE_PARAMS)
    logits, previous = arrays.logits, arrays.previous
    params["logits_stride"] = logits.strides[0] // logits.dtype.itemsize
    for name in OPTIONS:
        layout = getattr(arrays, name)
        if layout is not None:
            params[f"{name}_stride"] = layout.strides[0] // layout.dtype.itemsize
            if name in ("step", "top_k"):
                params[f"{name}_is_int64"] = layout.dtype.itemsize == 8
    if previous is not None:
        strides = [stride // previous.dtype.itemsize for stride in previous.strides]
        params["previous_stride"], params["previous_step"] = strides
        params["width"] = previous.shape[1]
    params["vocabulary"], params["parts"] = logits.shape[1], parts
    return params[()]


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield each dtype with loads of both kinds, with previous tokens and without."""
    del arch  # one configuration serves all
    for dtype, aligned, penalised, filtered in pairs(STORAGE, *[(True, False)] * 3):
        config = SampleConfig(dtype, aligned, penalised)
        for spec in (MAXIMA, COUNTS):
            yield specialise(spec, config)
        yield specialise_draw(config, filtered)
