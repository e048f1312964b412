"""``python -m cupyattn.benchmark plot``: pictures of the results that ``--json`` wrote.

For each command and dtype: time, TFLOP/s, GB/s, memory, speed-up over others, and the roofline.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyattn.benchmark.cases import Row, binding, labels_of, median_of, products_of
from cupyattn.benchmark.command import Option
from cupyattn.benchmark.libraries import BASELINES
from cupyattn.benchmark.results import device_of, place_of, results_of
from cupyattn.benchmark.table import label_text, seconds_text
from cupyattn.benchmark.timer import ARITHMETIC, COPY, FLOAT32, PRODUCTS, READ
from cupyattn.cli.arguments import Commands
from cupyattn.cli.terminal import Result, fail
from cupyattn.runtime.errors import error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ["svg", "png"]
TEACHING = ("cupyattn naive", "cupyattn tiled")
_STYLE = "seaborn-v0_8-colorblind"
_MARKERS = "osD^vPX"
_LINE = 0.17  # inches of a bar
_MOST_BARS = 60  # on a page
_T4 = {PRODUCTS: 65.0, FLOAT32: 8.1, COPY: 320.0}
Value = Callable[[Row], float | None]
Case = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Measured:
    """The rows of one command in one dtype on one device."""

    name: str
    source: str
    """Device, code and dates."""
    ceilings: dict[str, float | None]
    rows: tuple[Row, ...]

    @property
    def implementations(self) -> list[str]:
        """All names: this library's first, its teaching kernels after its others."""
        names = dict.fromkeys(row["implementation"] for row in self.rows)
        return sorted(names, key=lambda name: (not name.startswith("cupyattn"), name in TEACHING))

    @property
    def products(self) -> str:
        """The ceiling of the products of its dtype."""
        return binding(products_of(self.rows[0].get("dtype") or "float16"), self.ceilings)


def measured(results: Iterable[Result]) -> list[Measured]:
    """Gather the results of each command, and of each dtype if it has several.

    Raises ValueError for results of one command on several devices, and for two rows of one case.
    """
    commands: dict[str, list[Result]] = {}
    for result in results:
        commands.setdefault(result["command"], []).append(result)
    return [part for command, those in commands.items() for part in _of(command, those)]


def _of(command: str, results: list[Result]) -> Iterator[Measured]:
    devices = sorted(set(map(device_of, results)))
    if len(devices) > 1:
        raise error(
            ValueError, f"figures of {command} on {len(devices)} devices: {', '.join(devices)}",
            "a picture is of one", "draw each device's results with a separate --out",
        )  # fmt: skip
    rows: dict[object, Row] = {}
    for row in (row for result in results for row in result["rows"] if "implementation" in row):
        if rows.setdefault(key := (case_of(row), row["implementation"]), row) is not row:
            raise error(
                ValueError, f"two figures of {key[1]} for {command}: {label_text(dict(key[0]))}",
                "a picture has one for each implementation and case",
                "leave one of the results out",
            )  # fmt: skip
    dates = sorted({result["date"] for result in results if result.get("date")})
    source = ", ".join([place_of(results[-1]), *dict.fromkeys((*dates[:1], *dates[-1:]))])
    ceilings = [found for result in results if (found := result.get("ceilings"))]
    one = Measured(command.replace("_", "-"), source, ceilings[-1] if ceilings else {}, ())
    dtypes = list(dict.fromkeys(row.get("dtype") for row in rows.values()))
    for dtype in dtypes:
        name = f"{one.name}-{dtype or 'other'}" if len(dtypes) > 1 else one.name
        of_it = tuple(row for row in rows.values() if row.get("dtype") == dtype)
        yield replace(one, name=name, rows=of_it)


def case_of(row: Row) -> Case:
    """Return the labels of a row without its implementation."""
    return tuple((name, x) for name, x in labels_of(row).items() if name != "implementation")


