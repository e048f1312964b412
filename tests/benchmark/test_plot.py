"""``python -m cupyattn.benchmark plot``: what it draws of which results."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.drawn import one, pages, shown
from support.made_up_results import CEILINGS, FEW, SPEED, attention, layers, result, times

from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.frame.results import results_of
from cupyattn.benchmark.plot import (
    head_dims,
    labels,
    latency,
    memory,
    percentiles,
    roofline,
    scaling,
    speed_up,
    throughput,
)
from cupyattn.benchmark.plot.chart import LOGARITHMIC, chart_of, seconds, tick
from cupyattn.benchmark.plot.command import _PICTURES
from cupyattn.benchmark.plot.head_dims import Panel, figures_of
from cupyattn.benchmark.plot.results import by_dtype, measured

LENGTHS = (128, 512, 1024, 4096)


def test_what_is_drawn_of_which_results():
    def names(of):
        return {name for module in _PICTURES for name, drawn in pages(module, of).items() if drawn}

    everything = {
        "latency", "tflops", "speed-up", "speed-up-peers", "memory", "roofline", "percentiles",
    }  # fmt: skip
    assert names(attention(head_dims=(64,))) == everything
    assert names(attention(LENGTHS[:3], (64,))) == everything | {"scaling"}
    of_layers = {"latency", "bandwidth", "speed-up-peers", "scaling", "percentiles"}
    assert names(layers()) == of_layers, "no naive kernel, no products, no memory"
    modelled = [{"M": 8, "contender": "cupyattn", "tflops": 50.0, "flops": 1e9, "bytes": 1e6}]
    assert names(result("linear", modelled)) == {"tflops", "roofline"}, "no times"


def test_rows_are_read():
    found = one(
        result(
            "attention_backward",
            [
                {"M": 8, "dtype": "float16", "contender": "torch eager", "unavailable": "none"},
                {"M": 8, "dtype": "float16", "contender": "cupyattn naive", "tflops": 1.0},
                {"M": 8, "dtype": "float16", "contender": "cupyattn flash", "times": times(0.5),
                 "also": {"tokens_per_s": 3.0}},
            ],
        )
    )  # fmt: skip
    assert found.contenders == ("cupyattn flash", "cupyattn naive", "torch eager")
    assert all(row.case == {"M": 8, "dtype": "float16"} for row in found.rows)
    assert [row.time("p99") for row in found.rows] == [None, None, 0.6]
    assert found.source == "A GPU running compute_75 code, 2026-11-20"


def test_what_the_benchmarks_write_is_understood(a_gpu, tmp_path):
    sizes = ("--seqlen", "8", "24", "--head-dim", "16", "--width", "32", "--batch", "1")
    kinds = ("--dtype", "float16", "--implementation", "flash", "--options", "causal")
    results = []
    for command, more in (("attention", ()), ("attention_backward", ("--deterministic", "never"))):
        path = tmp_path / f"{command}.json"
        assert main([command, *sizes, *kinds, *more, "--json", str(path)]) == 0
        results += results_of(path)
    figures = figures_of(measured(results))
    assert list(figures.panels) == list(head_dims.PANELS)
    longest = {row["option"]: row["tflops"] for row in results[0]["rows"] if row["seqlen"] == 24}
    assert figures.panels[Panel("forward", False)] == {"cupyattn flash": {16: longest["plain"]}}
    assert figures.panels[Panel("forward", True)] == {"cupyattn flash": {16: longest["causal"]}}


def test_results_of_one_command_are_one_picture():
    peers = attention(contenders=("torch eager",), date="2026-11-22", ceilings=None)
    (found,) = measured([attention(contenders=FEW[:1]), peers])
    assert found.contenders == FEW
    assert found.source.endswith("2026-11-20 to 2026-11-22")
    assert found.ceilings == CEILINGS


def test_modelled_results_are_said_to_be():
    (found,) = measured([attention(modelled=True, machine="T4", device=None)])
    assert found.source.startswith("modelled: T4")
    undated = attention(modelled=True, machine="T4", date=None, code=None)
    assert one(undated).source == "modelled: T4"


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([attention(), attention(device="Another")], "of attention on 2 devices: A GPU, Another;"),
        ([attention(), attention()], "two figures of cupyattn naive for attention: {'batch': 4"),
    ],
)
def test_results_that_do_not_go_together(results, message):
    with pytest.raises(ValueError, match=message):
        measured(results)


def test_dtypes_are_pictures_of_their_own():
    both = by_dtype(one(attention(dtypes=("float16", "float32"))))
    assert list(both) == ["attention-float16", "attention-float32"]
    assert {row.case["dtype"] for row in both["attention-float32"].rows} == {"float32"}
    assert list(by_dtype(one(attention(command="attention_backward")))) == ["attention-backward"]


def test_the_labels_of_cases():
    cases = [row.case for row in one(attention(LENGTHS)).rows]
    assert labels.length_of(cases) == "seqlen"
    assert labels.distinguishing(cases, beside="seqlen") == ("head_dim", "option")
    assert labels.shared(cases) == "batch 4, float16"
    older = {"model": "gpt2"}  # than a label that others have none of
    assert labels.shared([older, {**older, "quantize": None}]) == "gpt2"
    once = list({row.key: row.case for row in one(attention(LENGTHS)).rows}.values())
    panels = labels.panels(once, "seqlen")
    assert len(panels) == 6 and [case["seqlen"] for case in panels[0]] == list(LENGTHS)
    tokens_alike = [{"batch": 4096 // n, "seqlen": n, "dtype": "float16"} for n in LENGTHS]
    assert labels.distinguishing(tokens_alike, beside="seqlen") == ()
    assert len(labels.panels(tokens_alike, "seqlen")) == 1, "the batch follows"


def test_a_chart_has_the_values_and_the_gaps():
    found = one(attention(head_dims=(80,)))
    chart = chart_of(found, "", lambda row: row.time("p50"), seconds, scale=LOGARITHMIC)
    plain, _ = chart.cases
    assert chart.of(plain, "cupyattn flash") == found.rows[2].time("p50")
    assert chart.failed(plain, "torch cudnn") and chart.of(plain, "torch cudnn") is None
    assert not chart.failed(plain, "torch eager")
    assert not chart.failed(plain, "who was not asked")
    few = replace(found, rows=tuple(row for row in found.rows if row.contender in FEW))
    assert not chart_of(few, "", lambda row: 1.0, str, scale=LOGARITHMIC).any_failed
    assert chart_of(few, "", lambda row: None, str, scale=LOGARITHMIC) is None


def test_who_was_not_asked_is_no_cross():
    """Nor a row without a figure, or of a call that the clock was too coarse for."""
    found = attention(head_dims=(64,), contenders=(*FEW, "torch math"))
    for row in found["rows"]:
        row |= {"left_out": True} if "unavailable" in row else {}
    chart = chart_of(one(found), "", lambda row: row.time("p50"), seconds, scale=LOGARITHMIC)
    assert chart.contenders == FEW and not chart.any_failed
    by_head_dim = figures_of(measured([found]))
    assert by_head_dim.contenders == FEW
    assert all(
        None not in bars.values() for of in by_head_dim.panels.values() for bars in of.values()
    )
    found["rows"][0]["times"]["p50_s"] = 0.0
    assert one(found).rows[0].time("p50") is None


def test_cases_stand_by_head_dim():
    found = one(attention(head_dims=(128, 40, 64), contenders=FEW))
    chart = chart_of(found, "", lambda row: row.time("p50"), seconds, scale=LOGARITHMIC)
    assert [(case["head_dim"], case["option"]) for case in chart.cases] == [
        (dim, option) for dim in (40, 64, 128) for option in ("plain", "causal")
    ]  # fmt: skip


def test_speed_ups():
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    found = pages(speed_up, attention(head_dims=(128,), contenders=("cupyattn naive", *FEW)))
    (naive,), (peers,) = found["speed-up"], found["speed-up-peers"]
    flops = 4 * 4 * 16 * 4096**2 * 128
    naive_s, flash_s, eager_s = (
        flops / SPEED[name] / 1e12 + 5e-6 for name in ("cupyattn naive", *FEW)
    )
    assert {f"{naive_s / flash_s:.3g}", f"{naive_s / eager_s:.3g}"} <= {t for t, _ in shown(naive)}
    assert f"{eager_s / flash_s:.3g}" in {text for text, _ in shown(peers)}


def test_a_peer_is_held_against_what_does_its_work():
    """As a block mask's, not the plain call beside it, which does more."""
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    of = attention(head_dims=(128,), contenders=("torch eager",))
    for row in list(of["rows"]):
        for name, share in (("cupyattn plain", 8), ("cupyattn block_mask", 1)):
            times = {each: 2 * share * taken for each, taken in row["times"].items()}
            flops = share * row["flops"]
            of["rows"].append({**row, "contender": name, "times": times, "flops": flops})
    (page,) = pages(speed_up, of)["speed-up-peers"]
    texts = [text for text, _ in shown(page)]
    assert any("how many times as fast cupyattn block_mask is" in text for text in texts)
    assert "0.5" in texts


