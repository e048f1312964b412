"""Cases and their implementations: prepared, compared, timed, one row each.

A benchmark is a list of cases. A case has labels, its least work, the ceiling that limits it, and
the implementations that compute it, this library's first. Implementations only prepare calls; the
harness compares their results and times them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from cupyattn.benchmark.libraries import ARRAY_CODE, BASELINES, SLOW, NotAskedError, float_array
from cupyattn.benchmark.timer import (
    ARITHMETIC,
    BFLOAT16,
    COPY,
    FLOAT32,
    PRODUCTS,
    READ,
    Call,
    Round,
    Samples,
    Tensor,
)
from cupyattn.runtime.annotations import Json, Keywords
from cupyattn.runtime.arrays import Array, dtype_of
from cupyattn.runtime.progress import progress

Row = Json

FIGURES = frozenset(
    (
        *("times", "flops", "bytes", "tflops", "gb_per_s", "of_ceiling", "ceiling", "peak_bytes"),
        *("unavailable", "left_out", "also", "modelled", "sustained"),
    )
)
"""The measured keys of a row; the others are labels."""
CEILINGS = (COPY, READ, PRODUCTS, FLOAT32)
COLD_BYTES = 400_000_000
"""Bytes of all the arrays that calls alternate between: several times an L2 cache."""
_DRAWN = 4_194_319  # a prime: no two heads, tokens or sequences get the same numbers
_OWN_REFUSALS = (NotImplementedError, MemoryError, NotAskedError)
"""Errors by which this library refuses a call. Any other error is a fault and ends the run."""


@dataclass(frozen=True)
class TimedImplementation:
    """An implementation of a case, and its calls."""

    name: str
    """This library's name for it, or a key of `BASELINES`: then its errors become rows."""
    prepare: Callable[[], Round]
    """Make the calls, with all memory that they need."""
    comparable: Callable[[Any], Any] = lambda result: result
    """Turn its result into the arrays to compare with the first implementation's; None for none."""
    errors: Callable[[Any], Mapping[str, float]] | None = None
    """Measure a result's errors, which are shown next to the times."""

    @property
    def baseline(self) -> str | None:
        """The key of `BASELINES`, if it is another library."""
        return self.name if self.name in BASELINES else None

    @property
    def label(self) -> str:
        """The name in rows."""
        return BASELINES.get(self.name, self.name)


@dataclass(frozen=True)
class Case:
    """Labels, implementations, the least work, and the ceiling that limits."""

    labels: Mapping[str, Any]
    implementations: Sequence[TimedImplementation]
    flops: float | None = None
    bytes: float | None = None
    ceiling: str | None = None
    tolerance: float = np.inf
    """How far results may differ from the first implementation's, relative to the largest."""
    own: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """``flops`` and ``bytes`` of implementations that do other work, by name."""

    def work_of(self, name: str) -> Keywords:
        """Return the work of one implementation."""
        return {"flops": self.flops, "bytes": self.bytes, **self.own.get(name, {})}


class Arrays:
    """Random arrays of an array library, the same for the same seed; or arrays without contents."""

    def __init__(self, xp: ModuleType, seed: int = 0, *, filled: bool = True) -> None:
        self.xp = xp
        self._filled = filled
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, dtype: str, scale: float = 1.0) -> Array:
        """Return standard normal numbers times `scale`."""
        if not self._filled:
            return np.empty(shape, dtype_of(dtype))
        drawn = self._rng.standard_normal(_few(shape), np.float32) * np.float32(scale)
        return self._repeated(drawn.astype(dtype_of(dtype)), shape)

    def integers(self, low: int, high: int, *shape: int, dtype: DTypeLike = np.int64) -> Array:
        """Return integers from `low` to below `high`."""
        return self._repeated(self._rng.integers(low, high, _few(shape)).astype(dtype), shape)

    def uniform(self, *shape: int, dtype: object = np.float32, scale: float = 1.0) -> Array:
        """Return numbers from 0 to `scale`."""
        drawn = self._rng.random(_few(shape), np.float32) * np.float32(scale)
        return self._repeated(drawn.astype(dtype), shape)

    def _repeated(self, drawn: np.ndarray, shape: tuple[int, ...]) -> Array:
        return self.xp.resize(self.xp.asarray(drawn), math.prod(shape)).reshape(shape)


