"""What attention and its backward write, and how it lies in memory."""

from __future__ import annotations

from cupyattn.ops.attention.problem import BACKWARD_RESULTS, LSE_DTYPE, AttentionProblem
from cupyattn.runtime.arrays import Layout, contiguous
from cupyattn.runtime.plan import Output

Outputs = tuple[tuple[str, Output], ...]


def forward_outputs(problem: AttentionProblem, return_lse: bool) -> Outputs:
    """Return what a forward call writes."""
    out = ("out", Output(problem.out_shape, problem.dtype))
    lse = ("lse", Output(problem.lse_shape, LSE_DTYPE))
    return (out, lse) if return_lse else (out,)


def gradient_outputs(problem: AttentionProblem) -> Outputs:
    """Return what a backward call writes: dbias and dsinks only where there are bias and sinks."""
    return tuple(
        (name, Output(of.shape, of.dtype))
        for name in BACKWARD_RESULTS
        if (of := problem.given(name[1:])) is not None
    )


def result_layouts(problem: AttentionProblem, outputs: Outputs) -> dict[str, Layout]:
    """Return how the results lie: as the caller's arrays do, otherwise contiguous."""
    return {
        name: problem.layouts.get(name)
        or problem.placed(name, contiguous(output.shape, output.dtype))
        for name, output in outputs
    }
