"""AdamW with running means of eight bits: the kernel is NumPy's float32, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, everywhere
from support.search import examples

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Report
from cupyattn.kernels.configs.layers import adamw_8bit as config
from cupyattn.reference.layers.adamw_8bit import BLOCK, DECADES, decode, encode

NUMBERS: dict[str, Any] = {
    "step": 3, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1,
}  # fmt: skip
NAMES = ("param", "grad", "m", "v", "m_scales", "v_scales")


def state(seed: int, *shape: int) -> list[np.ndarray]:
    """Codes of every kind, scales and gradients of many sizes, a block whose scales are 0."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    param, grad = rng.standard_normal((2, *shape), dtype=np.float32)
    grad *= 10 ** rng.uniform(-7, 1, shape).astype(np.float32)
    grad[rng.random(shape) < 0.1] = 0
    m = rng.integers(-127, 128, shape).astype(np.int8)
    v = rng.integers(0, 256, shape).astype(np.uint8)
    scales = rng.random((2, -(-count // BLOCK)), dtype=np.float32) ** 3
    scales[:, 1:2] = 0
    return [param, grad, m, v, *scales]


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(8)
@given(
    shape=st.sampled_from(((1,), (255,), (256,), (257,), (3, 7), (5, 1024), (1030,))),
    step=st.sampled_from((1, 2, 1000)),
    scale=st.sampled_from((1.0, 2.0**-16, 3.0)),
    on_device=st.booleans(),
    shift=st.sampled_from((0, 1)),
    seed=st.integers(0, 9),
)
def test_the_same_bits(shape, step, scale, on_device, shift, seed):
    arrays = state(seed, *shape)
    numbers = {**NUMBERS, "step": step}
    placed = [KERNELS.put(shifted(array, shift)) for array in arrays]
    given_scale = KERNELS.put(np.array(scale, np.float32)) if on_device else scale
    cupyattn.adamw_step_8bit(*placed, **numbers, grad_scale=given_scale)
    exact = reference.adamw_step_8bit(*arrays, **numbers, grad_scale=scale)
    assert_array_equal(KERNELS.get(placed[1]), arrays[1])
    for found, right in zip((placed[0], *placed[2:]), exact, strict=True):
        assert KERNELS.get(found).tobytes() == right.tobytes()


def shifted(array: np.ndarray, items: int) -> np.ndarray:
    """The same, that many items behind a vector's start."""
    memory = np.zeros(array.size + 257, array.dtype)
    start = -memory.ctypes.data % 256 // array.itemsize + items
    view = memory[start : start + array.size].reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.nvrtc
def test_extremes():
    """What is subnormal, what is not finite, and blocks of nothing at all."""
    arrays = state(0, 3 * BLOCK)
    param, grad, m, v, m_scales, v_scales = arrays
    grad[:8] = 1e-40, -1e-40, 1e-20, 3e38, np.inf, np.nan, -0.0, 1e-38
    param[:2] = 1e-40, -1e-39
    grad[BLOCK : 2 * BLOCK] = m[BLOCK : 2 * BLOCK] = v[BLOCK : 2 * BLOCK] = 0
    m_scales[2] = 1e-38
    exact = reference.adamw_step_8bit(*arrays, **NUMBERS)
    with cupyattn.backend("emulator"):
        cupyattn.adamw_step_8bit(*arrays, **NUMBERS)
    for found, right in zip((param, m, v, m_scales, v_scales), exact, strict=True):
        assert_array_equal(found, right)
    assert np.isnan(m_scales[0]) and np.isnan(v_scales[0]) and np.isnan(param[5])
    assert m_scales[1] == v_scales[1] == 0 and not m[BLOCK : 2 * BLOCK].any()


@pytest.mark.parametrize("name", ["m", "v"])
def test_codes_are_a_tree(name):
    """All different, rising, from 0 to exactly 1; a code of each is itself again."""
    decades = DECADES[name]
    codes = np.arange(2**decades)
    values = decode(codes, decades)
    assert values[0] == 0 and values[-1] == 1 and (np.diff(values) > 0).all()
    assert_array_equal(encode(values, np.float32(1), decades), codes)
    assert values[1] == pytest.approx(10.0 ** (1 - decades))
    if name == "m":
        assert_array_equal(decode(-codes.astype(np.int8), decades), -values)


@given(x=st.floats(2.0**-26, 1.0, width=32), name=st.sampled_from(("m", "v")))
def test_codes_are_the_nearest(x, name):
    values = decode(np.arange(2 ** DECADES[name]), DECADES[name])
    found = values[encode(np.float32([x]), np.float32(1), DECADES[name])[0]]
    assert abs(found - x) <= np.abs(values - np.float32(x)).min() + 1e-6 * x
    decade = np.floor(np.log10(x))
    half = 0.45 / 2 ** (DECADES[name] - 1) * 2 ** -(decade + 1) * 10 ** (decade + 1)
    if decade + 1 > 1 - DECADES[name]:
        assert abs(found - x) <= 1.001 * half  # what the documentation says of each decade


def test_no_v_above_zero_becomes_zero():
    grad = np.full(BLOCK, 1e-6, np.float32)
    grad[0] = 1.0
    arrays = [np.zeros(BLOCK, np.float32), grad, np.zeros(BLOCK, np.int8)]
    arrays += [np.zeros(BLOCK, np.uint8), *np.zeros((2, 1), np.float32)]
    for step in (1, 2, 3):
        cupyattn.adamw_step_8bit(*arrays, **{**NUMBERS, "step": step})
    assert (arrays[3] >= 1).all() and np.abs(arrays[0]).max() < 0.1


@everywhere
def test_it_finds_what_adamw_finds(side):
    """Least squares: after 60 steps it is where float32 means lead, nearly the right place."""
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal((4, 80), dtype=np.float32)
    param, whole = (side.put(np.zeros((4, 80), np.float32)) for _ in range(2))
    m, v = side.put(np.zeros((4, 80), np.int8)), side.put(np.zeros((4, 80), np.uint8))
    m_scales, v_scales = (side.put(np.zeros(2, np.float32)) for _ in range(2))
    means = [side.put(np.zeros((4, 80), np.float32)) for _ in range(2)]
    numbers = {**NUMBERS, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    for step in range(1, 61):
        numbers |= {"step": step, "lr": 0.3 * (1 - step / 61)}
        small = side.put(side.get(param) - wanted)
        cupyattn.adamw_step_8bit(param, small, m, v, m_scales, v_scales, **numbers)
        cupyattn.adamw_step(whole, side.put(side.get(whole) - wanted), *means, **numbers)
    found, right = side.get(param), side.get(whole)
    assert np.abs(right - wanted).max() < 0.1 < 2 < np.abs(wanted).max()
    assert np.abs(found - right).max() < 0.01


@pytest.mark.nvrtc
def test_whole_sectors():
    report = Report()
    arrays = state(0, 2048)
    with cupyattn.backend("emulator", report=report):
        cupyattn.adamw_step_8bit(*arrays, **NUMBERS)
    wide = [
        access for access in report.accesses if access.space == "global" and access.sectors > 20
    ]
    assert len(wide) >= 7 * 2
    assert {access.efficiency for access in wide} == {1.0}


def step(changes: dict[str, Any], side: Any, **options: Any) -> None:
    arrays = dict(zip(NAMES, state(0, 2, 200), strict=True)) | changes
    placed = [side.put(x) if isinstance(x, np.ndarray) else x for x in arrays.values()]
    cupyattn.adamw_step_8bit(*placed, **{**NUMBERS, **options})


@everywhere
@pytest.mark.parametrize(
    ("changes", "options", "kind", "message"),
    [
        ({"m": np.zeros((2, 200), np.uint8)}, {}, TypeError, "m has dtype uint8; .*make m once"),
        ({"v": np.zeros((2, 200), np.float32)}, {}, TypeError, "v has dtype float32; allowed are"),
        ({"param": np.zeros((2, 200))}, {}, TypeError, "float64.* pass it as param"),
        ({"grad": np.zeros((2, 200), np.float16)}, {}, TypeError, "grad has dtype float16"),
        ({"m_scales": np.zeros(3, np.float32)}, {}, ValueError, "one for each 256 items of param"),
        ({"v": np.zeros((200, 2), np.uint8)}, {}, ValueError, "v has shape .* shaped like param"),
        ({"grad": np.zeros((2, 400), np.float32)[:, ::2]}, {}, ValueError, "grad has strides"),
        ({"m": None}, {}, TypeError, "m is None"),
        ({}, {"step": 0}, ValueError, "step = 0; steps count from 1"),
        ({}, {"grad_scale": float("nan")}, ValueError, "grad_scale = nan"),
    ],
)
def test_bad_steps(side, changes, options, kind, message):
    with pytest.raises(kind, match=message):
        step(changes, side, **options)


@everywhere
def test_overlaps_and_scales(side):
    *arrays, scales, _ = map(side.put, state(0, 2, 200))
    with pytest.raises(ValueError, match="m_scales overlaps v_scales"):
        cupyattn.adamw_step_8bit(*arrays, scales, scales, **NUMBERS)
    with pytest.raises(ValueError, match="grad_scale has shape"):
        step({}, side, grad_scale=side.put(np.ones(2, np.float32)))


@everywhere
def test_nothing_to_do(side):
    empty = [np.zeros(0, dtype) for dtype in ("f4", "f4", "i1", "u1", "f4", "f4")]
    cupyattn.adamw_step_8bit(*map(side.put, empty), **NUMBERS)


def test_the_table_and_the_reference_have_one_block():
    assert config.BLOCK == BLOCK
