"""``python -m cupyattn tune``: the rows of the tables that are fastest on the GPU at hand.

A plan whose table has several admissible rows asks `cupyattn.kernels.choices` which to take. Here
calls are made whose plans ask; each answer is timed, and one that beats the usual row is kept.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark.frame.clock import Clock, Round
from cupyattn.benchmark.frame.gpu_command import add_json_file, run_on_gpu
from cupyattn.benchmark.frame.machine import measured_on
from cupyattn.benchmark.frame.table import show_machine
from cupyattn.benchmark.linear.calls import own_calls
from cupyattn.benchmark.linear.cases import LARGE, QUANTISED, THIN, THIN_ROWS, Case, arrays_of
from cupyattn.cli.arguments import integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.choices import TUNED_VARIABLE, Asked, Choices, file_of, keep
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.kernels.device import Device
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.progress import progress

KINDS = ("attention", "linear", "backward", "thin", "quantised")
HEAD_DIMS = (40, 64, 80, 96, 128, 160, 192)
_SHAPE = (4, 2048, 16)  # sequences, their length, heads
_WARM_UP, _BUDGET_S = 3, 10.0
_LESS = 0.98
"""Of the usual row's time: another has to take less, which noise does not."""

_FORMATS = ("nf4", "int4", "int8")
_KIND_OF_CASE = {"linear": "large", "backward": "backward", "thin": "thin"}


class Subject(NamedTuple):
    """Calls whose plan may have a choice."""

    name: str
    calls: Callable[[Any], Round]
    """Makes their arrays by an array library: calls that are made one behind the other."""


