"""The HTML of objects in notebooks: well formed, small, escaped, with the right numbers."""

from __future__ import annotations

import copy
import json
import pickle
import re
from xml.etree import ElementTree

import numpy as np
import pytest

import cupyattn
from cupyattn.environment import DeviceInfo
from cupyattn.runtime import html

SMALL = 20_000  # bytes


@pytest.fixture(autouse=True)
def masks_in_numpy(monkeypatch):
    """Compute block masks without arrays in NumPy, also where there is a GPU."""
    monkeypatch.setattr("cupyattn.ops.attention.block_mask.device_count", lambda: 0)


def shown(value):
    """Return the words of an object's HTML, and its pictures; it is well formed and small."""
    text = value._repr_html_()
    assert len(text.encode()) < SMALL
    assert not re.search(r"(?<!-)color:|<style|<script|http", text), "colours are the page's"
    tree = ElementTree.fromstring(text)
    return " ".join(" ".join(tree.itertext()).split()), list(tree.iter("svg"))


def cells(picture):
    """Return the cells of a grid as its lines cover them, by colour."""
    columns, rows = map(int, picture.get("viewBox").split()[2:])
    drawn = {}
    for path in picture.iter("path"):
        covered = np.zeros((rows, columns), bool)
        for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d")):
            covered[int(y), int(x) : int(x) + int(length)] = True
        drawn[path.get("stroke")] = covered
    return drawn


def mask(python, *lengths, text="m", **sizes):
    return cupyattn.block_mask(cupyattn.MaskMod(text, python=python), *lengths, **sizes)


def causal(b, h, q, k):
    return k <= q


@pytest.mark.parametrize("lengths", [(0, 100), (100, 0), (0, 0)])
def test_a_block_mask_without_tiles_is_a_line_of_text(lengths):
    text, pictures = shown(mask(causal, *lengths))
    assert "it has no tiles" in text and f"Sq={lengths[0]}, Sk={lengths[1]}" in text
    assert not pictures


def test_tiles_of_a_block_mask_are_drawn():
    found = mask(causal, 100, 130, text="k_idx <= q_idx && x < 3")
    text, (picture,) = shown(found)
    drawn = cells(picture)
    np.testing.assert_array_equal(drawn[html.BLUE], found.tiles[0, 0] == 2)
    np.testing.assert_array_equal(drawn[html.ORANGE], found.tiles[0, 0] == 1)
    assert "k_idx <= q_idx && x < 3" in text
    for kind, name in enumerate(("skipped", "seen in part", "seen in full")):
        assert f"{(found.tiles == kind).sum()} tiles {name}" in text
    assert "100 down, 130 to the right" in text and "16 queries and keys" in text
    assert "<" in repr(found), "a terminal has it as it is"


