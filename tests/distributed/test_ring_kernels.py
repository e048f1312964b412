"""Ring attention on the kernels, the GPU's or the emulator's, within derived bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices import KERNELS, placed
from support.modifiers import blocks_of, masked_tiles
from support.ring import Case, case, case_ratios, whole
from support.search import deep, mostly_deep

from cupyattn import AttentionGrads, MaskMod, Rotary, ScoreMod, rope_tables
from cupyattn.distributed import Group, ring_attention, ring_attention_backward, run

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

SLOPES = np.array([0.5, 0.125], np.float32)
SINKS = np.array([1.5, -0.5], np.float32)
CAUSAL = {"causal": True}


def tables(dim: int, *, interleaved: bool) -> Rotary:
    return Rotary(*rope_tables(400, dim), interleaved)


CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "causal": (2, "zigzag", "float16", CAUSAL),
    "three ranks in float32": (3, "zigzag", "float32", CAUSAL),
    "a window": (3, "contiguous", "float16", {"window_size": (20, 3)}),
    "striped": (2, "striped", "float16", {**CAUSAL, "softcap": 2.0}),
    "all keys": (2, "contiguous", "bfloat16", {"softmax_scale": 0.3}),
    "dropout": (
        2, "zigzag", "float16",
        {**CAUSAL, "dropout_p": 0.3, "seed": 7, "size": 32, "dims": (24, 24)},
    ),
    "one rank": (1, "zigzag", "float16", CAUSAL),
    "four ranks": (4, "contiguous", "float16", CAUSAL),
    "five ranks": (5, "zigzag", "float32", CAUSAL),
    "six ranks": (6, "striped", "float16", CAUSAL),
    "seven ranks": (7, "zigzag", "bfloat16", {"window_size": (9, 0)}),
    "eight ranks": (8, "zigzag", "float16", CAUSAL),
    "packed": (3, "zigzag", "float16", {**CAUSAL, "sizes": (2, 0, 9)}),
    "packed in stripes": (4, "striped", "float32", {"sizes": (3, 1), "window_size": (7, 2)}),
    "packed with dropout": (
        2, "zigzag", "float16", {"sizes": (32, 64), "dropout_p": 0.3, "seed": 7},
    ),
    "rotary": (2, "zigzag", "float16", {**CAUSAL, "rotary": tables(24, interleaved=False)}),
    "rotary in stripes": (3, "striped", "float32", {"rotary": tables(16, interleaved=True)}),
    "packed with rotary": (
        2, "zigzag", "float16", {"sizes": (5, 8), "rotary": tables(16, interleaved=True)},
    ),
    "ALiBi": (2, "zigzag", "float16", {**CAUSAL, "alibi_slopes": SLOPES}),
    "packed with ALiBi": (3, "contiguous", "float16", {"sizes": (4, 9), "alibi_slopes": SLOPES}),
    "sinks": (3, "zigzag", "float16", {**CAUSAL, "sinks": SINKS}),
    "packed with sinks": (2, "zigzag", "float32", {"sizes": (5, 8), "sinks": SINKS}),
    "values of the same width": (2, "zigzag", "float16", {**CAUSAL, "dims": (24, 24)}),
    "narrower values": (3, "striped", "float32", {"dims": (24, 8)}),
    "keys in use": (2, "zigzag", "float16", {**CAUSAL, "seqused_k": np.array([17])}),
    "packed keys in use": (
        2, "striped", "float32", {"sizes": (9, 5), "seqused_k": np.array([11, 0])},
    ),
    "mask and bias": (2, "zigzag", "float16", {"mask": True, "bias": True}),
    "mask and bias in stripes": (3, "striped", "float32", {"mask": True, "bias": True}),
}  # fmt: skip
PLAIN = ["packed with rotary"]
WITHOUT_DLSE = ("causal", "dropout")


def drawn(name: str) -> tuple[Case, str]:
    ranks, placement, dtype, options = CASES[name]
    given = {"size": 16, "dims": (24, 40), **options}
    problem = case(ranks, placement, heads=(2, 1), batch=1, dtype=dtype, draw=len(name), **given)
    if name in WITHOUT_DLSE:
        problem.arrays.pop("dlse")
    tokens = problem.arrays["q"].shape[1]
    rng = np.random.default_rng(len(name))
    if "mask" in options:
        problem.options["mask"] = rng.random((1, 2, tokens, tokens)) < 0.7
        problem.options["bias"] = rng.standard_normal((1, 1, tokens, tokens), np.float32)
    return problem, dtype


def of_rank(problem: Case, group: Group, **more: Any) -> tuple[Any, Any, AttentionGrads]:
    """The results of a rank, from arrays where kernels run."""
    arrays = {name: KERNELS.put(problem.shard(name, group.rank)) for name in problem.arrays}
    options = {name: placed(KERNELS, x) for name, x in problem.options_of(group.rank).items()}
    given = {"group": group, "placement": problem.placement, **problem.packed, **options}
    inputs = [arrays[name] for name in "qkv"]
    out, lse = ring_attention(*inputs, return_lse=True, **given)
    grads = ring_attention_backward(
        arrays["dout"], *inputs, out, lse, dlse=arrays.get("dlse"), **given, **more
    )
    return (
        KERNELS.get(out),
        KERNELS.get(lse),
        AttentionGrads(*(None if x is None else KERNELS.get(x) for x in grads)),
    )


def results(problem: Case) -> tuple[Any, Any, AttentionGrads]:
    """The joined results of all ranks."""
    return whole(problem, run(lambda group: of_rank(problem, group), problem.ranks, timeout=120))


@pytest.mark.parametrize("name", mostly_deep(CASES, PLAIN))
def test_within_bounds_of_one_device(name):
    problem, dtype = drawn(name)
    ratios = case_ratios(problem, *results(problem), dtype)
    expected = {"out", "lse", "dq", "dk", "dv"}
    expected |= {f"d{name}" for name in ("bias", "sinks") if name in problem.options}
    assert set(ratios) == expected
    assert min(ratios.values()) > 0
    assert max(ratios.values()) <= 1, ratios


def unused(*_: Any, **__: Any) -> Any:
    raise AssertionError("kernels run the expressions")


def expressions(mask: np.ndarray, **of_tokens: Any) -> dict[str, Any]:
    """ALiBi and a mask as expressions of positions in whole sequences."""
    return {
        "score_mod": ScoreMod(
            "score - slopes[h] * abs(q_idx - k_idx)", gradient="grad", python=unused, slopes=SLOPES
        ),
        "mask_mod": MaskMod("seen[b][h][q_idx][k_idx]", python=unused, seen=mask),
        **of_tokens,
    }


EXPRESSIONS = {
    "zigzag": (2, "zigzag", None, CAUSAL),
    "striped": (3, "striped", None, {}),
    "packed": (2, "zigzag", (4, 0, 7), CAUSAL),
    "packed with dropout": (2, "contiguous", (32, 64), {"dropout_p": 0.3, "seed": 7}),
}


@pytest.mark.parametrize("name", mostly_deep(EXPRESSIONS, ["packed"]))
def test_expressions_are_told_of_whole_sequences(name):
    ranks, placement, sizes, options = EXPRESSIONS[name]
    problem = case(
        ranks, placement, 16, heads=(2, 1), dims=(8, 8), batch=1, dtype="float16", sizes=sizes
    )
    tokens = problem.arrays["q"].shape[0 if sizes else 1]
    sequences = len(sizes) if sizes else 1
    mask = np.random.default_rng(1).random((sequences, 2, tokens, tokens)) < 0.7
    said = {**options, **expressions(mask)}
    found = results(problem._replace(options=said))
    meant = {**options, "alibi_slopes": SLOPES, "mask": mask}
    ratios = case_ratios(problem, *found, "float16", **meant)
    assert max(ratios.values()) <= 1, ratios


BLOCKS: dict[str, tuple[int, str, int, tuple[int, ...] | None]] = {
    "zigzag": (2, "zigzag", 16, None),
    "contiguous": (3, "contiguous", 40, None),
    "striped": (2, "striped", 24, None),
    "packed": (2, "zigzag", 16, (16, 16)),
}


@pytest.mark.parametrize("name", mostly_deep(BLOCKS, ["contiguous"]))
def test_block_masks_are_those_of_whole_sequences(name):
    """Where pieces begin between tiles, or tokens are no neighbours, the expression decides."""
    ranks, placement, size, sizes = BLOCKS[name]
    problem = case(
        ranks, placement, size, heads=(2, 1), dims=(8, 8), batch=1, dtype="float16", sizes=sizes
    )
    tokens = int(np.diff(problem.cu_seqlens).max()) if sizes else problem.arrays["q"].shape[1]
    seen = masked_tiles((len(sizes or (1,)), 2, tokens, tokens), 16, seed=2)
    found = results(problem._replace(options={"mask_mod": blocks_of(seen)}))
    ratios = case_ratios(problem, *found, "float16", mask=seen)
    assert max(ratios.values()) <= 1, ratios


def test_tiles_that_are_said_to_be_empty_are_skipped():
    """The expression is not asked of them: each call has the tiles that are its."""
    problem = case(2, "zigzag", 16, heads=(2, 1), dims=(8, 8), batch=1, dtype="float16")
    tokens = problem.arrays["q"].shape[1]
    blocks = blocks_of(np.ones((1, 2, tokens, tokens), bool))
    kept = np.random.default_rng(3).random(blocks.tiles.shape) < 0.7
    blocks.tiles *= KERNELS.put(kept)
    found = results(problem._replace(options={"mask_mod": blocks}))
    seen = kept.repeat(16, 2).repeat(16, 3)
    ratios = case_ratios(problem, *found, "float16", mask=seen)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("sizes", [None, *deep(((3, 0, 5),))])
def test_results_go_where_they_are_told(sizes):
    """Arrays with gaps get the same bits; gradients are added before they are rounded."""
    problem = case(
        2, "zigzag", 5, heads=(2, 1), dims=(8, 16), batch=1, dtype="float32", sizes=sizes,
        causal=True, sinks=SINKS,
    )  # fmt: skip

    def given(group: Group) -> None:
        expected = of_rank(problem, group, deterministic=True)
        shapes = {"out": expected[0], "lse": expected[1], **expected[2]._asdict()}
        shapes.pop("dbias")
        wide = {
            name: KERNELS.put(np.full((*x.shape[:-1], 2 * x.shape[-1]), 3, x.dtype))
            for name, x in shapes.items()
        }
        places = {name: array[..., : shapes[name].shape[-1]] for name, array in wide.items()}
        out, lse = places.pop("out"), places.pop("lse")
        arrays = {name: KERNELS.put(problem.shard(name, group.rank)) for name in problem.arrays}
        inputs = [arrays[name] for name in "qkv"]
        options = {"group": group, **problem.packed, "causal": True, "sinks": KERNELS.put(SINKS)}
        found = ring_attention(*inputs, return_lse=True, out=(out, lse), **options)
        assert found[0] is out and found[1] is lse
        for result, right in zip(found, expected, strict=False):
            np.testing.assert_array_equal(KERNELS.get(result), right)
        target = AttentionGrads(**places)
        grads = ring_attention_backward(
            arrays["dout"], *inputs, out, lse, dlse=arrays["dlse"], deterministic=True,
            grads=target, accumulate=True, **options,
        )  # fmt: skip
        for name, right in expected[2]._asdict().items():
            if right is not None:
                assert getattr(grads, name) is places[name]
                np.testing.assert_array_equal(KERNELS.get(places[name]), right + np.float32(3))
        for name, array in wide.items():  # and nothing else
            rest = KERNELS.get(array)[..., shapes[name].shape[-1] :]
            np.testing.assert_array_equal(rest, 3)

    run(given, 2, timeout=120)


def test_scores_beyond_the_digits_of_lse_give_finite_gradients():
    """Row maxima of 3e6 to 1e7: float32 rounds lse by up to 0.5 there."""
    dout, q, k, v = np.random.default_rng(0).standard_normal((4, 1, 64, 2, 64))
    arrays = [x.astype(np.float16) for x in (dout, 1500 * q, 1500 * k, v)]

    def shard_gradients(group: Group) -> list[np.ndarray]:
        rows = slice(32 * group.rank, 32 * group.rank + 32)
        own = [KERNELS.put(np.ascontiguousarray(x[:, rows])) for x in arrays]
        given = {"group": group, "placement": "contiguous"}
        out, lse = ring_attention(*own[1:], return_lse=True, **given)
        grads = ring_attention_backward(*own, out, lse, **given)
        return [KERNELS.get(x) for x in (grads.dq, grads.dk, grads.dv)]

    parts = run(shard_gradients, 2, timeout=120)
    gradients = [np.concatenate(each, 1) for each in zip(*parts, strict=True)]
    assert all(np.isfinite(each).all() for each in gradients)
    assert (np.abs(gradients[2]) <= 1.01 * np.abs(arrays[0].astype(float)).sum(1)).all()
