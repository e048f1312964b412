"""README's tables of figures: attention, layers, and what is told in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupyattn.benchmark.frame.peers import PEERS
from cupyattn.benchmark.plot.head_dims import Figures as Chart
from cupyattn.benchmark.plot.head_dims import Panel, figures_of
from cupyattn.benchmark.plot.results import Result, measured, on_what, rows_of, source_of
from cupyattn.benchmark.readme.figures import BESIDE, RATES, SENTENCES, TABLES, Figures
from cupyattn.benchmark.readme.marks import between, table
from cupyattn.errors import error
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.attention.tensor_core import backward_dkdv, forward_rows
from cupyattn.kernels.configs.tables import rows_for

WRITTEN_BY = "python -m cupyattn.benchmark readme"


def with_tables(text: str, figures: Figures) -> str:
    """Return README's text with every table of figures as it is now."""
    attention, layers = (figures[name] for name in TABLES)
    contents = {
        "speed": attention_table(chart_of(attention)) + sources(attention, "head_dim"),
        "layers": layers_table(layers) + sources(layers, "operation"),
        "others": sentences_table(figures[SENTENCES]),
    }
    for name, content in contents.items():
        text = between(text, name, WRITTEN_BY, content)
    return text


def chart_of(results: Sequence[Result]) -> Chart:
    """Return what README's picture and its table of attention show."""
    chart = figures_of(measured(results))
    if chart is None:
        raise error(ValueError, "no figures of attention", "README shows them", "measure some")
    return chart


def attention_table(chart: Chart) -> str:
    """Return TFLOP/s, plain / causal, of each contender, and the model's T4."""
    columns = [
        (direction, contender)
        for direction in ("forward", "backward")
        for contender in chart.contenders
    ]
    rows = [
        (
            str(head_dim),
            *(_speed(chart, direction, contender, head_dim) for direction, contender in columns),
            " / ".join(_utilisation(head_dim)),
        )
        for head_dim in chart.head_dims
    ]
    heads = [f"{direction}: {contender}" for direction, contender in columns]
    return table(("head dim", *heads, "T4, modelled: forward / backward"), rows)


def _speed(chart: Chart, direction: str, contender: str, head_dim: int) -> str:
    """Return what was measured, "none" where there is no kernel, and nothing for the rest."""
    bars = [
        chart.panels.get(Panel(direction, causal), {}).get(contender, {})
        for causal in (False, True)
    ]
    if not all(head_dim in of for of in bars):
        return ""
    figures = [of[head_dim] for of in bars]
    if all(figure is None for figure in figures):
        return "none"
    return " / ".join("none" if figure is None else f"{figure:.0f}" for figure in figures)


def _utilisation(head_dim: int) -> tuple[str, str]:
    """Return the tensor cores' utilisation in the forward's and the one-pass backward's loop.

    The forward is that of long sequences, which may have tall tiles.
    """
    arch = TURING.number
    tall = rows_for(forward_rows.FLASH_TALL, arch).get(head_dim)
    forward = tall or forward_rows.flash_row(arch, head_dim, head_dim)
    backward = backward_dkdv.dkdv_row(arch, head_dim, head_dim, one_pass=True)
    return f"{forward.gates.models:.2f}", f"{backward.gates.models:.2f}"


def layers_table(results: Sequence[Result]) -> str:
    """Return microseconds by operation, direction and width, in brackets the peers' over ours.

    What has rows of its own size stands in the last column.
    """
    times = {
        (row.case["operation"], row.case["direction"], row.case["width"], row.contender): found
        for result in results
        for row in rows_of(result)
        if (found := row.time("p50")) is not None
    }
    sizes = {
        row.case["operation"]: row.case["rows"] for result in results for row in rows_of(result)
    }
    usual = max(sizes.values(), key=list(sizes.values()).count)
    widths = sorted({width for operation, _, width, _ in times if sizes[operation] == usual})
    lines = []
    for operation in _in_order(times):
        own = sorted({width for name, _, width, _ in times if name == operation})
        shaped = sizes[operation] != usual
        columns = [None] * (len(widths) - 1) + [own[0]] if shaped else widths
        name = f"{operation}, {sizes[operation]:,} rows of {own[0]:,}" if shaped else operation
        cells = [
            "" if width is None else _time(times, operation, direction, width)
            for direction in ("forward", "backward")
            for width in columns
        ]
        lines.append((name, *cells))
    heads = [
        f"{direction}, {width:,}" if width == widths[0] else f"{width:,}"
        for direction in ("forward", "backward")
        for width in widths
    ]
    return table(("operation", *heads), lines)