Seconds = Callable[[Round], float]
"""Returns the seconds of a call of a round."""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "tune",
        help="time the admissible rows of the tables on this GPU, and keep the fastest",
        description="Time attention forward at each head dim and products with a weight of each "
        "size by every row of the launch-configuration tables that may compute it, and keep for "
        "this GPU what is faster than the usual row. Needs a GPU.",
        epilog=f"Calls take what was kept where {TUNED_VARIABLE}=1 is set; python -m cupyattn info "
        "says what there is. It is kept beside the compiled kernels, and is of these tables and "
        "kernels: after an update tune again. Exit code 1 without a GPU.",
    )
    parser.add_argument(
        "--kind",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        metavar="KIND",
        help=f"of {', '.join(KINDS)} (default: all)",
    )
    parser.add_argument(
        "--head-dim",
        nargs="+",
        type=integer(1, MAX_HEAD_DIM),
        default=list(HEAD_DIMS),
        metavar="D",
        help=f"of attention (default: {' '.join(map(str, HEAD_DIMS))})",
    )
    parser.add_argument(
        "--size",
        nargs=3,
        type=integer(1),
        action="append",
        metavar=("M", "N", "K"),
        help="of the products, instead of the usual ones; may be given several times",
    )
    parser.add_argument(
        "--calls",
        type=integer(1),
        default=20,
        metavar="N",
        help="calls of a row that are timed (default: %(default)s)",
    )
    add_json_file(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return run_on_gpu("tune", arguments, measure, show)


def measure(arguments: argparse.Namespace) -> Result:
    """Tune on the first GPU, and keep what was chosen."""
    cupy = load_cupy()
    device = cuda_device(0)
    file = file_of(device.name, device.arch.real)  # or say now that there is no place for it

    clock = Clock(arguments.calls, _WARM_UP, _BUDGET_S)

    def seconds(calls: Round) -> float:
        return statistics.median(clock.times(calls).seconds)

    with cupy.cuda.Device(device.ordinal):
        rows = tune(device, list(subjects(arguments)), cupy, seconds)
    machine = measured_on(device)
    chosen = {row["question"]: row["chosen"] for row in rows}
    keep(device.name, device.arch.real, chosen, date=machine["date"])
    return {
        "command": "tune",
        **machine,
        "file": str(file),
        "calls": arguments.calls,
        "rows": rows,
    }


def subjects(arguments: argparse.Namespace) -> Iterator[Subject]:
    """Yield what the command line asks for."""
    for kind in arguments.kind:
        if kind == "attention":
            yield from map(_attention, arguments.head_dim)
            continue
        if kind == "quantised":
            for (m, n, k), weights in product(arguments.size or QUANTISED, _FORMATS):
                for of_case in ("large", "dx"):
                    yield _product(kind, Case(of_case, m, n, k, "float16", "nk", None, weights))
            continue
        usual = [(m, n, k) for n, k in THIN for m in THIN_ROWS] if kind == "thin" else LARGE
        for m, n, k in arguments.size or usual:
            yield _product(kind, Case(_KIND_OF_CASE[kind], m, n, k, "float16", "nk", None))


def _attention(head_dim: int) -> Subject:
    def calls(xp: Any) -> Round:
        rng = np.random.default_rng(0)
        shape = (*_SHAPE, head_dim)
        q, k, v = (xp.asarray(rng.standard_normal(shape, np.float32), "float16") for _ in range(3))
        out = xp.empty_like(q)
        return [lambda: cupyattn.attention(q, k, v, out=out)]

    return Subject(f"attention D={head_dim}", calls)


def _product(kind: str, case: Case) -> Subject:
    of = "" if case.weights is None else f" {case.weights}{', dx' * (case.kind == 'dx')}"
    name = f"{kind} {case.M} x {case.N} x {case.K}{of}"
    return Subject(name, lambda xp: own_calls(case, arrays_of(case, xp)))


def tune(
    device: Device, subjects: Iterable[Subject], xp: Any, clock: Seconds
) -> list[dict[str, Any]]:
    """Time every answer to what the plans of calls ask on a device.

    Returns
    -------
    list of dict
        For each question its ``subject``, ``question``, the ``usual`` row's name, the ``chosen``
        one's, and the ``seconds`` of each that ran. The device's choices are as before.
    """
    subjects, before = list(subjects), device.choices
    rows: list[dict[str, Any]] = []
    chosen: dict[str, str] = {}
    try:
        with progress("timing", len(subjects)) as step:
            for subject in subjects:
                device.choices = Choices()
                calls = subject.calls(xp)
                for row in _answers(device, calls, chosen, clock):
                    chosen[row["question"]] = row["chosen"]
                    rows.append({"subject": subject.name, **row})
                step()
    finally:
        device.choices = before
    return rows


def _answers(
    device: Device, calls: Round, chosen: Mapping[str, str], clock: Seconds
) -> Iterator[dict[str, Any]]:
    device.choices = asked = Asked()
    calls[0]()
    taken = dict(chosen)
    for text, among in asked.questions:
        if len(among) == 1 or text in chosen:
            continue
        seconds = {}
        for name in among:
            device.choices = Choices({**taken, text: name})
            try:
                seconds[name] = clock(calls)
            except (RuntimeError, MemoryError):  # more than this card has; the usual row has to run
                if name == among[0]:
                    raise
        fastest = min(seconds, key=seconds.__getitem__)
        wins = seconds[fastest] < _LESS * seconds[among[0]]
        taken[text] = fastest if wins else among[0]
        yield {"question": text, "usual": among[0], "chosen": taken[text], "seconds": seconds}


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Rows of the tables", result, terminal)
    terminal.table(
        ("call", "usual", "time", "chosen", "time", "rows", "speed-up"),
        [_cells(row) for row in result["rows"]],
    )
    terminal.text(
        f"  Medians of {result['calls']} calls. Kept in {result['file']}; set {TUNED_VARIABLE}=1 "
        "to have calls take it."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    seconds, usual, chosen = row["seconds"], row["usual"], row["chosen"]
    same = chosen == usual
    return (
        f"{row['subject']} ({row['question'].partition(' ')[0]})",
        usual,
        f"{seconds[usual] * 1e6:.1f} us",
        "the same" if same else chosen,
        "" if same else f"{seconds[chosen] * 1e6:.1f} us",
        str(len(seconds)),
        "" if same else f"{seconds[usual] / seconds[chosen]:.2f}",
    )
