"""The gradient of a bias that broadcasts: whose terms a CTA sums, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.backward_runs import check, check_accumulated, inputs, run
from support.devices import KERNELS
from support.search import deep, examples, mostly_deep, wider
from support.strategies import AttentionProblem
from support.varlen import VarlenProblem

from cupyattn import AttentionGrads
from cupyattn.arrays import contiguous
from cupyattn.kernels.configs.attention.tensor_core.backward_summed_dbias import SUMMED_DBIAS
from cupyattn.ops.attention import backward, dbias, varlen
from cupyattn.ops.attention.dbias import shared_out

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

ROW = SUMMED_DBIAS[75][64]
ROWS, KEYS = ROW.tile_rows, ROW.tile_k


@contextmanager
def enough(ctas: int) -> Iterator[None]:
    """So many CTAs are enough: with few of them each walks over many pairs."""
    plans = backward._plan, varlen._backward_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dbias, "_ENOUGH_CTAS", ctas)
        for each in plans:
            each.cache_clear()
        yield
    for each in plans:
        each.cache_clear()


def problem_with(bias: tuple[int, ...], dtype: str = "float16", **drawn: Any) -> AttentionProblem:
    """Two tiles of queries and three of keys, the last of each with one row; the shape's H, Sq, Sk
    may be None for all of them."""
    sizes = (3, 4, ROWS + 1, 2 * KEYS + 1)
    shape = tuple(
        full if extent is None else extent
        for extent, full in zip(bias, sizes[4 - len(bias) :], strict=True)
    )
    options = (("bias", (shape, dtype)), *drawn.items())
    return AttentionProblem(
        B=3, Sq=sizes[2], Sk=sizes[3], H=4, G=2, D=24, Dv=40, dtype="float16", drawn=options
    )


ALL = None
WALKS = {
    "all heads": ((1, 1, ALL, ALL), {}),
    "a head of every batch element": ((1, ALL, ALL, ALL), {"causal": True}),
    "every head of a batch element": ((3, 1, ALL, ALL), {"window_size": (KEYS, KEYS - 1)}),
    "a row of keys": ((ALL,), {"causal": True}),
    "a column of queries": ((ALL, 1), {"causal": True}),
    "one number": ((1, 1), {"causal": True}),
    "keys in use, none of one": ((ALL, ALL), {"seqused_k": (2 * KEYS + 1, 0, KEYS)}),
    "positions": ((ALL, ALL), {"causal": True, "q_offset": (-3, KEYS - 1, 2 * KEYS)}),
}


PLAIN = [*list(WALKS)[:2], "a column of queries"]


@pytest.mark.parametrize("name", mostly_deep(WALKS, PLAIN))
@pytest.mark.parametrize("ctas", [1, *deep(16)], ids=["one part", "some parts"])
def test_tiles_and_pairs(name: str, ctas: int):
    shape, options = WALKS[name]
    with enough(ctas):
        check(problem_with(shape, **options), "flash")


# The window hides one score of the second tile of keys, on its left that of the last query, on its
# right that of the first; causal order leaves one score of it.
EDGES = {
    "left": (KEYS + 2, {"window_size": (KEYS, KEYS - 1), "q_offset": KEYS}),
    "right": (KEYS + 1, {"window_size": (KEYS, KEYS - 2), "q_offset": KEYS}),
    "one score": (KEYS + 1, {"causal": True, "q_offset": 0}),
}


@pytest.mark.parametrize("name", EDGES)
def test_masks_that_end_one_score_within_a_tile(name: str):
    rows, options = EDGES[name]
    drawn = (("bias", ((rows, 3 * KEYS), "float16")), *options.items())
    problem = AttentionProblem(2, rows, 3 * KEYS, 4, 2, 24, 40, "float16", drawn=drawn)
    with enough(1):
        check(problem, "flash")


@examples(6, deep=30)
@given(
    sizes=st.tuples(
        st.integers(1, 3),
        st.sampled_from((1, 16, ROWS - 1, ROWS, ROWS + 1)),
        st.sampled_from((1, 4, KEYS, KEYS + 1, 2 * KEYS + 4)),
        st.sampled_from(((1, 1), (4, 1), (4, 2), (2, 2))),
    ),
    head_dims=st.sampled_from(wider([(24, 40)], [(64, 64), (7, 40), (128, 80), (256, 160)])),
    broadcasts=st.tuples(*[st.booleans()] * 4),
    dtype=st.sampled_from(wider(("float32",), ("float16",))),
    options=st.sampled_from(
        wider(
            [{}, {"causal": True}, {"window_size": (20, 3)}, {"mask": 1, "softcap": 2.0}],
            [{"dropout_p": 0.5}, {"alibi_slopes": 1}, {"seqused_k": 1, "causal": True}],
        )
    ),
    ctas=st.sampled_from((1, 7, 512)),
)
def test_any_broadcast_is_within_the_bounds(
    sizes: tuple[int, int, int, tuple[int, int]],
    head_dims: tuple[int, int],
    broadcasts: tuple[bool, ...],
    dtype: str,
    options: dict[str, Any],
    ctas: int,
):
    batch, sq, sk, (heads, kv_heads) = sizes
    extents = (batch, heads, sq, sk)
    shape = tuple(1 if one else n for one, n in zip(broadcasts, extents, strict=True))
    drawn = {**options, "bias": (shape, dtype)}
    drawn |= {"mask": (sq, sk)} if "mask" in options else {}
    drawn |= {"alibi_slopes": ((heads,), "float32", 1)} if "alibi_slopes" in options else {}
    drawn |= (
        {"seqused_k": tuple(sk // n for n in range(1, batch + 1))} if "seqused_k" in options else {}
    )
    problem = AttentionProblem(
        B=batch, Sq=sq, Sk=sk, H=heads, G=kv_heads, D=head_dims[0], Dv=head_dims[1],
        dtype="float16", drawn=tuple(drawn.items()),
    )  # fmt: skip
    with enough(ctas):
        check(problem, "flash")


@pytest.mark.parametrize("shape", [(ALL, ALL), *deep(((ALL,),))], ids=["summed", "rows of it too"])
def test_it_is_added_to_what_is_there(shape: tuple[None, ...]):
    arrays, options = inputs(problem_with(shape, causal=True))
    before = np.full_like(options["bias"], 0.5)
    for ctas in (1, 512):  # dbias itself, and scratch
        grads = AttentionGrads(None, None, None, KERNELS.put(before.copy()), None)
        with enough(ctas):
            found = run(arrays, options, "flash", grads=grads, accumulate=True)
        start = {"dbias": before.astype(np.float64)}
        check_accumulated({"dbias": found["dbias"]}, start, arrays, options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_its_bits_are_the_same_each_time(deterministic: bool):
    """It is no sum of atomic additions, whatever was asked for."""
    arrays, options = inputs(problem_with((ALL, ALL)))
    found = [
        run(arrays, options, "flash", deterministic=way)["dbias"] for way in (deterministic, False)
    ]
    assert_array_equal(*found)


def test_packed_sequences_of_several_tiles():
    dense = AttentionProblem(
        B=5, Sq=ROWS + 1, Sk=KEYS + 1, H=2, G=1, D=24, Dv=40, dtype="float16",
        drawn=(("causal", True), ("bias", ((ROWS + 1, KEYS + 1), "float32"))),
    )  # fmt: skip
    # Behind the few rows of the first in scratch memory stand rows of the second, which see keys.
    problem = VarlenProblem(
        dense, queries=(5, 33, ROWS + 1, 0, 9), keys=(KEYS + 1, KEYS, KEYS, 7, 0), spare=3
    )
    with enough(1):
        ratios = problem.backward_ratios(problem.run_backward())
    assert max(ratios.values()) <= 1, ratios


class Sizes:
    """What is asked of a problem to share its work out."""

    def __init__(self, batch: int, heads: int, sq: int, sk: int) -> None:
        self.batch, self.heads, self.sq, self.sk = batch, heads, sq, sk


SHARES = {
    # Many tiles: no parts, no scratch.
    (8, 16, 4096, 4096): ((1, 16, 4096, 4096), (1, 16, 1, False, False), None),
    # 2 tiles: a CTA for each pair.
    (2, 4, 130, 100): ((130, 100), (1, 1, 8, False, False), (8, 1, 130, 100)),
    (8, 16, 1024, 1000): ((1, 16, 1024, 1000), (1, 16, 1, False, False), None),
    # 8 x 4 tiles of 512 CTAs that are enough: so many parts that there are as many.
    (8, 16, 1024, 500): ((8, 1, 1024, 500), (8, 1, 2, False, False), (8, 2, 1024, 500)),
    (9, 16, 1024, 500): ((1, 1, 1024, 500), (1, 1, 16, False, False), (16, 1, 1024, 500)),
    (9, 16, 1152, 500): ((1, 1, 1152, 500), (1, 1, 14, False, False), (14, 1, 1152, 500)),
    (2, 16, 300, 100): ((2, 1, 300, 100), (2, 1, 16, False, False), (2, 16, 300, 100)),
    # A row for each of a tile's 8 warps, a key for each tile.
    (2, 16, 300, 4000): ((2, 16, 1, 4000), (2, 16, 1, True, False), (2, 16, 24, 4000)),
    (2, 16, 300, 4001): ((2, 16, 300, 1), (2, 16, 1, False, True), (2, 16, 300, 32)),
    (1, 1, 300, 100): ((1,), (1, 1, 1, True, True), (1, 1, 24, 1)),
    (2, 3, 0, 100): ((100,), (1, 1, 6, True, False), (6, 1, 0, 100)),
}


@pytest.mark.parametrize("sizes", SHARES, ids=str)
def test_how_the_work_is_shared_out(sizes: tuple[int, int, int, int]):
    shape, shares, scratch = SHARES[sizes]
    target = contiguous(shape, np.dtype(np.float16))
    for accumulate in (False, True):
        found = shared_out(Sizes(*sizes), target, ROW, accumulate)
        assert found.shares == (*shares, accumulate and scratch is None)
        assert found.scratch == (scratch is not None)
        expected = target if scratch is None else contiguous(scratch, np.dtype(np.float32))
        assert found.target == expected
        batches, heads, parts, *_ = shares
        tiles = -(-sizes[2] // ROWS) * -(-sizes[3] // KEYS)
        assert found.ctas == batches * heads * parts * tiles
        # Of parts there are few more CTAs than are enough, and so little scratch.
        assert parts == 1 or found.ctas <= 512
