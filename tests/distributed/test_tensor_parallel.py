"""Products over several ranks give what one device gives, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices import DTYPES, dtype_of

from cupyattn import LinearGrads, linear, linear_backward, quantize
from cupyattn.distributed import (
    Group,
    RankFailedError,
    all_reduce,
    column_linear,
    column_linear_backward,
    row_linear,
    run,
    shard,
)

CLOSE = {"rtol": 1e-12, "atol": 1e-13}
RNG = np.random.default_rng(0)
X, DOUT, RESIDUAL = RNG.standard_normal((3, 2, 5, 12))
UP, UP_B = RNG.standard_normal((12, 48)), RNG.standard_normal(48)
DOWN, DOWN_B = RNG.standard_normal((24, 12)), RNG.standard_normal(12)


def cut(group: Group, x: Any, axis: int, *, halves: int = 1) -> Any:
    """A rank's rows or columns; of a gated weight those of both halves."""
    parts = np.split(x, halves, axis=axis)
    own = [shard(p, group.rank, group.size, axis=axis, placement="contiguous") for p in parts]
    return np.concatenate(own, axis=axis)


def layer(group: Group, activation: str, halves: int) -> dict[str, Any]:
    """A layer of two products, and all of its gradients."""
    up, up_b = (cut(group, each, -1, halves=halves) for each in (UP, UP_B))
    down = cut(group, DOWN if halves == 2 else np.concatenate([DOWN, DOWN[::-1]]), 0)
    inner = column_linear(X, up, up_b, group=group, activation=activation)
    out = row_linear(inner, down, DOWN_B, group=group, residual=RESIDUAL)
    of_down = linear_backward(DOUT, inner, down, DOWN_B)
    of_up = column_linear_backward(of_down.dx, X, up, up_b, group=group, activation=activation)
    return {"out": out, "dx": of_up.dx, "db": of_down.db, "dup": of_up, "ddown": of_down.dw}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("activation", "halves"), [("gelu", 1), ("swiglu", 2)])
def test_a_layer_of_two_products(ranks, activation, halves):
    whole_down = DOWN if halves == 2 else np.concatenate([DOWN, DOWN[::-1]])
    inner = linear(X, UP, UP_B, activation=activation)
    expected = linear(inner, whole_down, DOWN_B, residual=RESIDUAL)
    of_down = linear_backward(DOUT, inner, whole_down, DOWN_B)
    of_up = linear_backward(of_down.dx, X, UP, UP_B, activation=activation)
    for rank, found in enumerate(run(lambda group: layer(group, activation, halves), ranks)):
        place = Place(rank, ranks)
        np.testing.assert_allclose(found["out"], expected, **CLOSE)
        np.testing.assert_allclose(found["dx"], of_up.dx, **CLOSE)
        np.testing.assert_allclose(found["db"], of_down.db, **CLOSE)
        np.testing.assert_allclose(found["ddown"], cut(place, of_down.dw, 0), **CLOSE)
        for name, axis in (("dw", 1), ("db", 0)):
            own = cut(place, getattr(of_up, name), axis, halves=halves)
            np.testing.assert_allclose(getattr(found["dup"], name), own, **CLOSE)


class Place:
    """A rank, for `cut`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_have_the_same_bits_rounded_once(dtype):
    whole = RNG.standard_normal((4, 3, 7)).astype(dtype_of(dtype))
    found = run(lambda group: all_reduce(whole[group.rank], group=group), 4)
    expected = whole.astype(np.float32)
    expected = (((expected[0] + expected[1]) + expected[2]) + expected[3]).astype(whole.dtype)
    for each in found:
        assert each.dtype == whole.dtype
        np.testing.assert_array_equal(each, expected)
    assert not np.shares_memory(found[0], found[1])


def test_sums_of_many_do_not_round_between():
    """In float16 each addition of 1 to 2048 would be lost."""
    x = np.array([2048], np.float16), *[np.ones(1, np.float16)] * 3
    assert run(lambda group: all_reduce(x[group.rank], group=group)[0], 4) == [2052] * 4


@pytest.mark.parametrize("x", [np.arange(6).reshape(2, 3).T, np.array(3), np.zeros((0, 2))])
def test_sums_of_any_array(x):
    for found in run(lambda group: all_reduce(np.asarray(x * group.rank), group=group), 3):
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, 3 * x)


def test_the_caller_s_array_stays_as_it_is():
    x = np.ones(4)
    total = run(lambda group: all_reduce(x, group=group), 1)[0]
    total += 1
    np.testing.assert_array_equal(x, 1)


def test_quantised_weights():
    x = RNG.standard_normal((3, 128)).astype(np.float32)
    weight = quantize(RNG.standard_normal((128, 64)).astype(np.float32), format="int8")
    (out,) = run(lambda group: row_linear(x, weight, group=group), 1)
    np.testing.assert_array_equal(out, linear(x, weight))

    def of_rank(group: Group) -> LinearGrads:
        dout = np.ones((3, 64), np.float32)
        return column_linear_backward(dout, x, weight, group=group)

    first, second = run(of_rank, 2)
    assert first.dw is None
    np.testing.assert_array_equal(first.dx, second.dx)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda group: all_reduce(X, group=3), "TypeError: group has type builtins.int"),
        (
            lambda group: column_linear(X, UP, group=None),
            "TypeError: group has type builtins.NoneType",
        ),
        (lambda group: all_reduce([1.0], group=group), "TypeError: x has type builtins.list"),
        (lambda group: all_reduce(None, group=group), "TypeError: x is None; "),
        (lambda group: row_linear(X, UP[:7], group=group), "ValueError: x has shape .* w"),
        (
            lambda group: row_linear(X, UP, UP[0, :1], group=group),
            r"ValueError: b is .* \(1,\); of this x and w it is",
        ),
        (
            lambda group: row_linear(X, UP, UP[0].astype(np.float16), group=group),
            "TypeError: b is float16",
        ),
        (
            lambda group: row_linear(X, UP, residual=X[:1] @ UP, group=group),
            "ValueError: residual is",
        ),
        (
            lambda group: all_reduce(np.zeros((2, 3) if group.rank else (3, 2)), group=group),
            r"ValueError: rank . sent float64 \(., .\), rank . expected float64 \(., .\); ranks",
        ),
        (
            lambda group: all_reduce(X[: group.rank + 1], group=group),
            "ValueError: .*sent.*expected",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(call, says):
    with pytest.raises(RankFailedError, match=rf"rank \d failed: {says}"):
        run(call, 2, timeout=20)


def test_arrays_are_where_their_rank_is():
    def of_rank(group: Group) -> None:
        group.device = group.rank
        all_reduce(X, group=group)

    with pytest.raises(RankFailedError, match=r"arrays that are NumPy's, of rank \d on device"):
        run(of_rank, 2, timeout=20)
