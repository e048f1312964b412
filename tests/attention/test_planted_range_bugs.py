"""Bugs planted in what keeps gradients of scores within float16's range are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.backward_runs import error_ratios, inputs
from support.beyond_float16 import Beyond, Uneven, recorded_scales
from support.planted_bugs import Bug, planted_device
from support.varlen import VarlenProblem

import cupyattn
from cupyattn.emulator import KernelFault

pytestmark = pytest.mark.nvrtc

ONE_PASS, DETERMINISTIC = False, True
SIZES = {"B": 2, "Sq": 20, "Sk": 33, "H": 4, "G": 2, "D": 64, "Dv": 64, "dtype": "float16"}
UNUSED = (("seqused_k", (33, 9)), ("dropout_p", 0.9))
PLAIN, OF_SINKS = Uneven(**SIZES), Beyond(**SIZES, drawn=(("sinks", "float32"),))
KEPT, WIDE = Beyond(**SIZES, drawn=UNUSED), Uneven(**{**SIZES, "D": 256, "Dv": 256})
EVERY_SCORE, EVERY_HEAD = (
    Beyond(**SIZES, drawn=(("bias", (shape, "float32")),)) for shape in ((2, 4, 20, 33), (4, 1, 33))
)
PACKED = VarlenProblem(
    Uneven(**{**SIZES, "B": 3, "Sq": 70, "Sk": 66}), queries=(20, 70, 9), keys=(33, 66, 40)
)
PACKED_KEPT = VarlenProblem(
    Beyond(**{**SIZES, "B": 3}, drawn=(("seqused_k", (9, 33, 5)),)),
    queries=(20, 5, 9), keys=(33, 20, 7),
)  # fmt: skip

Problem = Beyond | VarlenProblem


def gradients(
    problem: Problem, deterministic: bool, of_dout: float = 1, of_dlse: float = 1
) -> dict[str, np.ndarray]:
    """Gradients by name, of dout and dlse times these."""
    if isinstance(problem, VarlenProblem):
        (dout, *arrays), bounds, options = problem.backward_inputs()
        call = cupyattn.attention_varlen_backward
        arrays = [*arrays, *bounds, *problem.longest]
    else:
        (dout, *arrays), options = inputs(problem)
        call = cupyattn.attention_backward
    options["dlse"] = options["dlse"] * np.float32(of_dlse)
    dout = dout * np.float16(of_dout)
    grads = call(dout, *arrays, **options, deterministic=deterministic)
    return {name: x for name, x in grads._asdict().items() if x is not None}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have backwards run from sources with bugs in them."""

    def plant(*bugs: Bug) -> None:
        folder = tmp_path / f"cuda_src{len(bugs)}"
        planted_device(monkeypatch, folder, *bugs, modules=["backward", "varlen_backward"])

    return plant


def ratios_of(problem: Problem, deterministic: bool) -> dict[str, float]:
    """Errors over bounds."""
    found = gradients(problem, deterministic)
    if isinstance(problem, VarlenProblem):
        return problem.backward_ratios(found)
    return error_ratios(found, *inputs(problem))


@pytest.mark.parametrize("deterministic", [ONE_PASS, DETERMINISTIC])
@pytest.mark.parametrize(
    "problem", [PLAIN, OF_SINKS, EVERY_SCORE, EVERY_HEAD, WIDE, PACKED], ids=str
)
def test_a_clean_copy_is_right(problem, deterministic, planted):
    planted()
    ratios = ratios_of(problem, deterministic)
    assert 0 < max(ratios.values()) <= 1, ratios


