"""Pages of pictures as they are drawn, and their texts."""

from __future__ import annotations

import pytest

from cupyattn.benchmark.plot.results import measured
from cupyattn.benchmark.plot.style import THEMES


def one(of):
    (found,) = measured([of])
    return found


def pages(module, of, theme=THEMES[0]):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install '.[test]')")
    return {name: list(draw(theme)) for name, draw in module.pictures(one(of)).items()}


def shown(page):
    """Every text of a page, with its box in pixels, as it is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(page.figure).get_renderer()
    page.figure.draw(renderer)
    texts = list(page.figure.texts)
    for axes in page.figure.axes:
        texts += axes.texts
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            within = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            texts += [axis.label, *(text for place, text in within if low <= place <= high)]
    every = [text for text in texts if text.get_text()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in every]
