"""The library's own kernels on the emulator: bugs planted in them are found.

A bug is a replaced line in a copy of the CUDA sources; the copy is compiled and launched as the
library does it. Results of the clean kernels are tested in test_kernels_*.py.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import cupyattn
from cupyattn import reference
from cupyattn.cli.recorder import Launch, LaunchRecorder, attention_launch
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
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.attention import TILED_TILE_K
from cupyattn.kernels.emulated_device import EmulatedDevice
from cupyattn.kernels.launch import launch
from cupyattn.kernels.source import source_root
from cupyattn.ops.attention_options import AttentionOptions
from cupyattn.ops.softmax import softmax_problem, softmax_rows

pytestmark = pytest.mark.nvrtc


ALL = Checks.all()


class Bug(NamedTuple):
    """Text of a file below cuda_src, which must be there once, and what takes its place."""

    file: str
    right: str
    wrong: str


def normal(*shape: int, dtype: str = "float16") -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


@pytest.fixture
def start_with(tmp_path: Path):
    """Run a recorded launch on the emulator, all checks on, from sources with bugs in them."""

    def start(recorded: Launch, *bugs: Bug, checks: Checks = ALL) -> None:
        folder = tmp_path / "cuda_src"
        shutil.copytree(source_root(), folder, dirs_exist_ok=True)
        for bug in bugs:
            text = (source_root() / bug.file).read_text()
            assert text.count(bug.right) == 1, f"{bug.file} has changed: plant the bug anew"
            (folder / bug.file).write_text(text.replace(bug.right, bug.wrong))
        right = recorded.specialisation
        spec = replace(right.spec, source=str(folder / right.spec.source))
        device = EmulatedDevice(checks)
        launch(device, replace(right, spec=spec), recorded.grid[0], recorded.arguments)

    return start


def attention_recorded(kernel: str) -> Launch:
    """Causal, several key tiles with a ragged end, two query heads on one key-value head.

    Scores rise from tile to tile, so that maxima do.
    """
    implementation, dtype = ("flash", "float32") if kernel == "flash f32" else (kernel, "float16")
    sq, sk = (3, 300) if kernel == "naive" else (100, 100)  # naive: a CTA for each query
    shapes = (1, sq, 2, 24), (1, sk, 1, 24), (1, sk, 1, 24)
    q, k, v = (normal(*shape, dtype=dtype) for shape in shapes)
    k[:, 64:] *= 16
    options = AttentionOptions(causal=True, implementation=implementation)
    return attention_launch(TURING, q, k, v, options)


def error_ratio(recorded: Launch) -> float:
    """The largest error of what a launch has written, over its bound."""
    q, k, v, out, lse = recorded.arguments[:5]
    exact = reference.attention(q, k, v, causal=True)
    bound = reference.attention_bound(q, k, v, dtype=q.dtype, tile_k=TILED_TILE_K, causal=True)
    results = zip((out, lse), exact, bound, strict=True)
    return max(reference.error_ratio(*each) for each in results)


def softmax_launch(length: int, *, backward: bool = False) -> Launch:
    """Three rows. Those of the backward's two inputs lie differently far apart."""
    recorder = LaunchRecorder(TURING)
    x, dout = normal(2, 3, length)
    named = {"x": x}
    if backward:
        out = np.zeros((3, length + 8), x.dtype)[:, :length]
        out[...] = reference.softmax(x)
        named = {"dout": dout, "out": out}
    operands = cupyattn.arrays.adopt(named)
    problem = softmax_problem(operands.layout_key(), "dx" if backward else "out")
    softmax_rows(recorder, problem, operands.arrays)
    (recorded,) = recorder.launches
    recorded.arguments[-2].fill(np.nan)  # the result
    return recorded


