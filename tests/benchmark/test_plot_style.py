"""The pictures' style: nothing is clipped or overlaps, and colours can be told apart."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from support.drawn import pages, shown
from support.made_up_results import FEW, attention, layers

from cupyattn.benchmark import block_mask, varlen
from cupyattn.benchmark.frame.peers import PEERS
from cupyattn.benchmark.plot.command import _PICTURES
from cupyattn.benchmark.plot.inks import COLOURS, inks
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


# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", 2009: severity 1, on linear RGB.
SEEN = {
    "by most": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "with deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                          (-0.011820, 0.042940, 0.968881)),
    "with protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                        (-0.003882, -0.048116, 1.051998)),
}  # fmt: skip
TO_XYZ = np.array([(0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750),
                   (0.0193339, 0.1191920, 0.9503041)])  # fmt: skip


def linear_rgb(colour):
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(colour, seen):
    """CIE's L*a*b* of what is seen, whose distance is CIE76's dE."""
    xyz = TO_XYZ @ np.clip(np.array(seen) @ linear_rgb(colour), 0, 1) / TO_XYZ.sum(1)
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    light, dark = sorted((TO_XYZ[1] @ linear_rgb(each) for each in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_distance_of_colours():
    """What two greys and the former dark colours are apart."""
    assert lab("#ffffff", SEEN["by most"]) == pytest.approx([100, 0, 0], abs=0.01)
    pair = [lab(colour, SEEN["with deuteranopia"]) for colour in ("#cc79a7", "#8b949e")]
    assert np.linalg.norm(pair[0] - pair[1]) == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_colours_can_be_told_apart(theme, seen):
    """Each from the page, text by WCAG's 4.5 and marks by its 3; any two; neighbours in print."""
    colours = COLOURS[theme.name]
    assert contrast(theme.text, theme.page) > 4.5
    for colour in colours:
        assert contrast(colour, theme.page) >= 3
    for one, other in combinations(colours, 2):
        assert np.linalg.norm(lab(one, seen) - lab(other, seen)) > 10, (one, other)
    for one, other in pairwise(colours):
        assert contrast(one, other) > 1.2


def test_contenders_look_different():
    looks = inks([str(number) for number in range(15)], THEMES[0])
    assert len(set(looks.values())) == 15
    with pytest.raises(ValueError, match=r"16 contenders: 0, .*; a picture has looks for 15"):
        inks([str(number) for number in range(16)], THEMES[0])


def test_a_contender_looks_the_same_in_every_picture():
    """By its name, whoever else is there; and no two of a benchmark look alike."""
    alone = {name: inks([name], THEMES[0])[name] for name in PEERS.values()}
    assert len(set(alone.values())) == len(PEERS)
    assert inks(list(reversed(PEERS.values())), THEMES[0]) == alone
    assert inks(["who", "torch eager"], THEMES[0])["torch eager"] == alone["torch eager"]
    assert inks(["who", "torch eager"], THEMES[0])["who"] != alone["torch eager"]
    for own in (["cupyattn", "read w"], ["cupyattn flash", "cupyattn flash deterministic",
                                         "cupyattn tiled", "cupyattn naive"]):  # fmt: skip
        looks = inks([*own, *PEERS.values()], THEMES[0])
        assert len(set(looks.values())) == len(looks)
        assert looks[own[0]] == inks(["cupyattn"], THEMES[0])["cupyattn"]


@pytest.mark.parametrize(
    "ways", [varlen.WAYS, block_mask.WAYS, ("dense", "paged", "packed"), ("one GPU", "ring")]
)
def test_ways_of_the_library_look_different(ways):
    looks = inks([f"cupyattn {way}" for way in ways], THEMES[0])
    assert len(set(looks.values())) == len(ways)
    assert {ink.colour for ink in looks.values()} <= {
        COLOURS["light"][0], COLOURS["light"][-1]
    }, "by name, all of them"  # fmt: skip
