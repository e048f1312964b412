"""The pictures' style: nothing is clipped or overlaps, and colours can be told apart."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from support.drawn import pages, shown
from support.made_up_results import FEW, attention, layers

from cupyattn.benchmark.plot import style
from cupyattn.benchmark.plot.command import _PICTURES
from cupyattn.benchmark.plot.style import THEMES

LENGTHS = (128, 512, 1024, 4096)

SHEETS = {
    "many contenders at one length": attention(head_dims=(64, 80)),
    "one contender, one case": attention(head_dims=(64,), contenders=FEW[:1]),
    "many lengths": attention(LENGTHS),
    "layers": layers(),
}


@pytest.mark.parametrize(
    "name",
    [*list(SHEETS)[:2], *(pytest.param(name, marks=pytest.mark.deep) for name in list(SHEETS)[2:])],
)
@pytest.mark.parametrize("picture", _PICTURES, ids=lambda module: module.__name__.split(".")[-1])
def test_texts_are_on_the_page_and_do_not_overlap(name, picture):
    """In the last page of each picture, which has the head of all."""
    for drawn in pages(picture, SHEETS[name]).values():
        for page in drawn[-1:]:
            texts = shown(page)
            width, height = page.figure.get_size_inches() * page.figure.dpi
            for text, box in texts:
                assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text
            for (text, box), (other, beside) in combinations(texts, 2):
                apart = (
                    box.x1 <= beside.x0 + 1 or beside.x1 <= box.x0 + 1
                    or box.y1 <= beside.y0 + 2 or beside.y1 <= box.y0 + 2
                )  # fmt: skip
                assert apart, (text, other)


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
    assert len(set(theme.colours)) == len(theme.colours)
    for colour in theme.colours:
        assert contrast(colour, theme.page) > 2
    for one, other in pairwise(theme.colours):
        assert contrast(one, other) > 1.2


def test_contenders_look_different():
    looks = style.inks([str(number) for number in range(14)], THEMES[0])
    assert len(set(looks.values())) == 14
    with pytest.raises(ValueError, match=r"15 contenders: 0, .*; a picture has looks for 14"):
        style.inks([str(number) for number in range(15)], THEMES[0])
