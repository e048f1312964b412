"""The picture of a pool."""

from __future__ import annotations

import sys

import pytest
from support.cache_contents import BASE, KnownCache

from cupyattn import BlockAllocator, PagedKVCache


def picture_of(cache, *arguments, **options):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    axes = cache.picture(*arguments, **options)
    plt.close(axes.figure)
    return axes


def cells(axes) -> list[str]:
    """What stands at each block's place: the colours of what is drawn there."""
    found = {}
    for patch in axes.patches:
        if patch.get_width():
            place = int(patch.get_y()) * int(axes.get_xlim()[1]) + int(patch.get_x())
            found.setdefault(place, []).append(patch)
    return [found[place] for place in sorted(found)]


def test_the_picture():
    from matplotlib.colors import to_rgb

    known = KnownCache("float32", num_blocks=10, prefix_caching=True, num_host_blocks=5)
    cache = known.cache
    first = cache.allocator.add(range(40))
    fork = first.fork()
    cache.copy(fork.append([7]))
    gone = cache.allocator.add([9] * 17)
    gone.free()
    cache.allocator.allocate()
    away = cache.allocator.add([1] * 5)
    cache.copy_to_host(away.swap_out())
    names = {"first": first, "fork": fork, "gone": gone, "away": away}
    axes = picture_of(cache, names, columns=4)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "first: 40 tokens", "fork: 41 tokens", "gone: finished", "away: 5 tokens, swapped out"
    ]  # fmt: skip
    places = cells(axes)
    assert len(places) == 10
    blue, orange = to_rgb("C0"), to_rgb("C1")
    shared = [patch for patch in places[0] if patch.get_facecolor()[3] == 1]
    assert [patch.get_facecolor()[:3] for patch in shared] == [blue, orange]
    assert len(places[0]) == 5, "two sharers, faint and full, and the edge"
    (faint, full, _), own = places[2], places[3]
    assert full.get_width() / faint.get_width() == pytest.approx(8 / 16)
    assert own[1].get_facecolor()[:3] == orange
    assert own[1].get_width() / own[0].get_width() == pytest.approx(9 / 16)
    states = [cache.allocator.state(block) for block in range(10)]
    assert sorted(states) == ["cached"] + ["free"] * 4 + ["used"] * 5
    greys = {"cached": 0.85, "free": 1.0, "used": 0.4}
    for place, state in list(zip(places, states, strict=True))[4:]:
        (edge,) = place
        assert edge.get_facecolor()[0] == pytest.approx(greys[state])
    given = picture_of(cache, axes=axes)
    assert given is axes
    (text,) = picture_of(cache, [first]).get_legend().get_texts()
    assert text.get_text() == "sequence 0: 40 tokens"
    assert picture_of(PagedKVCache(**BASE)).get_legend() is None


def test_pictures_refuse_what_is_not_the_caches():
    cache = PagedKVCache(**BASE)
    foreign = BlockAllocator(4, 16).add([1])
    with pytest.raises(ValueError, match="sequence 0, <Sequence of 1 tokens"):
        picture_of(cache, [foreign])
    with pytest.raises(TypeError, match="got sequence 0, 7; a picture is of Sequences"):
        picture_of(cache, [7])
    for wrong in (7, cache.allocator.add([1])):
        with pytest.raises(TypeError, match=r"got sequences, .*; pass .*\[sequence\] for one"):
            picture_of(cache, wrong)
    with pytest.raises(TypeError, match="axes = 3; it is an Axes of matplotlib"):
        picture_of(cache, axes=3)
    with pytest.raises(ValueError, match="columns = 0"):
        picture_of(cache, columns=0)


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.patches", None)
    with pytest.raises(RuntimeError, match=r"draws the picture; .*; pip install matplotlib"):
        PagedKVCache(**BASE).picture()
