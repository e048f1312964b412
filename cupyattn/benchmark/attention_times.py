"""The attention benchmark's rows: every case with every option, by each kernel, timed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import cupyattn
from cupyattn.benchmark.attention_cases import PLAIN, Case, Pool, arguments_of, items
from cupyattn.benchmark.cuda_events import Timer
from cupyattn.benchmark.torch_peer import TAKES, TORCH, torch_call
from cupyattn.cli.terminal import progress


def time_cases(
    cases: Sequence[Case],
    implementations: Sequence[str],
    options: Sequence[str],
    xp: Any,
    timer: Timer,
    torch: Any = None,
) -> list[dict[str, Any]]:
    """Time every case with every option, by each kernel, and by PyTorch if it is given.

    Parameters
    ----------
    cases : sequence of Case
        Of one dtype.
    implementations, options : sequence of str
        Which; the plain call is always timed, first.
    xp : module
        The array library: CuPy.
    timer : callable
        See `Timer`.
    torch : module, optional

    Returns
    -------
    list of dict
        A row for each case, option and implementation (``torch`` is one): ``seconds`` (the median),
        ``fastest_s``, ``tflops`` and ``time_ratio``, over the plain call of the same
        implementation; or ``unavailable``, the reason why there are none.
    """
    names = [PLAIN, *(name for name in options if not (name == "causal" and cases[0].causal))]
    pool = Pool(max(map(items, cases)), cases[0].dtype, xp)
    rows = []
    with progress("timing", len(cases) * len(names)) as step:
        for case in cases:
            plain: dict[str, float | None] = {}  # seconds by implementation
            for option in names:
                for implementation, figures in _time_option(
                    case, option, implementations, pool, xp, timer, torch
                ):
                    seconds = figures.get("seconds")
                    if option == PLAIN:
                        plain[implementation] = seconds
                    rows.append(
                        {
                            **asdict(case),
                            "option": option,
                            "implementation": implementation,
                            **figures,
                            "time_ratio": _ratio(seconds, plain[implementation]),
                        }
                    )
                step()
    return rows


def _time_option(
    case: Case,
    option: str,
    implementations: Sequence[str],
    pool: Pool,
    xp: Any,
    timer: Timer,
    torch: Any,
) -> Iterator[tuple[str, dict[str, Any]]]:
    q, k, v, out = pool.arrays(case)
    try:
        arguments = arguments_of(option, case, xp)
    except MemoryError as failure:
        yield from ((name, _unavailable(failure)) for name in implementations)
        return
    for implementation in implementations:

        def call(implementation: str = implementation) -> Any:
            return cupyattn.attention(q, k, v, out=out, implementation=implementation, **arguments)

        # Nothing else: a fault in a kernel is the end, not a row.
        try:
            yield implementation, _figures(case, option, timer(call))
        except (NotImplementedError, MemoryError) as failure:
            yield implementation, _unavailable(failure)
    if torch is not None and option in TAKES:
        try:
            times = timer(torch_call(torch, q, k, v, arguments))
            yield TORCH, _figures(case, option, times)
        except RuntimeError as failure:  # no kernel for the combination; no room
            yield TORCH, _unavailable(failure)


def _ratio(seconds: float | None, plain: float | None) -> float | None:
    return None if seconds is None or plain is None else seconds / plain


def _figures(case: Case, option: str, seconds: Sequence[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "fastest_s": min(seconds),
        "tflops": case.flops(option) / median / 1e12,
    }


def _unavailable(failure: Exception) -> dict[str, Any]:
    return {"unavailable": f"{type(failure).__name__}: {failure}"}
