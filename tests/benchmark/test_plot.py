"""``python -m cupyattn.benchmark plot``: what it draws of which results, and its files."""

from __future__ import annotations

import json
import sys
from itertools import combinations
from xml.etree import ElementTree

import pytest
from support.fake_gpu import FEW, MADE_UP_CEILINGS, SPEED, attention, layers, result

from cupyattn.benchmark import plot
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.cases import median_of
from cupyattn.benchmark.plot import chart_of, charts_of, draw, measured, roofline
from cupyattn.benchmark.results import results_of

LENGTHS = (128, 512, 1024, 4096)
WANTS_MATPLOTLIB = "needs matplotlib (pip install '.[test]')"


def one(of):
    (found,) = measured([of])
    return found


def test_a_rowless_or_modelled_result_has_the_pictures_of_its_figures():
    assert measured([result("linear", [])]) == []
    modelled = [{"M": 8, "implementation": "cupyattn", "tflops": 50.0, "ceiling": "mma_tflops"}]
    assert list(charts_of(one(result("linear", modelled)))) == ["tflops"]
    assert list(charts_of(one(attention()))) == [
        "latency", "tflops", "memory", "speed-up"
    ]  # fmt: skip
    assert list(charts_of(one(layers()))) == ["latency", "bandwidth", "speed-up"]


def test_results_of_one_command_are_one_picture():
    baselines = attention(implementations=("torch eager",), date="2026-11-22", ceilings=None)
    (found,) = measured([attention(implementations=FEW[:1]), baselines])
    assert found.implementations == [*FEW]
    assert found.source.endswith("2026-11-20, 2026-11-22")
    assert found.ceilings == MADE_UP_CEILINGS


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([attention(), attention(device="Another")], "of attention on 2 devices: A GPU, Another;"),
        ([attention(), attention()], "two figures of cupyattn naive for attention: batch 4"),
    ],
)
def test_results_that_do_not_go_together_are_refused(results, message):
    with pytest.raises(ValueError, match=message):
        measured(results)


def test_each_dtype_is_a_picture():
    both = measured([attention(dtypes=("float16", "float32"))])
    assert [each.name for each in both] == ["attention-float16", "attention-float32"]
    assert {row["dtype"] for row in both[1].rows} == {"float32"}
    assert [each.name for each in measured([attention(command="attention_backward")])] == [
        "attention-backward"
    ]


def test_a_refusal_is_a_gap_and_who_was_not_asked_is_none():
    found = attention(head_dims=(80,), implementations=("cupyattn flash", "torch cudnn"))
    chart = chart_of(one(found), "", median_of, str)
    values = list(chart.values.values())
    assert [each["torch cudnn"] for each in values] == [None, None]
    assert values[0]["cupyattn flash"] == found["rows"][0]["times"]["p50_s"]
    for row in found["rows"]:
        row |= {"left_out": True} if "unavailable" in row else {}
    assert all(
        "torch cudnn" not in of for of in chart_of(one(found), "", median_of, str).values.values()
    )
    assert chart_of(one(found), "", lambda row: None, str) is None


def test_speed_ups_are_ratios_of_medians():
    found = charts_of(one(attention(head_dims=(128,), implementations=("cupyattn naive", *FEW))))
    flops = 4 * 4 * 16 * 4096**2 * 128
    naive, flash, eager = (flops / SPEED[name] / 1e12 + 5e-6 for name in ("cupyattn naive", *FEW))
    plain, _ = found["speed-up"].values.values()
    assert plain == pytest.approx({"cupyattn naive": naive / flash, "torch eager": eager / flash})


