"""Bugs planted in the norms' kernels are found: by the emulator's checks, or by the bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.norm_problems import NormProblem, backward_ratios, forward_ratios
from support.planted_bugs import Bug, PlantedDevice, plant, without_barrier

from cupyattn import LayerNormGrads, RMSNormGrads, reference
from cupyattn.arrays import adopt
from cupyattn.emulator import Checks, SharedMemoryRaceError
from cupyattn.kernels.configs.layers import norms
from cupyattn.ops.rows import row_problem, run_rows

pytestmark = pytest.mark.nvrtc

FORWARD_CU, BACKWARD_CU = "layers/norm_forward.cu", "layers/norm_backward.cu"
ROWS_CUH, MOMENTS_CUH, SUMS_CU = "common/rows.cuh", "layers/moments.cuh", "layers/column_sums.cu"
ALL = ("weight", "bias", "residual")

SHORT = NormProblem((37, 1, 40), "float16", arrays=ALL)
"""Several rows to a warp."""
LAYER = NormProblem((11, 1, 2056), "float16", arrays=ALL)
"""Several warps to a row; of the backward four rows to a CTA, and more rows than that at a time."""
RMS = NormProblem((11, 1, 1032), "float16", False, ("weight", "residual"), weight_offset=1.0)
LONG = NormProblem((5, 1, 20_000), "float16", arrays=ALL)
"""Read twice."""
SMALL = NormProblem((5, 1, 24), "float32", arrays=ALL, mean=3.0)
FAR = NormProblem((5, 1, 24), "float32", arrays=ALL, mean=1e4, spread=1e-2)
"""Of whose mean float32 loses a twentieth of a standard deviation."""

Run = Callable[..., dict[str, float]]


def forward_of(problem: NormProblem, device: PlantedDevice) -> dict[str, float]:
    names = ("x", "residual", "weight", "bias")
    given = {name: problem.array(name) for name in names}
    operands = adopt({**given, "out": np.full_like(given["x"], np.nan)})
    statistics = ("mean", "rstd") if problem.centred else ("rstd",)
    described = row_problem(
        norms.FORWARD, operands, wanted=statistics, choices={"centred": problem.centred},
        scalars={"eps": problem.eps, "weight_offset": problem.weight_offset},
    )  # fmt: skip
    found = run_rows(device, described, operands)
    results = (found["out"], found.get("total", problem.array("x")), found.get("mean"))
    return forward_ratios(problem, (*results, found["rstd"]))


def backward_of(problem: NormProblem, device: PlantedDevice) -> dict[str, float]:
    total = problem.array("x")
    eps = float(np.float32(problem.eps))
    _, _, mean, rstd = reference.norm(total, centred=problem.centred, eps=eps)
    mean = mean.astype(np.float32) if problem.centred else None
    given: dict[str, Any] = {"x": total, "mean": mean, "rstd": rstd.astype(np.float32)}
    given |= {name: problem.array(name) for name in ("dout", "dtotal", "weight", "bias")}
    operands = adopt({**given, "dx": np.full_like(total, np.nan)})
    scalars = {"weight_offset": problem.weight_offset}
    described = row_problem(norms.BACKWARD, operands, scalars=scalars)
    found = run_rows(device, described, operands)
    kind = LayerNormGrads if problem.centred else RMSNormGrads
    grads = kind(**{name: found.get(name) for name in kind._fields})
    return backward_ratios(problem, total, mean, given["rstd"], grads)


@pytest.fixture
def ratio(tmp_path) -> Callable[..., float]:
    """The largest error of a kernel with bugs in it, over its bound."""

    def ratio(run: Run, problem: NormProblem, *bugs: Bug) -> float:
        plant(tmp_path / "cuda_src", *bugs)
        found = run(problem, PlantedDevice(tmp_path / "cuda_src", Checks.all()))
        return max(found.values())

    return ratio


@pytest.mark.parametrize("run", [forward_of, backward_of])
@pytest.mark.parametrize("problem", [SHORT, LAYER, RMS, LONG, SMALL, FAR], ids=str)
def test_a_clean_copy_is_right(run, problem, ratio):
    assert 0 < ratio(run, problem) <= 1


@pytest.mark.parametrize(
    ("run", "problem", "file", "comment", "barrier"),
    [
        (forward_of, LONG, MOMENTS_CUH, "partial: written", "row_barrier<Rows>();"),
        (forward_of, LAYER, ROWS_CUH, "partial[buffer]: written", "row_barrier<Rows>();"),
        (forward_of, RMS, ROWS_CUH, "partial[buffer]: written", "row_barrier<Rows>();"),
        (backward_of, LAYER, ROWS_CUH, "partial[buffer]: written", "row_barrier<Rows>();"),
        (backward_of, LAYER, ROWS_CUH, "columns_s: the previous", "__syncthreads();"),
        (backward_of, LAYER, ROWS_CUH, "columns_s: written", "__syncthreads();"),
        (backward_of, SHORT, SUMS_CU, "smem_s.sum: written", "__syncthreads();"),
    ],
)
def test_a_barrier_dropped_is_found(run, problem, file, comment, barrier, ratio):
    with pytest.raises(SharedMemoryRaceError):
        ratio(run, problem, without_barrier(file, comment, barrier))


@pytest.mark.parametrize(
    "bug",
    [
        Bug(BACKWARD_CU, "buffer ^= 1", "buffer ^= 0"),
        Bug(ROWS_CUH, "warp_index() / kWarps * kWarps + ", ""),
    ],
    ids=["one buffer for every row", "the sums of another row"],
)
def test_sums_read_too_early_are_found(bug, ratio):
    with pytest.raises(SharedMemoryRaceError):
        ratio(backward_of, LAYER, bug)


FORWARD_MISTAKES = {
    "the last row is left out": (SHORT, Bug(FORWARD_CU, "< params.rows;", "< params.rows - 1;")),
    "items are counted by vectors": (
        LONG, Bug(FORWARD_CU, "part.count += Rows::kVec;", "part.count += 1;"),
    ),
    "absent columns deviate": (
        LAYER, Bug(FORWARD_CU, "if (strip_exists<Rows>(strip, length)) part", "part"),
    ),
    "a part's mean is taken for the row's": (
        LONG, Bug(MOMENTS_CUH, "    s1 = warp_reduce<Sum, kWidth>(s1);\n", ""),
    ),
    "a lane's mean for a warp's": (
        SMALL, Bug(FORWARD_CU, "  smem_s.sums.add_up(sum, 0);\n", ""),
    ),
    "a lane's deviations for a warp's": (
        SHORT, Bug(FORWARD_CU, "  smem_s.moments.add_up(about, 0);\n", ""),
    ),
    "a row counts one lane's items": (
        LAYER, Bug(FORWARD_CU, "= static_cast<float>(length);", "= Rows::kVec;"),
    ),
    "parts are not moved to one pivot": (
        LONG, Bug(MOMENTS_CUH, "s2 += distance * (2.f * s1 + count * distance);", ""),
    ),
    "the squares of the other sign of s1": (LONG, Bug(MOMENTS_CUH, "(2.f * s1 +", "(-2.f * s1 +")),
    "what the pivot lacks is lost": (
        NormProblem((3, 1, 2056), mean=1e4, spread=1e-2, eps=0.0),
        Bug(MOMENTS_CUH, "return s1 * inverse(count);", "return 0.f;"),
    ),
    "the variance of n - 1": (
        SMALL, Bug(MOMENTS_CUH, "* inverse(count);  // of", "* inverse(count - 1.f);  // of"),
    ),
    "eps is left out": (
        NormProblem((5, 1, 24), "float32", spread=1e-3),
        Bug(FORWARD_CU, "mean_square + eps", "mean_square"),
    ),
    "the unrounded sum is normalised": (
        NormProblem((5, 1, 24), "float16", arrays=ALL, mean=1000.0, spread=0.3),
        Bug(FORWARD_CU, "    x.set(total);\n", ""),
    ),
    "the weight of the neighbouring column": (
        RMS, Bug(FORWARD_CU, "weight_offset + weight[i];", "weight_offset + weight[i ^ 1];"),
    ),
    "no offset": (RMS, Bug(FORWARD_CU, "weight_offset + weight[i];", "weight[i];")),
    "the second read is of x": (
        LONG, Bug(FORWARD_CU, "WITH_RESIDUAL ? row.total_g : row.x_g", "row.x_g"),
    ),
    "the second read is of the first strip": (
        LONG, Bug(FORWARD_CU, "row.total_g : row.x_g, strip,", "row.total_g : row.x_g, 0,"),
    ),
}  # fmt: skip
BACKWARD_MISTAKES = {
    "the last row is left out": (SHORT, Bug(BACKWARD_CU, "= index < params.rows;",
                                            "= index < params.rows - 1;")),
    "rows are walked once": (LAYER, Bug(BACKWARD_CU, "start += step, buffer",
                                        "start += params.rows, buffer")),
    "the next row is the next but one": (RMS, Bug(BACKWARD_CU, "params, index + step);",
                                                    "params, index + 2 * step);")),
    "the mean of g is left out": (LAYER, Bug(BACKWARD_CU, "g[i] - g_shift -", "g[i] -")),
    "x is not centred": (FAR, Bug(BACKWARD_CU, "(normal[i] - row.mean)", "normal[i]")),
    "what the mean lost stays lost": (FAR, Bug(BACKWARD_CU, "row.rstd - c;", "row.rstd;")),
    "g n is of what is not centred": (FAR, Bug(BACKWARD_CU, "sums[0] -= c * sums[1];", "")),
    "columns that are not there count": (FAR, Bug(BACKWARD_CU,
        "if (strip_exists<Rows>(strip, row.length)) sums[2]", "sums[2]")),
    "no rstd": (RMS, Bug(BACKWARD_CU, "dx[i] = row.rstd *", "dx[i] =")),
    "no offset": (RMS, Bug(BACKWARD_CU, ": weight_offset + g[i]", ": g[i]")),
    "the sum's gradient is left out": (LAYER, Bug(BACKWARD_CU,
        "    row.dtotal[held].get(more);\n",
        "    for (int i = 0; i < Rows::kVec; i++) more[i] = 0.f;\n")),
    "rows side by side are not added": (LAYER, Bug(ROWS_CUH, "row < Rows::kRowsPerCta; row++",
                                                   "row < 1; row++")),
    "columns of the neighbouring item": (LAYER, Bug(ROWS_CUH, "item % Rows::kVec * kPitch",
                                                    "(item ^ 1) % Rows::kVec * kPitch")),
    "a longer row's sums begin anew": (LONG, Bug(ROWS_CUH, "if (!first) load_vec(total,",
                                                 "if (first && !first) load_vec(total,")),
    "the sums of one CTA are left out": (SHORT, Bug(SUMS_CU, "p < count;", "p < count - 1;")),
    "two results are one": (SHORT, Bug(SUMS_CU, "partials_g = more_partials_g, sums_g",
                                       "sums_g")),
    "a warp's sum is left out": (LAYER, Bug(SUMS_CU, "int warp = 0; warp", "int warp = 1; warp")),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD_MISTAKES)
def test_a_mistake_in_the_forward_is_outside_its_bounds(name, ratio):
    problem, bug = FORWARD_MISTAKES[name]
    assert not ratio(forward_of, problem, bug) <= 2


@pytest.mark.parametrize("name", BACKWARD_MISTAKES)
def test_a_mistake_in_the_backward_is_outside_its_bounds(name, ratio):
    problem, bug = BACKWARD_MISTAKES[name]
    assert not ratio(backward_of, problem, bug) <= 2
