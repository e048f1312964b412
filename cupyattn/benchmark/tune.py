"""``python -m cupyattn tune``: find the configurations that are fastest on this GPU.

For calls whose plans may choose among configurations (`cupyattn.runtime.tuning`), this command
times each choice and keeps one that is faster than the default.
"""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from cupyattn.benchmark import attention, linear
from cupyattn.benchmark.cases import Harness
from cupyattn.benchmark.command import JSON, Option, run_on_gpu
from cupyattn.benchmark.results import measured_on
from cupyattn.benchmark.table import show_machine
from cupyattn.benchmark.timer import Round, Timer
from cupyattn.cli.arguments import Commands, integer
from cupyattn.cli.terminal import Result, Terminal
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.cuda import cuda_device
from cupyattn.runtime.progress import progress
from cupyattn.runtime.tables import MAX_HEAD_DIM
from cupyattn.runtime.tuning import TUNED_VARIABLE, Asked, Choices, file_of, keep

ATTENTION = "--batch 4 --seqlen 2048 --heads 16 --dtype float16 --implementation flash"
PRODUCTS = {
    "linear": "--kind large --activation none",
    "backward": "--kind backward --activation none",
    "thin": "--kind thin",
    "quantised": "--kind large --weights nf4 int4 int8",
    "int8": "--kind large --activations int8 --activation none",
}
"""The benchmark's options for each kind of products with a weight."""
KINDS = ("attention", *PRODUCTS, "matmul")
HEAD_DIMS = [40, 64, 80, 96, 128, 160, 192]
_WARM_UP, _BUDGET_S = 3, 10.0
_LESS = 0.98
"""The share of the default's time that another configuration has to beat; noise does not."""
_OPTIONS = (
    Option("kind", list(KINDS), "kinds of calls", choices=KINDS),
    Option("head-dim", HEAD_DIMS, "head dims of attention", integer(1, MAX_HEAD_DIM), metavar="D"),
    Option("size", [], "a size of the products instead of the usual ones; may be given several "
           "times", metavar=("M", "N", "K"), repeated=3),
    Option("calls", 20, "timed calls of a configuration"),
    JSON,
)  # fmt: skip


class TunedCall(NamedTuple):
    """Calls whose plan may have a choice."""

    name: str
    calls: Callable[[], Round]
    """Make their arrays and return the calls."""


Seconds = Callable[[Round], float]
"""Return the seconds of a call."""


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "tune",
        help="time the admissible configurations on this GPU, and keep the fastest",
        description="Time attention forward at each head dim and products of each "
        "size by every admissible configuration of the launch-configuration tables, and keep for "
        "this GPU what is faster than the default. Needs a GPU.",
        epilog=f"Calls take what was kept if {TUNED_VARIABLE}=1 is set; python -m cupyattn info "
        "lists it. It is kept next to the compiled kernels, and belongs to these tables and "
        "kernels: tune again after an update. Exit code 1 without a GPU.",
    )
    for option in _OPTIONS:
        option.add(parser)
    parser.set_defaults(
        run=lambda arguments: run_on_gpu("tune", arguments, measure, show),
        **{option.dest: option.default for option in _OPTIONS},
    )


def measure(arguments: argparse.Namespace) -> Result:
    """Tune on the first GPU, and keep what was chosen."""
    cupy, device = load_cupy(), cuda_device(0)
    file = file_of(device.name, device.arch.real)  # or say now that there is no place for it
    timer = Timer(arguments.calls, _WARM_UP, _BUDGET_S)

    def seconds(calls: Round) -> float:
        return statistics.median(timer.times(calls).seconds)

    with cupy.cuda.Device(device.ordinal):
        rows = tune(device, tuned_calls(arguments, Harness(cupy)), seconds)
    machine = measured_on(device)
    chosen = {row["question"]: row["chosen"] for row in rows}
    keep(device.name, device.arch.real, chosen, date=machine["date"])
    return {"command": "tune", **machine, "file": str(file), "calls": arguments.calls, "rows": rows}


def tuned_calls(arguments: argparse.Namespace, harness: Harness) -> Iterator[TunedCall]:
    """Yield the calls to tune."""
    for kind in arguments.kind:
        if kind == "attention":
            dims = " ".join(map(str, arguments.head_dim))
            _, given = attention.FORWARD.parse(
                *f"{ATTENTION} --options none --head-dim {dims}".split()
            )
            for case in attention.cases("forward", given, harness):
                yield TunedCall(
                    f"attention D={case.labels['head_dim']}", case.implementations[0].prepare
                )
            continue
        if kind == "matmul":
            sizes = [f"--size 1 {m} {n} {k}" for m, n, k in arguments.size]
            _, given = linear.MATMUL.parse(*" ".join(["--dtype float16 int8", *sizes]).split())
            for case in linear.matmul_cases(given, harness):
                of = case.labels
                name = f"matmul {of['batch']} x {of['M']} x {of['N']} x {of['K']} {of['dtype']}"
                yield TunedCall(name, case.implementations[0].prepare)
            continue
        sizes = [f"--size {m} {n} {k}" for m, n, k in arguments.size]
        _, given = linear.BENCHMARK.parse(*f"{PRODUCTS[kind]} {' '.join(sizes)}".split())
        for case in linear.cases(given, harness):
            of = case.labels
            if kind in ("quantised", "int8") and of["weights"] is None:
                continue
            form = f" {of['weights']}{', dx' * (of['kind'] == 'dx')}" if of["weights"] else ""
            name = f"{kind} {of['M']} x {of['N']} x {of['K']}{form}"
            yield TunedCall(name, case.implementations[0].prepare)


def tune(device: Device, tuned_calls: Iterable[TunedCall], timer: Seconds) -> list[Json]:
    """Time every choice that the plans of calls have on a device.

    Returns a row for each question: ``subject``, ``question``, the names of the ``usual`` and the
    ``chosen`` configuration, and the ``seconds`` of each. The device's choices do not change.
    """
    waiting, before = deque(tuned_calls), device.choices  # each allocates when it is prepared
    rows: list[Json] = []
    chosen: dict[str, str] = {}
    try:
        with progress("timing", len(waiting)) as step:
            while waiting:
                one = waiting.popleft()
                device.choices = Choices()
                for row in _answers(device, one.calls(), chosen, timer):
                    chosen[row["question"]] = row["chosen"]
                    rows.append({"subject": one.name, **row})
                step()
    finally:
        device.choices = before
    return rows


def _answers(
    device: Device, calls: Round, chosen: Mapping[str, str], timer: Seconds
) -> Iterator[Json]:
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
                seconds[name] = timer(calls)
            except (RuntimeError, MemoryError):  # the GPU has too little; the default has to run
                if name == among[0]:
                    raise
        fastest = min(seconds, key=seconds.__getitem__)
        wins = seconds[fastest] < _LESS * seconds[among[0]]
        taken[text] = fastest if wins else among[0]
        yield {"question": text, "usual": among[0], "chosen": taken[text], "seconds": seconds}


def show(result: Result, terminal: Terminal) -> None:
    """Print it for people."""
    show_machine("Configurations", result, terminal)
    terminal.table(
        ("call", "usual", "time", "chosen", "time", "rows", "speed-up"),
        [_cells(row) for row in result["rows"]],
    )
    terminal.text(
        f"  Medians of {result['calls']} calls. Kept in {result['file']}; set {TUNED_VARIABLE}=1 "
        "to have calls take it."
    )


def _cells(row: Json) -> tuple[str, ...]:
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
