"""Records of arrays: taken apart in the order of their fields, planned and run by slots."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import pytest
from support.recording_device import Recorder

from cupyattn.ops.activations.kernels import ACTIVATIONS, FORWARD
from cupyattn.runtime.arrays import Layout, adopt, contiguous, layouts_of, starts_of
from cupyattn.runtime.checks import require_apart
from cupyattn.runtime.plan import NULL, Output, Planner, Step, allot
from cupyattn.runtime.records import Record, T, fields_of, given_of, slots_of, values_of


@dataclass(slots=True)
class Copied(Record[T]):
    SHOWN_AS: ClassVar = MappingProxyType({"out": "grads.out"})

    x: T
    more: T | None = None
    out: T | None = None
    workspace: T | None = None


@dataclass(slots=True)
class CopiedTwice(Copied[T]):
    again: T | None = None


X = np.zeros((2, 3), np.float32)


def test_fields_of_a_base_come_first():
    assert fields_of(CopiedTwice[Layout]) == (*fields_of(Copied), "again")
    assert values_of(CopiedTwice(1, again=2)) == (1, None, None, None, 2)


def test_absent_fields_have_no_layout_and_no_place():
    operands = adopt(Copied(X, out=X[:, ::-1]))
    layouts = layouts_of(Copied[Layout], operands.description)
    assert layouts.x == contiguous((2, 3), X.dtype)
    assert layouts.out.strides == (12, -4)
    assert (layouts.more, layouts.workspace) == (None, None)
    assert operands.places[1] == 0 != operands.places[0]
    assert starts_of(Copied[int], operands.description).more is None
    assert list(given_of(operands.arrays)) == ["x", "out"]


def test_errors_name_fields_as_callers_do():
    with pytest.raises(TypeError, match=r"^grads\.out has type builtins\.str"):
        adopt(Copied(X, out="none"))
    with pytest.raises(ValueError, match=r"^grads\.out overlaps x in memory"):
        require_apart(adopt(Copied(X, out=X)), {"out": None})
    with pytest.raises(ValueError, match=r"^grads\.out is float32 \(2, 3\); the result is"):
        require_apart(adopt(Copied(X, out=X.copy())), {"out": Output((3,), X.dtype)})


def test_slots_are_the_fields_that_are_given_or_made():
    layouts = layouts_of(Copied[Layout], adopt(Copied(X)).description)
    planner = Planner(Copied, layouts, {"out": Output((2, 3), X.dtype)})
    assert planner.slots == Copied(0, None, 2, None)
    first, second = planner.scratch(5), planner.scratch(70)
    assert (first, second) == (len(fields_of(Copied)), len(fields_of(Copied)) + 1)
    plan = planner.plan(zero_first=[second])
    assert [(piece.offset, piece.items) for piece in plan.scratch] == [(0, 5), (256, 70)]
    assert plan.workspace_bytes == 256 + 4 * 70


def test_a_step_refuses_a_required_array_that_is_absent():
    specialisation = FORWARD.specialise(75, "float32", 1, 1, ACTIVATION=ACTIVATIONS["silu"])
    params = np.zeros((), specialisation.spec.parameters[-1].dtype)[()]
    assert Step.of(specialisation, 1, (0, 1), params).slots == (0, 1)
    with pytest.raises(TypeError, match="out of activation must be an array, not None"):
        Step.of(specialisation, 1, (0, None), params)
    assert slots_of(Copied, [X, None, X, None]) == Copied(0, None, 2, None)
    assert NULL == -1


def test_scratch_of_several_plans_is_cut_from_one_workspace():
    outputs = [Output((3,), np.dtype(np.float32)), Output((5,), np.dtype(np.uint8))]
    memory = np.full(300, 7, np.uint8).view(np.uint8)
    aligned = memory[-memory.ctypes.data % 16 :]
    first, second = allot(Recorder(), outputs, aligned)
    assert (first.nbytes, second.nbytes) == (12, 5)
    assert second.ctypes.data - first.ctypes.data == 256
    with pytest.raises(ValueError, match="workspace has 200 bytes; this call needs 261"):
        allot(Recorder(), outputs, aligned[:200])
