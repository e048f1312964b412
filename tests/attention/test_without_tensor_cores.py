"""float16 on devices without tensor cores: the float32 kernels, within float32's bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.backward_runs import check_accumulated, error_ratios, inputs
from support.backward_runs import run as run_backward
from support.devices import without_tensor_cores
from support.forward_runs import run as run_forward
from support.paged import PagedProblem, on_kernels
from support.search import examples, mostly_deep, wider
from support.strategies import FRUGAL, attention_problems

import cupyattn
from cupyattn import AttentionGrads, reference
from cupyattn.ops.attention.kernels import float32
from cupyattn.testing import AttentionCase

pytestmark = pytest.mark.nvrtc


@pytest.fixture(scope="module", autouse=True)
def kernels_of_such_a_device():
    with without_tensor_cores():
        yield


def forward_ratio(problem: AttentionCase) -> float:
    """The largest error over the bound of weights that stay in float32."""
    found = run_forward(problem, "flash")
    arrays, options = problem.arrays(), problem.keywords()
    row = float32.forward.flash_row(75, problem.D, problem.Dv)
    bounds = reference.attention_bound(
        *arrays, dtype="float16", tile_k=row.tile_k, float32_weights=True, **options
    )
    exact = reference.attention(*arrays, **options)
    return max(reference.error_ratio(*each) for each in zip(found, exact, bounds, strict=True))


def backward_ratio(problem: AttentionCase, **more: Any) -> float:
    """The largest error of a gradient over that bound."""
    arrays, options = inputs(problem)
    found = run_backward(arrays, options, "flash", **more)
    ratios = error_ratios(found, arrays, options, float32_weights=True)
    return max(ratios.values())


HEAD_DIMS = wider([(24, 40)], [(64, 64), (33, 24), (128, 128), (160, 160), (256, 256)])
DRAWN = attention_problems(
    head_dims=HEAD_DIMS, dtypes=("float16",), options={}, largest=100, **FRUGAL
)


@given(problem=DRAWN)
@examples(3, deep=16)
def test_forward_within_bounds_of_the_reference(problem: AttentionCase):
    assert forward_ratio(problem) <= 1


@pytest.mark.parametrize("deterministic", [False, True])
@given(problem=DRAWN)
@examples(3, deep=12)
def test_backward_within_bounds_of_the_reference(deterministic: bool, problem: AttentionCase):
    assert backward_ratio(problem, deterministic=deterministic) <= 1


BASE = AttentionCase(B=2, Sq=37, Sk=90, H=4, G=2, D=24, Dv=40, dtype="float16")
EVERY_OPTION = replace(
    BASE, B=1, Sk=70,
    options=(("causal", True), ("mask", (37, 70)), ("bias", ((4, 1, 70), "float16")),
           ("alibi_slopes", ((4,), "float32", 1)), ("softcap", 2.0), ("sinks", "float16"),
           ("dropout_p", 0.5)),
)  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("problem", [EVERY_OPTION, replace(EVERY_OPTION, D=64, Dv=64)])
def test_every_option(problem):
    assert forward_ratio(problem) <= 1
    assert backward_ratio(problem) <= 1


def test_gradients_are_added_to():
    """dq goes through float32 scratch memory, and is rounded once with what is there."""
    arrays, options = inputs(BASE)
    rng = np.random.default_rng(1)
    before = {
        name: rng.standard_normal(array.shape).astype(np.float16)
        for name, array in zip(("dq", "dk", "dv"), arrays[1:4], strict=True)
    }
    grads = AttentionGrads(*(array.copy() for array in before.values()), None, None)
    with cupyattn.backend("emulator"):
        cupyattn.attention_backward(*arrays, **options, grads=grads, accumulate=True)
    found = {name: getattr(grads, name) for name in before}
    check_accumulated(found, before, arrays, options)


def test_rows_of_dq_lie_anywhere():
    """dq is a view of several heads and sequences, with room between them."""
    arrays, options = inputs(BASE)
    room = np.full((2, 37, 5, 32), 77, np.float16)
    dq = room[:, :, :4, :24]
    dk, dv = (np.empty_like(array) for array in arrays[2:4])
    with cupyattn.backend("emulator"):
        grads = cupyattn.attention_backward(
            *arrays, **options, grads=AttentionGrads(dq, dk, dv, None, None)
        )
    found = {name: getattr(grads, name) for name in ("dq", "dk", "dv")}
    assert max(error_ratios(found, arrays, options, float32_weights=True).values()) <= 1
    assert (room[:, :, 4:] == 77).all() and (room[..., 24:] == 77).all()


@pytest.mark.parametrize(
    ("queries", "bits"),
    mostly_deep(itertools.product([1, 3, 40], [None, 8, 4]), [(1, None), (40, None), (1, 8)]),
)
def test_paged_attention(queries: int, bits: int | None):
    """Decoded, and by the forward over blocks; head dim 64 has rows of tensor cores too."""
    problem = PagedProblem((70, 17), queries, G=1, group=2, D=64, dtype="float16", bits=bits)
    arrays = problem.arrays()
    assert problem.ratio(*_on_such_a_device(problem, arrays), arrays) <= 1


def _on_such_a_device(problem: PagedProblem, arrays: tuple[np.ndarray, ...]) -> Any:
    with without_tensor_cores():
        return on_kernels(problem, arrays)


def test_keys_are_split_where_few_queries_see_many():
    problem = AttentionCase(B=1, Sq=2, Sk=300, H=2, G=1, D=64, Dv=64, dtype="float16")
    assert forward_ratio(problem) <= 1