def texts(path):
    return [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "results.json"
    of_layers = layers()
    of_layers["rows"] = [row for row in of_layers["rows"] if row["operation"] == "swiglu"]
    path.write_text(json.dumps([attention(head_dims=(64,), implementations=FEW), of_layers]))
    return path


def test_files_have_the_figures_and_are_the_same_again(file, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason=WANTS_MATPLOTLIB)
    folder = tmp_path / "new" / "pictures"
    assert main(["plot", str(file), "--out", str(folder), "--format", "svg"]) == 0
    names = {path.name for path in folder.iterdir()}
    assert {*capsys.readouterr().out.split()} == {str(folder / name) for name in names}
    assert names == {
        *(f"attention-{name}.svg" for name in (
            "latency", "tflops", "memory", "speed-up", "roofline")),
        *(f"layers-{name}.svg" for name in ("latency", "bandwidth", "speed-up")),
    }  # fmt: skip
    shown = texts(folder / "attention-tflops.svg")
    for text in ("attention: TFLOP/s (more is better)", "cupyattn flash",
                 "measured mma: 600 TFLOP/s", "289"):  # fmt: skip
        assert text in shown
    assert "measured copy: 4,000 GB/s" in texts(folder / "layers-bandwidth.svg")
    roofs = " ".join(texts(folder / "attention-roofline.svg"))
    assert "roof: a T4, as specified, 65.0 TFLOP/s, 320 GB/s" in roofs
    assert "roof: our code in this run, 600 TFLOP/s, 4,500 GB/s" in roofs
    again = tmp_path / "again"
    assert main(["plot", str(file), "--out", str(again), "--format", "svg"]) == 0
    for name in names:
        assert (again / name).read_text() == (folder / name).read_text()


def test_some_pictures_as_png(file, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason=WANTS_MATPLOTLIB)
    words = ("--only", "memory", "--format", "png")
    assert main(["plot", str(file), "--out", str(tmp_path), *words]) == 0
    assert (tmp_path / "attention-memory.png").read_bytes().startswith(b"\x89PNG")
    file.write_text(json.dumps(layers()))
    assert main(["plot", str(file), "--out", str(tmp_path), "--only", "roofline"]) == 1
    assert f"no figures in {file} for roofline" in capsys.readouterr().err


@pytest.mark.parametrize("of", [attention(), attention(LENGTHS, head_dims=(64,)), layers()],
                         ids=["bars", "lengths", "layers"])  # fmt: skip
def test_texts_are_on_the_page_and_do_not_overlap(of):
    pytest.importorskip("matplotlib", reason=WANTS_MATPLOTLIB)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    found = one(of)
    figures = [list(draw(chart))[-1] for chart in charts_of(found).values()]
    for figure in (*figures, *roofline(found)):
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        (axes,) = figure.axes
        every = [*axes.get_yticklabels(), axes.title, *figure.texts, *figure.legends[0].get_texts()]
        boxes = [text.get_window_extent(renderer) for text in every if text.get_text()]
        width, height = figure.get_size_inches() * figure.dpi
        assert all(box.x0 >= -1 and box.x1 <= width and box.y1 <= height + 1 for box in boxes)
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a JSON file"),
        ("[" * 100_000, "is not a JSON file"),
        ('{"rows": []}', "contains something else"),
        ("[1]", "contains something else: 1;"),
        ('{"command": "linear", "rows": {}}', "contains something else"),
        ('{"command": "linear", "rows": [null]}', "contains something else"),
    ],
)
def test_files_that_are_no_results(tmp_path, capsys, content, message):
    path = tmp_path / "some.json"
    path.write_text(content)
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and f"{path} " in said.err and message in said.err
    assert main(["plot", str(tmp_path / "none.json")]) == 1


def test_without_matplotlib(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(file), "--out", str(tmp_path / "pictures")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()


def test_what_the_benchmarks_write_is_understood(a_gpu, tmp_path):
    file = tmp_path / "attention.json"
    words = ("--seqlen", "8", "24", "--head-dim", "16", "--width", "32", "--batch", "1", "--dtype",
             "float16", "--implementation", "flash", "--options", "causal")  # fmt: skip
    assert main(["attention", *words, "--json", str(file)]) == 0
    found = charts_of(one(*results_of(file)))
    assert list(found) == ["latency", "tflops", "memory"]
    assert len(found["tflops"].values) == 4
    assert plot.PICTURES[:2] == ["latency", "tflops"]
