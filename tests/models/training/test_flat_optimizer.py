"""AdamW over views of one array: the steps that each array would have taken alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.devices import everywhere

import cupyattn
from cupyattn.models.training.flat import flatten
from cupyattn.models.training.optimizer import AdamW, AdamWOptions
from cupyattn.ops import plan

SHAPES = {"norm": (5,), "a": (3, 7), "b": (2, 130), "bias": (1,)}


def arrays(seed, put=np.asarray):
    rng = np.random.default_rng(seed)
    return {
        name: put(rng.standard_normal(shape, dtype=np.float32)) for name, shape in SHAPES.items()
    }


def test_views_are_the_arrays():
    given, copies = arrays(0), arrays(0)
    flat = flatten(given, np)
    for name, array in given.items():
        assert_array_equal(array, copies[name])
        assert array.base is flat.array
        assert (array.ctypes.data - flat.array.ctypes.data) % 1024 == 0
    assert list(given) == list(SHAPES)
    matrices = np.concatenate([copies[name].ravel() for name in ("a", "b")])
    assert_array_equal(flat.array[: flat.matrices][flat.array[: flat.matrices] != 0], matrices)
    assert [decays for _, decays in flat.parts] == [True, False]


def test_one_kind_alone_is_one_part():
    for names in (("a", "b"), ("norm",)):
        flat = flatten({name: arrays(0)[name] for name in names}, np)
        ((part, decays),) = flat.parts
        assert decays == (names == ("a", "b"))
        assert (part.start, part.stop) == (0, flat.array.size)


@everywhere
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_the_steps_of_each_array(side, clip):
    xp = getattr(side, "xp", np)
    options = AdamWOptions(weight_decay=0.25, clip=clip)
    given = arrays(0, side.put)
    alone = {name: side.get(array).copy() for name, array in given.items()}
    optimizer = AdamW(given, options, xp)
    means = {name: np.zeros((2, *array.shape), np.float32) for name, array in alone.items()}
    for step in (1, 2):
        gradients = arrays(step)
        for name, view in optimizer.gradients.items():
            view[...] = xp.asarray(8 * gradients[name])
        norm = float(side.get(optimizer.norm())) / 8
        optimizer.step(0.1 / step, norm, 8.0)
        exact = np.sqrt(sum(np.sum(each.astype(float) ** 2) for each in gradients.values()))
        assert norm == pytest.approx(exact, rel=1e-5)
        shrink = min(1.0, (clip or np.inf) / exact)
        for name, array in alone.items():
            cupyattn.adamw_step(
                array, gradients[name], *means[name], step=step, lr=0.1 / step, betas=(0.9, 0.999),
                eps=1e-8, weight_decay=0.25 if array.ndim > 1 else 0.0, grad_scale=shrink,
            )  # fmt: skip
            np.testing.assert_allclose(side.get(given[name]), array, rtol=2e-5, atol=1e-6)


@everywhere
def test_an_8_bit_state(side):
    """Blocks are of one array each: the steps of that array alone."""
    xp = getattr(side, "xp", np)
    given = arrays(0, side.put)
    alone = {name: side.get(array).copy() for name, array in given.items()}
    optimizer = AdamW(given, AdamWOptions(weight_decay=0.25, clip=None, state="8bit"), xp)
    means = {
        name: (
            np.zeros(array.shape, np.int8), np.zeros(array.shape, np.uint8),
            *np.zeros((2, -(-array.size // 256)), np.float32),
        )
        for name, array in alone.items()
    }  # fmt: skip
    for step in (1, 2):
        gradients = arrays(step)
        for name, view in optimizer.gradients.items():
            view[...] = xp.asarray(gradients[name])
        optimizer.step(0.1, 1.0, 1.0)
        for name, array in alone.items():
            cupyattn.adamw_step_8bit(
                array, gradients[name], *means[name], step=step, lr=0.1, betas=(0.9, 0.999),
                eps=1e-8, weight_decay=0.25 if array.ndim > 1 else 0.0,
            )  # fmt: skip
            assert_array_equal(side.get(given[name]), array)
    kept = optimizer.saved()
    assert {name: array.dtype.name for name, array in kept.items()} == {
        "parameters": "float32", "m": "int8", "v": "uint8", "m_scales": "float32",
        "v_scales": "float32",
    }  # fmt: skip
    float32 = AdamW(arrays(0, side.put), AdamWOptions(), xp).saved()
    sizes = [sum(array.nbytes for array in each.values()) for each in (kept, float32)]
    assert sizes[0] < sizes[1] * 6.1 / 12


@pytest.mark.nvrtc
def test_hundreds_of_arrays_are_a_few_launches(monkeypatch):
    given = {str(i): np.ones((2, 3) if i % 2 else (4,), np.float32) for i in range(100)}
    optimizer = AdamW(given, AdamWOptions(), np)
    started = []
    start = plan.start

    def noting(device, specialisation, *rest):
        started.append(specialisation.spec.entry)
        start(device, specialisation, *rest)

    monkeypatch.setattr(plan, "start", noting)
    with cupyattn.backend("emulator"):
        optimizer.norm()
        optimizer.step(0.1, 1.0, 1.0)
    assert started == ["norm_partials", "global_norm", "adamw", "adamw"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AdamWOptions(clip=0.0), r"clip = 0.0; it is a positive number up to 1e\+38, or None"),
        (AdamWOptions(clip=float("inf")), "clip = inf"),
        (AdamWOptions(clip="1"), "clip = '1'"),  # type: ignore[arg-type]
        (AdamWOptions(clip=float("nan")), "clip = nan"),
        (AdamWOptions(state="4bit"), "state = '4bit'; it is 'float32', '8bit'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(arrays(0), options, np)
