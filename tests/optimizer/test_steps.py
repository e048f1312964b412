"""AdamW with state in float32 and in eight bits, and the norm of many arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import DTYPES, KERNELS, NUMPY, dtype_of, everywhere
from support.recording_device import device_array
from support.search import deep, examples, wider

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Report
from cupyattn.ops.optimizer import kernels
from cupyattn.ops.optimizer.reference import BLOCK, DECADES, decode, encode

NUMBERS: dict[str, Any] = {
    "step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1,
}  # fmt: skip


def state(seed: int, dtype: str, *shape: int) -> list[np.ndarray]:
    """Return param, grad, m and v."""
    rng = np.random.default_rng(seed)
    param, grad = rng.standard_normal((2, *shape)).astype(dtype_of(dtype))
    m = 0.1 * rng.standard_normal(shape, dtype=np.float32)
    return [param, grad, m, rng.random(shape, dtype=np.float32) ** 4]


# Tests on NumPy come first: `kernels_run` stays active from its first use to the module's end.
def test_v_above_zero_never_becomes_zero():
    grad = np.full(BLOCK, 1e-6, np.float32)
    grad[0] = 1.0
    arrays = [np.zeros(BLOCK, np.float32), grad, np.zeros(BLOCK, np.int8)]
    arrays += [np.zeros(BLOCK, np.uint8), *np.zeros((2, 1), np.float32)]
    for step in (1, 2, 3):
        cupyattn.adamw_step_8bit(*arrays, **{**NUMBERS_8BIT, "step": step})
    assert (arrays[3] >= 1).all() and np.abs(arrays[0]).max() < 0.1


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(4)
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


def test_reference_matches_adamw_by_hand():
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


@pytest.mark.deep
def test_steps_match_torch():
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
def test_non_finite_gradients_reach_the_state():
    """Zero and flushed gradients divide by eps."""
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
def test_another_step_reuses_the_plan():
    from cupyattn.runtime import elements

    arrays = state(0, "float32", 8)
    with cupyattn.backend("emulator"):
        cupyattn.adamw_step(*arrays, **NUMBERS)
        before = elements._plan.cache_info().misses
        for step in (4, 5):
            cupyattn.adamw_step(*arrays, **{**NUMBERS, "step": step, "lr": 0.1 / step})
        assert elements._plan.cache_info().misses == before


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float32", *deep("float16")])
def test_adamw_and_norm_use_whole_sectors(dtype):
    report = Report()
    arrays = state(0, dtype, 2, 512)
    with cupyattn.backend("emulator", report=report):
        cupyattn.adamw_step(*arrays, **NUMBERS)
        cupyattn.global_norm(arrays[1])
    wide = [a for a in report.accesses if a.space == "global" and a.sectors > 40]
    assert len(wide) >= 8
    assert {access.efficiency for access in wide} == {1.0}


SHAPES = ((1,), (5, 7), (256,), (3, 1000), (40_000,))


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(3)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=20),
    dtypes=st.sampled_from((("float16",), ("float32",), ("float16", "float32"))),
    view=st.sampled_from(("contiguous", "sliced", "transposed", "repeated")),
    seed=st.integers(0, 9),
)
def test_global_norm_is_within_its_bound(shapes, dtypes, view, seed):
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
    bound = reference.global_norm_bound(*arrays)
    assert abs(float(found) - reference.global_norm(*arrays)) <= bound
    assert float(cupyattn.global_norm(*placed)) == float(found)


@pytest.mark.nvrtc
def test_norm_of_more_units_than_ctas_is_within_its_bound(monkeypatch):
    monkeypatch.setattr(kernels, "MOST_CTAS", 3)
    x = np.random.default_rng(0).standard_normal((11, 20_003)).astype(np.float16)
    kernels._norm_plan.cache_clear()
    with cupyattn.backend("emulator"):
        for array in (x, x[:, :20_000], x[::-2, 1:], x[:, ::1].T):
            found = float(cupyattn.global_norm(array))
            bound = reference.global_norm_bound(array) + 1e-6 * found
            assert abs(found - reference.global_norm(array)) <= bound
    kernels._norm_plan.cache_clear()


def test_norm_of_many_arrays_shares_launches(recorder):
    """Up to eight arrays of one dtype and alignment share a launch."""
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
def test_norm_of_non_finite_and_empty_arrays(side):
    for values, expected in (([np.inf, 1], np.inf), ([np.nan, 1], np.nan), ([0, 0], 0)):
        found = cupyattn.global_norm(side.put(np.array(values, np.float32)))
        assert_array_equal(side.get(found), np.float32(expected))
    out = side.put(np.array(7, np.float32))
    assert cupyattn.global_norm(side.put(np.zeros((0, 4), np.float16)), out=out) is out
    assert side.get(out) == 0


def dictionaries(side: Any, step: Any) -> list[dict[str, Any]]:
    """Return parameters, gradients and state of zeros, by name and nested."""
    shapes = {"w": (3, 8), "block": {"up": (2, 5), "bias": (5,), "unused": (2,)}}
    rng = np.random.default_rng(3)

    def made(make: Any, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: made(make, each) for name, each in tree.items()}
        return side.put(make(tree))

    def random(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    eight = step is cupyattn.adamw_step_8bit
    kinds = (np.int8, np.uint8) if eight else (np.float32, np.float32)
    makes = [random, random, *(lambda s, kind=kind: np.zeros(s, kind) for kind in kinds)]
    makes += [lambda s: np.zeros(1, np.float32)] * (2 if eight else 0)
    trees = [made(make, shapes) for make in makes]
    trees[1]["block"]["unused"] = None
    return trees


@everywhere
@pytest.mark.parametrize("step", [cupyattn.adamw_step, cupyattn.adamw_step_8bit])
def test_dictionaries_step_each_of_their_arrays(side, step):
    trees = dictionaries(side, step)
    alone = dictionaries(side, step)
    step(*trees, step=1)
    for of in (
        lambda tree: tree["w"],
        lambda tree: tree["block"]["up"],
        lambda tree: tree["block"]["bias"],
    ):
        step(*map(of, alone), step=1)
        for found, expected in zip(map(of, trees), map(of, alone), strict=True):
            assert_array_equal(side.get(found), side.get(expected))
    unused = [tree["block"]["unused"] for tree in (trees[0], alone[0])]
    assert_array_equal(*map(side.get, unused))


@pytest.mark.parametrize("step", [cupyattn.adamw_step, cupyattn.adamw_step_8bit])
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda p, g, m, v: g.pop("w"), ValueError, "grad has no 'w'; param has it, .*; add it"),
        (lambda p, g, m, v: v["block"].update(a=1), ValueError, r"param\['block'\] has no 'a'"),
        (lambda p, g, m, v: m.update(block=1), TypeError, r"m\['block'\] has type int; param"),
        (lambda p, g, m, v: m["block"].update(bias=m["w"]), ValueError,
         r"^the arrays of \['block'\]\['bias'\]: m has shape \(3, 8\)"),
        (lambda p, g, m, v: p.update(w=None), TypeError, r"arrays of \['w'\]: param is None"),
        (lambda p, g, m, v: [tree.update(tied=tree["w"]) for tree in (p, g, m, v)], ValueError,
         r"param\['tied'\] is param\['w'\]; each array is updated once"),
        (lambda p, g, m, v: [tree.update(tied=tree["w"][:]) for tree in (p, g, m, v)], ValueError,
         r"\w+\['tied'\] overlaps \w+\['w'\] in memory; each array is updated once"),
    ],
)  # fmt: skip
def test_dictionaries_that_do_not_fit_change_nothing(step, change, kind, message):
    trees = dictionaries(NUMPY, step)
    before = trees[0]["block"]["up"].copy()
    change(*trees[:4])
    for tree in trees[4:]:
        tree |= dict.fromkeys(trees[0].keys() - tree.keys(), tree["w"])
    with pytest.raises(kind, match=message):
        step(*trees, step=1)
    assert_array_equal(trees[0]["block"]["up"], before)


@everywhere
@pytest.mark.parametrize("name", ["param", "m", "v", None])
def test_entries_of_dictionaries_share_no_items(side, name):
    given = {}
    for each in ("param", "grad", "m", "v"):
        one, other = (side.put(np.ones((4, 16), np.float32)) for _ in range(2))
        # The columns of one array have no common item.
        columns = {"a": one[:, :8], "c": one[:, 8:]}
        given[each] = {"a": one[:3], "c": one[1:]} if each == name else columns
        if name is not None and each != name:
            given[each] = {"a": one[:3], "c": other[1:]}
    if name is None:
        cupyattn.adamw_step(*given.values(), step=1)
        assert (side.get(given["param"]["c"]) < 1).all()
        return
    with pytest.raises(ValueError, match=rf"^{name}\['c'\] overlaps {name}\['a'\] .* copy one"):
        cupyattn.adamw_step(*given.values(), step=1)
    assert (side.get(given["param"]["a"]) == 1).all()


def test_one_dictionary_among_arrays_is_refused():
    with pytest.raises(TypeError, match="param has type ndarray; grad is a dictionary; pass param"):
        cupyattn.adamw_step(P, {"w": P}, P, P, step=1)


def test_defaults_are_those_of_torch():
    arrays = state(1, "float32", 5)
    found, expected = ([array.copy() for array in arrays] for _ in range(2))
    cupyattn.adamw_step(*found, step=1)
    cupyattn.adamw_step(*expected, step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    assert_array_equal(found[0], expected[0])


@everywhere
def test_grad_scale_may_be_an_array_on_the_device(side):
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


def call_adamw(arrays: dict[str, Any], side: Any, **changes: Any) -> None:
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
        ({}, {"step": 1.0}, TypeError, "step is 1.0 of type float"),
        ({}, {"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] = 1.0; it is at least 0 and below 1"),
        ({}, {"betas": 0.9}, TypeError, "betas is 0.9"),
        ({}, {"betas": (0.9, "a")}, TypeError, r"betas\[1\] has type str"),
        ({}, {"lr": -1.0}, ValueError, "lr = -1.0; it is 0 or more"),
        ({}, {"lr": float("nan")}, ValueError, "lr = nan"),
        ({}, {"eps": "1"}, TypeError, "eps has type str"),
        ({}, {"weight_decay": -0.1}, ValueError, "weight_decay = -0.1"),
        ({}, {"grad_scale": float("inf")}, ValueError, "grad_scale = inf; .* skip this step"),
        ({}, {"grad_scale": np.float32("nan")}, ValueError, "= nan; .*gradients are not finite"),
        ({}, {"grad_scale": 1e39}, ValueError, r"grad_scale = 1e\+39; it is a finite number up to"),
        ({}, {"grad_scale": None}, TypeError, "grad_scale has type NoneType"),
    ],
)
def test_bad_steps(side, arrays, changes, kind, message):
    with pytest.raises(kind, match=message):
        call_adamw(arrays, side, **changes)


@everywhere
def test_bad_scales_and_overlaps(side):
    for scale, kind, message in (
        (np.ones(2, np.float32), ValueError, "grad_scale has shape"),
        (np.array(1.0), TypeError, "grad_scale has dtype float64"),
    ):
        with pytest.raises(kind, match=message):
            call_adamw({}, side, grad_scale=side.put(scale))
    x = side.put(P.copy())
    with pytest.raises(ValueError, match="m overlaps v in memory; both are written"):
        cupyattn.adamw_step(side.put(P.copy()), side.put(P.copy()), x, x, **NUMBERS)


@everywhere
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x: cupyattn.global_norm(), TypeError, "no arrays were given"),
        (lambda x: cupyattn.global_norm(x, 3.0), TypeError, r"arrays\[1\] has type builtins.float"),
        (lambda x: cupyattn.global_norm(x.astype(int)), TypeError, r"arrays\[0\] has dtype int64"),
        (lambda x: cupyattn.global_norm(x, out=x), ValueError, "out is float32"),
        (lambda x: cupyattn.global_norm(x, out=x[0, 0:1].reshape(())), ValueError, "out overlaps"),
    ],
)
def test_bad_norms(side, call, kind, message):
    with pytest.raises(kind, match=message):
        call(side.put(P.copy()))


def test_norm_of_unevenly_strided_axes_is_refused():
    x = np.zeros((3, 4, 5, 8), np.float16)[::2, :, ::2]
    with (
        cupyattn.backend("emulator"),
        pytest.raises(ValueError, match="rows of neighbouring items"),
    ):
        cupyattn.global_norm(x)


NUMBERS_8BIT: dict[str, Any] = {
    "step": 3, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1,
}  # fmt: skip
NAMES = ("param", "grad", "m", "v", "m_scales", "v_scales")


def state_8bit(seed: int, *shape: int) -> list[np.ndarray]:
    """Return all codes, scales and gradients of many sizes, and a block whose scales are 0."""
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
@examples(4)
@given(
    shape=st.sampled_from(((1,), (255,), (256,), (257,), (3, 7), (5, 1024), (1030,))),
    step=st.sampled_from((1, 2, 1000)),
    scale=st.sampled_from((1.0, 2.0**-16, 3.0)),
    on_device=st.booleans(),
    shift=st.sampled_from((0, 1)),
    seed=st.integers(0, 9),
)
def test_8bit_kernel_gives_the_bits_of_the_reference(shape, step, scale, on_device, shift, seed):
    arrays = state_8bit(seed, *shape)
    numbers = {**NUMBERS_8BIT, "step": step}
    placed = [KERNELS.put(shifted(array, shift)) for array in arrays]
    given_scale = KERNELS.put(np.array(scale, np.float32)) if on_device else scale
    cupyattn.adamw_step_8bit(*placed, **numbers, grad_scale=given_scale)
    exact = reference.adamw_step_8bit(*arrays, **numbers, grad_scale=scale)
    assert_array_equal(KERNELS.get(placed[1]), arrays[1])
    for found, right in zip((placed[0], *placed[2:]), exact, strict=True):
        assert KERNELS.get(found).tobytes() == right.tobytes()


def shifted(array: np.ndarray, items: int) -> np.ndarray:
    """Copy the array to an address `items` items after the start of a vector."""
    memory = np.zeros(array.size + 257, array.dtype)
    start = -memory.ctypes.data % 256 // array.itemsize + items
    view = memory[start : start + array.size].reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.nvrtc
def test_subnormal_and_non_finite_8bit_state():
    """Inputs are subnormal, non-finite, and blocks of zeros."""
    arrays = state_8bit(0, 3 * BLOCK)
    param, grad, m, v, m_scales, v_scales = arrays
    grad[:8] = 1e-40, -1e-40, 1e-20, 3e38, np.inf, np.nan, -0.0, 1e-38
    param[:2] = 1e-40, -1e-39
    grad[BLOCK : 2 * BLOCK] = m[BLOCK : 2 * BLOCK] = v[BLOCK : 2 * BLOCK] = 0
    m_scales[2] = 1e-38
    exact = reference.adamw_step_8bit(*arrays, **NUMBERS_8BIT)
    with cupyattn.backend("emulator"):
        cupyattn.adamw_step_8bit(*arrays, **NUMBERS_8BIT)
    for found, right in zip((param, m, v, m_scales, v_scales), exact, strict=True):
        assert_array_equal(found, right)
    assert np.isnan(m_scales[0]) and np.isnan(v_scales[0]) and np.isnan(param[5])
    assert m_scales[1] == v_scales[1] == 0 and not m[BLOCK : 2 * BLOCK].any()


@pytest.mark.parametrize("name", ["m", "v"])
def test_8bit_codes_rise_from_0_to_1(name):
    """Decoded codes are distinct, and encode to themselves."""
    decades = DECADES[name]
    codes = np.arange(2**decades)
    values = decode(codes, decades)
    assert values[0] == 0 and values[-1] == 1 and (np.diff(values) > 0).all()
    assert_array_equal(encode(values, np.float32(1), decades), codes)
    assert values[1] == pytest.approx(10.0 ** (1 - decades))
    if name == "m":
        assert_array_equal(decode(-codes.astype(np.int8), decades), -values)


@given(x=st.floats(2.0**-26, 1.0, width=32), name=st.sampled_from(("m", "v")))
def test_8bit_codes_are_the_nearest(x, name):
    values = decode(np.arange(2 ** DECADES[name]), DECADES[name])
    found = values[encode(np.float32([x]), np.float32(1), DECADES[name])[0]]
    assert abs(found - x) <= np.abs(values - np.float32(x)).min() + 1e-6 * x
    decade = np.floor(np.log10(x))
    half = 0.45 / 2 ** (DECADES[name] - 1) * 2 ** -(decade + 1) * 10 ** (decade + 1)
    if decade + 1 > 1 - DECADES[name]:
        assert abs(found - x) <= 1.001 * half  # what the documentation says of each decade


@everywhere
def test_8bit_state_converges_as_float32_state(side):
    """After 60 steps of least squares both are near the solution and near each other."""
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal((4, 80), dtype=np.float32)
    param, whole = (side.put(np.zeros((4, 80), np.float32)) for _ in range(2))
    m, v = side.put(np.zeros((4, 80), np.int8)), side.put(np.zeros((4, 80), np.uint8))
    m_scales, v_scales = (side.put(np.zeros(2, np.float32)) for _ in range(2))
    means = [side.put(np.zeros((4, 80), np.float32)) for _ in range(2)]
    numbers = {**NUMBERS_8BIT, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    for step in range(1, 61):
        numbers |= {"step": step, "lr": 0.3 * (1 - step / 61)}
        small = side.put(side.get(param) - wanted)
        cupyattn.adamw_step_8bit(param, small, m, v, m_scales, v_scales, **numbers)
        cupyattn.adamw_step(whole, side.put(side.get(whole) - wanted), *means, **numbers)
    found, right = side.get(param), side.get(whole)
    assert np.abs(right - wanted).max() < 0.1 < 2 < np.abs(wanted).max()
    assert np.abs(found - right).max() < 0.01


@pytest.mark.nvrtc
def test_whole_sectors_of_8bit_state():
    report = Report()
    arrays = state_8bit(0, 2048)
    with cupyattn.backend("emulator", report=report):
        cupyattn.adamw_step_8bit(*arrays, **NUMBERS_8BIT)
    wide = [a for a in report.accesses if a.space == "global" and a.sectors > 20]
    assert len(wide) >= 7 * 2
    assert {access.efficiency for access in wide} == {1.0}


def call_adamw_8bit(changes: dict[str, Any], side: Any, **options: Any) -> None:
    arrays = dict(zip(NAMES, state_8bit(0, 2, 200), strict=True)) | changes
    placed = [side.put(x) if isinstance(x, np.ndarray) else x for x in arrays.values()]
    cupyattn.adamw_step_8bit(*placed, **{**NUMBERS_8BIT, **options})


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
def test_bad_steps_of_8bit_state(side, changes, options, kind, message):
    with pytest.raises(kind, match=message):
        call_adamw_8bit(changes, side, **options)


@everywhere
def test_overlaps_and_scales_of_8bit_state(side):
    *arrays, scales, _ = map(side.put, state_8bit(0, 2, 200))
    with pytest.raises(ValueError, match="m_scales overlaps v_scales"):
        cupyattn.adamw_step_8bit(*arrays, scales, scales, **NUMBERS_8BIT)
    with pytest.raises(ValueError, match="grad_scale has shape"):
        call_adamw_8bit({}, side, grad_scale=side.put(np.ones(2, np.float32)))


@everywhere
def test_empty_8bit_state_is_accepted(side):
    empty = [np.zeros(0, dtype) for dtype in ("f4", "f4", "i1", "u1", "f4", "f4")]
    cupyattn.adamw_step_8bit(*map(side.put, empty), **NUMBERS_8BIT)


def test_kernel_and_reference_use_the_same_block_size():
    assert kernels.BLOCK == BLOCK