@dataclass(frozen=True)
class Chart:
    """A value for each case and implementation; None if the implementation refused the case."""

    title: str
    source: str
    values: dict[Case, dict[str, float | None]]
    show: Callable[[float], str]
    logarithmic: bool = False
    reference: tuple[float, str] | None = None
    """A value that is drawn as a line, and its name."""


def chart_of(
    one: Measured,
    title: str,
    value: Value,
    show: Callable[[float], str],
    names: Collection[str] | None = None,
    **more: Any,
) -> Chart | None:
    """Return the chart of a value of the rows, of some names or all; None if no row has it."""
    order = one.implementations
    values: dict[Case, dict[str, float | None]] = {}
    for row in sorted(one.rows, key=lambda row: order.index(row["implementation"])):
        found, refused = value(row), "unavailable" in row and not row.get("left_out")
        if row["implementation"] in (names or order) and (found is not None or refused):
            values.setdefault(case_of(row), {})[row["implementation"]] = found
    kept = {case: of for case, of in values.items() if any(x is not None for x in of.values())}
    return Chart(f"{one.name}: {title}", one.source, kept, show, **more) if kept else None


def three(value: float) -> str:
    """Write a number with three significant digits.

    Examples
    --------
    >>> three(0.4567), three(32.14), three(4254.2)
    ('0.457', '32.1', '4,254')
    """
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{digits}f}"


def charts_of(one: Measured) -> dict[str, Chart]:
    """Return the charts of a command by their names."""

    def reference(ceiling: str, unit: str) -> tuple[float, str] | None:
        rate, kind = one.ceilings.get(ceiling), ceiling.partition("_")[0]
        return (rate, f"measured {kind}: {three(rate)} {unit}") if rate else None

    def rate(name: str, ceilings: Collection[str | None]) -> Value:
        return lambda row: row.get(name) if row.get("ceiling", PRODUCTS) in ceilings else None

    def megabytes(row: Row) -> float | None:
        return None if row.get("peak_bytes") is None else row["peak_bytes"] / 1e6

    found: dict[str, Chart | None] = {
        "latency": chart_of(one, "median time of a call (less is better)",
                            lambda row: median_of(row) or None, seconds_text, logarithmic=True),
        "tflops": chart_of(one, "TFLOP/s (more is better)", rate("tflops", ARITHMETIC),
                           three, reference=reference(one.products, "TFLOP/s")),
        "bandwidth": chart_of(one, "GB/s (more is better)", rate("gb_per_s", (COPY, READ, None)),
                              three, reference=reference(COPY, "GB/s")),
        "memory": chart_of(one, "most memory beyond inputs and results, MB (less is better)",
                           megabytes, three),
    }  # fmt: skip
    slower = [name for name in one.implementations if name in (*TEACHING, *BASELINES.values())]
    own = [name for name in one.implementations if name not in slower]
    if slower and own:
        found["speed-up"] = _speed_up(one, own[0], slower)
    return {name: chart for name, chart in found.items() if chart is not None}


def _speed_up(one: Measured, own: str, names: list[str]) -> Chart | None:
    """Return how many times as fast `own` is as others."""
    alone = {case_of(row): median_of(row) for row in one.rows if row["implementation"] == own}

    def times(row: Row) -> float | None:
        taken, basis = median_of(row), alone.get(case_of(row))
        return taken / basis if taken and basis else None

    title = f"how many times as fast {own} is"
    return chart_of(one, title, times, three, names, logarithmic=True, reference=(1.0, "as fast"))


def _figure(title: str, source: str, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, height + 1.4), layout="constrained")
    figure.supxlabel(source, x=0.01, ha="left", fontsize=7, wrap=True)
    axes = figure.subplots()
    axes.set_title(title, loc="left", weight="bold", fontsize=11)
    return figure, axes


def _legend(figure: Figure, handles: Sequence[object]) -> None:
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=8)


