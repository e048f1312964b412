"""Dense attention of a few queries on the kernels of decoding, of fewer keys than it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.devices import KERNELS, placed
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import reference
from cupyattn.kernels.configs.attention.decode import TENSOR_CORES, TILE_KEYS
from cupyattn.ops.attention import few_queries
from cupyattn.ops.attention import forward as attention_forward


@contextmanager
def decoded(*, wherever: bool = True) -> Iterator[None]:
    """Let the kernels of decoding take all calls that they have, or none, whatever is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_queries, "_is_faster", lambda *_: wherever)
        attention_forward._plan.cache_clear()  # a plan is remembered for its problem
        yield
    attention_forward._plan.cache_clear()


def run(problem: AttentionProblem, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Run one problem on the kernels; returns out and lse as NumPy arrays."""
    options = problem.options() | options
    with KERNELS.running():
        results = cupyattn.attention(
            *map(KERNELS.put, problem.arrays()),
            **{name: placed(KERNELS, value) for name, value in options.items()},
            return_lse=True,
        )
    out, lse = map(KERNELS.get, results)
    return out, lse


def ratio(problem: AttentionProblem, out: np.ndarray, lse: np.ndarray) -> float:
    """The largest error over its bound, that of the tiles and weights of decoding."""
    arrays, options = problem.arrays(), problem.options()
    exact = reference.attention(*arrays, **options)
    bounds = reference.attention_bound(
        *arrays,
        dtype=problem.dtype,
        tile_k=TILE_KEYS,
        float32_weights=problem.dtype != "float16" or problem.D not in TENSOR_CORES[75],
        **options,
    )
    return max(reference.error_ratio(*each) for each in zip((out, lse), exact, bounds, strict=True))
