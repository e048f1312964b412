"""Bugs planted in the attention kernels that a check of the emulator finds."""

from __future__ import annotations

import numpy as np
import pytest
from support.planted_bugs import (
    EPILOGUE_CUH,
    F32_CUH,
    F32_EPILOGUE_CUH,
    F32_FEED_CUH,
    F32_KEYS_CUH,
    FEED_CUH,
    FORWARD_CUH,
    KEY_FEED_CUH,
    ROWS_CUH,
    Bug,
    attention_recorded,
    error_ratio,
    without_barrier,
)

from cupyattn.emulator import (
    BarrierError,
    Checks,
    ConstWriteError,
    KernelFault,
    MisalignedAccessError,
    OutOfBoundsError,
    SharedMemoryRaceError,
    UninitializedReadError,
)

pytestmark = pytest.mark.nvrtc


@pytest.mark.parametrize("kernel", ["flash", "flash f32"])
def test_a_clean_copy_of_the_attention_kernel_is_right(kernel, start_with):
    recorded = attention_recorded(kernel)
    inputs = [array.copy() for array in recorded.arguments[:3]]
    start_with(recorded)
    assert 0 < error_ratio(recorded) <= 1
    for before, after in zip(inputs, recorded.arguments, strict=False):
        np.testing.assert_array_equal(before, after)


FAULTS = {
    # flash: no barrier ...
    "flash: after Q": (without_barrier(FORWARD_CUH, "q: written"), SharedMemoryRaceError),
    "flash: between Q and K": (without_barrier(FORWARD_CUH, "q: read"), SharedMemoryRaceError),
    "flash: after the first tile": (
        without_barrier(FORWARD_CUH, "K and V: the first"),
        SharedMemoryRaceError,
    ),
    "flash: after each tile": (
        without_barrier(FORWARD_CUH, "K and V: this half"),
        SharedMemoryRaceError,
    ),
    "flash: inside the warp, before the store": (
        without_barrier(FORWARD_CUH, "out: each warp", "__syncwarp();"),
        SharedMemoryRaceError,
    ),
    "flash: one query too many is loaded": (
        Bug(ROWS_CUH, "if (item < valid_rows) quad", "if (item <= valid_rows) quad"),
        OutOfBoundsError,
    ),
    "flash: one key too many is loaded": (
        Bug(FEED_CUH, "return key < valid_rows;", "return key <= valid_rows;"),
        OutOfBoundsError,
    ),
    "flash: one row too many is stored": (
        Bug(EPILOGUE_CUH, "+ row >= place.sq) break;", "+ row > place.sq) break;"),
        OutOfBoundsError,
    ),
    "flash: one lse too many is stored": (
        Bug(EPILOGUE_CUH, "&& query < place.sq)", "&& query <= place.sq)"),
        OutOfBoundsError,
    ),
    "flash: the query head in place of the key-value head": (
        Bug(
            KEY_FEED_CUH,
            "head_rows(v_g, v, place.batch, place.kv_head,",
            "head_rows(v_g, v, place.batch, place.head,",
        ),
        OutOfBoundsError,
    ),
    "flash: the result overwrites q": (
        Bug(
            FORWARD_CUH,
            "output.store(smem.out, arrays.out_g);",
            "output.store(smem.out, const_cast<float16*>(arrays.q_g));",
        ),
        ConstWriteError,
    ),
    # flash in float32: no barrier ...
    "flash f32: after the first slice": (
        without_barrier(F32_CUH, "buffer: the first"),
        SharedMemoryRaceError,
    ),
    "flash f32: after each stage": (
        without_barrier(F32_CUH, "buffer: this one"),
        SharedMemoryRaceError,
    ),
    "flash f32: inside the warp, before P V": (
        without_barrier(F32_CUH, "p: written", "__syncwarp();"),
        SharedMemoryRaceError,
    ),
    "flash f32: the stage that is computed is filled": (
        Bug(
            F32_CUH,
            "} else {\n      feed.store_slice(thread.other_buffer_s(cta.smem));",
            "} else {\n      feed.store_slice(thread.buffer_s);",
        ),
        SharedMemoryRaceError,
    ),
    "flash f32: all warps write P of the first": (
        Bug(F32_CUH, "smem.p[warp_index()]", "smem.p[0]"),
        SharedMemoryRaceError,
    ),
    "flash f32: one query too many is loaded": (
        Bug(F32_FEED_CUH, "kPassRows < rows;", "kPassRows <= rows;"),
        OutOfBoundsError,
    ),
    "flash f32: one key too many is loaded": (
        Bug(F32_FEED_CUH, "slice_key(slice_row()) < keys;", "slice_key(slice_row()) <= keys;"),
        OutOfBoundsError,
    ),
    "flash f32: one value too many is loaded": (
        Bug(F32_FEED_CUH, "panel_row()) < keys;", "panel_row()) <= keys;"),
        OutOfBoundsError,
    ),
    "flash f32: a column too many is loaded": (
        Bug(F32_FEED_CUH, "if (columns <= 0) return quad;", ""),
        OutOfBoundsError,
    ),
    "flash f32: one row too many is stored": (
        Bug(
            F32_EPILOGUE_CUH,
            ">= place.sq) continue;\n      store_row(query_row",
            "> place.sq) continue;\n      store_row(query_row",
        ),
        OutOfBoundsError,
    ),
    "flash f32: the query head in place of the key-value head": (
        Bug(
            F32_KEYS_CUH,
            "head_rows(v_g, params.v, place.batch, place.kv_head,",
            "head_rows(v_g, params.v, place.batch, place.head,",
        ),
        OutOfBoundsError,
    ),
    "flash f32: vectors begin one item late": (
        Bug(F32_FEED_CUH, "+ slice_col()),\n        k_g", "+ slice_col() + 1),\n        k_g"),
        MisalignedAccessError,
    ),
    "flash f32: the result overwrites q": (
        Bug(
            F32_CUH,
            "place.head), arrays.out_g, arrays.lse_g);",
            "place.head), const_cast<Traits::Scalar*>(arrays.q_g), arrays.lse_g);",
        ),
        ConstWriteError,
    ),
    "flash f32: one row of K too few is staged": (
        Bug(
            F32_FEED_CUH,
            "for (int pass = 0; pass < kKPasses; pass++) {\n      store",
            "for (int pass = 1; pass < kKPasses; pass++) {\n      store",
        ),
        UninitializedReadError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_bug_in_an_attention_kernel_is_found(name, start_with):
    bug, fault = FAULTS[name]
    with pytest.raises(KernelFault) as found:
        start_with(attention_recorded(name.partition(":")[0]), bug)
    assert type(found.value) is fault
    assert found.value.line > 0
    assert found.value.block is not None
    assert found.value.thread is not None


@pytest.mark.parametrize(
    ("implementation", "file", "comment", "condition"),
    [
        ("flash", FORWARD_CUH, "K and V: this half", "active"),  # warps that see no key pass by
        ("flash f32", F32_CUH, "buffer: this one", "warp_index() != 2"),
    ],
)
def test_a_barrier_passed_by_is_found_twice(implementation, file, comment, condition, start_with):
    """As the race that it leads to, and with that check off as what it is."""
    right = f"__syncthreads();  // {comment}"
    bug = Bug(file, right, f"if ({condition}) {right}")
    with pytest.raises(SharedMemoryRaceError):
        start_with(attention_recorded(implementation), bug)
    with pytest.raises(BarrierError):
        start_with(attention_recorded(implementation), bug, checks=Checks(races=False))