def test_scaling_is_over_the_shortest():
    """Of each contender; without what has one length alone."""
    of = attention(LENGTHS, (64,), contenders=FEW)
    of["rows"].append({**attention((999,), (80,), contenders=FEW)["rows"][0]})
    ((page,),) = pages(scaling, of).values()
    assert len(page.figure.axes) == 2, "plain and causal"
    eager, flash, as_length, as_square = page.figure.axes[0].lines
    for line, name in ((eager, "torch eager"), (flash, "cupyattn flash")):
        rows = [row for row in one(of).rows if row.contender == name]
        plain = [row for row in rows if row.case["option"] == "plain"][: len(LENGTHS)]
        seconds_of = [row.time("p50") for row in plain]
        assert list(line.get_ydata()) == [taken / seconds_of[0] for taken in seconds_of]
    assert list(as_length.get_ydata()) == [1, 4, 8, 32]
    assert list(as_square.get_ydata()) == [1, 16, 64, 1024]


def test_two_lengths_are_no_curve():
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    two = attention(LENGTHS[:2], (64,), contenders=FEW)
    assert not pages(scaling, two).get("scaling")
    two["rows"] += [
        row for row in attention(LENGTHS[:3], (128,), contenders=FEW)["rows"]
        if row["option"] == "plain"
    ]  # fmt: skip
    ((page,),) = pages(scaling, two).values()
    assert len(page.figure.axes) == 1, "the case with three"


