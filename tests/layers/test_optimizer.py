"""AdamW in place, and the norm of many arrays: kernels within the bounds of the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import KERNELS, everywhere
from support.dtypes import DTYPES, dtype_of
from support.recording_device import device_array
from support.search import examples, wider

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Report

NUMBERS: dict[str, Any] = {
    "step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1,
}  # fmt: skip


def state(seed: int, dtype: str, *shape: int) -> list[np.ndarray]:
    """param, grad, m and v."""
    rng = np.random.default_rng(seed)
    param, grad = rng.standard_normal((2, *shape)).astype(dtype_of(dtype))
    m = 0.1 * rng.standard_normal(shape, dtype=np.float32)
    return [param, grad, m, rng.random(shape, dtype=np.float32) ** 4]


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(8)
@given(
    dtype=st.sampled_from(wider(("float16", "float32"), DTYPES)),
    shape=st.sampled_from(((1,), (3,), (4, 8), (2, 33), (1030,))),
    step=st.sampled_from((1, 2, 1000)),
    weight_decay=st.sampled_from((0.0, 0.1)),
    eps=st.sampled_from((1e-8, 0.25)),
    scale=st.sampled_from((1.0, 2.0**-10)),
    on_device=st.booleans(),
    seed=st.integers(0, 9),
)
def test_adamw_within_bounds(dtype, shape, step, weight_decay, eps, scale, on_device, seed):
    arrays = state(seed, dtype, *shape)
    arrays[1] = (arrays[1] / scale).astype(arrays[1].dtype)
    numbers = {**NUMBERS, "step": step, "weight_decay": weight_decay, "eps": eps}
    placed = [KERNELS.put(array.copy()) for array in arrays]
    given_scale = KERNELS.put(np.array(scale, np.float32)) if on_device else scale
    cupyattn.adamw_step(*placed, **numbers, grad_scale=given_scale)
    exact = reference.adamw_step(*arrays, **numbers, grad_scale=scale)
    bounds = reference.adamw_step_bound(*arrays, **numbers, grad_scale=scale, dtype=dtype)
    assert_array_equal(KERNELS.get(placed[1]), arrays[1])
    for found, right, bound in zip((placed[0], *placed[2:]), exact, bounds, strict=True):
        assert reference.error_ratio(KERNELS.get(found), right, bound) <= 1


@everywhere
def test_adamw_writes_through_views(side):
    memory = [np.full((4, 20 + i), 77, np.float32) for i in range(4)]  # each has its own strides
    arrays = state(0, "float32", 4, 9)
    placed = []
    for whole, array in zip(memory, arrays, strict=True):
        whole[:, 3:12] = array
        placed.append(side.put(whole))
    cupyattn.adamw_step(*(whole[:, 3:12] for whole in placed), **NUMBERS)
    exact = reference.adamw_step(*arrays, **NUMBERS)
    for whole, right in zip((placed[0], *placed[2:]), exact, strict=True):
        found = side.get(whole)
        assert_allclose(found[:, 3:12], right, rtol=1e-5, atol=1e-7)
        assert (np.delete(found, slice(3, 12), axis=1) == 77).all()


def test_the_reference_steps_as_adamw_by_hand():
    param, m, v = 1.0, 0.0, 0.0
    found = np.array([1.0]), np.zeros(1), np.zeros(1)
    for step, grad in enumerate((0.5, -0.25, 2.0), 1):
        param *= 1 - 0.01 * 0.1
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
        param -= 0.01 * (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.99**step)) + 1e-8)
        found = reference.adamw_step(
            found[0], [grad], *found[1:], step=step, lr=0.01, betas=(0.9, 0.99), eps=1e-8,
            weight_decay=0.1,
        )  # fmt: skip
    assert_allclose(np.ravel(found), (param, m, v), rtol=1e-12)


def test_torch_steps_the_same():
    torch = pytest.importorskip("torch")
    arrays = state(1, "float32", 5, 8)
    param = torch.nn.Parameter(torch.tensor(arrays[0]))
    optimiser = torch.optim.AdamW([param], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    m, v = np.zeros((2, 5, 8), np.float32)
    for step in (1, 2, 3):
        param.grad = torch.tensor(arrays[1] * step)
        optimiser.step()
        cupyattn.adamw_step(
            arrays[0], arrays[1] * np.float32(step), m, v, step=step, lr=1e-2, betas=(0.9, 0.99),
            eps=1e-8, weight_decay=0.1,
        )  # fmt: skip
    assert_allclose(arrays[0], param.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.nvrtc
def test_adamw_extremes():
    """Gradients that are not finite reach the state; zeros and what is flushed divide by eps."""
    grad = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 3e38, 1], np.float32)
    param, m, v = (np.ones(8, np.float32), *np.zeros((2, 8), np.float32))
    arrays = [param.copy(), grad, m.copy(), v.copy()]
    with cupyattn.backend("emulator"):
        cupyattn.adamw_step(*arrays, **NUMBERS)
    decayed = 1 - 1e-3 * 0.1
    assert_allclose(arrays[0][[0, 1, 5]], decayed, rtol=1e-6)
    assert np.isnan(arrays[0][[2, 3, 4]]).all()
    assert np.isinf(arrays[3][[2, 3, 6]]).all()
    assert np.isfinite(arrays[0][[6, 7]]).all()


@pytest.mark.nvrtc
def test_another_step_is_another_call_of_the_same_plan():
    from cupyattn.ops import elements

    arrays = state(0, "float32", 8)
    with cupyattn.backend("emulator"):
        cupyattn.adamw_step(*arrays, **NUMBERS)
        before = elements._plan.cache_info().misses
        for step in (4, 5):
            cupyattn.adamw_step(*arrays, **{**NUMBERS, "step": step, "lr": 0.1 / step})
        assert elements._plan.cache_info().misses == before


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_whole_sectors(dtype):
    report = Report()
    arrays = state(0, dtype, 2, 512)
    with cupyattn.backend("emulator", report=report):
        cupyattn.adamw_step(*arrays, **NUMBERS)
        cupyattn.global_norm(arrays[1])
    wide = [
        access for access in report.accesses if access.space == "global" and access.sectors > 40
    ]
    assert len(wide) >= 8
    assert {access.efficiency for access in wide} == {1.0}


SHAPES = ((1,), (5, 7), (256,), (3, 1000), (40_000,))


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(7)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=20),
    dtypes=st.sampled_from((("float16",), ("float32",), ("float16", "float32"))),
    view=st.sampled_from(("contiguous", "sliced", "transposed", "repeated")),
    seed=st.integers(0, 9),
)
def test_norm_within_its_bound(shapes, dtypes, view, seed):
    rng = np.random.default_rng(seed)
    arrays = []
    for i, shape in enumerate(shapes):
        array = rng.standard_normal(shape).astype(dtypes[i % len(dtypes)])
        if view == "sliced":
            wide = np.full((*shape[:-1], shape[-1] + 3), np.nan, array.dtype)
            wide[..., 3:] = array
            array = wide[..., 3:]
        if view == "repeated":
            array = np.broadcast_to(array, (3, *array.shape))
        arrays.append(array.T if view == "transposed" else array)
    placed = [KERNELS.put(array) for array in arrays]
    found = cupyattn.global_norm(*placed)
    assert (found.shape, found.dtype) == ((), np.float32)
    assert abs(float(found) - reference.global_norm(*arrays)) <= reference.global_norm_bound(
        *arrays
    )
    assert float(cupyattn.global_norm(*placed)) == float(found)


@pytest.mark.nvrtc
def test_more_units_than_ctas_and_rows_apart(monkeypatch):
    from cupyattn.kernels.configs.layers import global_norm as configs
    from cupyattn.ops.layers import global_norm as ops

    monkeypatch.setattr(configs, "MOST_CTAS", 3)
    x = np.random.default_rng(0).standard_normal((11, 20_003)).astype(np.float16)
    ops._plan.cache_clear()
    with cupyattn.backend("emulator"):
        for array in (x, x[:, :20_000], x[::-2, 1:], x[:, ::1].T):
            found = float(cupyattn.global_norm(array))
            bound = reference.global_norm_bound(array) + 1e-6 * found
            assert abs(found - reference.global_norm(array)) <= bound
    ops._plan.cache_clear()


def test_launches_of_many_arrays(recorder):
    """Eight arrays of a dtype and alignment share a launch; all of it is one number."""
    arrays = [device_array((64, 64), np.float16) for _ in range(11)]
    arrays += [device_array((9,), np.float32), device_array((0, 5), np.float16)]
    result = cupyattn.global_norm(*arrays)
    assert (result.shape, result.dtype) == ((), np.float32)
    entries = [launch[0].spec.entry for launch in recorder.started]
    assert entries == ["norm_partials"] * 3 + ["global_norm"]
    first, second, third, root = (launch[2] for launch in recorder.started)
    assert first[0] is arrays[0] and second[0] is arrays[8] and second[3] is None
    assert third[0] is arrays[11]
    assert [launch[-1]["first_partial"] for launch in (first, second, third)] == [0, 8, 11]
    assert root[-1] == 12


@everywhere
def test_norm_of_what_is_not_finite_and_of_nothing(side):
    for values, expected in (([np.inf, 1], np.inf), ([np.nan, 1], np.nan), ([0, 0], 0)):
        found = cupyattn.global_norm(side.put(np.array(values, np.float32)))
        assert_array_equal(side.get(found), np.float32(expected))
    out = side.put(np.array(7, np.float32))
    assert cupyattn.global_norm(side.put(np.zeros((0, 4), np.float16)), out=out) is out
    assert side.get(out) == 0


@everywhere
def test_clipping_by_a_norm_that_stays_where_it_is(side):
    param, grad, m, v = (side.put(array) for array in state(2, "float32", 3, 8))
    norm = cupyattn.global_norm(grad)
    scale = side.put(np.array(0.5 / float(side.get(norm)), np.float32))
    expected = reference.adamw_step(
        *(side.get(array) for array in (param, grad, m, v)), **NUMBERS,
        grad_scale=float(side.get(scale)),
    )  # fmt: skip
    cupyattn.adamw_step(param, grad, m, v, **NUMBERS, grad_scale=scale)
    assert_allclose(side.get(param), expected[0], rtol=1e-6)


P = np.ones((2, 8), np.float32)


def step(arrays: dict[str, Any], side: Any, **changes: Any) -> None:
    given_arrays = {name: np.zeros((2, 8), np.float32) for name in ("param", "grad", "m", "v")}
    given_arrays |= arrays
    placed = [side.put(x) if isinstance(x, np.ndarray) else x for x in given_arrays.values()]
    cupyattn.adamw_step(*placed, **{**NUMBERS, **changes})


@everywhere
@pytest.mark.parametrize(
    ("arrays", "changes", "kind", "message"),
    [
        ({"m": np.zeros((2, 7), np.float32)}, {}, ValueError, "m has shape .* shaped like param"),
        ({"v": np.zeros((8, 2), np.float32)}, {}, ValueError, "v has shape"),
        ({"m": np.zeros((2, 8), np.float16)}, {}, TypeError, "m has dtype float16; allowed are fl"),
        ({"v": np.zeros((2, 8), np.float64)}, {}, TypeError, "make v once before the .*, and keep"),
        ({"param": np.zeros((2, 8), int)}, {}, TypeError, "make a writable, .* pass it as param"),
        ({"grad": np.zeros((2, 8), np.float16)}, {}, TypeError, "share one dtype"),
        ({"grad": None}, {}, TypeError, "grad is None"),
        ({"param": np.zeros((2, 16), np.float32)[:, ::2]}, {}, ValueError, "param has strides"),
        ({"m": np.broadcast_to(np.float32(0), (2, 8))}, {}, ValueError, "m has strides"),
        ({}, {"step": 0}, ValueError, "step = 0; steps count from 1"),
        ({}, {"step": 1.0}, TypeError, "step is 1.0, a float"),
        ({}, {"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] = 1.0; it is at least 0 and below 1"),
        ({}, {"betas": 0.9}, TypeError, "betas is 0.9"),
        ({}, {"betas": (0.9, "a")}, TypeError, r"betas\[1\] is a str"),
        ({}, {"lr": -1.0}, ValueError, "lr = -1.0; it is 0 or more"),
        ({}, {"lr": float("nan")}, ValueError, "lr = nan"),
        ({}, {"eps": "1"}, TypeError, "eps is a str"),
        ({}, {"weight_decay": -0.1}, ValueError, "weight_decay = -0.1"),
        ({}, {"grad_scale": float("inf")}, ValueError, "grad_scale = inf; .* skip this step"),
        ({}, {"grad_scale": np.float32("nan")}, ValueError, "= nan; .*gradients are not finite"),
        ({}, {"grad_scale": 1e39}, ValueError, r"grad_scale = 1e\+39; it is a finite number up to"),
        ({}, {"grad_scale": None}, TypeError, "grad_scale is a NoneType"),
    ],
)
def test_bad_steps(side, arrays, changes, kind, message):
    with pytest.raises(kind, match=message):
        step(arrays, side, **changes)


@everywhere
def test_bad_scales_and_overlaps(side):
    for scale, kind, message in (
        (np.ones(2, np.float32), ValueError, "grad_scale has shape"),
        (np.array(1.0), TypeError, "grad_scale has dtype float64"),
    ):
        with pytest.raises(kind, match=message):
            step({}, side, grad_scale=side.put(scale))
    x = side.put(P.copy())
    with pytest.raises(ValueError, match="m overlaps v in memory; both are written"):
        cupyattn.adamw_step(side.put(P.copy()), side.put(P.copy()), x, x, **NUMBERS)


@everywhere
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x: cupyattn.global_norm(), TypeError, "no arrays were given"),
        (lambda x: cupyattn.global_norm(x, 3.0), TypeError, r"arrays\[1\] is a builtins.float"),
        (lambda x: cupyattn.global_norm(x.astype(int)), TypeError, r"arrays\[0\] has dtype int64"),
        (lambda x: cupyattn.global_norm(x, out=x), ValueError, "out is float32"),
        (lambda x: cupyattn.global_norm(x, out=x[0, 0:1].reshape(())), ValueError, "out overlaps"),
    ],
)
def test_bad_norms(side, call, kind, message):
    with pytest.raises(kind, match=message):
        call(side.put(P.copy()))


def test_axes_that_lie_unevenly_are_refused():
    x = np.zeros((3, 4, 5, 8), np.float16)[::2, :, ::2]
    with (
        cupyattn.backend("emulator"),
        pytest.raises(ValueError, match="rows of neighbouring items"),
    ):
        cupyattn.global_norm(x)
