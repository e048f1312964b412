"""``python -m cupyattn.benchmark plot``: the picture of attention by head dim."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.drawn import shown
from support.made_up_results import FEW, SPEED, attention, layers, result

from cupyattn.benchmark.plot import head_dims
from cupyattn.benchmark.plot.head_dims import Panel, figures_of
from cupyattn.benchmark.plot.results import measured
from cupyattn.benchmark.plot.style import THEMES

LENGTHS = (128, 512, 1024, 4096)


def test_attention_of_another_form_has_no_bars():
    old = {"seqlen": 4096, "dtype": "float16", "contender": "cupyattn flash", "tflops": 1.0}
    assert figures_of(measured([result("attention", [old, {**old, "head_dim": "64"}])])) is None


def test_bars_are_as_high_as_the_figures_and_do_not_overlap():
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    figures = figures_of(measured([attention(contenders=("torch cudnn", *FEW))]))
    (page,) = head_dims.draw(figures, THEMES[0])
    forward, _ = page.figure.axes
    bars = sorted(forward.patches, key=lambda bar: bar.get_x())
    plain = figures.panels[Panel("forward", False)]
    expected = [
        plain[name][dim] for dim in (64, 80, 128) for name in figures.contenders
        if plain[name][dim] is not None
    ]  # fmt: skip
    assert [bar.get_height() for bar in bars] == expected and len(expected) == 8
    for bar, following in pairwise(bars):
        assert bar.get_x() + bar.get_width() < following.get_x()
    (cross,) = forward.lines
    assert cross.get_ydata() == [0], "head dim 80 of torch cudnn"
    assert forward.get_ylim()[1] > max(expected)
    width, _ = page.figure.get_size_inches() * page.figure.dpi
    assert all(box.x0 >= 0 and box.x1 <= width for _, box in shown(page))


def test_many_contenders_by_head_dim_are_the_fastest_and_legible():
    """Of twelve six, whose bars are a few pixels of a README wide, under the same x everywhere."""
    dims = (40, 64, 80, 96, 128, 160, 192, 256)
    every = [attention(head_dims=dims), attention(head_dims=dims, command="attention_backward")]
    every[1]["rows"] = [row for row in every[1]["rows"] if row["head_dim"] < 160]
    figures = figures_of(measured(every))
    assert len(figures.contenders) == len(SPEED) == 12
    (page,) = head_dims.draw(figures, THEMES[0])
    said = " ".join(text for text, _ in shown(page))
    assert "the fastest 6 of 12" in said
    for name in ("cupyattn flash", "torch cudnn", "torch flash", "torch efficient", "triton"):
        assert name in said
    for name in ("cupyattn naive", "cupyattn tiled", "torch math"):
        assert name not in said
    axes = page.figure.axes
    assert len({each.get_xlim() for each in axes}) == 1 and len(axes) == 4
    for each in axes:
        low, high = each.get_xlim()
        for bar in each.patches:
            assert low < bar.get_x() and bar.get_x() + bar.get_width() < high
            assert bar.get_width() / (high - low) * each.get_position().width * 826 >= 8


def test_the_picture_by_head_dim():
    backward = attention(contenders=FEW, command="attention_backward", date="2026-11-22")
    figures = figures_of(measured([attention(LENGTHS, contenders=FEW), backward, layers()]))
    assert list(figures.panels) == list(head_dims.PANELS)
    assert figures.head_dims == (64, 80, 128) and figures.contenders == FEW
    tflops = figures.panels[Panel("forward", True)]["cupyattn flash"][64]
    assert tflops == pytest.approx(SPEED["cupyattn flash"], rel=0.01), "of the longest"
    on = "A GPU running compute_75 code, 2026-11-20 to 2026-11-22"
    assert figures.caption == f"{on}; float16, sequences of 4,096 tokens"
    assert figures_of(measured([layers()])) is None
