"""The model of memory-bound calls: what it computes, and that no call gets worse.

Calls are counted on the emulator. Passes over rows run among other kernels of a call; only one
kernel of such a call is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.gates import require_gates_tools
from support.search import deep

import cupyattn
from cupyattn.benchmark import decode, layers
from cupyattn.benchmark.cases import Harness
from cupyattn.benchmark.linear import LinearInputs, WeightProduct
from cupyattn.emulator import Checks, Report
from cupyattn.ops.linear.weight_formats import FORMATS, pieces
from cupyattn.runtime.arrays import dtype_of
from cupyattn.runtime.backend import running_on
from cupyattn.runtime.device.emulated import EmulatedDevice
from cupyattn.turing import MACHINES, T4
from cupyattn.turing.analysis import MemoryFigures, memory_figures

HERE = Harness(np, cold=False)
_ROWS, _WIDTH = 64, 2048
_SHAPE = (1, 256, 4, 128)
_FLOAT_BYTES = 4
Call = Callable[[], Any]


class CountedCall(NamedTuple):
    """A call by name, and the bytes that it has to move."""

    name: str
    least_bytes: int
    prepare: Callable[[], Call]
    """Make its arrays, on NumPy, and return the call."""
    kernel: str | None = None
    """Count only this kernel of the call; None counts all."""


def counted(call: CountedCall, *, tensor_cores: bool = True) -> tuple[list[str], MemoryFigures]:
    """Run a call on the emulator; return its kernels, and what they ask of memory."""
    device, report = EmulatedDevice(Checks.fast()), Report()
    device.tensor_cores = tensor_cores
    with running_on(device):
        run = call.prepare()
        device.report = report
        run()
    of = report if call.kernel is None else report.kernels[call.kernel]
    return list(report.kernels), memory_figures(of, call.least_bytes)


def instruction_bytes(found: MemoryFigures) -> float:
    """Return the bytes that have to move for each instruction of a warp that is issued."""
    issued = sum(n for pipe, n in found.instructions.items() if pipe != "move")
    return found.least_bytes / issued


def every_call() -> Iterator[CountedCall]:
    """Yield the calls."""
    for name in ("rms_norm", "layer_norm", "softmax", "logsumexp", "swiglu", "gelu", "dropout",
                 "rope", "adamw_step", "global_norm"):  # fmt: skip
        yield from _layer(name)
    yield from _layer("cross_entropy", 4, 32_768)
    operation = {each.name: each for each in layers.OPERATIONS}["embedding"]
    # Of a small table: no kernel zeroes its gradient, which is then as large as the rows.
    small = replace(operation, arrays=_embedded, backward_arrays=2, more_bytes=lambda size: (0, 0))
    yield from _of_operation(small, layers.RowSize(_ROWS, _WIDTH, "float16"))
    vocabulary = 32_768
    for name, options in (("greedy", {"temperature": 0}), ("all", {}), ("top-p", {"top_p": 0.9})):
        prepare = partial(_sampling, vocabulary, **options)
        yield CountedCall(f"sample {name}, 1 row", 2 * vocabulary, prepare)
    heads = _WIDTH // 128
    merged = 3 * _ROWS * (2 * _WIDTH + _FLOAT_BYTES * heads)
    yield CountedCall("merge_attention", merged, _merging)
    stored = pieces("nf4", 1024, 2048, FORMATS["nf4"].block_size or 0).values()
    moved = sum(int(np.prod(shape)) * kind.itemsize for shape, kind in stored) + 2 * 1024 * 2048
    yield CountedCall("quantize, nf4", moved, _quantising)
    yield CountedCall("dequantize, nf4", moved, _dequantising)
    yield from _caches()
    yield from _products()
    yield from _passes()


def _layer(name: str, rows: int = _ROWS, width: int = _WIDTH) -> Iterator[CountedCall]:
    operation = {each.name: each for each in layers.OPERATIONS}[name]
    yield from _of_operation(operation, layers.RowSize(rows, width, "float16"))


def _of_operation(operation: layers.LayerCall, size: layers.RowSize) -> Iterator[CountedCall]:
    for direction in ("forward", "backward")[: 1 + (operation.backward_arrays is not None)]:
        name = operation.name + ", backward" * (direction == "backward")
        prepare = partial(_prepared, operation, size, direction)
        yield CountedCall(name, operation.traffic(size, direction), prepare)


def _prepared(operation: layers.LayerCall, size: layers.RowSize, direction: str) -> Call:
    return layers.own_call(operation, direction, operation.arrays(size, HERE.arrays()), HERE)


def _embedded(size: layers.RowSize, source: Any) -> tuple[Any, ...]:
    table = source.normal(512, size.width, dtype=size.dtype)
    return table, source.integers(0, 512, size.rows)


def _sampling(vocabulary: int, **options: Any) -> Call:
    logits = HERE.arrays().normal(1, vocabulary, dtype="float16", scale=4)
    return partial(cupyattn.sample, logits, seed=1, **options)


def _merging() -> Call:
    source, heads = HERE.arrays(), _WIDTH // 128
    out = [source.normal(1, _ROWS, heads, 128, dtype="float16") for _ in range(2)]
    lse = [source.normal(1, heads, _ROWS, dtype="float32") for _ in range(2)]
    return partial(cupyattn.merge_attention, out[0], lse[0], out[1], lse[1])


def _quantising() -> Call:
    return partial(cupyattn.quantize, HERE.arrays().normal(1024, 2048, dtype="float16").T)


def _dequantising() -> Call:
    weight = cupyattn.quantize(HERE.arrays().normal(1024, 2048, dtype="float16").T)
    return partial(cupyattn.dequantize, weight, dtype="float16")


def _caches() -> Iterator[CountedCall]:
    shape = {"heads": 16, "kv_heads": 4, "head_dim": 128, "block_size": 16, "dtype": "float16"}
    for operation, cache in (("append", "int8"), ("copy", "float"), ("gather", "int4")):
        blocks = decode.CacheOperation(operation, cache, tokens=64, **shape)
        name = f"{decode.OPERATIONS[operation]}, {cache}"
        yield CountedCall(name, blocks.bytes, partial(_first, partial(blocks.round, np)))
    for layout, cache in (("paged", "float"), ("paged", "int4"), ("dense", "float")):
        given = shape | ({"block_size": None} if layout == "dense" else {})
        step = decode.DecodingStep(2, 512, False, queries=1, cache=cache, **given)
        yield CountedCall(f"decode, {layout}, {cache}", step.bytes, partial(step.call, np))


def _first(prepare: Callable[[], Any]) -> Call:
    return prepare()[0]


def _products() -> Iterator[CountedCall]:
    for m, weights in ((1, None), (16, None), (1, "nf4")):
        product = WeightProduct("thin", m, 1024, 2048, "float16", "nk", None, weights)
        name = ", ".join(filter(None, ("linear", f"M={m}", weights)))
        yield CountedCall(name, product.weight_bytes, _product(product))


def _product(product: WeightProduct) -> Callable[[], Call]:
    return lambda: LinearInputs(product, HERE).own_calls()[0]


def _passes() -> Iterator[CountedCall]:
    items = int(np.prod(_SHAPE))
    rows, row_bytes = items // _SHAPE[3], 2 * items
    # dout, out, lse and v to two numbers a row, and zeros for dq's sums; these to dq.
    delta = 3 * row_bytes + (3 * rows + items) * _FLOAT_BYTES
    for kernel, least in (
        ("attention_backward_delta", delta),
        ("attention_backward_convert", items * _FLOAT_BYTES + row_bytes),
        ("attention_rotary", 2 * row_bytes),
    ):
        yield CountedCall(kernel.replace("_", " "), least, _attention, kernel)
    codes = row_bytes + items + rows * _FLOAT_BYTES
    yield CountedCall("quantize_keys", codes, _keys, "quantize_keys")
    yield CountedCall("quantize_keys, rotated, with q", codes + 2 * row_bytes, _rotated_keys)
    case = WeightProduct("backward", 256, 512, 64, "float32", "nk", None)
    least = (case.M + 1) * case.N * _FLOAT_BYTES
    yield CountedCall("linear db f32", least, _product(case), "linear_db_f32")
    least = 2 * 2 * _ROWS * _WIDTH + 4 * _ROWS  # dout, out and a number a row
    yield CountedCall("softmax dbias", least, _biased_softmax, "softmax_dbias")


def _attention() -> Call:
    numbers = np.random.default_rng(0).standard_normal((4, *_SHAPE), np.float32)
    q, k, v, dout = numbers.astype(dtype_of("float16"))
    tables = cupyattn.rope_tables(_SHAPE[1], _SHAPE[3])
    out, lse = cupyattn.attention(q, k, v, rotary=tables, return_lse=True)

    def call() -> None:
        cupyattn.attention(q, k, v, rotary=tables)
        cupyattn.attention_backward(dout, q, k, v, out, lse)

    return call


def _keys() -> Call:
    k = HERE.arrays().normal(*_SHAPE, dtype="float16")
    return partial(cupyattn.quantize_keys, k)


def _rotated_keys() -> Call:
    k, q = (HERE.arrays().normal(*_SHAPE, dtype="float16") for _ in range(2))
    given = {"rotary": cupyattn.rope_tables(_SHAPE[1], _SHAPE[3]), "q": q}
    return partial(cupyattn.quantize_keys, k, centre=np.zeros(_SHAPE[2:], np.float32), **given)


def _biased_softmax() -> Call:
    source = HERE.arrays()
    x, dout = (source.normal(_ROWS, _WIDTH, dtype="float16") for _ in range(2))
    bias = source.normal(1, _WIDTH, dtype="float16")
    out = cupyattn.softmax(x, bias=bias)
    return partial(cupyattn.softmax_backward, dout, out, bias=bias)


CALLS = {call.name: call for call in every_call()}
SECTOR_TOLERANCE = 0.005
SHARE_TOLERANCE = 0.02

# Of calls with a kernel each: bytes of the sectors that are touched for each byte that has to move,
# bytes that have to move for each instruction of a warp, and the share of a T4's bandwidth that its
# instructions leave possible.
GATES = {
    "rms_norm": (1.5, 9.4, 1.0),
    "softmax, backward": (1.0, 14.3, 1.0),
    "swiglu": (1.0, 7.6, 1.0),
    "dropout": (1.0, 5.2, 1.0),
    "embedding": (1.016, 21.4, 1.0),
    "sample greedy, 1 row": (1.009, 2.1, 1.0),
    "append_kv, int8": (1.756, 3.8, 1.0),
    "decode, paged, float": (1.023, 33.9, 1.0),
    "merge_attention": (1.108, 4.4, 1.0),
    "linear, M=1": (1.508, 6.6, 1.0),
}
MORE_GATES = {
    "layer_norm, backward": (1.156, 3.3, 1.0),
    "logsumexp, backward": (1.008, 8.5, 1.0),
    "cross_entropy, backward": (1.012, 8.8, 1.0),
    "embedding, backward": (1.035, 13.1, 1.0),
    "rope": (1.25, 11.8, 1.0),
    "gelu, backward": (1.0, 6.3, 1.0),
    "adamw_step": (1.0, 20.3, 1.0),
    "global_norm": (1.001, 8.3, 1.0),
    "sample all, 1 row": (2.018, 0.52, 0.419),
    "sample top-p, 1 row": (8.397, 0.29, 0.228),
    "attention backward delta": (1.031, 6.6, 1.0),
    "attention backward convert": (1.005, 15.7, 1.0),
    "attention rotary": (1.5, 11.2, 1.0),
    "quantize_keys": (1.671, 8.0, 1.0),
    "quantize_keys, rotated, with q": (2.996, 4.9, 1.0),
    "linear db f32": (1.121, 30.6, 1.0),
    "softmax dbias": (1.046, 11.1, 1.0),
    "copy_blocks, float": (1.062, 5.5, 1.0),
    "gather, int4": (1.086, 6.6, 1.0),
    "decode, paged, int4": (1.147, 6.3, 1.0),
    "decode, dense, float": (1.05, 26.7, 1.0),
    "linear, M=16": (2.008, 18.2, 1.0),
    "linear, M=1, nf4": (2.792, 3.2, 1.0),
    "quantize, nf4": (1.805, 1.41, 0.876),
    "dequantize, nf4": (1.122, 4.9, 1.0),
}


# --- what follows from counts


def figures(sector_bytes=320_000, wavefronts=0, **instructions) -> MemoryFigures:
    return MemoryFigures(320_000, sector_bytes, instructions, wavefronts)


def test_memory_binds_where_little_else_is_done():
    found = figures(ldg=2500, fma=5000, move=10**9)
    assert found.seconds()["memory"] == 1e-6
    assert (found.bound(), found.bandwidth_share(), found.sector_ratio) == ("memory", 1, 1)


@pytest.mark.parametrize(
    ("found", "pipe", "cycles"),
    [
        (figures(fma=400_000), "fma", 200_000),
        (figures(alu=400_000), "alu", 200_000),
        (figures(half=400_000), "fp16", 200_000),
        (figures(xu=400_000), "xu", 800_000),
        (figures(tensor=400_000), "tensor", 800_000),
        (figures(integer_tensor=400_000), "tensor", 400_000),
        (figures(lds=400_000, control=400_000), "issue", 200_000),
        (figures(shuffle=400_000), "lsu", 405_000),
        (figures(wavefronts=400_000), "lsu", 805_000),
        (figures(sector_bytes=64_000_000), "lsu", 1_000_000),
    ],
)
def test_the_busiest_pipe_binds(found, pipe, cycles):
    assert found.cycles()[pipe] == cycles
    assert found.bound() == pipe
    seconds = cycles / (T4.multiprocessors * T4.clock_mhz * 1e6)
    assert found.bandwidth_share() == pytest.approx(1e-6 / seconds)


def test_cards_differ_by_bandwidth_for_each_multiprocessor():
    found = figures(alu=400_000)
    assert found.bandwidth_share(MACHINES["RTX 2060 Super"]) < found.bandwidth_share(T4)
    products = figures(tensor=1)
    assert products.bandwidth_share(MACHINES["GTX 1650 Ti"]) is None
    assert figures(integer_tensor=1).bandwidth_share(MACHINES["GTX 1650 Ti"]) is None
    assert products.bandwidth_share(MACHINES["RTX 2080 Ti"]) == 1


def test_an_empty_report_has_no_sectors():
    assert memory_figures(Report(), 64) == MemoryFigures(64, 0, {}, 0)


# --- the gates


@pytest.mark.parametrize("name", [*GATES, *deep(*MORE_GATES)])
def test_a_call_moves_no_more_than_its_gates_allow(name):
    require_gates_tools()
    sectors, least_bytes, share = {**GATES, **MORE_GATES}[name]
    _, found = counted(CALLS[name])
    assert found.sector_ratio <= sectors + SECTOR_TOLERANCE
    assert instruction_bytes(found) >= least_bytes
    assert found.bandwidth_share(T4) >= share - SHARE_TOLERANCE


@pytest.mark.nvrtc
def test_a_gpu_without_tensor_cores_has_its_own_kernels():
    call = CALLS["linear, M=1, nf4"]
    assert counted(call)[0] == ["linear_quantised_thin"]
    kernels, found = counted(call, tensor_cores=False)
    assert kernels == ["linear_quantised_thin_f32"]
    assert found.bandwidth_share(MACHINES["GTX 1650 Ti"]) > 0
