"""What copy_blocks refuses, and how it says so."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.devices import everywhere

import cupyattn

F32 = np.float32
CACHES = np.zeros((2, 5, 4, 2, 8), F32)


@everywhere
@pytest.mark.parametrize(
    ("copies", "kind", "message"),
    [
        (None, TypeError, "copies is None"),
        (3, TypeError, "copies is a int; it is a sequence of Copy(src, dst)"),
        ([3], TypeError, "copies[0] is 3; each copy is a pair"),
        ([(0, 1), (0, 1, 2)], TypeError, "copies[1] is (0, 1, 2)"),
        ([(0, 1.0)], TypeError, "copies[0]'s dst is 1.0, a float"),
        ([(0, 1), (True, 1)], TypeError, "copies[1]'s src is True"),
        (
            [(0, 1), (4, 5), (9, 9)],
            ValueError,
            "copies[1] is (4, 5); the caches have blocks 0 to 4",
        ),
        ([(-1, -1)], ValueError, "copies[0] is (-1, -1)"),
        (np.array([0, 1]), ValueError, "copies has shape (2,); it is (n, 2)"),
        (np.zeros((2, 3), int), ValueError, "copies has shape (2, 3)"),
        (np.zeros((2, 2)), TypeError, "copies has dtype float64"),
    ],
)
def test_copy_blocks(side, copies, kind, message):
    caches = side.put(CACHES)
    given = side.put(copies) if isinstance(copies, np.ndarray) else copies
    with side.running(), pytest.raises(kind, match=re.escape(message)):
        cupyattn.copy_blocks(caches[0], caches[1], given)


@everywhere
@pytest.mark.parametrize(
    ("pair", "shown"), [((0, 5), "(0, 5)"), ((-1, 0), "(-1, 0)"), ((2, -1), "(2, -1)")]
)
def test_blocks_that_do_not_exist_are_named(side, pair, shown):
    caches = side.put(CACHES)
    copies = side.put(np.array([(0, 1), (-1, -1), pair, (7, 7)]))
    with (
        side.running(),
        cupyattn.backend(checks=True),
        pytest.raises(ValueError, match=re.escape(f"copies[2] is {shown}")),
    ):
        cupyattn.copy_blocks(caches[0], caches[1], copies)


def test_copy_blocks_of_other_caches():
    pool = np.zeros((3, 2, 5, 4, 2, 8), F32)
    for caches, kind, message in (
        ((pool[:, 0], pool[0, 1]), ValueError, "v_cache has shape"),
        ((pool, pool), ValueError, "k_cache has shape (3, 2, 5, 4, 2, 8)"),
        ((CACHES[0], CACHES[0]), ValueError, "overlaps"),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            cupyattn.copy_blocks(*caches, [(0, 1)])
    stored = pool.astype(np.int8)
    scales = np.zeros(stored.shape[:-1], F32)
    with pytest.raises(TypeError, match="quantised caches have a float32 scale for each token"):
        cupyattn.copy_blocks(stored[:, 0], stored[:, 1], [(0, 1)])
    with pytest.raises(ValueError, match=re.escape("k_scales has shape (5, 4, 2)")):
        cupyattn.copy_blocks(stored[:, 0], stored[:, 1], [(0, 1)],
                             k_scales=scales[0, 0], v_scales=scales[0, 1])  # fmt: skip
