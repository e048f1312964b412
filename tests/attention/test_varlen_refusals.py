"""What attention over packed sequences refuses, and how it says so."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.strategies import AttentionProblem
from support.varlen import VarlenProblem

import cupyattn

PROBLEM = VarlenProblem(
    AttentionProblem(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6), queries=(5, 2), keys=(3, 7)
)
NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
RUNS = ("reference", pytest.param("emulator", marks=pytest.mark.nvrtc))


def call(
    options: dict[str, Any] | None = None, longest: tuple[Any, Any] = (5, 7), **changed: Any
) -> Any:
    arrays = dict(zip(NAMES, PROBLEM.arrays(), strict=True))
    for name, change in changed.items():
        arrays[name] = change(arrays[name])
    return cupyattn.attention_varlen(*arrays.values(), *longest, **(options or {}))


def bounds(*items: int, dtype: str = "int32") -> Any:
    return lambda _: np.array(items, dtype)


@pytest.mark.parametrize("backend", RUNS)
def test_the_call_itself_is_right(backend):
    with cupyattn.backend(backend):
        assert call().shape == (7, 4, 6)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"q": lambda x: None}, TypeError, "q is None"),
        ({"q": lambda x: x[None]}, ValueError, "q has shape (1, 7, 4, 8)"),
        ({"q": lambda x: x.astype("float16")}, TypeError, "q has float16"),
        ({"q": lambda x: x[:, :3]}, ValueError, "q has H = 3 heads, k and v have G = 2; H is a "
         "multiple of G (grouped-query attention), or equal to it; check the head axis: it is the "
         "last but one"),
        ({"q": lambda x: x[..., :4]}, ValueError, "k has shape (10, 2, 8)"),
        ({"q": lambda x: x[..., ::-1]}, ValueError, "q has strides"),
        ({"v": lambda x: x[1:]}, ValueError, "v has shape (9, 2, 6)"),
        ({"v": lambda x: x[:, :1]}, ValueError, "v has shape (10, 1, 6)"),
        ({"cu_seqlens_q": lambda x: None}, TypeError, "cu_seqlens_q is None"),
        ({"cu_seqlens_k": lambda x: x.tolist()}, TypeError, "cu_seqlens_k is a builtins.list"),
        ({"cu_seqlens_q": bounds(0, 5, 7, dtype="uint32")}, TypeError,
         "cu_seqlens_q has dtype uint32"),
        ({"cu_seqlens_k": bounds(0, 3, 10, dtype="float32")}, TypeError,
         "cu_seqlens_k has dtype float32"),
        ({"cu_seqlens_q": lambda x: x[None]}, ValueError, "cu_seqlens_q has shape (1, 3)"),
        ({"cu_seqlens_q": bounds()}, ValueError, "cu_seqlens_q has no items"),
        ({"cu_seqlens_k": bounds(0, 10)}, ValueError, "cu_seqlens_k has shape (2,)"),
        ({"cu_seqlens_q": bounds(1, 5, 7)}, ValueError, "cu_seqlens_q = [1, 5, 7]"),
        ({"cu_seqlens_q": bounds(0, 5, 4)}, ValueError, "cu_seqlens_q = [0, 5, 4]"),
        ({"cu_seqlens_q": bounds(0, 5, 8)}, ValueError, "cu_seqlens_q = [0, 5, 8]"),
        ({"cu_seqlens_k": bounds(0, -1, 7)}, ValueError, "cu_seqlens_k = [0, -1, 7]"),
        ({"cu_seqlens_k": bounds(0, 4, 11)}, ValueError, "cu_seqlens_k = [0, 4, 11]"),
        ({"cu_seqlens_q": bounds(0, 1, 7)}, ValueError, "sequence 1 of cu_seqlens_q has 6 rows"),
        ({"cu_seqlens_k": bounds(0, 8, 10)}, ValueError, "sequence 0 of cu_seqlens_k has 8 rows"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_arrays(changed, kind, message, backend):
    with cupyattn.backend(backend), pytest.raises(kind, match=re.escape(message)):
        call(**changed)


@pytest.mark.parametrize("backend", RUNS)
@pytest.mark.parametrize("most", [2**30, 2**31, 2**40, 2**70])
def test_longest_lengths_may_be_any_larger_numbers(most, backend):
    with cupyattn.backend(backend):
        assert np.array_equal(call(longest=(most, most)), call())


def test_rows_that_lie_too_far_apart_have_no_other_implementation(monkeypatch):
    monkeypatch.setattr("cupyattn.ops.attention.layouts._TILE_BYTES", 64)
    halves = {name: lambda x: x.astype(np.float16) for name in "qkv"}
    with (
        cupyattn.backend("emulator"),
        pytest.raises(ValueError, match=r"k has .* here; copy it with ascontiguousarray\(k\)$"),
    ):
        call(**halves)


@pytest.mark.parametrize(
    ("longest", "kind", "message"),
    [
        ((4, 7), ValueError, "sequence 0 of cu_seqlens_q has 5 rows"),
        ((5, 6), ValueError, "sequence 1 of cu_seqlens_k has 7 rows"),
        ((-1, 7), ValueError, "max_seqlen_q = -1"),
        ((5, -3), ValueError, "max_seqlen_k = -3"),
        ((5.0, 7), TypeError, "max_seqlen_q is 5.0, a float"),
        ((5, None), TypeError, "max_seqlen_k is None"),
        ((5, [7]), TypeError, "max_seqlen_k is [7], a list"),
        ((True, 7), TypeError, "max_seqlen_q is True"),
    ],
)
def test_longest_lengths(longest, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call(longest=longest)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"seqused_k": np.array([3, 8])}, ValueError, "seqused_k has values from 3 to 8"),
        ({"seqused_k": np.array([4, 7])}, ValueError, "seqused_k has values from 4 to 7"),
        ({"seqused_k": np.array([3])}, ValueError, "seqused_k has shape (1,)"),
        ({"q_offset": np.zeros(3, int)}, ValueError, "q_offset has shape (3,)"),
        ({"mask": np.ones((7, 10), bool)}, ValueError,
         "it broadcasts to the scores, (B, H, queries, keys) = (2, 4, 5, 7)"),
        ({"bias": np.ones((3, 1, 5, 7), "float32")}, ValueError, "bias has shape (3, 1, 5, 7)"),
        ({"alibi_slopes": np.ones(3, "float32")}, ValueError, "alibi_slopes has shape (3,)"),
        ({"sinks": np.ones(3, "float32")}, ValueError, "sinks has shape (3,)"),
        ({"dropout_p": 0.5}, ValueError, "dropout_p = 0.5 without a seed"),
        ({"window_size": 3}, TypeError, "window_size = 3"),
        ({"rotary": (np.ones((6, 4), "float32"),) * 2}, ValueError, "stand at positions"),
        ({"score_mod": 3}, TypeError, "score_mod is a int"),
        ({"return_lse": 1}, TypeError, "return_lse = 1"),
        ({"out": np.zeros((2, 5, 4, 6), "float32")}, ValueError, "out is "),
        ({"out": np.zeros((8, 4, 6), "float32")}, ValueError, "out is float32 (8, 4, 6)"),
        ({"out": (np.zeros((7, 4, 6), "float32"), np.zeros((7, 4), "float32")),
          "return_lse": True}, ValueError, "lse is float32 (7, 4)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_options(options, kind, message, backend):
    with cupyattn.backend(backend), pytest.raises(kind, match=re.escape(message)):
        call(options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mask_mod", lambda b, h, i, j: i >= j), ("score_mod", lambda s, b, h, i, j: 2 * s)],
)
def test_a_python_function_has_no_kernel(name, value):
    with (
        cupyattn.backend("emulator"),
        pytest.raises(NotImplementedError, match=f"{name} in attention_varlen"),
    ):
        call({name: value, "q_offset": 0})


def test_a_result_may_not_be_an_input():
    _, k, _, *bounds = PROBLEM.arrays()
    both = np.zeros((7, 4, 8), np.float32)
    values = np.zeros((10, 2, 8), np.float32)
    with pytest.raises(ValueError, match="out overlaps q"):
        cupyattn.attention_varlen(both, k, values, *bounds, 5, 7, out=both)


def test_no_sequence_and_no_heads():
    q, k, v, *_ = PROBLEM.arrays()
    none = np.zeros(1, np.int32)
    for backend in ("reference", "emulator"):
        with cupyattn.backend(backend):
            out = cupyattn.attention_varlen(q[:0], k[:0], v[:0], none, none, 0, 0)
            assert out.shape == (0, 4, 6)
            bounds = PROBLEM.bounds
            out = cupyattn.attention_varlen(q[:, :0], k[:, :0], v[:, :0], *bounds, 5, 7)
            assert out.shape == (7, 0, 6)
