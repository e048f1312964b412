"""Rotary embedding in attention, dense and packed: results are those of rope, then attention."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support import backward_runs, forward_runs
from support.devices import KERNELS, placed
from support.search import Search, deep, examples, wider
from support.strategies import CHUNK, FRUGAL, RUN_TIME_OPTIONS, RotaryProblem, attention_problems
from support.varlen import VarlenProblem

import cupyattn
from cupyattn import AttentionGrads, Rotary, ScoreMod, reference, rope_tables

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


@st.composite
def rotary_problems(
    draw: st.DrawFn, *, always: tuple[str, ...] = (), tables: tuple[str, ...], **problem: Any
) -> RotaryProblem:
    """Draw a problem that has the option, and the options `always` too."""
    names = dict.fromkeys(("rotary", *always), "")
    drawn = draw(
        attention_problems(options=(*RUN_TIME_OPTIONS, "rotary"), option_sets=(names,), **problem)
    )
    of = {field.name: getattr(drawn, field.name) for field in fields(drawn)}
    if drawn.D >= 2 * CHUNK and draw(st.booleans()):
        positions, _ = dict(drawn.options)["rotary"]
        pairs = CHUNK * draw(st.integers(1, drawn.D // (2 * CHUNK)))
        of["options"] = tuple({**dict(drawn.options), "rotary": (positions, pairs)}.items())
    return RotaryProblem(
        **of,
        interleaved=draw(st.booleans()),
        table=draw(st.sampled_from(tables)),
        spare=draw(st.sampled_from((0, 3))),
    )


TABLES = wider(("float32",), ("float16", "bfloat16"))
# Whole chunks and tails, D != Dv; tables have any number of pairs.
HALF_DIMS = wider([(24, 40)], [(80, 80), (64, 64), (128, 128), (5, 8), (256, 256), (320, 257)])
FLOAT_DIMS = wider([(24, 40)], [(64, 64), (5, 8)])
# Phi-2 rotates 32 of its 80 features.
PHI = RotaryProblem(
    B=2, Sq=21, Sk=70, H=4, G=2, D=80, Dv=80, dtype="float16",
    options=(("causal", True), ("rotary", (70, 16))),
)  # fmt: skip
# The head dims of the searches in float32, whose kernels are there.
NARROW = {"D": 24, "Dv": 40, "options": (("causal", True), ("rotary", (70, 8)))}
OFFSETS = (("causal", True), ("q_offset", (3, 40)), ("seqused_k", (70, 33)), ("rotary", (70, 16)))
FEW = replace(PHI, Sq=2, Sk=300, D=64, Dv=64, options=(("causal", True), ("rotary", (300, 24))))


@examples(5, deep=14)
@given(rotary_problems(head_dims=HALF_DIMS, dtypes=("float16",), tables=TABLES, **FRUGAL))
def test_half_within_bounds_of_the_reference(problem):
    forward_runs.check(problem, "flash")


@examples(3, deep=8)
@given(rotary_problems(
    head_dims=FLOAT_DIMS, dtypes=wider(("float32",), ("bfloat16",)), tables=TABLES, **FRUGAL
))  # fmt: skip
def test_floats_within_bounds_of_the_reference(problem):
    forward_runs.check(problem, "flash")


@examples(3, deep=8)
@given(rotary_problems(head_dims=HALF_DIMS[:3], dtypes=("float16",), tables=TABLES, **FRUGAL))
def test_half_gradients_within_bounds_of_the_reference(problem):
    backward_runs.check(problem, "flash")


@examples(3, deep=8)
@given(rotary_problems(
    head_dims=FLOAT_DIMS[:1], dtypes=wider(("float32",), ("bfloat16",)), tables=TABLES, **FRUGAL
))  # fmt: skip
def test_float_gradients_within_bounds_of_the_reference(problem):
    backward_runs.check(problem, "flash", deterministic=True)


@pytest.mark.parametrize("drawn", [PHI.options, OFFSETS], ids=["from the end", "offsets"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float16", *deep("float32", "bfloat16")])
def test_rotary_equals_rope_and_then_attention(dtype, interleaved, drawn):
    """Bit for bit: rotated q and k are rounded as rope rounds them."""
    problem = replace(PHI, dtype=dtype, interleaved=interleaved, options=drawn)
    _equals_rope_and_attention(problem)


def test_queries_after_the_first_tile_are_at_later_positions():
    drawn = (("q_offset", 5), ("rotary", (135, 16)))
    problem = replace(PHI, B=1, Sq=130, Sk=16, H=1, G=1, options=drawn)
    _equals_rope_and_attention(problem)


@pytest.mark.parametrize("dtype", ["float16", *deep("float32", "bfloat16")])
def test_a_few_queries_rotate_too(dtype):
    """Which the kernels of decoding take."""
    _equals_rope_and_attention(replace(FEW, dtype=dtype))
    forward_runs.check(replace(FEW, dtype=dtype), "flash")


def _equals_rope_and_attention(problem: RotaryProblem) -> None:
    found = forward_runs.run(problem, "flash")
    q, k = map(KERNELS.put, problem.turned())
    v = KERNELS.put(problem.arrays()[2])
    options = {name: placed(KERNELS, value) for name, value in problem.keywords().items()}
    del options["rotary"]
    expected = cupyattn.attention(q, k, v, **options, return_lse=True)
    for actual, wanted in zip(found, expected, strict=True):
        assert_array_equal(actual, KERNELS.get(wanted))


def test_other_options_go_with_it():
    """Also those that bring arrays, a struct and a seed of their own."""
    q, k, v = PHI.arrays()
    turn = PHI.normal("turn", (4, 2), "float32")
    own = {"score_mod": ScoreMod(
        "score + turn[h][k_idx % 2]",
        python=lambda score, b, h, i, j, turn: score + turn[h, j % 2], turn=KERNELS.put(turn),
    )}  # fmt: skip
    options = {**PHI.keywords(), "bias": PHI.normal("bias", (21, 70)), "dropout_p": 0.25, "seed": 7}
    found = cupyattn.attention(
        *map(KERNELS.put, (q, k, v)), return_lse=True, **own,
        **{name: placed(KERNELS, value) for name, value in options.items()},
    )  # fmt: skip
    both = options["bias"] + turn[:, np.arange(70) % 2][:, None]
    options["bias"] = both.astype("f4")
    exact = reference.attention(q, k, v, **options)
    bounds = reference.attention_bound(q, k, v, dtype="float16", tile_k=16, **options)
    for actual, *expected in zip(found, exact, bounds, strict=True):
        assert reference.error_ratio(KERNELS.get(actual), *expected) <= 1


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_added_to_what_is_there(dtype, interleaved):
    """In arrays of any strides, in one rounding."""
    problem = replace(PHI, dtype=dtype, interleaved=interleaved, options=OFFSETS)
    arrays, options = backward_runs.inputs(problem)
    before = {
        name: 50 * problem.normal(name, (*x.shape[:2], 2, *x.shape[2:]))[:, :, 1]
        for name, x in zip(("dq", "dk", "dv"), arrays[1:4], strict=True)
    }
    grads = AttentionGrads(**{name: KERNELS.put(x) for name, x in before.items()})
    found = backward_runs.run(arrays, options, "flash", grads=grads, accumulate=True)
    backward_runs.check_accumulated(found, before, arrays, options)


def test_keys_behind_those_in_use_get_no_gradient():
    """Also where no position of the tables is theirs."""
    drawn = (("seqused_k", (33, 20)), ("q_offset", 3), ("rotary", (33, 16)))
    arrays, options = backward_runs.inputs(replace(PHI, options=drawn))
    grads = backward_runs.run(arrays, options, "flash")
    assert grads["dk"][0, :33].any()
    for b, used in enumerate((33, 20)):
        assert not grads["dk"][b, used:].any()


def test_a_workspace_is_all_the_memory_that_it_takes():
    """As much as the error says, both ways: on tensor cores queries are rotated in registers."""
    q, k, v = map(KERNELS.put, PHI.arrays())
    options = {name: placed(KERNELS, value) for name, value in PHI.keywords().items()}
    size = k.nbytes + (q.nbytes if KERNELS.device.traits.native else 0)
    short = KERNELS.put(np.zeros(size - 16, np.uint8))
    with pytest.raises(ValueError, match=f"needs {size}, "):
        cupyattn.attention(q, k, v, workspace=short, **options)
    room = KERNELS.put(np.zeros(size, np.uint8))
    out, lse = cupyattn.attention(q, k, v, workspace=room, return_lse=True, **options)
    expected = forward_runs.run(PHI, "flash")
    assert_array_equal(KERNELS.get(out), expected[0])
    assert KERNELS.get(room).any()
    with pytest.raises(ValueError, match="this call needs"):
        cupyattn.attention_backward(out, q, k, v, out, lse, workspace=short, **options)


@pytest.mark.parametrize(
    ("changed", "rotates"),
    [
        ({}, True),
        ({"dtype": "float32", **NARROW}, False),
        ({"options": (("rotary", (70, 12)),)}, False),  # no whole chunks, but of neighbours
        ({"options": (("rotary", (70, 12)),), "interleaved": True}, True),
        ({"spare": 3}, False),
        ({"Sq": 2, "Sk": 300, "D": 64, "Dv": 64, "options": (("rotary", (300, 24)),)}, False),
        *deep(
            ({"dtype": "float32"}, False),
            ({"Sq": 2, "Sk": 300, "options": (("rotary", (300, 16)),)}, False),
        ),
    ],
)
def test_calls_whose_forward_rotates_queries(changed, rotates, monkeypatch):
    if not KERNELS.device.tensor_cores:
        pytest.skip("a GPU without tensor cores: float32 kernels run")
    rotates = rotates and not KERNELS.device.traits.native  # a launch before rotates both
    entries = []
    module = sys.modules["cupyattn.runtime.plan"]
    started = module.start
    monkeypatch.setattr(
        module, "start", lambda d, s, *more: (entries.append(s.spec.entry), started(d, s, *more))
    )
    forward_runs.run(replace(PHI, **changed), "flash")
    assert entries[0] == "attention_rotary"
    assert (entries[1] == "attention_forward_rotary") == rotates


@pytest.mark.parametrize("changed", [NARROW, *deep({})], ids=["narrow", "of 80"])
def test_vjp_differentiates_through_the_rotation(changed):
    arrays, options = backward_runs.inputs(replace(PHI, dtype="float32", **changed))
    options = {name: placed(KERNELS, value) for name, value in options.items() if name != "dlse"}
    dout, q, k, v, *_ = map(KERNELS.put, arrays)
    _, pullback = cupyattn.vjp(cupyattn.attention, q, k, v, **options)
    given = {**options, "rotary": tuple(map(KERNELS.get, options["rotary"][:2]))}
    exact = reference.attention_backward(*arrays, **given)
    for actual, wanted in zip(pullback(dout), exact[:3], strict=True):
        np.testing.assert_allclose(KERNELS.get(actual), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "changed", "message"),
    [
        (69, {}, "keys are at positions 0 to 69; the rotary tables have positions 0 to 68"),
        (70, {"q_offset": 50}, "queries that see a key are at positions 50 to 70"),
        (70, {"q_offset": -1}, "queries that see a key are at positions -1 to 19"),
    ],
)
def test_tables_that_are_too_short(rows, changed, message, values_unchecked):
    """Found without a look at any value, so on a GPU too."""
    arrays = [*map(KERNELS.put, PHI.arrays())]
    tables = placed(KERNELS, rope_tables(rows, 32))
    out, lse = cupyattn.attention(*arrays, return_lse=True)
    with pytest.raises(ValueError, match=message):
        cupyattn.attention(*arrays, rotary=tables, **changed)
    with pytest.raises(ValueError, match=message):
        cupyattn.attention_backward(out, *arrays, out, lse, rotary=tables, **changed)


@pytest.mark.parametrize("checks", [False, *deep(True)])
@pytest.mark.parametrize("dtype", ["float16", *deep("float32", "bfloat16")])
@pytest.mark.parametrize(
    "drawn",
    [
        (("causal", True), ("seqused_k", (70, 60))),
        (("causal", True), ("q_offset", -5)),
        # The last queries are after the last key that the window leaves any of them.
        (("window_size", (3, None)), ("q_offset", (30, 5)), ("seqused_k", (40, 0))),
    ],
    ids=["padded", "before 0", "window"],
)
def test_queries_that_see_no_key_need_no_position(dtype, drawn, checks):
    positions = 43 if drawn[0][0] == "window_size" else 70
    problem = replace(PHI, Sq=75, dtype=dtype, options=(*drawn, ("rotary", (positions, 16))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyattn.ops.attention.checks.checks_values", lambda _: checks)
        forward_runs.check(problem, "flash")
        backward_runs.check(problem, "flash")


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "seqused_k": np.array([8, 5])},
        {"causal": True, "q_offset": -5, "seqused_k": np.array([8, 0])},
        {"window_size": (3, None), "q_offset": np.array([3, 0]), "seqused_k": np.array([5, 2])},
        {"window_size": (2**60, 0), "q_offset": np.array([-2, -1], np.int32)},
    ],
)
def test_tables_as_long_as_they_have_to_be(options):
    """Up to the last key in use, and the last query that sees one."""
    q, k, v = (PHI.normal(name, (2, n, 1, 4)) for name, n in zip("qkv", (9, 8, 8), strict=True))
    with cupyattn.backend("reference"):
        cupyattn.attention(q, k, v, rotary=rope_tables(8, 4), **options)
        with pytest.raises(ValueError, match="the rotary tables have positions 0 to 6"):
            cupyattn.attention(q, k, v, rotary=rope_tables(7, 4), **options)


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_no_keys_need_no_tables(dtype):
    drawn = (("seqused_k", (0, 0)), ("rotary", (0, 16)))
    backward_runs.check(replace(PHI, dtype=dtype, options=drawn), "flash")


def test_positions_in_arrays_outside_of_the_tables_give_nan(values_unchecked):
    """Where nothing looks at values, as on a GPU, and nothing is read there."""
    arrays = [*map(KERNELS.put, PHI.arrays())]
    offsets = KERNELS.put(np.array([0, 60]))
    rotary = Rotary(*placed(KERNELS, rope_tables(70, 32)))
    out = KERNELS.get(cupyattn.attention(*arrays, rotary=rotary, q_offset=offsets))
    outside = np.isnan(out).any(axis=(2, 3))
    assert not outside[0].any()
    assert_array_equal(outside[1], np.arange(21) + 60 >= 70)


@pytest.mark.parametrize("dtype", ["float16", *deep("float32", "bfloat16")])
def test_no_pairs_are_no_rotation(dtype):
    problem = replace(PHI, dtype=dtype, options=(("rotary", (70, 0)),))
    plain = replace(problem, options=())
    for actual, wanted in zip(
        forward_runs.run(problem, "flash"), forward_runs.run(plain, "flash"), strict=True
    ):
        assert_array_equal(actual, wanted)


@pytest.mark.parametrize(
    "shape", [{"Sq": 0}, {"Sk": 0, "options": (("q_offset", 0), PHI.options[1])}]
)
def test_empty_arrays(shape):
    problem = replace(PHI, **shape)
    out, _ = forward_runs.run(problem, "flash")
    assert out.shape == (2, problem.Sq, 4, 80)
    assert not out.any()
    arrays, options = backward_runs.inputs(problem)
    for gradient in backward_runs.run(arrays, options, "flash").values():
        assert not gradient.any()


# Sequences without queries, without keys, and rows of no sequence.
PACKED = VarlenProblem(
    RotaryProblem(
        B=4, Sq=40, Sk=70, H=4, G=2, D=24, Dv=40, dtype="float16",
        options=(("causal", True), ("q_offset", (30, 5, 0, 0)), ("seqused_k", (70, 20, 33, 0)),
               ("rotary", (70, 8))),
    ),
    queries=(40, 0, 13, 7), keys=(70, 31, 33, 0), spare=3,
)  # fmt: skip
PACKED_PHI = replace(
    PACKED,
    dense=replace(
        PACKED.dense, D=80, Dv=80, options=(*PACKED.dense.options[:3], ("rotary", (70, 16)))
    ),
)
each_packed = pytest.mark.parametrize(
    "packed", [PACKED, *deep(PACKED_PHI)], ids=["narrow", "of 80"]
)


@st.composite
def packed_problems(draw: st.DrawFn, dtypes: tuple[str, ...]) -> VarlenProblem:
    dense = draw(rotary_problems(
        always=("q_offset",), tables=("float32",),
        head_dims=wider([(24, 40)], [(64, 64), (80, 80)]),
        dtypes=dtypes, views=("contiguous",), option_views=("strided",),
    ))  # fmt: skip
    counts = [
        tuple(draw(st.integers(0, most)) for _ in range(dense.B)) for most in (dense.Sq, dense.Sk)
    ]
    return VarlenProblem(dense, *counts, spare=draw(st.sampled_from((0, 3))))


def run_packed(problem: VarlenProblem, **more: object) -> tuple[np.ndarray, np.ndarray]:
    arrays = map(KERNELS.put, problem.arrays())
    options = {name: placed(KERNELS, value) for name, value in problem.keywords().items()}
    out, lse = cupyattn.attention_varlen(
        *arrays, *problem.longest, return_lse=True, **options, **more
    )
    return KERNELS.get(out), KERNELS.get(lse)


@examples(4, deep=12)
@given(packed_problems(wider(("float16",), ("float32", "bfloat16"))))
def test_each_sequence_is_a_dense_call(problem):
    assert problem.ratio(*run_packed(problem)) <= 1


@examples(3, deep=8)
@given(packed_problems(wider(("float16",), ("float32", "bfloat16"))))
def test_gradients_of_each_sequence_are_those_of_a_dense_call(problem):
    ratios = problem.backward_ratios(problem.run_backward())
    assert max(ratios.values()) <= 1, ratios


@each_packed
@pytest.mark.parametrize("interleaved", [*deep(False), True])
@pytest.mark.parametrize("dtype", ["float16", *deep("float32", "bfloat16")])
def test_sequences_without_queries_or_keys(packed, dtype, interleaved):
    problem = replace(packed, dense=replace(packed.dense, dtype=dtype, interleaved=interleaved))
    assert problem.ratio(*run_packed(problem)) <= 1
    ratios = problem.backward_ratios(problem.run_backward(deterministic=Search.deep))
    assert max(ratios.values()) <= 1, ratios


@each_packed
def test_the_last_query_is_at_the_last_key(packed):
    """By default, in each sequence for itself."""
    drawn = packed.dense.options[::3]  # without q_offset and seqused_k
    problem = replace(packed, dense=replace(packed.dense, options=drawn), queries=(40, 31, 13, 0))
    assert problem.ratio(*run_packed(problem)) <= 1


@pytest.mark.parametrize("dtype", ["float16", *deep("float32", "bfloat16")])
def test_packed_queries_that_see_no_key_need_no_position(dtype, values_unchecked):
    """By default the first of more queries than keys are before position 0."""
    dense = replace(PACKED.dense, dtype=dtype, options=PACKED.dense.options[::3])
    problem = replace(PACKED, dense=dense, queries=(40, 31, 13, 7), keys=(30, 31, 5, 0))
    assert problem.ratio(*run_packed(problem)) <= 1
    ratios = problem.backward_ratios(problem.run_backward())
    assert max(ratios.values()) <= 1, ratios


@each_packed
def test_gradients_are_added_and_rows_of_no_sequence_stay(packed):
    (_, q, k, v, *_), bounds, _ = packed.backward_inputs()
    before = {
        name: packed.dense.normal(name, x.shape)
        for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)
    }
    plain = packed.run_backward()
    grads = AttentionGrads(**{name: KERNELS.put(x) for name, x in before.items()})
    found = packed.run_backward(grads=grads, accumulate=True)
    for name, start in before.items():
        end = bounds[0 if name == "dq" else 1][-1]
        np.testing.assert_allclose(
            found[name][:end], start[:end] + plain[name][:end].astype("f4"), rtol=2e-3, atol=2e-3
        )
        assert_array_equal(found[name][end:], start[end:])


@each_packed
@pytest.mark.parametrize(
    "bounds", [[0, 900, -5, 178, 2**31 - 1], *deep(([7, 3, 3, 3, 3],), ([-9] * 5,))]
)
def test_wild_bounds_touch_nothing_outside(packed, bounds, values_unchecked):
    """The emulator's checks of addresses would say so; values are not looked at here."""
    q, k, v, *_ = map(KERNELS.put, packed.arrays())
    wild = KERNELS.put(np.array(bounds, np.int32))
    options = {name: placed(KERNELS, value) for name, value in packed.keywords().items()}
    cupyattn.attention_varlen(q, k, v, wild, wild, 40, 70, **options)
