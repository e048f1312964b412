"""Which dense calls of a few queries the kernels of decoding take, and with what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.recording_device import device_array

import cupyattn
from cupyattn.cli.recorder import LaunchRecorder
from cupyattn.ops.attention.few_queries import LEAST_KEYS

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


def launched(recorder: LaunchRecorder, sq: int, sk: int, **changed: Any) -> list[str]:
    """The kernels that a call starts on 40 multiprocessors."""
    sizes = {"B": 1, "H": 8, "G": 2, "D": 128, "Dv": 128, "dtype": np.float16}
    sizes |= {name: changed.pop(name) for name in [*changed] if name in sizes}
    batch, heads, kv_heads, head_dim, head_dim_v, dtype = sizes.values()
    q = device_array((batch, sq, heads, head_dim), dtype)
    k, v = (device_array((batch, sk, kv_heads, d), dtype) for d in (head_dim, head_dim_v))
    cupyattn.attention(q, k, v, **changed)
    return [launch.specialisation.spec.entry for launch in recorder.started]


DECODE = ["attention_decode", "attention_decode_combine"]


FLASH = ["attention_forward"]


SPLIT = ["attention_forward_split", "attention_combine_parts"]


@pytest.mark.parametrize(
    ("sq", "sk", "changed", "expected"),
    [
        (1, 32_768, {}, DECODE),
        (1, LEAST_KEYS, {}, DECODE),
        (1, LEAST_KEYS - 1, {}, FLASH),
        (16, 4096, {}, DECODE),
        (17, 4096, {}, SPLIT),
        (0, 4096, {}, []),
        (1, 4096, {"Dv": 64}, SPLIT),
        (1, 4096, {"causal": True, "window_size": (200, 5)}, FLASH),
        (1, 4096, {"causal": True, "window_size": (600, 5)}, DECODE),
        (1, 4096, {"window_size": (None, 5)}, DECODE),
        (1, 4096, {"implementation": "tiled"}, ["attention_tiled"]),
        (1, 4096, {"softcap": 5.0}, DECODE),
        (1, 4096, {"dropout_p": 0.5, "seed": 0}, SPLIT),
        (1, 4096, {"dtype": np.float32}, DECODE),
        (17, 4096, {"dtype": np.float32}, ["attention_forward_split_f32", SPLIT[1]]),
        # A grid that fills the card: one pass over the keys always, more of them for a few tokens.
        (1, 4096, {"B": 64, "H": 2}, DECODE),
        (16, 4096, {"B": 64, "H": 2}, DECODE),
        (12, 4096, {"B": 64}, DECODE),
        (13, 4096, {"B": 64}, FLASH),
        (13, 4096, {"B": 7}, DECODE),
        (16, 4096, {"B": 64, "dtype": np.float32}, DECODE),
    ],
)
def test_which_calls_share_the_keys(recorder, sq, sk, changed, expected):
    assert launched(recorder, sq, sk, **changed) == expected


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("mask", (4096,), SPLIT),
        ("bias", (4096,), SPLIT),
        ("alibi_slopes", (8,), DECODE),
        ("sinks", (8,), DECODE),
        ("seqused_k", (1,), DECODE),
        ("q_offset", (1,), DECODE),
    ],
)
def test_options_that_are_arrays(recorder, name, shape, expected):
    dtypes = {"mask": bool, "seqused_k": np.int32, "q_offset": np.int64}
    option = {name: device_array(shape, dtypes.get(name, np.float32))}
    assert launched(recorder, 1, 4096, **option) == expected
    for launch in recorder.started if expected is DECODE else []:
        names = [parameter.name for parameter in launch.specialisation.spec.parameters]
        passed = dict(zip(names, launch.arguments, strict=True))
        wanted = {"seqused_k": ("seqlens_k", "q_offset")}.get(name, (name,))
        for parameter in wanted:
            if parameter in names:
                assert passed[parameter] is option[name]
        others = {"seqlens_k", "q_offset", "block_table"} - {*wanted}
        assert all(passed.get(other) is None for other in others)


@pytest.mark.parametrize("return_lse", [False, True])
def test_with_out_and_workspace_nothing_is_allocated(recorder, return_lse):
    q, k = device_array((1, 1, 8, 128)), device_array((1, 4096, 2, 128))
    out, lse = device_array(q.shape), device_array((1, 8, 1), np.float32)
    given = (out, lse) if return_lse else out
    workspace = device_array((2**22,), np.uint8)
    cupyattn.attention(q, k, k, return_lse=return_lse, out=given, workspace=workspace)
    assert not recorder.allocated
    forward, combine = recorder.started
    assert forward.arguments[10] is combine.arguments[5] is out
    assert (forward.arguments[11] is lse) == return_lse
