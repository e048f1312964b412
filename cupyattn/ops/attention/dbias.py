"""The gradient of a bias, summed from a float32 scratch over what the bias broadcast along."""

from __future__ import annotations

import math

import numpy as np

from cupyattn.arrays import Layout
from cupyattn.kernels.configs.attention.tensor_core import passes
from cupyattn.kernels.structs.attention import DBIAS_PARAMS
from cupyattn.ops.attention.params import score_strides
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.ops.plan import Step


def sum_step(problem: AttentionProblem, dbias: Layout, scratch: Layout, accumulate: bool) -> Step:
    """Return the launch that sums the scratch to dbias."""
    shape = four_axes(dbias.shape)
    params = np.zeros((), DBIAS_PARAMS)
    params["shape"] = shape
    params["repeats"] = [
        1 if items == extent else extent for items, extent in zip(shape, scratch.shape, strict=True)
    ]
    params["source"] = score_strides(scratch, problem.scores_shape)
    params["target"] = score_strides(dbias, problem.scores_shape)
    params["accumulate"] = accumulate
    ctas = passes.dbias_ctas(math.prod(shape), bool(params["repeats"][3] > 1))
    return Step.of(passes.dbias(dbias.dtype.name), ctas, params[()])


def four_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array that broadcasts to (B, H, Sq, Sk), with every axis."""
    return (1,) * (4 - len(shape)) + shape
