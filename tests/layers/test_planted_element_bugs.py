"""Bugs planted in the element-wise kernels, rope, embedding and the norm are found.

By the emulator's checks, which name the fault, or because a result is far outside of its bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from support.planted_bugs import (
    REDUCE_CUH,
    Bug,
    PlantedDevice,
    found_by,
    plant,
    without_barrier,
)

from cupyattn import reference
from cupyattn.arrays import adopt
from cupyattn.emulator import Checks, OutOfBoundsError, SharedMemoryRaceError
from cupyattn.kernels.configs.layers import activations, adamw, add_to, dropout
from cupyattn.kernels.device import Device
from cupyattn.ops.elements import Part, element_problem, run_elements
from cupyattn.ops.layers import embedding as embedding_ops
from cupyattn.ops.layers import global_norm as norm_ops
from cupyattn.ops.layers import rope as rope_ops
from cupyattn.ops.layers.adamw import AdamwNumbers
from cupyattn.ops.layers.dropout import Draw

pytestmark = pytest.mark.nvrtc

ELEMENTS, ACTIVATIONS = "common/elements.cuh", "common/activations.cuh"


@pytest.fixture
def planted(tmp_path):
    """Give the emulator, all checks on, with kernels that have bugs in them."""

    def device(*bugs: Bug) -> PlantedDevice:
        plant(tmp_path / "cuda_src", *bugs)
        return PlantedDevice(tmp_path / "cuda_src", Checks.all())

    return device


def normal(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def apart(x: np.ndarray) -> np.ndarray:
    """The same rows with a gap of NaN behind each, at multiples of eight items."""
    length = x.shape[-1] + 8 + -x.shape[-1] % 8
    memory = np.full((*x.shape[:-1], length), np.nan, x.dtype)
    memory[..., : x.shape[-1]] = x
    return memory[..., : x.shape[-1]]


def activation(
    device: Device, kind: str = "silu", length: int = 301, dtype: str = "float32"
) -> float:
    """Values and derivatives over -12 to 12 in rows that lie apart; the error over its bound."""
    x = np.linspace(-12, 12, 3 * length).reshape(3, length).astype(dtype)
    dout, there = normal(1, 3, length, dtype=dtype), normal(2, 3, length, dtype=dtype)
    decided = {"ACTIVATION": activations.ACTIVATIONS[kind]}
    operands = adopt({"x": apart(x), "out": apart(np.full_like(x, np.nan))})
    problem = element_problem(activations.FORWARD, operands, decided=decided)
    out = run_elements(device, problem, operands)["out"]
    bound = reference.activation_bound(x, kind, dtype=dtype)
    forward = reference.error_ratio(out, reference.activation(x, kind), bound)
    operands = adopt({"dout": dout, "x": apart(x), "dx": apart(there)})
    problem = element_problem(activations.BACKWARD, operands, decided=decided, accumulate=True)
    dx = run_elements(device, problem, operands)["dx"]
    exact = reference.activation_backward(dout, x, kind) + there
    bound = reference.activation_backward_bound(dout, x, kind, dtype=dtype, present=there)
    return max(forward, reference.error_ratio(dx, exact, bound))


def gated(device: Device) -> float:
    packed, dout = normal(0, 5, 48), normal(1, 5, 24)
    gate, up = packed[:, :24], packed[:, 24:]
    parts = {"gate": Part("gate", 0, 2), "up": Part("gate", 1, 2)}
    decided = {"ACTIVATION": "GeluTanh"}
    operands = adopt({"gate": packed, "out": np.full((5, 24), np.nan, np.float32)})
    problem = element_problem(activations.GATED, operands, parts=parts, decided=decided)
    out = run_elements(device, problem, operands)["out"]
    bound = reference.gated_bound(gate, up, "gelu_tanh", dtype="float32")
    ratios = [reference.error_ratio(out, reference.gated(gate, up, "gelu_tanh"), bound)]
    operands = adopt({"dout": dout, "gate": packed, "dgate": np.full_like(packed, np.nan)})
    parts |= {"dgate": Part("dgate", 0, 2), "dup": Part("dgate", 1, 2)}
    problem = element_problem(activations.GATED_BACKWARD, operands, parts=parts, decided=decided)
    dpacked = run_elements(device, problem, operands)["dgate"]
    exact = np.concatenate(reference.gated_backward(dout, gate, up, "gelu_tanh"), axis=-1)
    bounds = reference.gated_backward_bound(dout, gate, up, "gelu_tanh", dtype="float32")
    ratios.append(reference.error_ratio(dpacked, exact, np.concatenate(bounds, axis=-1)))
    return max(ratios)


def dropped(device: Device) -> float:
    x, residual = apart(normal(0, 2, 500)), normal(1, 2, 500)
    operands = adopt({"x": x, "residual": residual, "out": np.full((2, 500), np.nan, np.float32)})
    draw = Draw.of(0.25, 2**40 + 3)
    problem = element_problem(dropout.DROPOUT, operands)
    out = run_elements(device, problem, operands, **draw.scalars)["out"]
    exact = reference.dropout(x, draw.p, draw.seed, residual)
    bound = reference.dropout_bound(x, draw.p, draw.seed, residual, dtype="float32")
    return reference.error_ratio(out, exact, bound)


def stepped(device: Device) -> float:
    arrays = [normal(0, 40), normal(1, 40), 0.1 * normal(2, 40), normal(3, 40) ** 2]
    numbers = {"step": 3, "lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}
    named = dict(zip(("param", "grad", "m", "v"), (a.copy() for a in arrays), strict=True))
    operands = adopt({**named, "grad_scale": np.array(0.5, np.float32)})
    problem = element_problem(adamw.ADAMW, operands)
    scalars = AdamwNumbers.of(*numbers.values(), 1.0).scalars
    run_elements(device, problem, operands, **scalars)
    exact = reference.adamw_step(*arrays, **numbers, grad_scale=0.5)
    bounds = reference.adamw_step_bound(*arrays, **numbers, grad_scale=0.5, dtype="float32")
    found = (named[name] for name in ("param", "m", "v"))
    return max(map(reference.error_ratio, found, exact, bounds))


def added(device: Device) -> float:
    """Rows whose ends are ragged, of two dtypes."""
    total, x = normal(0, 3, 33), normal(1, 3, 33).astype(np.float16)
    operands = adopt({"total": total.copy(), "x": x})
    run_elements(device, element_problem(add_to.ADD_TO, operands), operands)
    found, exact = operands.arrays["total"], reference.add_to(total, x)
    return reference.error_ratio(found, exact, reference.add_to_bound(total, x))


def turned(device: Device, interleaved: bool = False) -> float:
    """q of 5 heads and k of 3, 12 of 17 features, positions of each batch element."""
    q, k = apart(normal(0, 2, 3, 5, 17)), apart(normal(1, 2, 3, 3, 17))
    cos, sin = (table.astype(np.float32) for table in reference.rope_tables(9, 12, base=50.0))
    positions = np.array([[0, 3, 8], [7, 1, 1]])
    given = {"x[0]": q, "x[1]": k, "cos": cos, "sin": sin, "positions": positions}
    outs = {f"out[{i}]": np.full(x.shape, np.nan, np.float32) for i, x in enumerate((q, k))}
    operands = adopt({**given, **outs})
    names = (("x[0]", "out[0]"), ("x[1]", "out[1]"))
    problem = rope_ops.rope_problem(operands, names, interleaved=interleaved, inverse=False)
    rope_ops.run_rope(device, problem, operands)
    ratios = []
    for x, out in zip((q, k), outs.values(), strict=True):
        exact = reference.rope(x, cos, sin, positions, interleaved=interleaved)
        bound = reference.rope_bound(
            x, cos, sin, positions, dtype="float32", interleaved=interleaved
        )
        ratios.append(reference.error_ratio(out, exact, bound))
    return max(ratios)


def embedded(device: Device) -> float:
    """Rows that come never, once, in several chunks, and across the end of the first chunk."""
    table, dout = apart(normal(0, 300, 24)), normal(1, 150, 24)
    ids = np.random.default_rng(0).integers(0, 300, 150)
    ids[3:140:2] = 270
    operands = adopt({"table": table, "ids": ids, "out": np.full((150, 24), np.nan, np.float32)})
    out = embedding_ops.run_embedding(device, embedding_ops.embedding_problem(operands), operands)
    lookup = reference.error_ratio(out, table[ids], np.full((150, 24), 1e-30))
    there = normal(2, 300, 24)
    operands = adopt({"dout": dout, "table": table, "ids": ids, "grads": apart(there)})
    problem = embedding_ops.embedding_problem(operands, backward=True, accumulate=True)
    dtable = embedding_ops.run_embedding(device, problem, operands)
    exact = reference.embedding_backward(dout, 300, ids) + there
    bound = reference.embedding_backward_bound(dout, 300, ids, dtype="float32", present=there)
    return max(lookup, reference.error_ratio(dtable, exact, bound))


def normed(device: Device) -> float:
    arrays = [normal(0, 5, 3000), apart(normal(1, 4, 20)), normal(2, 7)]
    operands = adopt({f"arrays[{i}]": array for i, array in enumerate(arrays)})
    found = norm_ops.run_norm(device, norm_ops.norm_problem(operands), operands)
    bound = reference.global_norm_bound(*arrays)
    return abs(float(found) - reference.global_norm(*arrays)) / bound


RUNS: dict[str, Callable[[Device], float]] = {
    "activation": activation,
    "gelu": partial(activation, kind="gelu"),
    "gelu_tanh": partial(activation, kind="gelu_tanh"),
    "gated": gated,
    "dropout": dropped,
    "adamw": stepped,
    "add_to": added,
    "rope": turned,
    "rope interleaved": partial(turned, interleaved=True),
    "embedding": embedded,
    "norm": normed,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_clean_copy_is_right(name, planted):
    assert 0 < RUNS[name](planted()) <= 1


ROPE, SLOTS = "layers/rope.cu", "layers/rotated_slots.cuh"
NORM = "layers/norm_partials.cu"
ROTATION = "layers/rotation.cuh"
EMBEDDING, SUMS = "layers/embedding.cu", "layers/embedding_backward.cu"
SORT, COMBINE = "layers/embedding_sort.cu", "layers/embedding_combine.cu"

# what runs, the bug, what finds it
FAULTS = {
    "one vector too many is loaded": (
        "activation",
        Bug(ELEMENTS, "+ kVec <= rest) {\n        items", "<= rest) {\n        items"),
        OutOfBoundsError,
    ),
    "one vector too many is stored": (
        "activation",
        Bug(ELEMENTS, "+ kVec <= rest) {\n        store", "<= rest) {\n        store"),
        OutOfBoundsError,
    ),
    "a head too many": (
        "rope",
        Bug(SLOTS, "if (head + h < heads) x[h]", "if (head + h <= heads) x[h]"),
        OutOfBoundsError,
    ),
    "the first id beyond the table": (
        "embedding",
        Bug(SUMS, "if (first >= count) return;", "if (first > count + CHUNK) return;"),
        OutOfBoundsError,
    ),
    "found ids are overwritten while they are read": (
        "embedding",
        without_barrier(SORT, "smem_s.warp_sum, smem_s.found_*: the previous"),
        SharedMemoryRaceError,
    ),
    "found ids are read before they are written": (
        "embedding", without_barrier(SORT, "smem_s.found_*: written"), SharedMemoryRaceError,
    ),
    "counts are read before they are added": (
        "embedding",
        without_barrier(SORT, "smem_s.count, smem_s.below: every thread"),
        SharedMemoryRaceError,
    ),
    "the norm's partial sums are read before they are written": (
        "norm", without_barrier(REDUCE_CUH, "partial_s: written"), SharedMemoryRaceError,
    ),
    "the last unit of a row has no end": (
        "norm", Bug(NORM, "at + VEC <= left)", "at <= left)"), OutOfBoundsError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_bug_is_found_by_the_checks(name, planted):
    run, bug, fault = FAULTS[name]
    with found_by(fault):
        RUNS[run](planted(bug))


MISTAKES = {
    "a row's own place is forgotten": (
        "activation", Bug(ELEMENTS, "if (row > 0) {", "if (row > 1) {"),
    ),
    "ragged items are left out": (
        "activation", Bug(ELEMENTS, "+ i < rest) first_g[", "+ i + 1 < rest) first_g["),
    ),
    "the tails are swapped": (
        "activation", Bug(ACTIVATIONS, "z > 0.f ? larger : smaller", "z < 0.f ? larger : smaller"),
    ),
    "the slope's x is cut off too early": ("activation", Bug(ACTIVATIONS, "128.f);", "4.f);")),
    "what is there is forgotten": (
        "activation",
        Bug("layers/activation_backward.cu", "walk.present<ACCUMULATE>", "walk.present<false>"),
    ),
    "the polynomial's last digit but two": ("gelu", Bug(ACTIVATIONS, "0.036564298f", "0.0366f")),
    "the density's factor": ("gelu", Bug(ACTIVATIONS, "0.3989422804014327f", "0.39895f")),
    "the cube's factor": ("gelu_tanh", Bug(ACTIVATIONS, "0.07135481282052424f", "0.07136f")),
    "three is two": ("gelu_tanh", Bug(ACTIVATIONS, "3.f * kCubic", "2.f * kCubic")),
    "up's gradient has up": (
        "gated",
        Bug("layers/gated_backward.cu", "dup[v][i] = dout(v, i) *", "dup[v][i] = up(v, i) *"),
    ),
    "the other half": (
        "gated", Bug("layers/gated.cu", "walk.load(up_g, kUp)", "walk.load(up_g, kGate)"),
    ),
    "every field twice": (
        "dropout", Bug("common/philox.cuh", "(16 * (place % 2))", "(16 * (place / 8))"),
    ),
    "groups of four": ("dropout", Bug("layers/dropout.cu", "index / 8", "index / 4")),
    "rows of items start anew": (
        "dropout", Bug(ELEMENTS, "row * params.length + column", "column + row"),
    ),
    "the first moment's other factor": (
        "adamw", Bug("layers/adamw.cu", "beta1 * m(k, i) + rest1", "beta1 * m(k, i) + beta1"),
    ),
    "the gradient's scale only once": (
        "adamw", Bug("layers/adamw.cu", "rest2 * g * g", "rest2 * g * grad(k, i)"),
    ),
    "eps within the root": (
        "adamw",
        Bug("layers/adamw.cu", "sqrtf(new_v[k][i]) * inverse_bias2 + eps",
            "sqrtf(new_v[k][i] + eps) * inverse_bias2"),
    ),
    "the sum replaced": (
        "add_to", Bug("layers/add_to.cu", "total(v, i) + x(v, i)", "x(v, i)"),
    ),
    "the sum added to itself": (
        "add_to", Bug("layers/add_to.cu", "load(x_g, kX)", "load(total_g, kTotal)"),
    ),
    "turned the other way": ("rope", Bug(ROTATION, "cos, other * turn", "cos, -other * turn")),
    "the position of another batch element": (
        "rope", Bug(ROPE, "batch * params.positions_batch", "0 * params.positions_batch"),
    ),
    "k has q's strides": ("rope", Bug(ROPE, "other ? strides[1].seq", "false ? strides[1].seq")),
    "a stretch too few is copied": (
        "rope", Bug(SLOTS, "= column[p] < params.dim", "= column[p] + 1 < params.dim"),
    ),
    "pairs of halves among neighbours": (
        "rope interleaved", Bug(SLOTS, "slot * (2 * kPairs)", "slot * kPairs"),
    ),
    "the neighbouring row": (
        "embedding", Bug(EMBEDDING, "id * table_stride", "(id ^ 1) * table_stride"),
    ),
    "parts of runs change places": (
        "embedding", Bug(SUMS, "(began_here ? params.length", "(!began_here ? params.length"),
    ),
    "the first part is left out": ("embedding", Bug(COMBINE, "parts_g[length + i]", "parts_g[i]")),
    "the last chunk is left out": ("embedding", Bug(COMBINE, "k <= more", "k < more")),
    "smaller ids are not counted": (
        "embedding", Bug(SORT, "smem_s.below + of_rows.before", "of_rows.before"),
    ),
    "a row's stride": ("norm", Bug(NORM, "row * stride", "row * length")),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_its_bound(name, planted):
    run, bug = MISTAKES[name]
    try:
        ratio = RUNS[run](planted(bug))
    except OutOfBoundsError:
        return  # a place that is no array's
    assert not ratio <= 3
