"""Errors of paged attention."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.paged import PackedProblem, PagedProblem

import cupyattn

PROBLEM = PagedProblem(lengths=(20, 40), Sq=2, G=2, group=2, D=8, dtype="float32")
NAMES = ("q", "k_cache", "v_cache", "block_table", "seqlens_k")


def call(options: dict[str, Any] | None = None, **changed: Any) -> Any:
    arrays = dict(zip(NAMES, PROBLEM.arrays(), strict=True))
    for name, change in changed.items():
        arrays[name] = change(arrays[name])
    return cupyattn.paged_attention(*arrays.values(), **(options or {}))


def with_item(index: Any, value: Any) -> Any:
    def change(array: np.ndarray) -> np.ndarray:
        array[index] = value
        return array

    return change


def test_the_call_itself_is_right():
    assert call().shape == (2, 2, 4, 8)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"q": lambda x: None}, TypeError, "q is None"),
        ({"q": lambda x: x[0]}, ValueError, "q has shape (2, 4, 8)"),
        ({"q": lambda x: x.astype("float16")}, TypeError, "q has float16"),
        ({"q": lambda x: x[:, :, :3]}, ValueError, "q has H = 3 heads, the caches have G = 2"),
        ({"q": lambda x: x[..., :4]}, ValueError, "k_cache has shape"),
        ({"k_cache": lambda x: x[:, :15], "v_cache": lambda x: x[:, :15]}, ValueError,
         "k_cache has blocks of 15 tokens"),
        ({"v_cache": lambda x: x[1:]}, ValueError, "v_cache has shape"),
        ({"v_cache": lambda x: np.swapaxes(x, 2, 3).copy().swapaxes(2, 3)}, ValueError,
         "v_cache has strides"),
        ({"block_table": lambda x: x.astype("int64")}, TypeError, "block_table has dtype int64"),
        ({"block_table": lambda x: x[:1]}, ValueError, "block_table has shape (1, 4)"),
        ({"block_table": lambda x: x[0]}, ValueError, "block_table has shape (4,)"),
        ({"seqlens_k": lambda x: x.astype("float32")}, TypeError, "seqlens_k has dtype float32"),
        ({"seqlens_k": lambda x: x[:1]}, ValueError, "seqlens_k has shape (1,)"),
        ({"seqlens_k": with_item(1, 65)}, ValueError, "seqlens_k[1] = 65"),
        ({"seqlens_k": with_item(0, -1)}, ValueError, "seqlens_k[0] = -1"),
        ({"block_table": with_item((1, 2), -1)}, ValueError, "block_table[1, 2] = -1"),
        ({"block_table": with_item((0, 1), 9)}, ValueError, "block_table[0, 1] = 9"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_arrays(changed, kind, message, backend):
    with cupyattn.backend(backend), pytest.raises(kind, match=re.escape(message)):
        call(**changed)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"cu_seqlens_q": np.array([0, 2, 4], np.int32)}, ValueError, "q has shape (2, 2, 4, 8)"),
        ({"k_scales": np.ones(3)}, ValueError, "k_scales was given with caches of float32"),
        ({"v_scales": np.ones(3)}, ValueError, "v_scales was given with caches of float32"),
        ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q = 2 without cu_seqlens_q"),
        ({"max_seqlen_q": np.array([1, 2])}, TypeError, "; it is an integer; pass one number"),
        ({"causal": 1}, TypeError, "causal = 1"),
        ({"window_size": 3}, TypeError, "window_size = 3"),
        ({"softcap": 0.0}, ValueError, "softcap = 0.0"),
        ({"sinks": np.zeros(3, np.float32)}, ValueError, "sinks has shape (3,)"),
        ({"sinks": np.full(4, 3e38, np.float32)}, ValueError, "sinks has values up to"),
        ({"alibi_slopes": np.zeros((1, 4), np.float32)}, ValueError, "alibi_slopes has shape"),
        ({"return_lse": 1}, TypeError, "return_lse = 1"),
        ({"out": np.zeros((2, 2, 4, 8), np.float16)}, TypeError, "out is float16"),
        ({"out": (np.zeros(3), np.zeros(3))}, TypeError, "out is a tuple of 2"),
        ({"workspace": np.zeros((4, 4))[:, ::2]}, ValueError, "workspace has strides"),
    ],
)  # fmt: skip
def test_options(options, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call(options)


PACKED = PackedProblem(lengths=(20, 40), Sq=20, queries=(0, 20), G=2, group=2, D=8, dtype="float32")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"cu_seqlens_q": np.zeros((3, 1), np.int32)}, ValueError, "cu_seqlens_q has shape (3, 1)"),
        ({"cu_seqlens_q": np.zeros(3)}, TypeError, "cu_seqlens_q has dtype float64"),
        ({"cu_seqlens_q": [0, 0, 20]}, TypeError, "cu_seqlens_q has type builtins.list"),
        ({"cu_seqlens_q": np.zeros(0, int)}, ValueError, "cu_seqlens_q has no items"),
        ({"cu_seqlens_q": np.array([0, 20])}, ValueError, "block_table has shape (2, 4)"),
        ({"cu_seqlens_q": np.array([-1, 1, 20])}, ValueError, "cu_seqlens_q = [-1, 1, 20]"),
        ({"cu_seqlens_q": np.array([0, 9, 5])}, ValueError, "cu_seqlens_q = [0, 9, 5]"),
        ({"cu_seqlens_q": np.array([0, 1, 21])}, ValueError, "cu_seqlens_q = [0, 1, 21]"),
        ({"cu_seqlens_q": None}, ValueError, "max_seqlen_q = 20 without cu_seqlens_q"),
        ({"max_seqlen_q": 19}, ValueError, "sequence 1 of cu_seqlens_q has 20 rows"),
        ({"out": np.zeros((1, 20, 4, 8), np.float32)}, ValueError, "out is float32 (1, 20, 4, 8)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_packed_queries(options, kind, message, backend):
    right = {"cu_seqlens_q": PACKED.bounds, "max_seqlen_q": 20}
    with cupyattn.backend(backend), pytest.raises(kind, match=re.escape(message)):
        cupyattn.paged_attention(*PACKED.arrays(), **{**right, **options})


def test_packed_queries_of_caches_that_are_not_alike():
    q, k, v, *others = PACKED.arrays()
    wide = np.repeat(v, 2, axis=1)[:, ::2]
    options = {"cu_seqlens_q": PACKED.bounds, "max_seqlen_q": 20}
    cupyattn.paged_attention(q, k, wide, *others, **options)
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match="caches of equal strides"):
        cupyattn.paged_attention(q, k, wide, *others, **options)


def test_a_place_beyond_32_bits():
    """Strides of rows that are odd bytes apart: nothing larger than two bytes divides them."""
    problem = PagedProblem(lengths=(20,), Sq=20, G=1, group=1, D=8, dtype="float16")
    q, k, v, table, lengths = problem.arrays()
    far = [
        np.lib.stride_tricks.as_strided(x, (2**28, *x.shape[1:]), (34, 16, 16, 2)) for x in (k, v)
    ]
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match="units of 2 bytes"):
        cupyattn.paged_attention(q, *far, table % 3, lengths)


def test_a_result_within_the_cache():
    arrays = PROBLEM.arrays()
    inside = arrays[1].reshape(-1)[: arrays[0].size].reshape(arrays[0].shape)
    with pytest.raises(ValueError, match="out overlaps k_cache"):
        cupyattn.paged_attention(*arrays, out=inside)


def test_entries_that_a_window_hides_may_be_absent():
    """Those of block 0 of sequence 1: of 40 tokens the queries see 22 and more."""
    call({"window_size": (15, 0)}, block_table=with_item((1, 0), -1))
    with pytest.raises(ValueError, match=re.escape("block_table[1, 0] = -1")):
        call({"window_size": (23, 0)}, block_table=with_item((1, 0), -1))
    call({"window_size": (22, 0)}, block_table=with_item((1, 0), -1))


STORED = replace(PROBLEM, bits=4)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"k_scales": lambda x: None}, ValueError, "caches of uint8 without k_scales"),
        ({"v_scales": lambda x: None}, ValueError, "caches of uint8 without v_scales"),
        ({"k_scales": lambda x: x.astype("float16")}, TypeError, "k_scales has dtype float16"),
        ({"v_scales": lambda x: x[:, :, :1]}, ValueError, "v_scales has shape (9, 16, 1)"),
        ({"v_scales": lambda x: x[..., None]}, ValueError, "v_scales has shape (9, 16, 2, 1)"),
        ({"k_cache": lambda x: x.view("int8")}, TypeError, "k_cache has int8, v_cache has uint8"),
        ({"k_cache": lambda x: x.view("int8"), "v_cache": lambda x: x.view("int8")}, ValueError,
         "k_cache has shape (9, 16, 2, 4)"),
        ({"k_cache": lambda x: x.astype("int16")}, TypeError, "k_cache has dtype int16"),
        ({"q": lambda x: x[..., :7]}, ValueError, "D = 7 with caches of uint8"),
        ({"q": lambda x: x.view("int32")}, TypeError, "q has dtype int32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_caches_of_integers(changed, kind, message, backend):
    names = (*NAMES, "k_scales", "v_scales")
    arrays = dict(zip(names, STORED.arrays(), strict=True))
    for name, change in changed.items():
        arrays[name] = change(arrays[name])
    scales = {name: arrays.pop(name) for name in names[5:]}
    with cupyattn.backend(backend), pytest.raises(kind, match=re.escape(message)):
        cupyattn.paged_attention(*arrays.values(), **scales)
