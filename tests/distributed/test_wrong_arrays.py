"""Arrays and results that do not fit a ring's call: errors that say so, never another result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import AttentionGrads, DropoutSeed, MaskMod, ScoreMod, block_mask
from cupyattn.distributed import (
    Group,
    RankFailedError,
    ring_attention,
    ring_attention_backward,
    run,
)

SHAPES = {"q": (1, 8, 4, 8), "k": (1, 8, 2, 8), "v": (1, 8, 2, 6), "dout": (1, 8, 4, 6)}


def drawn(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).standard_normal(SHAPES[name])


def backward(group: Group, **changed: Any) -> None:
    """A right forward, and a backward of what is changed of its arrays and options."""
    q, k, v = (drawn(name) for name in "qkv")
    out, lse = ring_attention(q, k, v, group=group, return_lse=True)
    arrays = {"dout": drawn("dout"), "q": q, "k": k, "v": v, "out": out, "lse": lse}
    options = {name: x for name, x in changed.items() if name not in arrays}
    arrays |= {name: x for name, x in changed.items() if name in arrays}
    ring_attention_backward(*arrays.values(), group=group, **options)


def forward(group: Group, **changed: Any) -> None:
    arrays = {name: changed.pop(name, drawn(name)) for name in "qkv"}
    ring_attention(*arrays.values(), group=group, **changed)


def within_q() -> dict[str, Any]:
    """A q, and an out that shares its memory."""
    both = np.zeros((1, 8, 4, 11))
    both[...] = 1
    return {"q": both[..., :8], "out": both[..., -6:]}


def read_only() -> np.ndarray:
    array = np.zeros(SHAPES["dout"])
    array.flags.writeable = False
    return array


def twice() -> AttentionGrads:
    array = np.zeros(SHAPES["k"])
    return AttentionGrads(dk=array, dv=array[..., :6])


def overlapping_bias() -> dict[str, Any]:
    bias = np.zeros((8, 16))
    return {"bias": bias, "grads": AttentionGrads(dbias=bias)}


def half(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """A score_mod of the forward alone."""
    return s / 2


FIRST_KEYS = MaskMod("k_idx < 4", python=lambda b, h, q, k: k < 4)
PACKED = {
    "cu_seqlens": [0, 8, 16],
    **{name: drawn(name)[0] for name in "qkv"},
}


@pytest.mark.parametrize(
    ("call", "changed", "says"),
    [
        # Calls take rows of these arrays: more tokens than q has would be cut off in silence.
        (forward, {"k": np.zeros((1, 10, 2, 8))}, "ValueError: q has 8 tokens, k has 10"),
        (forward, {"v": np.zeros((1, 10, 2, 6))}, "ValueError: q has 8 tokens, v has 10"),
        (backward, {"dout": np.zeros((1, 10, 4, 6))}, "ValueError: q has 8 tokens, dout has 10"),
        (backward, {"out": np.zeros((1, 10, 4, 6))}, "ValueError: q has 8 tokens, out has 10"),
        (backward, {"lse": np.zeros((1, 4, 10))}, "ValueError: q has 8 tokens, lse has 10"),
        (backward, {"dlse": np.zeros((1, 4, 10))}, "ValueError: q has 8 tokens, dlse has 10"),
        (backward, {"dout": np.zeros((1, 8, 4, 7))}, "ValueError: dout has shape"),
        (forward, {"q": None}, "TypeError: q is None"),
        (backward, {"lse": None}, "TypeError: lse is None"),
        (
            forward,
            {"rotary": (np.ones((15, 2)), np.zeros((15, 2)))},
            "ValueError: rotary's tables have 15 rows, for sequences of 16",
        ),
        # Options: those that attention has and a ring has not, and those of whole sequences.
        (
            forward,
            {"q_offset": 1},
            "NotImplementedError: q_offset = 1 was given to ring_attention; queries are .*; leave",
        ),
        (forward, {"q_offset": False}, "NotImplementedError: q_offset = False was given"),
        (forward, {"q_offset": np.zeros(1, int)}, "NotImplementedError: q_offset = .* was given"),
        (forward, {"implementation": "naive"}, "NotImplementedError: implementation = 'naive' was"),
        (
            backward,
            {"workspace": np.zeros(9, np.uint8)},
            "NotImplementedError: workspace = .* was given to .*_backward; .* leave workspace out",
        ),
        (forward, {"maskk": None}, "TypeError: ring_attention was given maskk; it has no such"),
        (
            forward,
            {"mask_mod": block_mask(FIRST_KEYS, 8, 8)},
            r"ValueError: mask_mod is a block mask of .* = \(1, 1, 8, 8\); the .* \(1, 4, 16, 16",
        ),
        (
            forward,
            {"mask_mod": block_mask(FIRST_KEYS, 16, 16, H=3)},
            "ValueError: mask_mod is a bl",
        ),
        (
            forward,
            {"mask_mod": block_mask(FIRST_KEYS, 16, 16, q_offset=2)},
            "ValueError: .*, q_offset = 2; .*; make it on each rank by block_mask",
        ),
        (
            forward,
            {"mask_mod": block_mask(FIRST_KEYS, 16, 16), **PACKED},
            r"ValueError: .* \(2, 4, 8, 8\)",
        ),
        (forward, {"score_mod": block_mask(FIRST_KEYS, 16, 16)}, "TypeError: score_mod is a Block"),
        (forward, {"mask_mod": ScoreMod("score")}, "TypeError: mask_mod is a ScoreMod"),
        (forward, {"score_mod": MaskMod("true")}, "TypeError: score_mod is a MaskMod"),
        (forward, {"score_mod": "score"}, "TypeError: score_mod is a str; it is a ScoreMod"),
        (forward, {"score_mod": ScoreMod("score")}, "NotImplementedError: score_mod = ScoreMod"),
        (
            forward,
            {"mask": np.ones((8, 8), bool)},
            r"ValueError: mask has .* all Sk = 16 keys",
        ),
        (forward, {"mask": np.ones((16, 16), bool)}, "ValueError: mask has shape .*axis=-2"),
        # As they were passed, and not as calls take parts of them.
        (forward, {"mask": np.ones((3, 1, 1), bool)}, r"ValueError: mask has shape \(3, 1, 1\)"),
        (
            forward,
            {"mask": np.ones((1, 1, 1, 8, 16), bool)},
            r"ValueError: mask has shape \(1, 1, 1, 8, 16\); .* = \(1, 4, 8, 16\): .*axes of 1",
        ),
        (forward, {"bias": np.ones((2, 1, 8, 16))}, r"ValueError: bias has shape \(2, 1, 8, 16\)"),
        (
            forward,
            {"v": np.zeros((1, 8, 4, 6))},
            r"ValueError: v has shape \(1, 8, 4, 6\); it is \(1, 8, 2, 6\) by",
        ),
        (forward, {"k": np.zeros((1, 8, 2, 7))}, r"ValueError: k has shape .*\(1, 8, 2, 8\) by"),
        (forward, {"k": np.zeros((2, 8, 2, 8))}, r"ValueError: k has shape \(2, 8, 2, 8\)"),
        (
            forward,
            {**PACKED, "v": np.zeros((8, 1, 6))},
            r"ValueError: v has shape \(8, 1, 6\); it is \(8, 2, 6\) by",
        ),
        (backward, {"out": np.zeros((1, 8, 2, 6))}, r"ValueError: out has .* it is \(1, 8, 4, 6\)"),
        (backward, {"dlse": np.zeros((1, 2, 8))}, r"ValueError: dlse has .* it is \(1, 4, 8\) by"),
        (forward, {"mask": np.ones((8, 16))}, "TypeError: mask has dtype float64"),
        (forward, {"bias": np.ones((8, 16), int)}, "TypeError: bias has dtype int64"),
        (
            forward,
            {"mask": np.ones((4, 4), bool), **PACKED},
            "NotImplementedError: mask with cu_seqlens; .* pass a mask_mod",
        ),
        (forward, {"bias": np.ones((4, 4)), **PACKED}, "NotImplementedError: .* a score_mod"),
        (forward, {"seqused_k": np.ones(1)}, "TypeError: seqused_k has dtype float64"),
        (forward, {"seqused_k": np.ones(2, int)}, r"ValueError: seqused_k has shape \(2,\)"),
        (forward, {"seqused_k": np.array([17])}, r"ValueError: seqused_k = \[17\]; .* \[16\] keys"),
        (forward, {"seqused_k": np.array([-1])}, r"ValueError: seqused_k = \[-1\]"),
        (forward, {"seqused_k": np.array([4, 9]), **PACKED}, r"ValueError: seqused_k = \[4, 9\]"),
        (forward, {"seed": DropoutSeed(3)}, "TypeError: seed is a DropoutSeed; .*; pass 3"),
        (
            forward,
            {"return_lse": "no"},
            "TypeError: return_lse = 'no'; it is True or False; pass one",
        ),
        (backward, {"deterministic": 1}, "TypeError: deterministic = 1; it is True or False"),
        (
            backward,
            {"accumulate": "yes", "grads": AttentionGrads(dq=np.zeros(SHAPES["q"]))},
            "TypeError: accumulate = 'yes'; it is True or False",
        ),
        (
            backward,
            {"score_mod": half},
            "NotImplementedError: score_mod = <function half .*; give ScoreMod python=",
        ),
        # Results.
        (forward, {"out": np.zeros((1, 1))}, r"ValueError: out is float64 \(1, 1\); it is"),
        (forward, {"out": np.zeros(SHAPES["dout"], np.float32)}, "ValueError: out is float32"),
        (forward, {"out": (np.zeros(2), np.zeros(2))}, "TypeError: out is a tuple of 2"),
        (forward, {"out": np.zeros(2), "return_lse": True}, "TypeError: out is a ndarray"),
        (forward, {"out": read_only()}, "ValueError: out is read-only"),
        (forward, within_q(), "ValueError: out overlaps q in memory"),
        (backward, {"accumulate": True}, "ValueError: accumulate=True without grads"),
        (backward, {"grads": (None, None)}, "TypeError: grads is a tuple"),
        (
            backward,
            {"grads": AttentionGrads(dbias=np.zeros(2))},
            "ValueError: grads.dbias was given; gradients of this call are dq, dk, dv",
        ),
        (backward, overlapping_bias(), "ValueError: grads.dbias overlaps bias in memory"),
        (
            backward,
            {"grads": AttentionGrads(dsinks=np.zeros(4))},
            "ValueError: grads.dsinks was given",
        ),
        (backward, {"grads": twice()}, "ValueError: grads.dv overlaps grads.dk in memory"),
        (
            backward,
            {"grads": AttentionGrads(dq=np.zeros((1, 8, 4, 7)))},
            "ValueError: grads.dq is float64",
        ),
    ],
)
def test_it_is_an_error_on_every_rank(call, changed, says):
    with pytest.raises(RankFailedError, match=rf"rank \d failed: {says}"):
        run(lambda group: call(group, **changed), 2, timeout=20)


def test_what_a_ring_does_anyway_is_no_error():
    given = {"q_offset": 0, "implementation": "flash", "workspace": None}
    run(lambda group: forward(group, **given), 2)
    run(lambda group: backward(group, **{**given, "q_offset": None}), 2)


def test_what_lies_between_an_input_s_items_does_not_overlap_it():
    packed = np.random.default_rng(0).standard_normal((1, 8, 4, 2, 8))
    q, k, v, out = (packed[:, :, part] for part in range(4))
    expected = run(lambda group: ring_attention(q, k, v, group=group), 2)[0]
    found = run(
        lambda group: ring_attention(q, k, v, group=group, out=out if group.rank == 0 else None), 2
    )[0]
    assert found is out
    np.testing.assert_array_equal(found, expected)
