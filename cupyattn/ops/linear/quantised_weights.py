"""A quantised weight as kernels see it."""

from __future__ import annotations

from cupyattn.ops.linear.problem import LinearProblem, Matrix
from cupyattn.ops.linear.tiles import Blocks

_WHOLE_ROW_LOG2 = 31


def weight_matrix(problem: LinearProblem) -> Matrix:
    """Return w as if its rows of codes were of float16."""
    width = problem.weight_columns
    transposed = problem.weight is not None and problem.weight.transposed
    strides = (width, 1) if transposed else (1, problem.inner)
    return Matrix(problem.inner, width, *strides, problem.dtype.itemsize, 0)


def blocks_of(problem: LinearProblem) -> Blocks:
    """Return how the rows of codes are divided."""
    assert problem.weight is not None
    name, block_size, transposed = problem.weight
    blocks = (problem.weight_columns if transposed else problem.inner) // block_size
    return Blocks(name, blocks, block_size.bit_length() - 1 if blocks > 1 else _WHOLE_ROW_LOG2)
