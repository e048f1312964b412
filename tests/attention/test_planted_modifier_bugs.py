"""Bugs planted where kernels take expressions are found: by the emulator, or by the bounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.devices import NUMPY
from support.modifiers import Case
from support.planted_bugs import Bug, planted_device

from cupyattn.emulator import OutOfBoundsError

pytestmark = pytest.mark.nvrtc

SCORES, SINGLE = "attention/scores.cuh", "attention/score_gradient.cuh"
MODIFIERS = "attention/modifiers.cuh"
HALF_GRADIENT = "attention/tensor_core/score_gradient.cuh"
FLOAT_GRADIENT = "attention/float32/score_gradient.cuh"
CASES = {"float16": Case("float16", 8, Sq=21, Sk=67), "float32": Case("float32", 8, Sq=21, Sk=67)}


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run expressions, forward or backward, from sources with bugs in them."""

    def run(dtype: str, *bugs: Bug, backward: bool = False) -> float:
        folder, modules = tmp_path / "cuda_src", ("forward", "backward")
        planted_device(monkeypatch, folder, *bugs, modules=modules)
        case = CASES[dtype]
        own = {"score_mod": case.score_mod(), "mask_mod": case.mask_mod()}
        alike = {**case.score_options(), **case.mask_options()}
        ratios = (case.backward_ratios if backward else case.forward_ratios)(own, alike, NUMPY)
        return max(ratios.values())

    return run


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_clean_copy_is_right(dtype, backward, ratio_with):
    assert 0 < ratio_with(dtype, backward=backward) <= 1


FORWARD = [
    Bug(SCORES, "row(min(row_, sq - 1))", "row(max(row_ - 1, 0))"),
    Bug(SCORES, "if (!modifiers.mask(at.batch, at.head, at.row, at.key))",
        "if (!modifiers.mask(at.batch, at.head, at.key, at.key))"),
    Bug(SCORES, "first_key + key + at", "first_key + key"),
    Bug(MODIFIERS, "{from_g, strides + 1}", "{from_g, strides}"),
]  # fmt: skip


@pytest.mark.parametrize("bug", FORWARD, ids=str)
def test_wrong_scores_are_found(bug, ratio_with):
    with suppress(OutOfBoundsError):  # then the emulator has found it
        assert ratio_with("float16", bug) > 1


@pytest.mark.parametrize(
    "bug",
    [
        Bug(SCORES, "row(min(row_, sq - 1))", "row(row_)"),
        Bug(SCORES, "key(min(key_, sk - 1))", "key(key_)"),
    ],
    ids=str,
)
def test_arrays_read_for_scores_that_do_not_exist_are_found(bug, ratio_with):
    with pytest.raises(OutOfBoundsError):
        ratio_with("float16", bug)


BACKWARD = [
    (
        "float16",
        Bug(
            HALF_GRADIENT,
            "if constexpr (Modifiers::kScore) dp[n][i][e] =",
            "if constexpr (false) dp[n][i][e] =",
        ),
    ),
    ("float16", Bug(HALF_GRADIENT, "if constexpr (Modifiers::kMask) {", "if constexpr (false) {")),
    ("float16", Bug(HALF_GRADIENT, "score = kLn2 * score_log2(", "score = score_log2(")),
    ("float32", Bug(FLOAT_GRADIENT, "pass.gradient(unmodified.c[m][n]", "pass.gradient(s.c[m][n]")),
    ("float32", Bug(FLOAT_GRADIENT, "      pass.modify(s, first_row, first_key);\n", "")),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "bug"), BACKWARD, ids=str)
def test_wrong_gradients_are_found(dtype, bug, ratio_with):
    assert ratio_with(dtype, bug, backward=True) > 1
