"""Cases and their contenders: prepared, checked against each other, timed, one row each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyattn.benchmark.frame.clock import Call, Round, Samples
from cupyattn.benchmark.frame.peers import ARRAY_CODE, PEERS, SLOW
from cupyattn.benchmark.frame.rows import NotAskedError, Row, row_of, without
from cupyattn.benchmark.frame.torch_arrays import float_array
from cupyattn.progress import progress

_OWN_REFUSALS = (NotImplementedError, MemoryError, NotAskedError)
"""What this library says of a call that it cannot make. Another error, of a fault, is the end."""


@dataclass(frozen=True)
class Contender:
    """Who computes a case, and the calls that do it."""

    name: str
    prepare: Callable[[], Round]
    """Makes the calls, with all that they need allocated; their arrays live as long as they do."""
    peer: str | None = None
    """Its name in `PEERS`, if it is one: whatever it raises is a row, not the end."""
    comparable: Callable[[Any], Any] = lambda result: result
    """Makes of its result what can be held against the first contender's; of none, nothing is."""

    @classmethod
    def of_peer(
        cls,
        peer: str,
        prepare: Callable[[], Round],
        comparable: Callable[[Any], Any] = lambda result: result,
    ) -> Contender:
        """Make one of `PEERS`."""
        return cls(PEERS[peer], prepare, peer, comparable)


@dataclass(frozen=True)
class Subject:
    """A case: its labels, who computes it, its least work, and which ceiling binds it."""

    labels: Mapping[str, Any]
    contenders: Sequence[Contender]
    flops: float | None = None
    bytes: float | None = None
    ceiling: str | None = None
    tolerance: float = np.inf
    """How far results may differ from the first contender's, in shares of the largest."""
    reset: Callable[[], None] = lambda: None
    """Puts back what calls change in place, before each call whose result is compared."""
    own: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """``flops`` and ``bytes`` of contenders whose work is another."""


@dataclass(frozen=True)
class Gauge:
    """What rows are measured with."""

    xp: Any
    """The array library: CuPy."""
    times: Callable[[Round, Any], Samples]
    """See `Clock.times`."""
    memory: Callable[[Call, Any], int | None]
    """See `peak_bytes`."""
    torch: Any = None
    """PyTorch, or the error that it cannot be imported with."""
    peers: tuple[str, ...] = ()
    """Those of the benchmark that are wanted."""
    ceilings: Mapping[str, float | None] = field(default_factory=dict)
    compile_mode: str = "default"
    """Of ``torch.compile``."""
    limit_s: float = np.inf
    """Peers are left out when the benchmark has taken as long; half of it where they are slow."""
    began: float = field(default_factory=time.monotonic)
    free: Callable[[], None] = lambda: None
    """Gives memory back between subjects."""

    @classmethod
    def idle(cls, xp: Any) -> Gauge:
        """Make one that measures nothing: for who wants the calls, or has a clock of its own."""
        return cls(xp, lambda calls, torch: Samples([]), lambda call, torch: None)

    def library_of(self, contender: Contender) -> Any:
        """Return PyTorch if a contender's calls are its own.

        Raises
        ------
        RuntimeError
            If it cannot be imported.
        """
        if contender.peer is None or contender.peer in ARRAY_CODE:
            return None
        if isinstance(self.torch, Exception):
            raise self.torch
        return self.torch

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of tensors, compiled by PyTorch for each shape that it is given."""
        found: Callable[..., Any] = self.torch.compile(
            function, dynamic=False, mode=self.compile_mode
        )
        return found

    def require_time_for(self, peer: str | None) -> None:
        """Raise NotAskedError where a peer has no time."""
        limit = self.limit_s / 2 if peer in SLOW else self.limit_s
        if peer is not None and time.monotonic() - self.began > limit:
            raise NotAskedError(f"left out: {limit:g} s were over, of the benchmark's --limit")


def measured(subjects: Iterable[Subject], gauge: Gauge, total: int) -> Iterator[Row]:
    """Yield a row for each contender of each subject."""
    with progress("timing", total) as step:
        for subject in subjects:
            yield from rows_of(subject, gauge)
            gauge.free()
            step(", ".join(map(str, subject.labels.values())))


def rows_of(subject: Subject, gauge: Gauge) -> Iterator[Row]:
    """Yield a subject's rows; results are compared before they are timed."""
    expected: list[Any] | None = None
    for contender in subject.contenders:
        try:
            gauge.require_time_for(contender.peer)
            torch = gauge.library_of(contender)
            calls = contender.prepare()
            if np.isfinite(subject.tolerance):
                subject.reset()
                found = _floats(contender.comparable(calls[0]()), gauge.xp)
                if expected is None:
                    expected = found or None
                elif found:
                    _require_agreement(found, expected, subject.tolerance, gauge.xp)
                del found
            samples = gauge.times(calls, torch)
            peak = gauge.memory(calls[0], torch)
        except Exception as failure:  # whatever another library raises
            if contender.peer is None and not isinstance(failure, _OWN_REFUSALS):
                raise
            yield without(subject.labels, contender.name, failure)
            continue
        work: dict[str, Any] = {"flops": subject.flops, "bytes": subject.bytes} | dict(
            subject.own.get(contender.name, {})
        )
        yield row_of(
            subject.labels, contender.name, samples.seconds, **work, ceiling=subject.ceiling,
            calls_per_sample=samples.calls_each, ceilings=gauge.ceilings, peak_bytes=peak,
        )  # fmt: skip
        del calls


def _floats(result: Any, xp: Any) -> list[Any]:
    """Return float32 copies of all arrays of a result."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [float_array(each, xp) for each in results if each is not None]


def _require_agreement(
    found: Sequence[Any], expected: Sequence[Any], tolerance: float, xp: Any
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
