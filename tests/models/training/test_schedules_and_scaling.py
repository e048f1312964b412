"""Learning rates step by step, and the loss scale that follows overflows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.models.training.scaling import LEAST, MOST, MOST_SKIPPED, LossScale
from cupyattn.models.training.schedules import SCHEDULES, Schedule


@given(
    kind=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 200),
    data=st.data(),
)
def test_rates_rise_and_fall(kind, steps, data):
    warmup = data.draw(st.integers(0, steps - 1))
    schedule = Schedule.checked(kind, 3e-4, steps, warmup)
    rates = np.array([schedule.at(step) for step in range(1, steps + 1)])
    assert (rates > 0).all() and rates.max() == rates[warmup] == 3e-4
    assert (np.diff(rates[: warmup + 1]) > 0).all()
    falls = np.diff(rates[warmup:])
    assert (falls == 0).all() if kind == "constant" else (falls < 0).all()


@pytest.mark.parametrize("step", [0, -1, 5])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_there_are_rates_of_its_steps_alone(kind, step):
    """That of a cosine would rise again."""
    with pytest.raises(ValueError, match=f"step {step} of 4; .*; make a schedule of more steps"):
        Schedule(kind, 1.0, 4).at(step)


def test_rates_by_hand():
    cosine = Schedule.checked("cosine", 2.0, 5, 1)
    assert [cosine.at(step) for step in range(1, 6)] == pytest.approx(
        [1.0, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]
    )
    linear = Schedule.checked("linear", 1.0, 4, 0)
    assert [linear.at(step) for step in range(1, 5)] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    "given_",
    [("linear", 1.0, 5.5, 0), ("linear", 1.0, 5, 0.5), ("linear", 1.0, None, 0),
     ("linear", 1.0, True, 0)],
)  # fmt: skip
def test_steps_are_counted(given_):
    with pytest.raises(TypeError, match=r"is an integer of [01] or more; pass"):
        Schedule.checked(*given_)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (([], 1.0, 5, 0), r"schedule = \[\]"),
        (("linear", "1", 5, 0), "lr = '1'; it is a positive number"),
        (("linear", 1.0, 5, -1), "warmup = -1; it is an integer of 0 or more"),
        (("steps", 1.0, 5, 0), "schedule = 'steps'; it is 'constant', 'linear', 'cosine'"),
        (("linear", 0.0, 5, 0), "lr = 0.0; it is a positive number"),
        (("linear", float("nan"), 5, 0), "lr = nan"),
        (("linear", 1e40, 5, 0), r"lr = 1e\+40; it is a positive number up to 1e\+38"),
        (("linear", 1.0, 5, 5), "warmup = 5 of 5 steps; the warm-up is shorter"),
        (("linear", 1.0, 0, 0), "steps = 0; it is an integer of 1 or more"),
    ],
)
def test_bad_schedules(given_, message):
    with pytest.raises(ValueError, match=message):
        Schedule.checked(*given_)


def test_the_scale_halves_and_doubles():
    scale = LossScale(8.0, good_steps=3)
    seen = []
    for finite in (True, True, False, True, True, True, True, True, False, False):
        scale.update(finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8, 8, 4, 2]
    copy = LossScale(good_steps=3)
    copy.restore(scale.state())
    assert copy == scale


@pytest.mark.parametrize(
    "given_",
    [{"scale": 0.0}, {"scale": float("inf")}, {"scale": "2"}, {"good_steps": 0}, {"skipped": -1}],
)
def test_bad_scales(given_):
    ((name, value),) = given_.items()
    with pytest.raises(ValueError, match=f"{name} = {value!r}; it is "):
        LossScale(**given_)


def test_the_scale_has_limits():
    scale = LossScale(MOST, good_steps=1)
    scale.update(True)
    assert scale.scale == MOST
    for _ in range(MOST_SKIPPED - 1):
        scale.update(False)
    assert scale.scale == LEAST
    scale.update(True)
    for _ in range(MOST_SKIPPED - 1):
        scale.update(False)
    with pytest.raises(FloatingPointError, match=r"not finite, 40 steps in a row.* smaller lear"):
        scale.update(False)


def test_without_a_scale_nothing_helps():
    scale = LossScale.off()
    for _ in range(5000):
        scale.update(True)
    assert scale.scale == 1.0
    with pytest.raises(FloatingPointError, match="1 steps in a row"):
        scale.update(False)
