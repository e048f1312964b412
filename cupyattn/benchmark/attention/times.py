"""The attention benchmarks' rows: every case with every option, by each contender, timed."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from cupyattn.benchmark.attention.arguments import cases_of
from cupyattn.benchmark.attention.cases import PLAIN, Case, Pool, arguments_of, items
from cupyattn.benchmark.contenders import Contender
from cupyattn.benchmark.cuda_events import Timer, event_timer, measured_on
from cupyattn.benchmark.torch_peer import TORCH, load_torch
from cupyattn.cli.terminal import Result
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.progress import progress


def measure_cases(
    command: str,
    arguments: argparse.Namespace,
    contenders_of: Callable[[argparse.Namespace, Any], Sequence[Contender]],
) -> Result:
    """Measure what a command line names on the first GPU.

    `contenders_of` is called with the command line, and PyTorch if that names it, or None.
    """
    cupy = load_cupy()

    device = cuda_device(0)
    torch = load_torch() if arguments.peer == TORCH else None
    with cupy.cuda.Device(device.ordinal):
        rows = time_cases(
            cases_of(arguments),
            contenders_of(arguments, torch),
            arguments.options,
            cupy,
            event_timer(arguments.calls, arguments.warm_up),
        )
    return {
        "command": command,
        **measured_on(device),
        "torch": None if torch is None else torch.__version__,
        "calls": arguments.calls,
        "warm_up": arguments.warm_up,
        "rows": rows,
    }


def time_cases(
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    options: Sequence[str],
    xp: Any,
    timer: Timer,
) -> list[dict[str, Any]]:
    """Time every case with every option, by each contender.

    Parameters
    ----------
    cases : sequence of Case
        Of one dtype.
    contenders : sequence of Contender
        Each is timed with those of the options that it has.
    options : sequence of str
        Which; the plain call is always timed, first.
    xp : module
        The array library: CuPy.
    timer : callable
        See `Timer`.

    Returns
    -------
    list of dict
        A row for each case, option and contender, with the labels of the latter: ``seconds`` (the
        median), ``fastest_s``, ``tflops``, ``gb_per_s`` where the case says how many queries, and
        ``time_ratio``, over the plain call of the same contender; or ``unavailable``, the reason
        why there are none.
    """
    names = [PLAIN, *(name for name in options if not (name == "causal" and cases[0].causal))]
    pool = Pool(max(map(items, cases)), cases[0].dtype, xp)
    rows = []
    with progress("timing", len(cases) * len(names)) as step:
        for case in cases:
            plain: dict[int, float | None] = {}  # seconds by contender
            for option in names:
                for index, figures in _time_option(case, option, contenders, pool, xp, timer):
                    seconds = figures.get("seconds")
                    if option == PLAIN:
                        plain[index] = seconds
                    rows.append(
                        {
                            **asdict(case),
                            "option": option,
                            **contenders[index].labels,
                            **figures,
                            "time_ratio": _ratio(seconds, plain[index]),
                        }
                    )
                step()
    return rows


def _time_option(
    case: Case,
    option: str,
    contenders: Sequence[Contender],
    pool: Pool,
    xp: Any,
    timer: Timer,
) -> Iterator[tuple[int, dict[str, Any]]]:
    having = [
        (index, contender)
        for index, contender in enumerate(contenders)
        if option in contender.options
    ]
    arrays = pool.arrays(case)
    try:
        arguments = arguments_of(option, case, xp)
    except MemoryError as failure:
        yield from ((index, _unavailable(failure)) for index, _ in having)
        return
    for index, contender in having:
        try:
            seconds = timer(contender.prepare(case, arrays, arguments, xp))
        except contender.refusals as failure:
            yield index, _unavailable(failure)
        else:
            figures = figures_of(seconds, contender.flops(case, option))
            if case.queries is not None:
                figures["gb_per_s"] = case.bytes / figures["seconds"] / 1e9
            yield index, figures


def figures_of(seconds: Sequence[float], flops: float) -> dict[str, float]:
    """Return the median and the fastest of some calls, and the TFLOP/s of the median.

    Examples
    --------
    >>> figures_of([0.5, 0.25, 4.0], flops=1e12)
    {'seconds': 0.5, 'fastest_s': 0.25, 'tflops': 2.0}
    """
    median = statistics.median(seconds)
    return {"seconds": median, "fastest_s": min(seconds), "tflops": flops / median / 1e12}


def _ratio(seconds: float | None, plain: float | None) -> float | None:
    return None if seconds is None or plain is None else seconds / plain


def _unavailable(failure: Exception) -> dict[str, Any]:
    return {"unavailable": f"{type(failure).__name__}: {failure}"}