def test_a_page_has_the_axis_of_its_own_values():
    """One operation that takes long leaves the others theirs."""
    of = layers()
    norms = [row for row in of["rows"] if row["operation"] == "rms_norm"]
    of["rows"] += [{**row, "operation": f"operation {n}"} for n in range(12) for row in norms]
    for row in of["rows"]:
        if row["operation"] in ("operation 11", "cross_entropy"):
            row["times"] = times(1000 * row["times"]["p50_s"])
    first, *_, last = pages(latency, of)["latency"]
    assert len(first.figure.axes) == 8
    assert first.figure.axes[0].get_ylim() == first.figure.axes[-1].get_ylim()
    assert first.figure.axes[0].get_ylim()[1] < 1e-3 < last.figure.axes[0].get_ylim()[1]


def test_lines_below_others_are_named():
    """Gaps of a line that is below another's say nothing else."""
    said = {text for text, _ in shown(pages(memory, attention(LENGTHS, (64,)))["memory"][0])}
    assert {"torch flash: as cupyattn flash", "torch math: as cupyattn naive"} <= said
    assert {"cupyattn flash", "cupyattn naive"} <= said
    apart = {text for text, _ in shown(pages(latency, attention(LENGTHS, (64,)))["latency"][0])}
    assert "torch cudnn" in apart, "which is 1.6 times as fast"