(
    SCALE_CUH,
    SCORES_CUH,
    SCALES_CUH,
    DELTA_CUH,
    CONVERT_CUH,
    DKDV_CUH,
    DQ_CUH,
    KEYS_CUH,
    WIDE_CUH,
    SUMMED_CUH,
) = (
    f"attention/tensor_core/{name}.cuh"
    for name in (
        *("gradient_scale", "score_gradient", "backward_scales", "backward_delta"),
        *("backward_convert", "backward_dkdv", "backward_dq", "dkdv", "backward_dkdv_paired"),
        "backward_summed_dbias",
    )
)
DELTA_CU, SCALES_CU, DELTA_VARLEN_CU, SCALES_VARLEN_CU = (
    f"attention/tensor_core/backward_{name}.cu"
    for name in ("delta", "scales", "delta_varlen", "scales_varlen")
)
BUGS = [
    (PLAIN, ONE_PASS, Bug(CONVERT_CUH, "even[lane] * scale", "even[lane] * params.scale")),
    (PLAIN, ONE_PASS, Bug(KEYS_CUH, "params.scale * scales.up()", "params.scale")),
    (PLAIN, DETERMINISTIC, Bug(DQ_CUH, "params.scale * scales.up()", "params.scale")),
    (PLAIN, ONE_PASS, Bug(DKDV_CUH, "scale_fragments(warp.v, scale.down);", "")),
    (WIDE, ONE_PASS, Bug(WIDE_CUH, "scale_fragments(warp.rows, cta.scale.down);", "")),
    (PLAIN, DETERMINISTIC, Bug(DQ_CUH, "(scale.down)", "(1.f)")),
    (PLAIN, ONE_PASS, Bug(DKDV_CUH, "place.kv_head * attention.group);", "0);")),
    (PLAIN, ONE_PASS, Bug(SCALE_CUH, "if (threadIdx.x == 0) ctas_g", "if (!blockIdx.x) ctas_g")),
    (PLAIN, ONE_PASS, Bug(SCALE_CUH, "batch * params.attention.heads + head", "head")),
    (PLAIN, ONE_PASS, Bug(SCALES_CUH, "pairs_g[pair].w *= scale.down;", "")),
    (
        PLAIN,
        ONE_PASS,
        Bug(
            SCALES_CUH,
            "for (int head = 0; head < attention.group; head++)",
            "for (int head = 0; head < 1; head++)",
        ),
    ),
    (PLAIN, ONE_PASS, Bug(SCALES_CUH, "div_up(queries, 2)", "queries / 4")),
    (EVERY_SCORE, ONE_PASS, Bug(SCORES_CUH, "scale.up, Dbias::kAcc", "1.f, Dbias::kAcc")),
    (EVERY_HEAD, ONE_PASS, Bug(SUMMED_CUH, "dp[n][i][e], own_scale.up,", "dp[n][i][e], 1.f,")),
    (PACKED, ONE_PASS, Bug(SCALES_VARLEN_CU, "scratch_begin(queries, batch))", "0)")),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "deterministic", "bug"), BUGS)
def test_wrong_gradients_are_found(problem, deterministic, bug, planted):
    planted(bug)
    with suppress(KernelFault):  # which is as good
        ratios = ratios_of(problem, deterministic)
        assert not max(ratios.values()) <= 1, ratios  # NaN too


# What makes k larger than it has to be, or smaller by little, is seen in k alone.
OTHER_POWERS = [
    (PLAIN, Bug(SCALES_CUH, "dout_square * v_square", "v_square")),
    (PLAIN, Bug(DELTA_CUH, "sizes.take_square(square);", "")),
    (PLAIN, Bug(DELTA_CUH, "sizes.take_square(v.product(v));", "")),
    (PLAIN, Bug(SCALES_CU, "blockIdx.x) * padded_rows", "0) * padded_rows")),
    (PLAIN, Bug(DELTA_CU, "(flat - rows) / padded", "0 / padded")),
    (
        PACKED,
        Bug(SCALES_VARLEN_CU, "kv_head * padded + scratch_begin(keys, batch)", "kv_head * padded"),
    ),
    (PACKED, Bug(DELTA_VARLEN_CU, "sequence.keys.begin + key)", "0)")),
    (KEPT, Bug(SCALES_CUH, "attention.scores.keep_scale, delta", "1.f, delta")),
    (KEPT, Bug(DELTA_CU, "key < keys_in_use(attention, seqused_k_g, batch)", "key < attention.sk")),
    (
        PACKED_KEPT,
        Bug(DELTA_VARLEN_CU, "key < sequence.keys_in_use", "key < sequence.keys.count"),
    ),
    (PLAIN, Bug(SCALES_CUH, "sizes.take_delta(of_cta.y);", "")),
    (PLAIN, Bug(DELTA_CUH, "sizes.take_delta(fabsf(sum));", "")),
    (PLAIN, Bug(SCALES_CUH, "log2 - kMostLog2, 0", "log2 - kMostLog2, 1")),
    (PLAIN, Bug(SCALE_CUH, "kMostLog2 = 15", "kMostLog2 = 14")),
]


@pytest.mark.parametrize(("problem", "bug"), OTHER_POWERS)
def test_another_power_of_two_is_found(problem, bug, planted):
    planted()
    right = powers(problem)
    planted(bug)
    with suppress(KernelFault):  # which is as good
        assert not np.array_equal(powers(problem), right)


def powers(problem: Problem) -> np.ndarray:
    """2^-k and 2^k of each head, also of a small dout with a large dlse, and of none."""
    with recorded_scales() as found:
        for factors in ((1, 1), (2.0**-20, 1e6), (0, 0)):
            gradients(problem, DETERMINISTIC, *factors)
    return np.array(found)
