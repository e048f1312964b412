"""What sampling refuses, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices import everywhere, placed

import cupyattn

X = np.zeros((2, 9), np.float32)
PREVIOUS = np.array([[0, -1], [8, 3]], np.int32)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


@everywhere
@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"logits": None}, TypeError, "logits is None"),
        ({"logits": X[0]}, ValueError, r"logits has shape \(9,\); logits is \(rows, V\)"),
        ({"logits": X[None]}, ValueError, r"logits has shape \(1, 2, 9\)"),
        ({"logits": X.astype(int)}, TypeError, "logits has dtype int64"),
        ({"logits": X.astype(float)}, TypeError, r"logits has dtype float64; allowed are float16"),
        ({"logits": X[:, ::2]}, ValueError, "logits has strides"),
        ({"logits": X[:, :0]}, ValueError, "V = 0; a row has 1 to 262,144 tokens"),
        ({"logits": np.zeros((1, 2**18 + 1), np.float16)}, ValueError, "V = 262145"),
        ({"seed": None}, TypeError, "seed is None"),
        ({"seed": -1}, ValueError, r"seed = -1; it is an integer from 0 to 2\*\*64 - 1"),
        ({"seed": 2**64}, ValueError, "seed = 18446744073709551616"),
        ({"seed": 1.5}, TypeError, "seed is 1.5, a float"),
        ({"seed": ones(2, dtype=np.int32)}, TypeError, "seed has dtype int32; allowed are uint64"),
        ({"seed": ones(3, dtype=int)}, ValueError, r"seed has shape \(3,\).*here \(2,\)"),
        ({"step": -1}, ValueError, "step = -1"),
        ({"step": True}, TypeError, "step is True"),
        ({"step": ones(2)}, TypeError, "step has dtype float32; allowed are int32, int64"),
        ({"temperature": -0.5}, ValueError, "temperature = -0.5; it is finite, 0"),
        ({"temperature": np.inf}, ValueError, "temperature = inf"),
        ({"temperature": np.nan}, ValueError, "temperature = nan"),
        ({"temperature": "1"}, TypeError, "temperature is a str; it is a real number"),
        ({"temperature": None}, TypeError, "temperature is a NoneType"),
        ({"temperature": ones(2, 1)}, ValueError, r"temperature has shape \(2, 1\)"),
        ({"temperature": ones(2, dtype=float)}, TypeError, "temperature has dtype float64"),
        ({"top_k": -1}, ValueError, "top_k = -1"),
        ({"top_k": 1.0}, TypeError, "top_k is 1.0, a float"),
        ({"top_k": ones(2)}, TypeError, "top_k has dtype float32; allowed are int32, int64"),
        ({"top_p": 0}, ValueError, "top_p = 0; it is above 0 and at most 1"),
        ({"top_p": 1.5}, ValueError, "top_p = 1.5"),
        ({"top_p": np.nan}, ValueError, "top_p = nan"),
        ({"top_p": ones(2, dtype=np.float16)}, TypeError, "top_p has dtype float16"),
        ({"min_p": -0.1}, ValueError, "min_p = -0.1; it is 0 to 1"),
        ({"min_p": 1.1}, ValueError, "min_p = 1.1"),
        ({"min_p": [0.1, 0.2]}, TypeError, "min_p is a list"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty = 0; it is finite and more"),
        ({"repetition_penalty": 2.0, "previous": None}, TypeError, "without previous"),
        ({"repetition_penalty": ones(2), "previous": None}, TypeError, "without previous"),
        ({"previous": PREVIOUS.astype(int)}, TypeError, "previous has dtype int64"),
        ({"previous": PREVIOUS[0]}, ValueError, r"previous has shape \(2,\)"),
        ({"previous": PREVIOUS[:1]}, ValueError, r"previous has shape \(1, 2\).*here \(2, 2\)"),
        ({"out": ones(2)}, TypeError, "out is float32"),
        ({"out": ones(3, dtype=np.int32)}, ValueError, r"out is int32 \(3,\); the result is int32"),
        ({"workspace": np.zeros((9, 9), np.uint8)[:, :3]}, ValueError, "workspace has strides"),
    ],
)  # fmt: skip
def test_bad_input(side, changed, kind, message):
    given = {"logits": X, "seed": 0, "previous": PREVIOUS, **changed}
    logits = placed(side, given.pop("logits"))
    with pytest.raises(kind, match=message):
        cupyattn.sample(logits, **{name: placed(side, value) for name, value in given.items()})


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    "name", ["seed", "step", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
)
def test_a_list_is_told_to_be_an_array(name, kind):
    """float([...]) would raise."""
    given: dict[str, Any] = {"seed": 0, "previous": PREVIOUS, name: kind([1, 1])}
    message = f"^{name} is a {kind.__name__}; it is a number for all rows, .*; pass an array, one a"
    with pytest.raises(TypeError, match=message) as said:
        cupyattn.sample(X, **given)
    *_, example = str(said.value).split(": ")
    followed = eval(example, {"numpy": np, name: given[name]})
    assert cupyattn.sample(X, **{**given, name: followed}).shape == (2,)


def test_true_is_no_number_behind_a_call_that_was_given_1():
    """Numbers that were checked once are remembered, and 1 == True."""
    cupyattn.sample(X, seed=0, top_k=1, step=1)
    for name in ("top_k", "step", "seed"):
        with pytest.raises(TypeError, match=f"{name} is True"):
            cupyattn.sample(X, **{"seed": 0, name: True})


@everywhere
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("seed", np.array([0, -5]), r"seed\[1\] = -5"),
        ("step", np.array([-1, 0]), r"step\[0\] = -1"),
        ("temperature", np.array([1, -1], np.float32), r"temperature\[1\] = -1.0"),
        ("temperature", np.array([1, np.nan], np.float32), r"temperature\[1\] = nan"),
        ("top_k", np.array([3, -2], np.int32), r"top_k\[1\] = -2"),
        ("top_p", np.array([0, 1], np.float32), r"top_p\[0\] = 0.0"),
        ("min_p", np.array([0, 2], np.float32), r"min_p\[1\] = 2.0"),
        ("repetition_penalty", np.array([1, 0], np.float32), r"repetition_penalty\[1\] = 0.0"),
        ("previous", np.array([[0, 1], [2, 9]], np.int32), r"previous\[1, 1\] is 9; .* 0 to 8"),
        ("previous", np.array([[0, -2], [2, 9]], np.int32), r"previous\[0, 1\] is -2"),
    ],
)  # fmt: skip
def test_the_first_number_out_of_range_is_named(side, name, values, message):
    given = {"seed": 0, "previous": PREVIOUS, name: values}
    given = {each: placed(side, value) for each, value in given.items()}
    with cupyattn.backend(checks=True), pytest.raises(ValueError, match=message):
        cupyattn.sample(side.put(X.copy()), **given)


@everywhere
def test_results_share_no_memory_with_what_is_read(side):
    memory = side.put(np.zeros((2, 9), np.int32))
    with pytest.raises(ValueError, match="out overlaps previous"):
        cupyattn.sample(side.put(X.copy()), seed=0, previous=memory, out=memory[0, :2])


def test_greedy_needs_no_seed():
    assert cupyattn.sample(X, seed=None, temperature=0).tolist() == [0, 0]
    with pytest.raises(TypeError, match="seed is None"):
        cupyattn.sample(X, seed=None, temperature=np.zeros(2, np.float32))


@pytest.mark.nvrtc
def test_a_workspace_that_is_too_small_is_refused_before_anything_is_written():
    out = np.full(2, 77, np.int32)
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match="workspace has 100 bytes"):
        cupyattn.sample(X, seed=0, top_p=0.5, out=out, workspace=np.zeros(100, np.uint8))
    assert out.tolist() == [77, 77]