def softmax_error_ratio(recorded: Launch) -> float:
    """The largest error of what a softmax launch has written, over its bound."""
    *inputs, result, _ = recorded.arguments
    if len(inputs) == 1:
        exact = reference.softmax(*inputs)
        bound = reference.softmax_bound(*inputs, dtype=result.dtype)
    else:
        exact = reference.softmax_backward(*inputs)
        bound = reference.softmax_backward_bound(*inputs, dtype=result.dtype)
    return reference.error_ratio(result, exact, bound)


# --- the harness itself: copies without a bug


@pytest.mark.parametrize("kernel", ["naive", "tiled", "flash", "flash f32"])
def test_a_clean_copy_of_the_attention_kernel_is_right(kernel, start_with):
    recorded = attention_recorded(kernel)
    inputs = [array.copy() for array in recorded.arguments[:3]]
    start_with(recorded)
    assert 0 < error_ratio(recorded) <= 1
    for before, after in zip(inputs, recorded.arguments, strict=False):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("length", [24, 2040, 2048, 20_000])
def test_a_clean_copy_of_a_softmax_kernel_is_right(length, backward, start_with):
    recorded = softmax_launch(length, backward=backward)
    start_with(recorded)
    assert 0 < softmax_error_ratio(recorded) <= 1


# --- planted bugs that a check finds

NAIVE_CU, TILED_CU = "attention/naive.cu", "attention/tiled.cu"
FORWARD_CU = "attention/forward.cu"
SOFTMAX_CU, SOFTMAX_BACKWARD_CU = "fused/softmax_forward.cu", "fused/softmax_backward.cu"
ROWS_CUH = "fused/rows.cuh"
PRODUCTS_CUH, EPILOGUE_CUH = "attention/forward_products.cuh", "attention/forward_epilogue.cuh"
F32_CU, F32_STAGE_CUH = "attention/forward_f32.cu", "attention/float_stage.cuh"
F32_PRODUCTS_CUH = "attention/float_products.cuh"
TILE_CUH, STAGE_CUH, REDUCE_CUH = "common/tile.cuh", "attention/stage.cuh", "common/reduce.cuh"


def without_barrier(file: str, comment: str, barrier: str = "__syncthreads();") -> Bug:
    return Bug(file, f"{barrier}  // {comment}", f"// {comment}")


