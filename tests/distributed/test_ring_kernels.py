"""Ring attention on the kernels, the GPU's or the emulator's, within derived bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices import KERNELS
from support.dtypes import dtype_of
from support.ring_bounds import ring_ratios
from support.search import mostly_deep

from cupyattn.distributed import ring_attention, ring_attention_backward, run, shard, unshard

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "causal": (2, "zigzag", "float16", {"causal": True}),
    "three ranks in float32": (3, "zigzag", "float32", {"causal": True}),
    "a window": (3, "contiguous", "float16", {"window_size": (20, 3)}),
    "striped": (2, "striped", "float16", {"causal": True, "softcap": 2.0}),
    "all keys": (2, "contiguous", "bfloat16", {"softmax_scale": 0.3}),
    "dropout": (2, "zigzag", "float16", {"causal": True, "dropout_p": 0.3, "seed": 7}),
}


def drawn(name: str) -> tuple[dict[str, np.ndarray], int, str, dict[str, Any]]:
    ranks, placement, dtype, options = CASES[name]
    rng = np.random.default_rng(len(name))
    tokens = 32 * ranks * (2 if placement == "zigzag" else 1)
    heads = {"q": 2, "k": 1, "v": 1, "dout": 2}
    arrays = {
        array: rng.standard_normal((1, tokens, count, 24)).astype(dtype_of(dtype))
        for array, count in heads.items()
    }
    return arrays, ranks, placement, {"dtype": dtype, **options}


def results(arrays: dict[str, np.ndarray], ranks: int, placement: str, **options: Any) -> Any:
    """out, lse, dq, dk and dv of all ranks, put together."""

    def of_rank(group: Any) -> Any:
        q, k, v, dout = (
            KERNELS.put(shard(x, group.rank, ranks, placement=placement)) for x in arrays.values()
        )
        given = {"group": group, "placement": placement, **options}
        out, lse = ring_attention(q, k, v, return_lse=True, **given)
        grads = ring_attention_backward(dout, q, k, v, out, lse, **given)
        return [KERNELS.get(x) for x in (out, lse, grads.dq, grads.dk, grads.dv)]

    parts = zip(*run(of_rank, ranks, timeout=120), strict=True)
    return [
        unshard(list(part), placement=placement, axis=2 if number == 1 else 1)
        for number, part in enumerate(parts)
    ]


@pytest.mark.parametrize("name", mostly_deep(CASES, ["a window", "striped", "dropout"]))
def test_within_bounds_of_one_device(name):
    arrays, ranks, placement, options = drawn(name)
    dtype = options.pop("dtype")
    found = results(arrays, ranks, placement, **options)
    ratios = ring_ratios(arrays, found, ranks, placement, dtype, **options)
    assert min(ratios.values()) > 0
    assert max(ratios.values()) <= 1, ratios