@pytest.mark.parametrize("sizes", [{}, {"B": 2}, {"B": 3, "H": 5}])
def test_many_tiles_share_cells_so_that_the_picture_stays_small(sizes):
    found = mask(
        lambda b, h, q, k: (q // 16 * 7919 + k // 16 * 104729) % 5 < 2, 1600, 1500, **sizes
    )
    text, pictures = shown(found)
    count = found.shape[0] * found.shape[1]
    assert len(pictures) == min(count, 4)
    assert (f"{count - 4} more" in text) == (count > 4)
    span = int(re.search(r"a cell (\d+) queries", text)[1]) // 16
    assert span > 1 and "orange where its tiles are not the same" in text
    drawn = cells(pictures[0])
    rows, columns = drawn[html.BLUE].shape
    tiles = found.tiles[0, 0]
    for row in range(rows):
        for column in range(columns):
            block = tiles[row * span : (row + 1) * span, column * span : (column + 1) * span]
            assert drawn[html.BLUE][row, column] == (block == 2).all()
            mixed = len(np.unique(block)) > 1 or (block == 1).all()
            assert drawn[html.ORANGE][row, column] == mixed


def test_one_query_of_many_keys_is_drawn():
    (picture,) = shown(mask(causal, 1, 40_000))[1]
    assert float(picture.get("height")) >= 1


def test_a_pool_shows_its_blocks_and_sequences():
    allocator = cupyattn.BlockAllocator(40, 4, prefix_caching=True, num_host_blocks=8)
    first = [allocator.add([*range(8), 100 + each, 7]) for each in range(3)]
    freed = allocator.add([*range(8), 55, 56, 57, 58])
    freed.free()
    swapped = allocator.add(range(200, 208))
    swapped.swap_out()
    text, (bar,) = shown(allocator)
    assert "BlockAllocator of 40 blocks of 4 tokens" in text
    used, shared = allocator.num_used, 2
    cached, free = allocator.num_cached, allocator.num_free
    assert (used, cached) == (5, 3)
    assert f"{used - shared} used by one 2 shared {cached} cached {free} free" in text
    widths = [float(each.get("width")) for each in bar.iter("rect")]
    assert widths == pytest.approx([12 * each for each in (3, 2, 3, free)])
    assert "10 tokens 3 2 in the device's pool" in text
    assert "8 tokens 2 0 swapped out" in text and "2 of 8 blocks of host memory" in text
    more = [allocator.add([each]) for each in range(9)]
    assert f"and {len(first) + 1 + len(more) - 8} more sequences" in shown(allocator)[0]


def test_a_cache_shows_its_pool():
    cache = cupyattn.PagedKVCache(3, 8, 16, 2, 4, dtype="int8", xp=np)
    kept = cache.allocator.add(range(20))
    text, _ = shown(cache)
    assert "8 of 16 tokens, in each of 3 layers" in text and "2 heads in int8" in text
    assert "2 used by one 0 shared 0 cached 6 free" in text
    assert f"{len(kept)} tokens 2 0" in text
    assert "empty slots in used blocks 37.5%" in text


@pytest.mark.parametrize("transposed", [False, True])
def test_a_quantised_weight_shows_its_arrays(transposed):
    weight = cupyattn.quantize(np.ones((128, 6), np.float32))
    text, (bar,) = shown(weight.T if transposed else weight)
    assert ("(6, 128) = (N, K)" if transposed else "(128, 6) = (K, N)") in text
    assert "4.50 bits a weight, 28% of float16" in text
    assert "codes uint8 (6, 64) 384" in text and "scales float32 (6, 2) 48" in text
    assert len(list(bar.iter("rect"))) == 2


def device(**changes):
    found = {
        "name": "Tesla <T4>", "compute_capability": "7.5", "memory_bytes": 15_843_721_216,
        "arch": 75, "tensor_cores": True, "tensor_cores_because": "its name", "native": False,
        "tuned": None, "unusable_because": None,
    }  # fmt: skip
    return {**found, **changes}


def test_device_info_is_a_dict_that_is_shown_as_tables():
    info = cupyattn.device_info()
    assert isinstance(info, dict) and info == dict(info) == json.loads(json.dumps(info))
    assert copy.copy(info) == pickle.loads(pickle.dumps(info)) == info
    assert eval(repr(info)) == info
    old = device(name="GTX 750", arch=None, tensor_cores=None, unusable_because="it is too old")
    more = {"devices": [device(), old], "cuda_driver": 12090, "arch_override": "75"}
    found = DeviceInfo({**info, **more})
    text, _ = shown(found)
    assert "Tesla <T4> 7.5 15.84 GB sm_75 yes" in text and "GTX 750 7.5" in text
    assert "it is too old" in text and "CUPYATTN_ARCH 75" in text and "12.9" in text
    lines = str(found).splitlines()
    assert lines[0].removeprefix("GPU").strip() == "Tesla <T4>, 7.5, 15.84 GB, sm_75"
    assert all(len(line) < 200 for line in lines)
    newer = DeviceInfo({**info, "devices": [device(arch=90, native=True)]})
    assert "sm_90 yes, for bfloat16 too" in shown(newer)[0]
    assert "15.84 GB, sm_90, bfloat16 on tensor cores" in str(newer)
    none = DeviceInfo({**info, "devices": [], "cuda_driver": None, "cuda_runtime": None})
    assert "no GPU: NumPy arrays run on the CPU" in shown(none)[0]
    assert re.search(r"^GPU +none", str(none), re.MULTILINE)


@pytest.mark.usefixtures("default_architecture")
@pytest.mark.nvrtc
def test_an_explanation_shows_each_launch():
    q, k = ((1, 4, 8, 64), "float16"), ((1, 2048, 8, 64), "float16")
    report = cupyattn.explain(cupyattn.attention, q, k, k)
    text, _ = shown(report)
    assert "attention on a T4 (sm_75): 2 launches" in text and len(report.launches) == 2
    for launch in report.launches:
        assert f"{launch.kernel} ({launch.source})" in text
        assert f"{launch.ctas:,} {launch.threads} {launch.registers}" in text
        assert shown(launch)[0].startswith(launch.kernel)
    assert all(reason in text for reason in report.reasons)
    assert str(report) == repr(report) and "<div" not in str(report)


def test_an_explanation_of_many_launches_stays_small():
    launch = cupyattn.explanation.LaunchReport(
        "kernel", "k.cu", {f"MACRO_{n}": n for n in range(30)}, "why " * 50, 3, 128, 0, None, None,
        None, "limit",
    )  # fmt: skip
    report = cupyattn.explanation.Explanation("f", "a T4", (launch,) * 40, ("<reason>",))
    assert "<reason>" in shown(report)[0]
    assert "and 34 more: print it" in shown(report)[0]


def test_texts_are_escaped_and_cut():
    assert html.escaped("<a href='x'>&\"") == "&lt;a href=&#39;x&#39;&gt;&amp;&quot;"
    assert len(html.escaped("&" * 10_000)) < 2000