FAULTS = {
    # naive: no barrier ...
    "naive: after q": (without_barrier(NAIVE_CU, "q: written"), SharedMemoryRaceError),
    "naive: before p": (without_barrier(NAIVE_CU, "p: the previous"), SharedMemoryRaceError),
    "naive: after p": (without_barrier(NAIVE_CU, "p: this strip"), SharedMemoryRaceError),
    "naive: one key too many for the maximum": (
        Bug(NAIVE_CU, "+ thread; key < visible.end;", "+ thread; key <= visible.end;"),
        OutOfBoundsError,
    ),
    "naive: one key too many for the sum": (
        Bug(NAIVE_CU, "exists = key < visible.end;", "exists = key <= visible.end;"),
        OutOfBoundsError,
    ),
    "naive: one feature too many of q": (
        Bug(NAIVE_CU, "d < Traits::kHeadDim; d += ", "d <= Traits::kHeadDim; d += "),
        OutOfBoundsError,
    ),
    "naive: one column too many is stored": (
        Bug(NAIVE_CU, "(col < Traits::kHeadDimV) out", "(col <= Traits::kHeadDimV) out"),
        OutOfBoundsError,
    ),
    "naive: all threads but one write p": (
        Bug(NAIVE_CU, "smem.p[thread] = p;", "if (thread != 5) smem.p[thread] = p;"),
        UninitializedReadError,
    ),
    "naive: the query head in place of the key-value head": (
        Bug(
            NAIVE_CU,
            "head_rows(v_g, params.v, place.batch, place.kv_head,",
            "head_rows(v_g, params.v, place.batch, place.head,",
        ),
        OutOfBoundsError,
    ),
    # tiled: no barrier ...
    "tiled: before K": (without_barrier(TILED_CU, "key_value: the prev"), SharedMemoryRaceError),
    "tiled: after K": (without_barrier(TILED_CU, "key_value: K (and"), SharedMemoryRaceError),
    "tiled: before V": (without_barrier(TILED_CU, "key_value: K has"), SharedMemoryRaceError),
    "tiled: after V": (without_barrier(TILED_CU, "key_value: V has"), SharedMemoryRaceError),
    "tiled: all warps write P of the first": (
        Bug(TILED_CU, "smem.p[warp_index() * Traits::kRows + r][lane", "smem.p[r][lane"),
        SharedMemoryRaceError,
    ),
    "tiled: one row too many is loaded": (
        Bug(TILE_CUH, "if (row < valid_rows &&", "if (row <= valid_rows &&"),
        OutOfBoundsError,
    ),
    "tiled: one row too many is stored": (
        Bug(TILED_CU, "if (i >= params.sq) return;", "if (i > params.sq) return;"),
        OutOfBoundsError,
    ),
    "tiled: one row too few is staged": (
        Bug(TILE_CUH, "at < TileShape::kRows * kColVecs", "at < (TileShape::kRows - 1) * kColVecs"),
        UninitializedReadError,
    ),
    "tiled: the query head in place of the key-value head": (
        Bug(
            TILED_CU,
            "head_rows(k_g, params.k, place.batch, place.kv_head,",
            "head_rows(k_g, params.k, place.batch, place.head,",
        ),
        OutOfBoundsError,
    ),
    "tiled: vectors begin one item late": (
        Bug(TILE_CUH, "rows_g + row * row_stride + col)", "rows_g + row * row_stride + col + 1)"),
        MisalignedAccessError,
    ),
    "tiled: the result overwrites q": (
        Bug(
            TILED_CU,
            "store_rows(rows, place, out_g,",
            "store_rows(rows, place, const_cast<Traits::Scalar*>(q_g),",
        ),
        ConstWriteError,
    ),
    # flash: no barrier ...
    "flash: after Q": (without_barrier(FORWARD_CU, "q: written"), SharedMemoryRaceError),
    "flash: between Q and K": (without_barrier(FORWARD_CU, "q: read"), SharedMemoryRaceError),
    "flash: after the first tile": (
        without_barrier(FORWARD_CU, "K and V: the first"),
        SharedMemoryRaceError,
    ),
    "flash: after each tile": (
        without_barrier(FORWARD_CU, "K and V: this half"),
        SharedMemoryRaceError,
    ),
    "flash: inside the warp, before the store": (
        without_barrier(FORWARD_CU, "out: each warp", "__syncwarp();"),
        SharedMemoryRaceError,
    ),
    "flash: one query too many is loaded": (
        Bug(FORWARD_CU, "if (row < rows) quad", "if (row <= rows) quad"),
        OutOfBoundsError,
    ),
    "flash: one key too many is loaded": (
        Bug(STAGE_CUH, "key_of_pass(pass) >= valid_rows", "key_of_pass(pass) > valid_rows"),
        OutOfBoundsError,
    ),
    "flash: one row too many is stored": (
        Bug(EPILOGUE_CUH, "+ row >= params.sq) break;", "+ row > params.sq) break;"),
        OutOfBoundsError,
    ),
    "flash: one lse too many is stored": (
        Bug(EPILOGUE_CUH, "&& query < params.sq)", "&& query <= params.sq)"),
        OutOfBoundsError,
    ),
    "flash: the query head in place of the key-value head": (
        Bug(
            FORWARD_CU,
            "head_rows(v_g, params.v, place.batch, place.kv_head,",
            "head_rows(v_g, params.v, place.batch, place.head,",
        ),
        OutOfBoundsError,
    ),
    "flash: the result overwrites q": (
        Bug(
            FORWARD_CU,
            "output.store(smem.out, out_g);",
            "output.store(smem.out, const_cast<float16*>(q_g));",
        ),
        ConstWriteError,
    ),
    # flash in float32: no barrier ...
    "flash f32: after the first slice": (
        without_barrier(F32_CU, "stage: the first"),
        SharedMemoryRaceError,
    ),
    "flash f32: after each stage": (
        without_barrier(F32_CU, "stage: this one"),
        SharedMemoryRaceError,
    ),
    "flash f32: inside the warp, before P V": (
        without_barrier(F32_CU, "p: written", "__syncwarp();"),
        SharedMemoryRaceError,
    ),
    "flash f32: the stage that is computed is filled": (
        Bug(
            F32_CU,
            "} else {\n      staging.store_slice(thread.other_stage_s(cta.smem));",
            "} else {\n      staging.store_slice(thread.stage_s);",
        ),
        SharedMemoryRaceError,
    ),
    "flash f32: all warps write P of the first": (
        Bug(F32_CU, "smem.p[warp_index()]", "smem.p[0]"),
        SharedMemoryRaceError,
    ),
    "flash f32: one query too many is loaded": (
        Bug(F32_STAGE_CUH, "kPassRows < rows;", "kPassRows <= rows;"),
        OutOfBoundsError,
    ),
    "flash f32: one key too many is loaded": (
        Bug(F32_STAGE_CUH, "slice_key(slice_row()) < keys;", "slice_key(slice_row()) <= keys;"),
        OutOfBoundsError,
    ),
    "flash f32: one value too many is loaded": (
        Bug(F32_STAGE_CUH, "panel_row()) < keys;", "panel_row()) <= keys;"),
        OutOfBoundsError,
    ),
    "flash f32: a column too many is loaded": (
        Bug(F32_STAGE_CUH, "if (columns <= 0) return quad;", ""),
        OutOfBoundsError,
    ),
    "flash f32: one row too many is stored": (
        Bug(F32_CU, "(query >= cta.params.sq) continue;", "(query > cta.params.sq) continue;"),
        OutOfBoundsError,
    ),
    "flash f32: the query head in place of the key-value head": (
        Bug(
            F32_CU,
            "head_rows(v_g, params.v, place.batch, place.kv_head,",
            "head_rows(v_g, params.v, place.batch, place.head,",
        ),
        OutOfBoundsError,
    ),
    "flash f32: vectors begin one item late": (
        Bug(F32_STAGE_CUH, "+ slice_col()),\n        k_g", "+ slice_col() + 1),\n        k_g"),
        MisalignedAccessError,
    ),
    "flash f32: the result overwrites q": (
        Bug(
            F32_CU,
            "place.head), out_g, lse_g);",
            "place.head), const_cast<Traits::Scalar*>(q_g), lse_g);",
        ),
        ConstWriteError,
    ),
    "flash f32: one row of K too few is staged": (
        Bug(
            F32_STAGE_CUH,
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
        ("tiled", TILED_CU, "key_value: K has", "warp_index() != 2"),
        ("tiled", TILED_CU, "key_value: K has", "lane_index() < 16"),
        ("flash", FORWARD_CU, "K and V: this half", "active"),  # warps that see no key pass by
        ("flash f32", F32_CU, "stage: this one", "warp_index() != 2"),
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


@pytest.mark.parametrize(
    ("backward", "comment"),
    [
        (False, "partial_s: the previous"),  # the backward reduces but once: none was before it
        (False, "partial_s: written"),
        (True, "partial_s: written"),
    ],
)
def test_a_barrier_dropped_in_a_softmax_kernel_is_found(backward, comment, start_with):
    recorded = softmax_launch(2048, backward=backward)
    with pytest.raises(SharedMemoryRaceError, match=r"\(in `.*partial_s`, 32 bytes at 0\)"):
        start_with(recorded, without_barrier(REDUCE_CUH, comment))


# length of a row, the bug, what finds it
SOFTMAX_FAULTS = {
    "one vector too many is loaded": (
        2040, Bug(ROWS_CUH, "(column < length) {", "(column <= length) {"), OutOfBoundsError,
    ),
    "one vector too many is stored": (
        2040, Bug(ROWS_CUH, "(column < length) store", "(column <= length) store"),
        OutOfBoundsError,
    ),
    "the last strip has no end": (
        2040, Bug(ROWS_CUH, "(column < length) {", "(true) {"), OutOfBoundsError,
    ),
    "vectors begin one item late": (
        2048, Bug(ROWS_CUH, "row_g + column);", "row_g + column + 1);"), MisalignedAccessError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", SOFTMAX_FAULTS)
def test_a_bug_in_a_softmax_kernel_is_found(name, backward, start_with):
    length, bug, fault = SOFTMAX_FAULTS[name]
    with pytest.raises(KernelFault) as found:
        start_with(softmax_launch(length, backward=backward), bug)
    assert type(found.value) is fault
    assert found.value.line > 0


def test_strides_of_another_array_are_found(start_with):
    """They lead into what lies between the rows of out, a slice."""
    bug = Bug(SOFTMAX_BACKWARD_CU, "row_offset(params, kY,", "row_offset(params, kDout,")
    with pytest.raises(OutOfBoundsError, match="between the elements of the strided view"):
        start_with(softmax_launch(2040, backward=True), bug)


# --- planted bugs inside the arrays, which no check of memory can see: the bound finds them

MISTAKES = {
    "naive: K of the neighbouring feature": Bug(
        NAIVE_CU, "to_float(k_row_g[d])", "to_float(k_row_g[d ^ 1])"
    ),
    "naive: P of the first key for all": Bug(NAIVE_CU, "smem.p[j] *", "smem.p[0] *"),
    "naive: the later half of a strip has no values": Bug(
        NAIVE_CU, "j < strip; j++", "j < strip / 2; j++"
    ),
    "naive: V of every strip from the first": Bug(
        NAIVE_CU, "(first + j) * params.v.seq", "j * params.v.seq"
    ),
    "tiled: K of the neighbouring lane": Bug(
        TILED_CU,
        "smem.key_value + lane_index() * Traits::KTile",
        "smem.key_value + (lane_index() ^ 1) * Traits::KTile",
    ),
    "tiled: V of the neighbouring key": Bug(
        TILED_CU, "smem.key_value[(j + i) *", "smem.key_value[(j + (i ^ 1)) *"
    ),
    "tiled: P of the neighbouring row": Bug(
        TILED_CU,
        "&smem.p[warp_index() * Traits::kRows + r][j]",
        "&smem.p[warp_index() * Traits::kRows + (r ^ 1)][j]",
    ),
    "tiled: a row sees one key too many": Bug(
        "common/mask.cuh", "begin <= key && key < end", "begin <= key && key <= end"
    ),
    "flash: K of the neighbouring k8 step": Bug(
        PRODUCTS_CUH, "q[i][group * 4 + step], b[step])", "q[i][group * 4 + step], b[0])"
    ),
    "flash: V of the neighbouring columns": Bug(
        PRODUCTS_CUH, "packed.p[i][n], b[tile])", "packed.p[i][n], b[0])"
    ),
    "flash: the first tile in the wrong half": Bug(
        FORWARD_CU,
        "cta.k_stage.store(cta.k_s + (left & 1) *",
        "cta.k_stage.store(cta.k_s + (left + 1 & 1) *",
    ),
    "flash f32: K of the neighbouring columns": Bug(
        F32_PRODUCTS_CUH,
        "step * Slice::kKColumnBytes",
        "(step ^ 1) * Slice::kKColumnBytes",
    ),
    "flash f32: P of the neighbouring rows": Bug(
        F32_PRODUCTS_CUH, "ld_shared_group(p, i,", "ld_shared_group(p, i ^ 4,"
    ),
    "flash f32: V of the neighbouring keys": Bug(
        F32_STAGE_CUH,
        "return Scores::key_at(8 * panel + row / 2, pair, row % 2);",
        "return Scores::key_at(8 * panel + row / 2, pair, (row + 1) % 2);",
    ),
    "flash f32: K in another order than P": Bug(
        F32_STAGE_CUH, "kColumnLanes, item / 2, item % 2);", "kColumnLanes, item % 4, item / 4);"
    ),
    "flash f32: what was accumulated keeps its scale": Bug(
        "attention/register_softmax.cuh", "acc[i][c] *= shrink;", "acc[i][c] *= 1.f;"
    ),
    "flash f32: the maximum of half of the row's lanes": Bug(
        "attention/register_tile.cuh",
        "distance < 2 * kColumnLanes; distance",
        "distance < kColumnLanes; distance",
    ),
    "flash f32: a row sees one key too many": Bug(
        "attention/register_tile.cuh", "8 * n + e >= end", "8 * n + e > end"
    ),
    "flash: a row sees one key too many": Bug(
        "attention/score_fragment.cuh", "key_step(n) + e >= end", "key_step(n) + e > end"
    ),
    "flash: a cut tile counts as full": Bug(
        "attention/key_walk.cuh",
        "full_end = top.end / kTileK;",
        "full_end = div_up(top.end, kTileK);",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_an_attention_kernel_is_outside_its_bound(name, start_with):
    recorded = attention_recorded(name.partition(":")[0])
    start_with(recorded, MISTAKES[name])
    assert not error_ratio(recorded) <= 10


# A mistake, and the length of a row at which it shows.
RAGGED = Bug(ROWS_CUH, "(length + kStripItems - 1) / kStripItems", "length / kStripItems")
OTHERS = Bug(ROWS_CUH, "threadIdx.x % Rows::kLanes * Rows::kVec", "threadIdx.x * Rows::kVec")
LOAD = "(x[Rows::held(strip)], x_row_g, strip, length, "
LOAD_AGAIN = "load(dout_row_g, y_row_g, strip, length);\n    strips"
FORWARD_MISTAKES = {
    "the ragged strip is left out": (RAGGED, 20_000),
    "threads forget that other rows have their CTA too": (OTHERS, 24),
    "the last row is left out": (
        Bug(SOFTMAX_CU, "row < params.rows;", "row < params.rows - 1;"), 24,
    ),
    "columns beyond the row count": (
        Bug(SOFTMAX_CU, f"{LOAD}-kInfinity);\n    fold", f"{LOAD}4.f);\n    fold"), 2040,
    ),
}  # fmt: skip
BACKWARD_MISTAKES = {
    "the ragged strip is left out": (RAGGED, 20_000),
    "threads forget that other rows have their CTA too": (OTHERS, 24),
    "the last row is left out": (
        Bug(SOFTMAX_BACKWARD_CU, "row < params.rows;", "row < params.rows - 1;"), 24,
    ),
    "y of the neighbouring column": (
        Bug(SOFTMAX_BACKWARD_CU, "dx[i] = y[i] *", "dx[i] = y[i ^ 1] *"), 2048,
    ),
    "the dot product of the neighbouring columns": (
        Bug(SOFTMAX_BACKWARD_CU, "y[i] * dout[i];", "y[i] * dout[i ^ 1];"), 2048,
    ),
    "the second read is of the first strip": (
        Bug(SOFTMAX_BACKWARD_CU, LOAD_AGAIN, LOAD_AGAIN.replace("strip,", "0,")), 20_000,
    ),
}  # fmt: skip
SOFTMAX_MISTAKES = {f"forward: {name}": mistake for name, mistake in FORWARD_MISTAKES.items()}
SOFTMAX_MISTAKES |= {f"backward: {name}": mistake for name, mistake in BACKWARD_MISTAKES.items()}


@pytest.mark.parametrize("name", SOFTMAX_MISTAKES)
def test_a_mistake_in_a_softmax_kernel_is_outside_its_bound(name, start_with):
    bug, length = SOFTMAX_MISTAKES[name]
    recorded = softmax_launch(length, backward=name.startswith("backward"))
    start_with(recorded, bug)
    assert not softmax_error_ratio(recorded) <= 10