def draw(chart: Chart) -> Iterator[Figure]:
    """Yield figures of a page each: bars, or points on a logarithmic axis; a cross was refused."""
    page: list[Case] = []
    for case in chart.values:
        if page and sum(len(chart.values[each]) for each in (*page, case)) > _MOST_BARS:
            yield _page(chart, page)
            page = []
        page.append(case)
    yield _page(chart, page)


def _page(chart: Chart, cases: Sequence[Case]) -> Figure:
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator, NullFormatter

    names = list(dict.fromkeys(name for values in chart.values.values() for name in values))
    tables = [dict(case) for case in chart.values]
    same = {name for name in tables[0] if all(t.get(name) == tables[0][name] for t in tables)}
    alike = label_text({name: x for name, x in tables[0].items() if name in same})
    count = sum(len(chart.values[case]) + 1 for case in cases)
    caption = "; ".join(filter(None, (chart.source, alike)))
    figure, axes = _figure(chart.title, caption, max(count * _LINE, 1.0))
    ticks, y = {}, 0.0
    for case in cases:
        values = chart.values[case]
        ticks[y + (len(values) - 1) / 2] = label_text({n: x for n, x in case if n not in same})
        for name, value in values.items():
            colour = f"C{names.index(name) % 6}"
            if value is None:
                axes.plot(0.01, y, "x", color=colour, transform=axes.get_yaxis_transform())
            elif chart.logarithmic:
                axes.plot(value, y, _MARKERS[names.index(name) % 7], color=colour)
            else:
                axes.barh(y, value, 0.8, color=colour, hatch="//" * (names.index(name) // 6))
            if value is not None:
                axes.annotate(chart.show(value), (value, y), xytext=(6, 0), va="center",
                              textcoords="offset points", fontsize=7)  # fmt: skip
            y += 1
        y += 1
    axes.set_ylim(y - 1, -1)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.margins(x=0.15)
    if chart.logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: chart.show(value) if value > 0 else "0")
    axes.grid(axis="x", alpha=0.3)
    handles: list[object] = [
        Patch(color=f"C{n % 6}", label=name, hatch="//" * (n // 6)) for n, name in enumerate(names)
    ]
    if any(None in chart.values[case].values() for case in cases):
        handles += axes.plot([], [], "xk", label="no kernel, or no room")
    if chart.reference is not None:
        value, name = chart.reference
        handles.append(axes.axvline(value, color="black", linestyle=":", label=name))
    _legend(figure, handles)
    return figure


def roofline(one: Measured) -> Iterator[Figure]:
    """Yield the roofline of rows with products (Williams et al., CACM 2009), if there are any.

    Points are TFLOP/s over operations for each byte, the fastest case of each implementation.
    """
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for row in one.rows:
        if all(row.get(name) for name in ("flops", "bytes", "tflops")):
            intensity = row["flops"] / row["bytes"]
            at = row["implementation"], round(2 * math.log2(intensity))
            best[at] = max(best.get(at, (0, 0)), (intensity, row["tflops"]), key=lambda x: x[1])
    if not best:
        return
    memory = [rate for name in (READ, COPY) if (rate := one.ceilings.get(name))]
    on_a_t4 = binding(products_of(one.rows[0].get("dtype") or "float16"), _T4)
    roofs = {"a T4, as specified": (_T4[on_a_t4], _T4[COPY])}
    if memory:
        roofs["our code in this run"] = one.ceilings.get(one.products) or math.inf, max(memory)
    figure, axes = _figure(f"{one.name}: TFLOP/s over FLOP for each byte", one.source, 3.6)
    handles = []
    for number, name in enumerate(one.implementations):
        points = sorted(point for (who, _), point in best.items() if who == name)
        if points:
            handles += axes.plot(*zip(*points, strict=True), label=name, linewidth=0.6,
                                 marker=_MARKERS[number % 7], color=f"C{number % 6}")  # fmt: skip
    ridges = [tflops / gb * 1e3 for tflops, gb in roofs.values() if tflops < math.inf]
    places = sorted([*ridges, *(x for x, _ in best.values())])
    for (name, (tflops, gb)), style in zip(roofs.items(), ("--", "-"), strict=False):
        along = sorted({places[0] / 2, 2 * places[-1], *ridges})
        label = f"roof: {name}, {three(tflops)} TFLOP/s, {three(gb)} GB/s"
        heights = [min(tflops, gb * x / 1e3) for x in along]
        handles += axes.plot(along, heights, color="black", linestyle=style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte", ylabel="TFLOP/s")
    _legend(figure, handles)
    yield figure


PICTURES = ["latency", "tflops", "bandwidth", "memory", "speed-up", "roofline"]
"""Suffixes of the names of pictures."""


def write(
    results: Iterable[Result], folder: Path, only: Collection[str], suffixes: Sequence[str]
) -> Iterator[Path]:
    """Write every picture that the results have figures for."""
    from matplotlib import style

    more = {"svg.fonttype": "none", "svg.hashsalt": "cupyattn"}  # the same figures, the same file
    for one in measured(results):
        draws: dict[str, Callable[[], Iterator[Figure]]] = {
            name: partial(draw, chart) for name, chart in charts_of(one).items()
        }
        draws["roofline"] = partial(roofline, one)
        with style.context([_STYLE, more]):
            for name in filter(draws.__contains__, only):
                for number, figure in enumerate(draws[name](), 1):
                    page = name if number == 1 else f"{name}-{number}"
                    folder.mkdir(parents=True, exist_ok=True)
                    for suffix in suffixes:
                        path = folder / f"{one.name}-{page}.{suffix}"
                        metadata = {"Date": None} if suffix == "svg" else None
                        figure.savefig(path, dpi=200, metadata=metadata)
                        yield path


def add_parser(benchmarks: Commands) -> None:
    """Add the command to the command line."""
    parser = benchmarks.add_parser(
        "plot",
        help="draw what the benchmarks wrote with --json",
        description="Draw, for each benchmark in the files: the time of a call, TFLOP/s and GB/s, "
        "the memory, the speed-up over teaching kernels and other libraries, and the roofline of "
        "the GPU and of a T4, as SVG and as PNG. Needs matplotlib, but no GPU.",
        epilog="A file contains what a benchmark writes with --json, or a list of such objects, as "
        "all writes it. A cross is an implementation without a kernel, or without room.",
    )
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="written by a benchmark's --json"
    )
    options = (
        Option("out", Path(), "folder to write to (default: .)", Path, metavar="DIR"),
        Option("only", PICTURES, "pictures to draw (default: all)", choices=PICTURES),
        Option("format", FORMATS, "formats to write (default: both)", choices=FORMATS),
    )
    for option in options:
        option.add(parser)
    parser.set_defaults(run=run, **{each.dest: each.default for each in options})


def run(arguments: argparse.Namespace) -> int:
    """Draw the pictures, and print where they are."""
    written = None
    try:
        results = [result for file in arguments.results for result in results_of(file)]
        for written in write(results, arguments.out, arguments.only, arguments.format):
            print(written)
        if written is None:
            wanted = "" if arguments.only == PICTURES else f" for {', '.join(arguments.only)}"
            raise error(
                ValueError,
                f"no figures in {', '.join(map(str, arguments.results))}{wanted}",
                "pictures are of rows that were measured or modelled",
                "see what the benchmark that wrote them reported",
            )
    except ImportError as missing:
        print(f"plot: matplotlib draws the pictures; pip install matplotlib ({missing})",
              file=sys.stderr)  # fmt: skip
        return 1
    except (RuntimeError, ValueError, OSError) as failure:
        fail("plot", failure, as_json=False)
        return 1
    return 0
