"""What sampling starts: as few launches as its filters need, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.recording_device import device_array

import cupyattn
from cupyattn.kernels.configs.layers.sampling import PART

ROWS = 3
MAXIMA, COUNTS, DRAW = "sample_maxima", "sample_bins", "sample"


def per_row(dtype: Any) -> Any:
    return device_array((ROWS,), dtype)


@pytest.mark.parametrize(
    ("options", "entries"),
    [
        ({"temperature": 0, "seed": None, "top_p": 0.5}, [DRAW]),
        ({}, [MAXIMA, DRAW]),
        ({"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1.0}, [MAXIMA, DRAW]),
        ({"min_p": 0.1}, [MAXIMA, DRAW]),
        ({"top_k": 5}, [MAXIMA, COUNTS, DRAW]),
        ({"top_p": 0.5, "min_p": 0.1}, [MAXIMA, COUNTS, DRAW]),
        ({"temperature": np.float32, "seed": np.uint64, "step": np.int32}, [MAXIMA, DRAW]),
        ({"top_k": np.int32, "temperature": np.float32}, [MAXIMA, COUNTS, DRAW]),
        ({"min_p": np.float32}, [MAXIMA, DRAW]),
    ],
)
@pytest.mark.parametrize("tokens", [100, 2 * PART + 1])
def test_launches(recorder, options, entries, tokens):
    """No array of options is looked at; with out= and workspace= nothing is allocated."""
    logits, ids = device_array((ROWS, tokens)), device_array((ROWS,), np.int32)
    room = device_array((2**20,), np.uint8)
    given = {n: per_row(v) if isinstance(v, type) else v for n, v in options.items()}
    found = cupyattn.sample(logits, **{"seed": 1, **given}, out=ids, workspace=room)
    assert found is ids
    assert recorder.allocated == []
    assert [each.specialisation.spec.entry for each in recorder.started] == entries
    parts = -(-tokens // PART)
    assert {each.grid for each in recorder.started} == {(ROWS * parts, 1, 1)}
    # Greedy, no launch is there to zero the counters of a row of several parts.
    assert len(recorder.zeroed) == (entries == [DRAW] and parts > 1)


def test_numbers_of_each_call_reach_the_kernel(recorder):
    """What is remembered of a call is not its seed, its step, or another call's filter."""
    logits = device_array((ROWS, 100))
    for seed, step, top_p in ((1, 0, 0.5), (2**64 - 1, 7, 0.5), (1, 2**40, 0.25)):
        cupyattn.sample(logits, seed=seed, step=step, top_p=top_p, top_k=9, min_p=0.125)
        draw = recorder.started[-1]
        told = dict(
            zip([p.name for p in draw.specialisation.spec.parameters], draw.arguments, strict=True)
        )
        assert (told["seed_value"], told["step_value"], told["top_k_value"]) == (seed, step, 9)
        assert (told["top_p_value"], told["min_p_value"]) == (top_p, 0.125)
        assert (told["temperature_value"], told["repetition_penalty_value"]) == (1, 1)
        assert type(told["seed_value"]) is np.uint64
        assert all(told[name] is None for name in ("seed", "step", "temperature", "top_k"))


@pytest.mark.parametrize(
    ("tokens", "stride", "rows", "aligned"),
    [(104, 104, 3, "true"), (104, 105, 3, "false"), (101, 101, 1, "true"), (101, 101, 3, "false")],
)
def test_vector_loads_where_each_row_starts_at_one(recorder, tokens, stride, rows, aligned):
    cupyattn.sample(device_array((rows, tokens), np.float16, (2 * stride, 2)), seed=0)
    assert dict(recorder.started[-1].specialisation.macros)["ALIGNED"] == aligned


@pytest.mark.parametrize("tokens", [4096, 128_256, 2**18])
def test_the_documented_workspace_is_enough(recorder, tokens):
    """About 83,000 bytes a row, and 12 for each 4,096 tokens of one."""
    rows = 64
    needed = rows * (83_000 + 12 * -(-tokens // 4096))
    cupyattn.sample(device_array((rows, tokens)), seed=0, top_p=0.5)
    (ids, workspace) = recorder.allocated
    assert ids.shape == (rows,)
    assert 0.97 * needed < workspace.nbytes <= needed