def _few(shape: tuple[int, ...]) -> int:
    """Return how many numbers are drawn: NumPy takes a second for a hundred million."""
    return min(math.prod(shape), _DRAWN)


@dataclass(frozen=True)
class Harness:
    """The harness that prepares and measures cases."""

    xp: ModuleType
    """The array library: CuPy on a GPU."""
    times: Callable[[Round, ModuleType | None], Samples] = lambda calls, torch: Samples([])
    """See `Timer.times`."""
    memory: Callable[[Call, ModuleType | None], int | None] = lambda call, torch: None
    """See `peak_bytes`."""
    torch: Any = None
    """PyTorch, or the error that its import raised."""
    baselines: tuple[str, ...] = ()
    """The requested baselines of the benchmark."""
    ceilings: Mapping[str, float | None] = field(default_factory=dict)
    compile_mode: str = "default"
    """The mode of ``torch.compile``."""
    limit_s: float = np.inf
    """Seconds after which baselines are left out; slow ones after half of it."""
    began: float = field(default_factory=time.monotonic)
    free: Callable[[], None] = lambda: None
    """Give back memory between cases."""
    filled: bool = True
    """Whether arrays have contents; they need none if no kernel runs."""
    cold: bool = True
    """Whether calls alternate between so many arrays that no cache holds them."""

    def arrays(self, seed: int = 0) -> Arrays:
        """Return a source of arrays."""
        return Arrays(self.xp, seed, filled=self.filled)

    def sets(self, traffic: int, most: int) -> int:
        """Return how many sets of arrays of so many bytes exceed any cache, `most` at most."""
        return max(1, min(most, -(-COLD_BYTES // max(traffic, 1)))) if self.cold else 1

    def library_of(self, implementation: TimedImplementation) -> ModuleType | None:
        """Return PyTorch if the implementation needs it; raise RuntimeError if it is missing."""
        if implementation.baseline is None or implementation.baseline in ARRAY_CODE:
            return None
        if isinstance(self.torch, Exception):
            raise self.torch
        return self.torch

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function of tensors that PyTorch compiles for each shape."""
        found: Callable[..., Tensor] = self.torch.compile(
            function, dynamic=False, mode=self.compile_mode
        )
        return found

    def require_time_for(self, baseline: str | None) -> None:
        """Raise NotAskedError if the time for a baseline is over."""
        limit = self.limit_s / 2 if baseline in SLOW else self.limit_s
        if baseline is not None and time.monotonic() - self.began > limit:
            raise NotAskedError(f"left out: {limit:g} s of the benchmark's --limit were over")


def measured(cases: Iterable[Case], harness: Harness) -> Iterator[Row]:
    """Yield a row for each implementation of each case."""
    waiting = deque(cases)  # a case allocates its arrays when it is prepared, not before
    with progress("timing", len(waiting)) as step:
        while waiting:
            case = waiting.popleft()
            yield from rows_of(case, harness)
            finished = ", ".join(map(str, case.labels.values()))
            del case
            harness.free()
            step(finished)


def rows_of(case: Case, harness: Harness) -> Iterator[Row]:
    """Yield the rows of a case; results are compared before they are timed."""
    expected: list[Array] | None = None
    for implementation in case.implementations:
        try:
            harness.require_time_for(implementation.baseline)
            torch = harness.library_of(implementation)
            calls = implementation.prepare()
            if np.isfinite(case.tolerance):
                found = _floats(implementation.comparable(calls[0]()), harness.xp)
                if expected is None:
                    expected = found or None
                elif found:
                    _require_agreement(found, expected, case.tolerance, harness.xp)
                del found
            also = implementation.errors(calls[0]()) if implementation.errors else None
            samples = harness.times(calls, torch)
            peak = harness.memory(calls[0], torch)
        except Exception as failure:  # another library may raise anything
            if implementation.baseline is None and not isinstance(failure, _OWN_REFUSALS):
                raise
            yield without(case.labels, implementation.label, failure)
            continue
        yield row_of(
            case.labels,
            implementation.label,
            samples.seconds,
            **case.work_of(implementation.label),
            ceiling=case.ceiling,
            calls_per_sample=samples.calls_each,
            ceilings=harness.ceilings,
            peak_bytes=peak,
            also=also,
        )
        del calls


def _floats(result: object, xp: ModuleType) -> list[Array]:
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [float_array(each, xp) for each in results if each is not None]


def _require_agreement(
    found: Sequence[Array], expected: Sequence[Array], tolerance: float, xp: ModuleType
) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one.shape != other.shape:
            raise ArithmeticError(f"result {index} has shape {one.shape}, not {other.shape}")
        if not one.size:
            continue
        largest = max(float(xp.abs(other).max()), 1e-6)
        error = float(xp.abs(one - other).max()) / largest
        if not error <= tolerance:
            raise ArithmeticError(
                f"result {index} differs from cupyattn's by {error:.3g} of the largest; at most "
                f"{tolerance} is allowed: one of them is wrong"
            )


def products_of(dtype: str) -> str:
    """Return the ceiling of a dtype's products: from sm_80 on tensor cores take bfloat16 too."""
    return {"float16": PRODUCTS, "bfloat16": BFLOAT16}.get(dtype, FLOAT32)


def binding(ceiling: str, ceilings: Mapping[str, float | None]) -> str:
    """Return which ceiling binds: float32 arithmetic where tensor cores do not take the dtype."""
    if ceiling not in (PRODUCTS, BFLOAT16):
        return ceiling
    return FLOAT32 if ceilings.get(ceiling) is None else PRODUCTS


def times_of(seconds: Sequence[float], calls_per_sample: int = 1) -> dict[str, float]:
    """Return the statistics of the times of calls, or of means of several calls."""
    shares = (50, 95, 99)
    return {
        "mean_s": statistics.fmean(seconds),
        "std_s": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "min_s": min(seconds),
        "max_s": max(seconds),
        **{f"p{share}_s": float(np.percentile(seconds, share)) for share in shares},
        "samples": len(seconds),
        "calls_per_sample": calls_per_sample,
    }


def row_of(
    labels: Mapping[str, object],
    implementation: str,
    seconds: Sequence[float],
    *,
    calls_per_sample: int = 1,
    flops: float | None = None,
    bytes: float | None = None,
    ceiling: str | None = None,
    ceilings: Mapping[str, float | None] | None = None,
    peak_bytes: int | None = None,
    also: Mapping[str, object] | None = None,
) -> Row:
    """Return a row of measured times: those of each call, or means of several.

    Examples
    --------
    >>> row = row_of({"M": 8}, "cupyattn", [0.5], flops=1e12, ceiling=PRODUCTS,
    ...              ceilings={PRODUCTS: 4.0})
    >>> row["tflops"], row["of_ceiling"], row["gb_per_s"]
    (2.0, 0.5, None)
    """
    times = times_of(seconds, calls_per_sample)
    return {
        **labels,
        "implementation": implementation,
        "times": times,
        **rates_of(times["p50_s"], flops, bytes, ceiling, ceilings or {}),
        "peak_bytes": peak_bytes,
        **({"also": dict(also)} if also else {}),
    }


def rates_of(
    seconds: float | None,
    flops: float | None,
    bytes: float | None,
    ceiling: str | None,
    ceilings: Mapping[str, float | None],
) -> Json:
    """Return the work of a row, its rates, and their share of the ceiling that binds."""
    limit = None if ceiling is None else ceilings.get(binding(ceiling, ceilings))
    tflops = flops / seconds / 1e12 if flops is not None and seconds else None
    gb_per_s = bytes / seconds / 1e9 if bytes is not None and seconds else None
    rate = tflops if ceiling in ARITHMETIC else gb_per_s
    return {
        **{"flops": flops, "bytes": bytes, "tflops": tflops, "gb_per_s": gb_per_s},
        **{"ceiling": ceiling, "of_ceiling": rate / limit if rate and limit else None},
    }


def without(labels: Mapping[str, Any], implementation: str, reason: Exception | str) -> Row:
    """Return the row of what could not be measured."""
    row = {**labels, "implementation": implementation, "unavailable": str(reason)[:300]}
    if isinstance(reason, NotAskedError):
        return {**row, "left_out": True}
    if isinstance(reason, Exception):
        first = next(iter(str(reason).strip().splitlines()), "")
        row["unavailable"] = f"{type(reason).__name__}: {first}"[:300]
    return row


def labels_of(row: Mapping[str, object]) -> Json:
    """Return what distinguishes a row from others, its implementation included."""
    return {name: value for name, value in row.items() if name not in FIGURES}


def median_of(row: Mapping[str, Any]) -> float | None:
    """Return the median seconds of a row, None if it was not measured."""
    return None if "times" not in row else float(row["times"]["p50_s"])
