"""``python -m cupyattn.benchmark plot``: what it draws of which results, and what it refuses."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from support.fake_gpu import HEADER, FakeTimer

from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.attention.cases import Case
from cupyattn.benchmark.attention.times import time_cases
from cupyattn.benchmark.contenders import backward_contenders, forward_contenders
from cupyattn.benchmark.plot.chart import THEMES
from cupyattn.benchmark.plot.figures import Panel, figures_of

FORWARD, CAUSAL = Panel("forward", False), Panel("forward", True)


def row(head_dim, tflops, implementation="flash", **more):
    found = {"tflops": tflops} if tflops else {"unavailable": "NotImplementedError: none"}
    return {
        "head_dim": head_dim, "seqlen": 64, "dtype": "float16", "causal": False, "option": "plain",
        "implementation": implementation, **found, **more,
    }  # fmt: skip


def result(*rows, **more):
    return {"command": "attention", **HEADER, "rows": list(rows), **more}


BESIDE_A_PEER = [
    result(
        row(64, 201.4), row(64, 180.6, option="causal"), row(128, 222.2),
        row(64, 50.5, "peer"), row(128, None, "peer"),
    ),
    result(
        row(64, 33.3, deterministic=False), row(64, 31.1, deterministic=True),
        command="attention_backward", date="2026-11-22",
    ),
]  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(BESIDE_A_PEER))
    return path


def test_every_figure_is_in_its_panel():
    figures = figures_of(BESIDE_A_PEER)
    assert figures.panels == {
        FORWARD: {"cupyattn flash": {64: 201.4, 128: 222.2}, "peer": {64: 50.5, 128: None}},
        CAUSAL: {"cupyattn flash": {64: 180.6}},
        Panel("backward", False): {
            "cupyattn flash": {64: 33.3}, "cupyattn flash deterministic": {64: 31.1},
        },
    }  # fmt: skip
    assert figures.head_dims == (64, 128)
    assert figures.contenders == ("cupyattn flash", "peer", "cupyattn flash deterministic")
    assert figures.caption == (
        "A GPU running compute_75 code; float16, sequences of 64 tokens; 2026-11-20 to 2026-11-22"
    )


def test_what_the_benchmarks_write_is_understood():
    cases = [
        Case(1, 2, length, 16, 16, "float16", causal=causal, window=3)
        for causal in (False, True)
        for length in (8, 24)
    ]
    forward, backward = (
        [
            line
            for case in cases
            for line in time_cases(
                [case], contenders, ["causal", "window"], np, FakeTimer(*[0.001] * 9)
            )
        ]
        for contenders in (
            forward_contenders(["flash"])[:1],
            backward_contenders(["flash"], [False]),
        )
    )
    plain = [line for line in forward if not line["causal"]]
    figures = figures_of([result(*plain), result(*backward[-2:], command="attention_backward")])
    assert list(figures.panels) == [FORWARD, CAUSAL, Panel("backward", True)]
    longest = {line["option"]: line["tflops"] for line in plain if line["seqlen"] == 24}
    assert figures.panels[FORWARD] == {"cupyattn flash": {16: longest["plain"]}}
    assert figures.panels[CAUSAL] == {"cupyattn flash": {16: longest["causal"]}}
    assert figures.seqlen == 24


def texts(path):
    return [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_files(file, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    folder = tmp_path / "new" / "pictures"
    assert main(["plot", str(file), "--out", str(folder), "--name", "some"]) == 0
    names = [f"some-{theme}.{suffix}" for theme in ("light", "dark") for suffix in ("svg", "png")]
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]
    for name in names:
        if name.endswith("png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")
    for theme in ("light", "dark"):
        shown = texts(folder / f"some-{theme}.svg")
        caption = figures_of(BESIDE_A_PEER).caption
        for text in ("201", "181", "222", "33", "peer", "no kernel", "backward", caption):
            assert text in shown
        assert "backward, causal" not in shown, "there is none"


def test_the_same_figures_give_the_same_file(file, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    for folder in ("one", "other"):
        assert main(["plot", str(file), "--out", str(tmp_path / folder)]) == 0
    one, other = ((tmp_path / name / "speed-dark.svg").read_text() for name in ("one", "other"))
    assert one == other


def test_bars_are_as_high_as_the_figures_and_do_not_overlap():
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    from cupyattn.benchmark.plot.chart import draw

    forward, *_ = draw(figures_of(BESIDE_A_PEER), THEMES[0]).axes
    bars = sorted(forward.patches, key=lambda bar: bar.get_x())
    assert [bar.get_height() for bar in bars] == [201.4, 50.5, 222.2]
    for bar, following in pairwise(bars):
        assert bar.get_x() + bar.get_width() < following.get_x()
    (cross,) = forward.lines
    assert cross.get_ydata() == [0]
    assert cross.get_xdata()[0] > bars[-1].get_x() + bars[-1].get_width()
    assert forward.get_ylim()[1] > 222.2


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance of #rrggbb."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_colours_can_be_told_apart(theme):
    """Text from the page (WCAG's 4.5), and neighbouring bars by lightness alone."""
    assert contrast(theme.text, theme.page) > 4.5
    assert contrast(theme.bars[0], theme.page) > 3
    assert len(set(theme.bars)) == len(theme.bars)
    for one, other in pairwise(theme.bars):
        assert contrast(one, other) > 1.2


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], r"no plain or causal call among the results; .*--json FILE"),
        ([result(row(64, 1.0, option="softcap"))], r"no plain or causal call"),
        (
            [result(row(64, 1.0)), result(row(80, 1.0), device="Another GPU")],
            r"figures of 2 devices: A GPU, Another GPU; .*; draw a chart for each device",
        ),
        ([result(row(64, 1.0), row(80, 1.0, dtype="float32"))], r"2 dtypes: float16, float32"),
        ([result(row(64, 1.0)), result(row(64, 2.0))], r"two figures of cupyattn flash at head di"),
    ],
)
def test_results_that_make_no_chart(results, message):
    with pytest.raises(ValueError, match=message):
        figures_of(results)


def test_more_contenders_than_colours(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    path = tmp_path / "many.json"
    path.write_text(json.dumps(result(*(row(64, 1.0, f"peer {n}") for n in range(8)))))
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 1
    assert "8 contenders: peer 0, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("TFLOP/s: many", "is no JSON file"),
        ('{"command": "turing"}', "holds something else"),
        ("[1]", "holds something else"),
    ],
)
def test_files_that_are_no_results(tmp_path, capsys, content, message):
    path = tmp_path / "some.json"
    path.write_text(content)
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and f"{path} {message}" in said.err
    assert not list(tmp_path.glob("*.svg"))


def test_a_missing_file(tmp_path, capsys):
    assert main(["plot", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_without_matplotlib(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(file), "--out", str(tmp_path / "pictures")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()
