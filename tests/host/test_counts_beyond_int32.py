"""Extents that kernels' integers do not hold are refused by name, before anything is compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cupyattn
from cupyattn.kernels.launch import typed
from cupyattn.kernels.spec import KernelSpec, Scalar
from cupyattn.kernels.structs.record import record

MANY = 2**31


def rows(batch: int, seq: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays shaped like q and lse, without items."""
    return np.zeros((batch, seq, heads, 8), np.float32), np.zeros((batch, heads, seq), np.float32)


def attended(batch: int, seq: int, heads: int) -> Any:
    q, _ = rows(batch, seq, heads)
    return cupyattn.attention(q, q, q)


def differentiated(batch: int, seq: int, heads: int) -> Any:
    q, lse = rows(batch, seq, heads)
    return cupyattn.attention_backward(q, q, q, q, q, lse)


def merged(batch: int, seq: int, heads: int) -> Any:
    out, lse = rows(batch, seq, heads)
    return cupyattn.merge_attention(out, lse, out, lse)


@pytest.mark.parametrize(
    ("call", "shape", "name"),
    [
        (attended, (1, 0, MANY), "heads"),
        (attended, (0, 1, MANY), "heads"),
        (differentiated, (1, 0, MANY), "heads"),
        (differentiated, (MANY, 0, 1), "batch"),
        (merged, (1, 0, MANY), "heads"),
        (merged, (0, MANY, 1), "seq"),
    ],
)
def test_more_than_int32_holds_is_refused_by_name(
    call: Callable[..., Any], shape: tuple[int, int, int], name: str
):
    message = f"{name} = {MANY}; kernels take {name} as int32, {-MANY} to {MANY - 1}; split the"
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match=re.escape(message)):
        call(*shape)


def test_many_heads_with_items_are_refused_before_memory_is_taken():
    q = as_strided(np.zeros(8, np.float32), (1, 1, MANY, 8), (0, 0, 0, 4))
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match="heads = 2147483648; ker"):
        cupyattn.attention(q, q, q)


def test_a_token_that_is_more_than_a_launch_takes_is_refused():
    q = as_strided(np.zeros(8, np.float16), (1, 1, MANY, 8), (0, 0, 0, 2))
    tables = cupyattn.rope_tables(1, 8)
    message = "one such token is more than a launch of rope takes; split the batch or the heads"
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match=message):
        cupyattn.rope(q, *tables)


def test_fields_of_a_struct_refuse_what_they_do_not_hold():
    inner = np.dtype([("count", np.uint32)])
    params = record(np.dtype([("inner", inner), ("each", np.int32, (2,)), ("scale", np.float32)]))
    with pytest.raises(ValueError, match="count = 4294967296; kernels take count as uint32"):
        params["inner"]["count"] = 2**32
    with pytest.raises(ValueError, match="each = -2147483649; kernels take each as int32"):
        params["each"][1] = -(2**31) - 1
    with pytest.raises(ValueError, match=r"each = \(0, 2147483648\); kernels take"):
        params["each"] = 0, 2**31
    params["each"] = 0, 2**31 - 1
    params["inner"]["count"] = 2**32 - 1
    params["scale"] = 1.5
    filled = params[()]
    assert isinstance(filled, np.void)
    assert filled["each"].tolist() == [0, 2**31 - 1]
    assert (filled["inner"]["count"], filled["scale"]) == (2**32 - 1, 1.5)


def test_a_number_passed_by_value_refuses_what_it_does_not_hold():
    spec = KernelSpec("copy", "copy.cu", (Scalar("count", np.dtype(np.int32)),))
    assert typed(spec, [2**31 - 1]) == [2**31 - 1]
    with pytest.raises(ValueError, match="count = 2147483648; kernels take count as int32"):
        typed(spec, [2**31])
