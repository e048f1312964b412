"""The rules of differentiation: what a row of the table says, and that each finds what it names."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import cupyattn
from cupyattn import vjp
from cupyattn.functional import differentiable as rules
from cupyattn.functional.differentiable import differentiable

X = np.random.default_rng(0).standard_normal((3, 9), dtype=np.float32)


def scaled(pair, weight=None, /, *, factor=1.0, stats=False, workspace=None):
    """Two results for a tuple of two arrays; one more for the backward."""
    a, b = pair
    results = factor * a * b, a + b
    return (*results, np.exp(a)) if stats else results


class ScaledGrads(NamedTuple):
    dpair: Any = None
    dweight: Any = None


GIVEN: list[dict[str, Any]] = []


def scaled_backward(
    dout, dtotal, pair, weight=None, /, *, exp, dexp=0, factor=1.0, grads=None, workspace=None
):
    GIVEN.append({"weight": weight, "workspace": workspace, "grads": grads, "dexp": dexp})
    a, b = pair
    assert_array_equal(exp, np.exp(a))
    return ScaledGrads((factor * b * dout + dtotal, factor * a * dout + dtotal))


@pytest.fixture
def scaled_function(monkeypatch):
    monkeypatch.setattr(rules, "names", [*rules.names])
    return differentiable(
        scaled, scaled_backward, results=("out", "total"), saved=("exp",), saved_by="stats",
        gradients=ScaledGrads._fields,
    )  # fmt: skip


@pytest.mark.parametrize("stats", [False, True])
def test_a_rule_with_a_tuple_of_arrays_and_several_results(scaled_function, stats):
    """As a rotary embedding of (q, k), or a norm with a residual and statistics, will have it."""
    a, b, dout, dtotal = np.random.default_rng(0).standard_normal((4, 3, 5))
    results, pullback = vjp(scaled_function, (a, b), factor=3.0, stats=stats, workspace=a)
    assert len(results) == 2 + stats
    ((da, db),) = pullback((dout, dtotal, None)[: 2 + stats])
    assert_allclose(da, 3 * b * dout + dtotal)
    assert_allclose(db, 3 * a * dout + dtotal)
    dexp = None if stats else 0  # given as None, not as zeros: the backward has a default
    assert GIVEN[-1] == {"weight": None, "workspace": None, "grads": None, "dexp": dexp}
    ((da, _),) = pullback((None, dtotal, None)[: 2 + stats], grads=1)
    assert_allclose(da, dtotal)
    assert GIVEN[-1]["grads"] == 1

    results, pullback = vjp(lambda b, a: scaled_function((a, b), None), b, a)
    db, da = pullback((dout, dtotal))
    assert_allclose(da, b * dout + dtotal)
    assert_allclose(db, a * dout + dtotal)


def negated(x, /):
    return -x[0][0] if isinstance(x, tuple) else -x


@pytest.fixture
def negated_function(monkeypatch):
    monkeypatch.setattr(rules, "names", [*rules.names])
    return differentiable(negated, lambda dout, /: -dout, gradients=("dx",))


def test_too_many_arguments_are_the_functions_error(negated_function):
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        vjp(negated_function, X, 3)


def test_a_stand_in_deep_in_tuples_stays_one(negated_function):
    """Only for those in a tuple is there a place in the gradient."""
    with pytest.raises(TypeError, match="uses argument 0 itself"):
        vjp(lambda x: negated_function(((x,), 1)), X)


def test_every_public_backward_has_a_rule():
    backwards = {name for name in cupyattn.__all__ if name.endswith("_backward")}
    assert {name.removesuffix("_backward") for name in backwards} == set(rules.names)


@pytest.mark.parametrize("name", rules.names)
def test_every_rule_finds_what_its_backward_takes(name):
    found = []
    token = rules.recorder.set(lambda rule, args, options: found.append(rule))
    try:
        getattr(cupyattn, name)()
    finally:
        rules.recorder.reset(token)
    (rule,) = found
    assert inspect.unwrap(rule.backward) is getattr(cupyattn, f"{name}_backward")
    results = {*rule.results, *rule.saved}
    known = {*rule.parameters, *results, *(f"d{result}" for result in results)}
    assert rule.required <= known
    assert {gradient[1:] for gradient in rule.gradients} <= set(rule.parameters)
    assert rule.saved_by is None or rule.saved_by in rule.parameters
    assert rule.backward_options