def test_what_computes_little_has_no_tflops():
    """A thin product's are few whatever its kernel does: its picture is that of GB/s."""
    figures = {"times": times(1e-3), "tflops": 1.0, "gb_per_s": 1.0, "flops": 1e9}
    rows = [{"kind": kind, "contender": "cupyattn", **figures, "bytes": least}
            for kind, least in (("large", 1e6), ("thin", 1e9))]  # fmt: skip
    found = pages(throughput, result("linear", rows))
    assert all(len(drawn) == 1 for drawn in found.values())
    assert "large" not in {text for text, _ in shown(found["tflops"][0])}, "the one case"
    assert not pages(throughput, result("linear", rows[1:]))["tflops"]


def test_short_sequences_stand_in_the_line_of_the_long_ones():
    """Causal calls of 128 tokens compute little for each byte of float32."""
    found = pages(throughput, attention((128, 4096), (64,), dtypes=("float32",), contenders=FEW))
    assert len(found["tflops"]) == 1 and not found["bandwidth"]
    assert all(len(line.get_xdata()) == 2 for axes in found["tflops"][0].figure.axes
               for line in axes.lines)  # fmt: skip


def test_percentiles_are_of_single_calls():
    """Not of means of several, as those of short calls are."""
    of = attention(head_dims=(64,), contenders=FEW)
    for row in of["rows"]:
        row["times"]["calls_per_sample"] = 50 if row["option"] == "causal" else 1
    (page,) = pages(percentiles, of)["percentiles"]
    said = " ".join(text for text, _ in shown(page))
    assert "causal" not in said
    assert "without short calls, of which a sample is a mean of several" in said
    for row in of["rows"]:
        row["times"]["calls_per_sample"] = 50
    assert not pages(percentiles, of)["percentiles"]


def test_ticks_have_no_zeros_that_say_nothing():
    chart = chart_of(one(layers()), "", lambda row: row.time("p50"), seconds, scale=LOGARITHMIC)
    written = [tick(chart, value) for value in (7.5e-3, 1e-5, 2.0, 3e-4)]
    assert written == ["7.5 ms", "10 us", "2 s", "300 us"]


def test_the_roofs():
    measured_roof, t4 = roofline.roofs_of(one(attention()))
    assert (measured_roof.tflops, measured_roof.gb_per_s) == (600, 4500)
    assert (t4.tflops, t4.gb_per_s) == (65, 320)
    assert t4.ridge == 65 / 320 * 1e3
    in_float32, t4 = roofline.roofs_of(one(attention(dtypes=("float32",))))
    assert in_float32.tflops == 60 and t4.tflops < 10, "no tensor cores"
    older = {"read_gb_per_s": 4500.0, "mma_tflops": 600.0}
    memory_alone, _ = roofline.roofs_of(one(attention(dtypes=("float32",), ceilings=older)))
    assert memory_alone.tflops is None and memory_alone.at(1e6) == 4500 * 1e3
    (t4,) = roofline.roofs_of(one(attention(ceilings={})))
    assert t4.tflops == 65


def test_the_points_under_them():
    found = pages(roofline, attention(LENGTHS, (64, 128), contenders=FEW))
    ((page,),) = found.values()
    (axes,) = page.figure.axes
    _, flash, _, _ = axes.lines  # above the other contender, and below two roofs
    intensity, tflops = flash.get_xdata(), flash.get_ydata()
    assert list(intensity) == sorted({length / 2 for length in LENGTHS} | {n / 4 for n in LENGTHS})
    assert max(tflops) == pytest.approx(SPEED["cupyattn flash"], rel=0.03)