def _time(
    times: Mapping[tuple[str, str, int, str], float], operation: str, direction: str, width: int
) -> str:
    ours, *theirs = (
        times.get((operation, direction, width, name)) for name in ("cupyattn", *BESIDE["layers"])
    )
    if ours is None:
        return ""
    shares = ["-" if their is None else f"{their / ours:.2f}" for their in theirs]
    while shares and shares[-1] == "-":
        shares.pop()
    return f"{ours * 1e6:.1f}" + (f" ({', '.join(shares)})" if shares else "")


def _in_order(times: Mapping[tuple[str, str, int, str], float]) -> list[str]:
    """Return the operations in the order of their benchmark."""
    from cupyattn.benchmark.layers.operations import OPERATIONS

    there = {operation for operation, *_ in times}
    return [operation.name for operation in OPERATIONS if operation.name in there]


def sentences_table(sentences: Sequence[Mapping[str, Any]]) -> str:
    """Return what was measured beside the tables, with its date, and its code where it differs."""
    device, code = usual = sentences[0]["device"], sentences[0]["code"]
    return table(
        ("what", "arguments of `python -m cupyattn.benchmark`", "figures", on_what(device, code)),
        [
            (
                sentence["what"],
                sentence["arguments"],
                sentence["figures"].format(*map(_rate, sentence.get("rows", ()))),
                sentence["date"]
                if (sentence["device"], sentence["code"]) == usual
                else source_of(sentence["device"], sentence["code"], [sentence["date"]]),
            )
            for sentence in sentences
        ],
    )


def _rate(row: Mapping[str, Any]) -> float:
    return next(float(row[name]) for name in RATES if name in row)


def sources(results: Sequence[Result], label: str) -> str:
    """Return a table of the runs: whose figures, measured on what, when, and how.

    Where a contender has figures of several runs, the smaller say of which values of a label.
    """
    runs: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        runs.setdefault(_run(result), []).append(result)
    values = {run: _values(those, label) for run, those in runs.items()}
    lines = []
    for run, those in runs.items():
        on, date, note = run
        how = "; ".join(filter(None, (_commands(those), note)))
        lines.append((_whose(run, values), on, date, how))
    return "\n" + table(("figures of", "measured on", "date", "by"), lines)


def _values(results: Sequence[Result], label: str) -> dict[str, list[tuple[str, Any]]]:
    """Return of which benchmarks, and for which values of a label, each contender has figures."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            have = found.setdefault(row["contender"], [])
            value = result["command"], row[label]
            have += [] if value in have else [value]
    return found


def _whose(
    run: tuple[str, ...], values: Mapping[tuple[str, ...], Mapping[str, Sequence[tuple[str, Any]]]]
) -> str:
    names = []
    for contender, own in values[run].items():
        others = [of[contender] for name, of in values.items() if name != run and contender in of]
        smaller = any(len(own) <= len(other) and _meet(own, other) for other in others)
        of = ", ".join(dict.fromkeys(str(value) for _, value in own))
        names.append(f"{contender} ({of})" if smaller else contender)
    return ", ".join(names)


def _meet(own: Sequence[tuple[str, Any]], other: Sequence[tuple[str, Any]]) -> bool:
    """Whether two runs are of the same benchmark."""
    return not {command for command, _ in own}.isdisjoint(command for command, _ in other)


def _commands(results: Sequence[Result]) -> str:
    """Write the commands of a run; of those that differ in the benchmark's name, the name."""
    first = results[0]
    said: list[str] = []
    for result in results:
        invocation = result.get("invocation")
        if invocation is None:
            continue
        same = invocation == first["invocation"].replace(first["command"], result["command"], 1)
        named = f"the same with `{result['command']}`"
        said.append(named if said and result is not first and same else f"`{invocation}`")
    return ", ".join(dict.fromkeys(said))


def _run(result: Result) -> tuple[str, str, str]:
    """Return what tells runs from each other: where, when, and what is said of them."""
    versions = {"cuda_driver": "driver", "cupy": "CuPy", "torch": "PyTorch"}
    parts = [f"{name} {result[key]}" for key, name in versions.items() if result.get(key)]
    compiled = any(row["contender"] == PEERS["compile"] for row in result["rows"])
    if compiled and result.get("torch_compile"):
        parts.append(f"torch.compile in mode {result['torch_compile']}")
    copied = (result.get("ceilings") or {}).get("copy_gb_per_s")
    if copied and result["command"] == "layers":
        parts.append(f"a copy at {copied:,.0f} GB/s")
    on = ", ".join([on_what(result["device"], result["code"]), *parts])
    return on, result["date"], result.get("note", "")
