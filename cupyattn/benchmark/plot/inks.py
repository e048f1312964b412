"""How each contender is drawn: by its name, the same in every picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from cupyattn.benchmark.frame.peers import PEERS
from cupyattn.benchmark.plot.style import Theme
from cupyattn.errors import error

# Hues of Okabe and Ito ("Color Universal Design", 2008), lighter or darker: each has a contrast of
# 3 with its page, any two are apart for colour-blind readers too, and neighbours differ in
# lightness, for print without colours.
COLOURS = {
    "light": ("#0a4f9e", "#c07c00", "#0b7f57", "#2f95dd", "#a32a00", "#a8618f", "#4a5058"),
    "dark": ("#61c2f7", "#e08600", "#1fc28c", "#2a7de0", "#bf3d1f", "#c04f86", "#aab3bb"),
}
_MARKERS = "osD^vPX"
_FULL, _EMPTY, _PALE = range(3)
_DASHES = ("-", (0, (3, 1.6)), (0, (1, 1.5)))
_PALE_SHARE = 0.35

Look = tuple[int, int]
"""The number of a colour, and how it is filled."""
_BLUE, *_OF_PEERS, _GREY = range(len(_MARKERS))
_OURS: dict[str, Look] = {
    **dict.fromkeys(
        ("cupyattn", *(f"cupyattn {what}" for what in ("flash", "equal", "paged", "block_mask",
                                                       "ring"))), (_BLUE, _FULL),
    ),
    **dict.fromkeys(
        [f"cupyattn {what}" for what in ("flash deterministic", "ragged", "packed", "mask_mod")],
        (_BLUE, _EMPTY),
    ),
    **dict.fromkeys(
        [f"cupyattn {what}" for what in ("tiled", "dense", "plain", "one GPU")], (_GREY, _FULL)
    ),
    "cupyattn naive": (_GREY, _EMPTY),
    "read w": (_GREY, _PALE),
}  # fmt: skip
"""The library in blue, and in grey what it is held against."""
_FREE = tuple((colour, fill) for fill, colour in product(range(3), _OF_PEERS))
_LOOKS: dict[str, Look] = {**_OURS, **dict(zip(PEERS.values(), _FREE, strict=False))}


class Ink(NamedTuple):
    """How one contender is drawn: empty and dashed, or pale and dotted, where others are full."""

    colour: str
    marker: str
    fill: int

    def line(self, theme: Theme) -> dict[str, Any]:
        """Return the properties of a line with markers."""
        return {
            **self.points(theme),
            "color": self.colour,
            "linestyle": _DASHES[self.fill],
            "linewidth": 1.5,
        }

    def points(self, theme: Theme) -> dict[str, Any]:
        """Return the properties of markers alone."""
        full = self.fill == _FULL
        return {
            "marker": self.marker,
            "markersize": 5.5,
            "linestyle": "",
            "markerfacecolor": self._inner(theme),
            "markeredgecolor": theme.page if full else self.colour,
            "markeredgewidth": 0.5 if full else 1.4,
        }

    def patch(self, theme: Theme) -> dict[str, Any]:
        """Return the properties of the square that stands for a bar."""
        return {
            **self.points(theme), "marker": "s", "markersize": 8.5, "markeredgewidth": 1.2,
            "markeredgecolor": self.colour,
        }  # fmt: skip

    def bar(self, theme: Theme) -> dict[str, Any]:
        """Return the properties of a bar."""
        return {
            "facecolor": self._inner(theme), "edgecolor": self.colour, "linewidth": 1.2,
            "zorder": 2,
        }  # fmt: skip

    def _inner(self, theme: Theme) -> str:
        if self.fill == _FULL:
            return self.colour
        return theme.page if self.fill == _EMPTY else _mixed(self.colour, theme.page)


def _mixed(colour: str, page: str) -> str:
    """Return a colour that is thinned with the page's."""
    pairs = ((int(one[at : at + 2], 16) for one in (colour, page)) for at in (1, 3, 5))
    mixed = (_PALE_SHARE * ink + (1 - _PALE_SHARE) * paper for ink, paper in pairs)
    return "#" + "".join(f"{round(each):02x}" for each in mixed)


def inks(contenders: Sequence[str], theme: Theme) -> dict[str, Ink]:
    """Give each contender its look; who has none by name takes one that is free here.

    Raises
    ------
    ValueError
        If there are more than looks.
    """
    used = {_LOOKS[name] for name in contenders if name in _LOOKS}
    free = (look for look in _FREE if look not in used)
    return {
        name: Ink(COLOURS[theme.name][colour], _MARKERS[colour], fill)
        for name, (colour, fill) in _looks_of(contenders, free)
    }


def _looks_of(contenders: Sequence[str], free: Iterator[Look]) -> Iterator[tuple[str, Look]]:
    for name in contenders:
        look = _LOOKS.get(name) or next(free, None)
        if look is None:
            raise error(
                ValueError,
                f"{len(contenders)} contenders: {', '.join(contenders)}",
                f"a picture has looks for {len(_FREE)} that have none by name",
                "leave some of the results out",
            )
        yield name, look
