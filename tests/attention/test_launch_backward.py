"""What attention_backward passes to its kernels, and the scratch that they share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.recording_device import Recorder, backward_call, device_array
from support.strategies import dtype_of

from cupyattn import AttentionGrads, attention_backward
from cupyattn.kernels.spec import Specialisation


def started_backward(recorder: Recorder) -> dict[str, tuple[dict[str, Any], Specialisation, int]]:
    """By kernel: its arguments by name, its specialisation, its CTAs."""
    found = {}
    for specialisation, grid, arguments in recorder.started:
        parameters = specialisation.spec.parameters
        named = {p.name: a for p, a in zip(parameters, arguments, strict=True)}
        kernel = specialisation.spec.entry.removeprefix("attention_backward_f32_")
        found[kernel] = (named, specialisation, grid[0])
    return found


def memory_of(array: Any) -> tuple[int, int]:
    """Where an array begins, and how long it is."""
    return array.data.ptr, array.nbytes


def test_what_the_backward_passes_to_its_kernels(recorder):
    """In order, each with the call's arrays under the names of its parameters."""
    bias, sinks = device_array((4, 1, 5), np.float32), device_array((8,), np.float16)[::2]
    arrays, options = backward_call(bias=bias, sinks=sinks, softmax_scale=0.5, causal=True)
    arrays["lse"] = device_array((4, 2, 3), np.float32).transpose(1, 0, 2)
    dlse = device_array((2, 4, 6), np.float32)[..., :3]
    grads = attention_backward(*arrays.values(), **options, dlse=dlse)
    found = started_backward(recorder)
    assert list(found) == ["delta", "dkdv", "dq", "dbias", "dsinks"]
    assert [ctas for _, _, ctas in found.values()] == [2 * 4 * 3 // 8, 2 * 2, 2 * 4, 1, 4]
    call_arrays = {**arrays, "bias": bias, "sinks": sinks, "dlse": dlse, **grads._asdict()}
    for arguments, _, _ in found.values():
        params = arguments.pop("params")
        delta = arguments.pop("delta")
        assert (delta.dtype, delta.shape) == (np.float32, (2 * 4 * 3,))
        assert delta.data.ptr == recorder.allocated[-1].data.ptr
        for name, argument in arguments.items():
            if name in call_arrays:
                assert argument is call_arrays[name]
            else:
                assert argument is None, f"{name} was not given"
    assert params["attention"]["lse"].tolist() == (3, 1, 6), "batch, query, head"
    assert params["dlse"].tolist() == (24, 1, 6)
    assert params["dout"].tolist() == (72, 24, 6)
    assert params["dk"].tolist() == (80, 16, 8)
    assert params["dbias"].tolist() == (0, 5, 0, 1)
    assert (params["dsinks_stride"], params["attention"]["scores"]["sinks_stride"]) == (1, 2)
    assert (params["batch"], params["accumulate"]) == (2, 0)
    assert params["scale"] == 0.5
    assert dict(found["dbias"][1].macros)["LANES"] == 1, "6 scores an item"


def test_a_backward_with_grads_and_workspace_allocates_nothing(recorder):
    arrays, options = backward_call()
    targets = [device_array(arrays[name].shape, np.float32) for name in "qkv"]
    workspace = device_array((2 * 4 * 3 + 1,), np.float32)
    grads = attention_backward(
        *arrays.values(),
        **options,
        grads=AttentionGrads(*targets, None, None),
        workspace=workspace,
        accumulate=True,
    )
    assert not recorder.allocated
    assert all(given is target for given, target in zip(grads, targets, strict=False))
    delta = started_backward(recorder)["delta"][0]["delta"]
    assert (delta.data.ptr, delta.size) == (workspace.data.ptr, 2 * 4 * 3)
    assert started_backward(recorder)["dq"][0]["params"]["accumulate"] == 1


def half_backward_call(**options: Any) -> tuple[list[Any], dict[str, Any]]:
    """A call that flash takes: (B, Sq, Sk, H, G, D, Dv) = (2, 70, 90, 4, 2, 8, 16)."""
    shapes = (2, 70, 4, 16), (2, 70, 4, 8), (2, 90, 2, 8), (2, 90, 2, 16), (2, 70, 4, 16)
    return [*map(device_array, shapes), device_array((2, 4, 70), np.float32)], options


ROWS, KEYS = 2 * 4 * 128, 2 * 2 * 128  # 70 query rows are padded to 128, and so are 90 keys
SUMS = 2 * 4 * 4 * 90  # by each of four warps, of each batch element, which are a part each


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("deterministic", "bias_shape", "kernels", "scratch"),
    [
        (False, None, ["dkdv", "convert"], [8 * ROWS]),
        (True, None, ["dkdv", "dq"], []),
        (False, (4, 1, 90), ["dkdv", "convert", "summed_dbias", "dbias"], [SUMS, 8 * ROWS]),
        (True, (4, 1, 90), ["dkdv", "dq", "summed_dbias", "dbias"], [SUMS]),
        (False, (2, 4, 70, 90), ["dkdv", "convert"], [8 * ROWS]),
    ],
    ids=str,
)
def test_what_the_flash_backward_launches(
    recorder, deterministic, bias_shape, kernels, scratch, accumulate
):
    """The kernels by the options, and the scratch that they share, as documented."""
    bias = None if bias_shape is None else device_array(bias_shape)
    arrays, options = half_backward_call(bias=bias, sinks=device_array((4,)), causal=True)
    grads = AttentionGrads(*map(device_array, [a.shape for a in arrays[1:4]]), None, None)
    names = {"dbias": bias, "dsinks": options["sinks"]}
    targets = {n: None if a is None else device_array(a.shape) for n, a in names.items()}
    grads = grads._replace(**targets)
    attention_backward(
        *arrays, **options, deterministic=deterministic, grads=grads, accumulate=accumulate
    )
    entries = [s.spec.entry.removeprefix("attention_backward_") for s, _, _ in recorder.started]
    assert entries == ["delta", "dsinks", "scales", *kernels]
    (workspace,) = recorder.allocated
    # Of delta two numbers a CTA of 32 rows, of each head two, and of dkdv and dq one a CTA.
    grids = [grid for s, grid, _ in recorder.started if s.spec.entry.endswith(("dkdv", "dq"))]
    *others, last = [2 * ROWS, 2 * (ROWS + KEYS) // 32, 2 * 2 * 4, max(grids)[0], *scratch]
    assert workspace.nbytes == sum(-(-4 * n // 256) * 256 for n in others) + 4 * last

    named = {}
    for specialisation, _, arguments in recorder.started:
        parameters = [parameter.name for parameter in specialisation.spec.parameters]
        named[specialisation.spec.entry] = dict(zip(parameters, arguments, strict=True))
    delta, dkdv = (named[f"attention_backward_{name}"] for name in ("delta", "dkdv"))
    zeroed = 0 if deterministic else scratch[-1]
    assert (0 if delta["zeroed"] is None else delta["zeroed"].size) == zeroed
    assert (dkdv["params"]["zeroed"], dkdv["params"]["accumulate"]) == (zeroed, accumulate)
    assert dkdv["params"]["rows_padded"] == 128
    broadcasts = bias_shape == (4, 1, 90)
    if broadcasts:
        summed, last = (named[f"attention_backward_{n}dbias"] for n in ("summed_", ""))
        assert summed["dbias"] is last["scratch"]
        assert last["dbias"] is grads.dbias
        assert last["params"]["repeats"].tolist() == [2, 1, 4, 1]
    elif bias is not None:
        assert dkdv["dbias"] is grads.dbias
    filled = [grads.dbias] if bias is not None and not broadcasts and not accumulate else []
    assert sorted(map(memory_of, recorder.zeroed)) == sorted(map(memory_of, filled))


@pytest.mark.parametrize(
    ("dtype", "deterministic", "one_pass"),
    [
        *(("float32", False, True), ("float32", True, False)),
        *(("bfloat16", False, True), ("bfloat16", True, False)),
    ],
)
@pytest.mark.parametrize(
    ("bias_shape", "kernels"),
    [(None, []), ((4, 3, 5), ["f32_dbias"]), ((2, 4, 3, 5), [])],
    ids=str,
)
def test_what_the_float_backward_launches(
    recorder, dtype, deterministic, one_pass, bias_shape, kernels
):
    arrays, _ = backward_call()
    arrays = {
        name: array if name == "lse" else device_array(array.shape, dtype_of(dtype))
        for name, array in arrays.items()
    }
    bias = None if bias_shape is None else device_array(bias_shape, np.float32)
    sinks = device_array((4,), np.float32)
    grads = attention_backward(
        *arrays.values(), bias=bias, sinks=sinks, deterministic=deterministic
    )
    entries = [s.spec.entry.removeprefix("attention_backward_") for s, _, _ in recorder.started]
    rounded = one_pass and dtype != "float32"
    last = {"f32_convert": 2 * 4 * 3 // 8} if rounded else {} if one_pass else {"f32_dq": 2 * 4}
    gradients = ["f32_delta", "f32_dkdv", *last]
    assert entries == [*gradients, *kernels, "f32_dsinks"]
    ctas = [grid[0] for _, grid, _ in recorder.started[: len(gradients)]]
    assert ctas == [2 * 4 * 3 // 8, 2 * 2, *last.values()]
    specialisation, _, arguments = recorder.started[1]
    names = [parameter.name for parameter in specialisation.spec.parameters]
    macros, named = dict(specialisation.macros), dict(zip(names, arguments, strict=True))
    assert named["delta"].size == 2 * 4 * 3
    direct = bias_shape == (2, 4, 3, 5)
    assert macros["DBIAS"] == ("float32" if direct else "void")
    assert macros["ONE_PASS"] == ("true" if one_pass else "false")
    added_to = named["dq"]
    if rounded:  # (B, H, Sq, D) in scratch memory
        assert (added_to.dtype, added_to.size) == (np.float32, 2 * 4 * 3 * 8)
        assert named["params"]["dq"].tolist() == (4 * 3 * 8, 8, 3 * 8)
        _, _, (source, target, params) = recorder.started[2]
        assert source is added_to and target is grads.dq
        assert params["dq"].tolist() == (3 * 4 * 8, 4 * 8, 8)
    else:
        assert added_to is grads.dq
    filled = [added_to] * one_pass + [grads.dbias] * direct
    assert sorted(map(memory_of, recorder.zeroed)) == sorted(map(memory_of, filled))
    if bias is not None:
        assert named["dbias"] is grads.dbias


def test_a_backward_plan_is_made_once(recorder):
    """Arrays of one description share the kernels' struct; other options do not."""
    for options in ({}, {}, {"causal": True}):
        arrays, others = backward_call(**options)
        attention_backward(*arrays.values(), **others)
    first, again, causal = (started[2][-1] for started in recorder.started[::3])
    assert first is again
    assert first is not causal
