"""Keys of the dense forward that several CTAs share: which calls, and their results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS
from support.forward_runs import check, ratios_of, run, split
from support.modifiers import Expression
from support.paged import multiprocessors
from support.recording_device import device_array
from support.search import deep, examples, wider
from support.strategies import (
    EITHER_HALF,
    FRUGAL,
    LONGEST,
    RUN_TIME_OPTIONS,
    attention_problems,
    every_option,
)

import cupyattn
from cupyattn.emulator import Report
from cupyattn.ops.attention.choice import LEAST_KEYS
from cupyattn.ops.attention.kernels.float32.forward import flash_row as float_row
from cupyattn.ops.attention.kernels.tensor_core.forward import flash_row
from cupyattn.runtime.device.recorder import LaunchRecorder
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

HEAD_DIMS = wider(
    [(64, 64), (24, 24)],
    [(40, 33), (128, 128), (192, 192), (256, 256), (1, 1), (512, 512), (72, 257)],
)
DTYPES = wider(["float16", "float32"], ["bfloat16"])


def some(**more: Any) -> Any:
    """Problems of any number of queries, of up to some tiles of keys."""
    return attention_problems(
        options=RUN_TIME_OPTIONS, queries=(0, LONGEST), largest=LONGEST,
        **{"dtypes": DTYPES, **FRUGAL, **more},
    )  # fmt: skip


@given(
    problem=some(head_dims=HEAD_DIMS),
    into=st.integers(2, 9),
    least_keys=st.sampled_from((1, 64, 100)),
)
@examples(6, deep=20)
def test_within_bounds_of_the_reference(problem: AttentionCase, into: int, least_keys: int):
    """Wherever parts end, with and without keys; of any length, in any view."""
    with split(into, least_keys):
        check(problem, "flash")


@given(
    problem=some(
        head_dims=wider([(24, 24)], [(64, 64)]),
        dtypes=wider(DTYPES[:1], DTYPES[1:]),
        option_sets=wider(*EITHER_HALF[0]),
    ),
    into=st.integers(2, 5),
)
@examples(4, deep=12)
def test_options_within_bounds_of_the_reference(problem: AttentionCase, into: int):
    with split(into):
        check(problem, "flash")


@pytest.mark.deep
@pytest.mark.parametrize("of", [("float16", 24), ("float32", 24)], ids=str)
def test_expressions_within_the_bounds_of_what_they_stand_for(of):
    case = Expression(*of)
    own = {"score_mod": case.score_mod(KERNELS.put), "mask_mod": case.mask_mod(KERNELS.put)}
    with split(4):
        ratios = case.forward_ratios(own, {**case.score_options(), **case.mask_options()})
    assert max(ratios.values()) <= 1, ratios


BASE = AttentionCase(B=2, Sq=20, Sk=300, H=2, G=1, D=64, Dv=64, dtype="float16")
LONG = replace(BASE, B=1, Sq=17, Sk=3000)


@pytest.mark.parametrize(
    "problem",
    [
        LONG,
        replace(LONG, Sq=200, Sk=1500, options=(("causal", True),)),
        *deep(
            replace(LONG, dtype="float32"),
            replace(LONG, B=2, options=(("causal", True), ("seqused_k", (3000, 40)))),
            replace(LONG, options=(("window_size", (1200, 30)), ("sinks", "float32"))),
        ),
    ],
    ids=str,
)
def test_long_keys_without_a_pin(problem: AttentionCase):
    """By the rule itself, on a device of eight multiprocessors."""
    with multiprocessors(8):
        check(problem, "flash")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("used", [0, 1, 63, 65, 299])
@pytest.mark.parametrize("sinks", [False, *deep(True)])
def test_nan_behind_the_keys_in_use_never_leaks(dtype: str, used: int, sinks: bool):
    """Nor from scratch memory of parts that no CTA has."""
    drawn = (("seqused_k", (used, 300)), *((("sinks", "float32"),) if sinks else ()))
    problem = replace(BASE, dtype=dtype, options=drawn)
    with split(5):
        out, lse = run(problem, "flash")
    assert max(ratios_of(problem, (out, lse), "flash").values()) <= 1
    assert np.isfinite(out).all()
    if used == 0 and not sinks:
        assert not out[0].any()
        assert np.isneginf(lse[0]).all()


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_rows_that_see_no_key_of_a_part_that_others_see(dtype: str):
    """Causal, with queries before the first key: rows of a tile end in different parts.

    Slopes depend on the positions of each batch element's queries.
    """
    drawn = (("causal", True), ("q_offset", (-30, 100)), *every_option(dtype, 2, 130, 300))
    problem = replace(BASE, Sq=130, D=24, Dv=24, dtype=dtype, options=drawn, option_view="strided")
    with split(5):
        check(problem, "flash")


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_windows_whose_ends_lie_in_different_parts(dtype: str):
    """A part begins before the tiles that a window leaves whole, or after them."""
    problem = replace(BASE, B=1, Sq=140, D=24, Dv=24, dtype=dtype)
    with split(3):
        check(replace(problem, options=(("window_size", (70, 40)),)), "flash")


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_results_are_the_same_in_every_run(dtype: str):
    problem = replace(BASE, dtype=dtype, options=(("causal", True),))
    with split(3):
        first, again = run(problem, "flash"), run(problem, "flash")
    assert all(map(np.array_equal, first, again))


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_dropout_is_that_of_keys_that_are_not_split(dtype: str):
    """Kept scores are equal: with values of 1 and no softmax to speak of, out counts them."""
    q, k, v = replace(BASE, D=24, Dv=24, dtype=dtype).arrays()
    q[...], v[...] = 0, 1
    kept = []
    for parts in (1, 4):
        with split(parts):
            out = cupyattn.attention(*map(KERNELS.put, (q, k, v)), dropout_p=0.5, seed=3)
        kept.append(np.rint(KERNELS.get(out).astype(np.float64) * 150).astype(int))
    assert np.array_equal(*kept)
    assert len(np.unique(kept[0])) > 5


def test_workspace_given_and_too_small():
    problem = replace(BASE, Sk=130)
    q, k, v = problem.arrays()
    with split(3):
        arrays = [*map(KERNELS.put, (q, k, v))]
        expected = KERNELS.get(cupyattn.attention(*arrays))
        needed = 4 * 3 * problem.B * problem.H * problem.Sq * (problem.Dv + 2)
        with pytest.raises(ValueError, match=f"workspace has 8 bytes.*needs {needed}"):
            cupyattn.attention(*arrays, workspace=KERNELS.put(np.empty(8, np.uint8)))
        workspace = KERNELS.put(np.full(needed, 0xFF, np.uint8))
        again = KERNELS.get(cupyattn.attention(*arrays, workspace=workspace))
    assert np.array_equal(again, expected)


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), *deep(("float32", 64))])
def test_each_key_is_read_once_for_a_tile_of_query_rows(dtype: str, head_dim: int):
    """All parts together: 16 bytes at a time come K, V, and Q again for each part."""
    row = (flash_row if dtype == "float16" else float_row)(75, head_dim, head_dim)
    problem = replace(BASE, B=1, Sq=140, Sk=8 * 64, D=head_dim, Dv=head_dim, dtype=dtype)
    q, k, v = problem.arrays()

    def loaded(parts: int) -> int:
        report = Report()
        with split(parts), cupyattn.backend("emulator", report=report):
            cupyattn.attention(q, k, v)
        return sum(
            access.bytes
            for access in report.accesses
            if access.space == "global"
            and not access.write
            and any(wide in access.instruction.opcode for wide in (".v4", "cp.async"))
        )

    tiles = problem.H * -(-problem.Sq // row.tile_q)
    if dtype == "float16":
        assert loaded(4) == tiles * (k.nbytes + v.nbytes) + 4 * q.nbytes
    else:  # which reads Q again for each tile of keys
        slices = problem.Sk // row.tile_k
        assert loaded(4) == tiles * (k.nbytes + v.nbytes) + slices * q.nbytes


SPLIT = ["attention_forward_split", "attention_combine_parts"]
FLASH = ["attention_forward"]
DECODE = ["attention_decode", "attention_decode_combine"]
ONE_CARD = 40 * 2  # CTAs of 128 query rows that a T4 takes at once


def launched(recorder: LaunchRecorder, sq: int, sk: int, **changed: Any) -> list[str]:
    """The kernels that a call starts on 40 multiprocessors."""
    sizes = {"B": 1, "H": 8, "D": 128, "dtype": np.float16}
    sizes |= {name: changed.pop(name) for name in [*changed] if name in sizes}
    batch, heads, head_dim, dtype = sizes.values()
    q = device_array((batch, sq, heads, head_dim), dtype)
    k = device_array((batch, sk, heads, head_dim), dtype)
    cupyattn.attention(q, k, k, **changed)
    return [launch.specialisation.spec.entry for launch in recorder.started]


@pytest.mark.parametrize(
    ("sq", "sk", "changed", "expected"),
    [
        (64, 65_536, {}, SPLIT),
        (300, 65_536, {}, SPLIT),
        (17, 2 * LEAST_KEYS, {}, SPLIT),
        (17, 2 * LEAST_KEYS - 1, {}, FLASH),
        (16, 65_536, {}, DECODE),
        (16, 65_536, {"dropout_p": 0.5, "seed": 0}, SPLIT),
        (0, 65_536, {}, []),
        # Tiles that fill the device: none of it is left.
        (128, 4096, {"H": ONE_CARD}, FLASH),
        (128, 4096, {"H": ONE_CARD // 2}, SPLIT),
        (128 * 10, 4096, {"H": 8}, FLASH),
        # What the window leaves counts, not what is there.
        (64, 65_536, {"window_size": (100, 100)}, FLASH),
        (64, 65_536, {"window_size": (4096, 0)}, SPLIT),
        (64, 65_536, {"causal": True, "q_offset": 100}, FLASH),
        (512, 2048, {"causal": True, "H": 4}, SPLIT),
        (64, 65_536, {"implementation": "tiled"}, ["attention_tiled"]),
        (64, 65_536, {"softcap": 5.0}, SPLIT),
        (64, 65_536, {"dtype": np.float32}, ["attention_forward_split_f32", SPLIT[1]]),
    ],
)
def test_which_calls_split_their_keys(recorder, sq, sk, changed, expected):
    assert launched(recorder, sq, sk, **changed) == expected


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"sq": 64, "sk": 65_536}, 10),  # 8 CTAs of the 80 without
        ({"sq": 64, "sk": 65_536, "H": 1}, 80),
        ({"sq": 64, "sk": 8192, "H": 1}, 32),  # LEAST_KEYS each
        ({"sq": 300, "sk": 65_536}, 10),  # 24 tiles: three waves of 10 parts, not one of 3
        ({"sq": 64, "sk": 65_536, "H": 64}, 5),  # four waves of a fifth, and not one of a whole
    ],
)
def test_into_how_many_parts(recorder, sizes, parts):
    assert launched(recorder, sizes["sq"], sizes["sk"], H=sizes.get("H", 8)) == SPLIT
    forward, combine = recorder.started
    tiles = sizes.get("H", 8) * -(-sizes["sq"] // 128)
    assert forward.grid == (tiles * parts, 1, 1)
    assert forward.arguments[-1]["splits"] == combine.arguments[-1]["splits"] == parts
    assert combine.grid == (sizes.get("H", 8) * sizes["sq"] // 4, 1, 1)


@pytest.mark.parametrize("name", ["mask", "bias", "alibi_slopes", "sinks", "seqused_k", "q_offset"])
def test_options_that_are_arrays(recorder, name):
    """Sinks come in once, where parts are added up."""
    shapes = {"mask": (4096,), "bias": (4096,), "alibi_slopes": (8,), "sinks": (8,)}
    dtypes = {"mask": bool, "seqused_k": np.int32, "q_offset": np.int64}
    array = device_array(shapes.get(name, (1,)), dtypes.get(name, np.float32))
    assert launched(recorder, 64, 4096, **{name: array}) == SPLIT
    taking = []
    for launch in recorder.started:
        names = [parameter.name for parameter in launch.specialisation.spec.parameters]
        passed = dict(zip(names, launch.arguments, strict=True))
        taking.append([key for key, value in passed.items() if value is array])
    lengths = ["q_offset", "seqused_k"] if name == "seqused_k" else [name]
    positions = name in ("seqused_k", "q_offset")
    both = [lengths, lengths] if positions else [lengths, []]
    assert taking == ([[], ["sinks"]] if name == "sinks" else both)


def test_packed_sequences_are_not_split(recorder):
    q, k = device_array((64, 8, 128)), device_array((65_536, 8, 128))
    ends = [device_array((2,), np.int32) for _ in range(2)]
    cupyattn.attention_varlen(q, k, k, *ends, 64, 65_536)
    (launch,) = recorder.started
    assert launch.specialisation.spec.entry == "attention_forward_varlen"


@pytest.mark.parametrize("return_lse", [False, True])
def test_with_out_and_workspace_nothing_is_allocated(recorder, return_lse):
    q, k = device_array((1, 64, 8, 128)), device_array((1, 4096, 8, 128))
    out, lse = device_array(q.shape), device_array((1, 8, 64), np.float32)
    workspace = device_array((2**24,), np.uint8)
    given = (out, lse) if return_lse else out
    cupyattn.attention(q, k, k, return_lse=return_lse, out=given, workspace=workspace)
    assert not recorder.allocated
    _, combine = recorder.started
    assert combine.arguments[5] is out
    assert (combine.arguments[6] is lse) == return_lse


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("queries", [3, 20], ids=["decode", "split"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_captured_call_is_replayed_with_new_contents(dtype: str, queries: int, rotary: bool):
    """The device works out which keys a CTA has: lengths may change too."""
    import cupy

    problem = replace(BASE, Sq=queries, Sk=5000, dtype=dtype)
    q, k, v = map(cupy.asarray, problem.arrays())
    lengths = cupy.asarray([5000, 20], np.int32)
    out, workspace = cupy.empty_like(q), cupy.empty(2**26, np.uint8)
    options = {"seqused_k": lengths}
    if rotary:
        options["rotary"] = tuple(map(cupy.asarray, cupyattn.rope_tables(5000, 32)))
    given = {**options, "out": out, "workspace": workspace}
    cupyattn.attention(q, k, v, **given)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            cupyattn.attention(q, k, v, **given)
        finally:
            graph = stream.end_capture()
    for factor, length in ((1, 1700), (-2, 0)):
        q *= factor
        lengths[1] = length
        expected = cupyattn.attention(q, k, v, **options)
        out.fill(7)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(cupy.asnumpy(out), cupy.asnumpy(expected))
