"""Calls that do not fit, on one rank or between ranks: every rank raises before it sends."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn import AttentionGrads, DropoutSeed, MaskMod, Rotary, ScoreMod, block_mask, rope_tables
from cupyattn.distributed import (
    Group,
    RankFailedError,
    nccl,
    ring_attention,
    ring_attention_backward,
    run,
)
from cupyattn.distributed.calls import RingCalls
from cupyattn.distributed.failures import SharedFailures
from cupyattn.distributed.group import agree
from cupyattn.distributed.mailbox import ThreadCommunicator
from cupyattn.distributed.nccl import ThreadMeeting
from cupyattn.distributed.problem import RingProblem

X = np.random.default_rng(0).standard_normal((1, 64, 2, 8))
ONES = np.ones(2)


def call(group: Group, **options: Any) -> Any:
    return ring_attention(X, X, X, group=group, **options)


def rotary(dim: int, **how: Any) -> Rotary:
    return Rotary(*rope_tables(128, dim, dtype="float64"), **how)


def seen(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return k_idx < 4


DIFFERENT = {
    "causal": (True, False),
    "window_size": ((3, 0), (4, 0)),
    "softmax_scale": (0.0, None),
    "softcap": (1.0, 2.0),
    "sinks": (ONES, 2 * ONES),
    "alibi_slopes": (ONES, np.stack([ONES])),
    "rotary": (rotary(8), rotary(8, interleaved=True)),
    "placement": ("zigzag", "contiguous"),
    "seqused_k": (np.array([3]), np.array([4])),
    "mask": (np.ones((1, 1), bool), None),
    "mask_mod": (MaskMod("k_idx < 4", python=seen), MaskMod("k_idx < 5", python=seen)),
}
VALUES = {"alibi_slopes": (ONES, 2 * ONES), "rotary": (rotary(8), rotary(4))}


@pytest.mark.parametrize(
    ("option", "values"), [*DIFFERENT.items(), *VALUES.items()], ids=lambda x: str(x)[:12]
)
def test_an_option_that_differs_is_an_error_on_every_rank(option, values):
    errors: dict[int, str] = {}

    def of_rank(group: Group) -> None:
        try:
            call(group, **{option: values[group.rank]})
        except ValueError as raised:
            errors[group.rank] = str(raised)
        call(group)  # nothing was sent: the next call finds nothing of it

    run(of_rank, 2, timeout=20)
    assert set(errors) == {0, 1}
    for rank, said in errors.items():
        ours, theirs = re.fullmatch(
            rf"rank {rank} called with (.*), rank {1 - rank} with (.*); all ranks .*", said
        ).groups()
        assert ours != theirs and "q float64" not in said  # equal parts are left out
        name = option if option != "placement" else "zigzag"
        assert name in ours or name in theirs


def test_the_seed_is_one():
    with pytest.raises(RankFailedError, match=r"called with seed=., rank . with seed="):
        run(lambda group: call(group, dropout_p=0.5, seed=group.rank), 2, timeout=20)
    run(lambda group: call(group, seed=group.rank), 2, timeout=20)  # which nothing draws from


def test_what_is_alike_may_be_written_otherwise():
    given = [
        {"softmax_scale": 1, "softcap": np.float64(2.0), "window_size": (3, 0), "dropout_p": 0},
        {"softmax_scale": 1.0, "softcap": 2, "window_size": (3, 0), "placement": "zigzag"},
    ]
    run(lambda group: call(group, **given[group.rank]), 2, timeout=20)


@pytest.mark.parametrize("agreed", [(True, False), (False, True)])
def test_kinds_of_call_that_were_agreed_on_are_not_mixed(agreed):
    """Each was right on all ranks before: the ranks would take one another's blocks for theirs."""
    with pytest.raises(RankFailedError, match=r"ValueError: rank . called with"):
        run(
            lambda group: [call(group, causal=each) for each in (*agreed, bool(group.rank))],
            2, timeout=20,
        )  # fmt: skip


def test_a_forward_does_not_meet_a_backward():
    def of_rank(group: Group) -> None:
        out, lse = call(group, return_lse=True)
        given = X, X, X, X, out, lse
        ring_attention_backward(*given, group=group)
        if group.rank:
            call(group)
        else:
            ring_attention_backward(*given, group=group)

    with pytest.raises(RankFailedError, match=r"rank . (called )?with dout float64"):
        run(of_rank, 2, timeout=20)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """NumPy arrays that are taken for a GPU's, and how often each rank gathers, and from where."""

    class Elsewhere(np.ndarray):
        def get(self) -> np.ndarray:
            return np.asarray(self)

    def asarray(x: Any) -> Any:
        return np.asarray(x).view(Elsewhere)

    gather, asked = Group.all_gather, []

    def gathered(self: Group, x: Any) -> Any:
        asked.append(isinstance(x, Elsewhere))
        return gather(self, np.asarray(x))

    monkeypatch.setattr(RingProblem, "xp", SimpleNamespace(**{**vars(np), "asarray": asarray}))
    monkeypatch.setattr(Group, "all_gather", gathered)
    return asked


def many_calls(group: Group) -> None:
    for seed in range(3):
        for causal in (True, False):
            call(group, causal=causal, dropout_p=0.5, seed=seed)


def test_where_the_host_would_wait_each_kind_of_call_is_asked_about_once(as_on_a_gpu, monkeypatch):
    """The seed changes in every step."""
    monkeypatch.setattr(ThreadCommunicator, "gathers_on_host", False)
    run(many_calls, 2, timeout=20)
    assert as_on_a_gpu == [True] * 4


def test_where_it_need_not_wait_every_call_is(as_on_a_gpu):
    run(many_calls, 2, timeout=20)
    assert as_on_a_gpu == [False] * 12
    with pytest.raises(RankFailedError, match=r"rank . called with seed=., rank . with seed="):
        run(lambda group: call(group, dropout_p=0.5, seed=group.rank), 2, timeout=20)


def test_threads_of_nccl_gather_on_the_host(monkeypatch):
    """Where they meet, as often as they like; processes of NCCL do not."""
    monkeypatch.setattr(nccl, "load_nccl", lambda: None)
    failures = SharedFailures()
    meeting = ThreadMeeting(3, failures, timeout=20.0)

    def end(rank: int, *how: Any) -> Group:
        known = {"rank_id": lambda: rank, "size": lambda: 3, "device_id": lambda: rank}
        known |= {"abort": lambda: None, "destroy": lambda: None}
        return Group(nccl.NCCLCommunicator(SimpleNamespace(**known), *how))

    assert not end(0, failures).gathers_on_host
    found: dict[int, Any] = {}

    def of_rank(rank: int) -> None:
        with end(rank, failures, meeting) as group:
            assert group.gathers_on_host
            array = np.array([rank, 7])
            found[rank] = [group.all_gather(array + turn) for turn in range(50)]

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    expected = [[[rank + turn, 7 + turn] for rank in range(3)] for turn in range(50)]
    for each in range(3):
        np.testing.assert_array_equal(found[each], expected)


def test_ranks_agree_behind_the_first_kernels_and_before_anything_is_sent(monkeypatch):
    """A GPU has work while threads wait for one another; and what differs is found in time."""
    order: dict[int, list[str]] = {0: [], 1: []}

    def noted(owner: Any, name: str, rank_of: Any) -> None:
        of_before = getattr(owner, name)

        def noting(self: Any, *given: Any, **options: Any) -> Any:
            order[rank_of(self)].append(name)
            return of_before(self, *given, **options)

        monkeypatch.setattr(owner, name, noting)

    noted(RingCalls, "forward", lambda calls: calls._plan.rank)
    noted(RingCalls, "backward", lambda calls: calls._plan.rank)
    noted(RingProblem, "agree", lambda problem: problem.group.rank)
    noted(Group, "exchange", lambda group: group.rank)

    def of_rank(group: Group) -> None:
        q, k, v, dout = X, X, X, X
        out, lse = ring_attention(q, k, v, group=group, causal=True, return_lse=True)
        order[group.rank].append("then")
        ring_attention_backward(dout, q, k, v, out, lse, group=group, causal=True)

    run(of_rank, 2)
    for said in order.values():
        at = said.index("then")
        assert said[:at] == ["forward", "agree", "exchange", "forward"]
        assert said[at + 1 : at + 4] == ["backward", "agree", "exchange"]


@pytest.mark.parametrize("number", [0, 2**63 - 1, -5])
def test_numbers_of_all_ranks(number):
    def of_rank(group: Group) -> list[int]:
        mine = number if group.rank else 7
        return agree(group, ["the same"], np, allowed="", fix="", number=mine)

    assert run(of_rank, 3, timeout=20) == [[7, number, number]] * 3


def test_what_differs_is_said_however_much_is_alike():
    def of_rank(group: Group) -> None:
        said = [*(f"option {number}" for number in range(500)), f"last={group.rank}"]
        agree(group, said, np, allowed="alike", fix="change it")

    says = r"rank (\d) called with last=\1, rank (\d) with last=\2; alike; change it"
    with pytest.raises(RankFailedError, match=says):
        run(of_rank, 3, timeout=20)


def test_a_long_description_is_told_apart_whole():
    def of_rank(group: Group) -> None:
        said = ["é" * 1000 + str(group.rank)]
        agree(group, said, np, allowed="alike", fix="change it")

    with pytest.raises(RankFailedError, match=r"rank . with é{180} \.\.\.; alike; change it"):
        run(of_rank, 2, timeout=20)


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


FIRST_KEYS = MaskMod("k_idx < 4")
PACKED = {"cu_seqlens": [0, 8, 16], **{name: drawn(name)[0] for name in "qkv"}}


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
            {"mask_mod": block_mask(FIRST_KEYS, 16, 16, q_offset=2)},
            "ValueError: .*, q_offset = 2; .*; make it on each rank by block_mask",
        ),
        (
            forward,
            {"mask_mod": block_mask(FIRST_KEYS, 16, 16), **PACKED},
            r"ValueError: .* \(2, 4, 8, 8\)",
        ),
        (
            forward,
            {"score_mod": block_mask(FIRST_KEYS, 16, 16)},
            "TypeError: score_mod has type Block",
        ),
        (
            forward,
            {"score_mod": ScoreMod("__expf(score)")},
            "NotImplementedError: ScoreMod's expression has '__expf' at 0",
        ),
        (forward, {"mask": np.ones((8, 8), bool)}, r"ValueError: mask has .* all Sk = 16 keys"),
        (forward, {"mask": np.ones((16, 16), bool)}, "ValueError: mask has shape .*axis=-2"),
        # As they were passed, and not as calls take parts of them.
        (
            forward,
            {"mask": np.ones((1, 1, 1, 8, 16), bool)},
            r"ValueError: mask has shape \(1, 1, 1, 8, 16\); .* = \(1, 4, 8, 16\): .*axes of 1",
        ),
        (
            forward,
            {"v": np.zeros((1, 8, 4, 6))},
            r"ValueError: v has shape \(1, 8, 4, 6\); it is \(1, 8, 2, 6\) by",
        ),
        (forward, {"k": np.zeros((2, 8, 2, 8))}, r"ValueError: k has shape \(2, 8, 2, 8\)"),
        (
            forward,
            {**PACKED, "v": np.zeros((8, 1, 6))},
            r"ValueError: v has shape \(8, 1, 6\); it is \(8, 2, 6\) by",
        ),
        (backward, {"out": np.zeros((1, 8, 2, 6))}, r"ValueError: out has .* it is \(1, 8, 4, 6\)"),
        (forward, {"mask": np.ones((8, 16))}, "TypeError: mask has dtype float64"),
        (
            forward,
            {"mask": np.ones((4, 4), bool), **PACKED},
            "NotImplementedError: mask with cu_seqlens; .* pass a mask_mod",
        ),
        (forward, {"seqused_k": np.ones(1)}, "TypeError: seqused_k has dtype float64"),
        (forward, {"seqused_k": np.ones(2, int)}, r"ValueError: seqused_k has shape \(2,\)"),
        (forward, {"seqused_k": np.array([17])}, r"ValueError: seqused_k = \[17\]; .* \[16\] keys"),
        (forward, {"seed": DropoutSeed(3)}, "TypeError: seed is a DropoutSeed; .*; pass 3"),
        (
            forward,
            {"return_lse": "no"},
            "TypeError: return_lse = 'no'; it is True or False; pass one",
        ),
        (backward, {"deterministic": 1}, "TypeError: deterministic = 1; it is True or False"),
        (
            backward,
            {"score_mod": half},
            "NotImplementedError: score_mod = <function half .*; give ScoreMod python=",
        ),
        # Results.
        (forward, {"out": np.zeros((1, 1))}, r"ValueError: out is float64 \(1, 1\); it is"),
        (forward, {"out": (np.zeros(2), np.zeros(2))}, "TypeError: out is a tuple of 2"),
        (forward, {"out": np.zeros(2), "return_lse": True}, "TypeError: out has type ndarray"),
        (forward, {"out": read_only()}, "ValueError: out is read-only"),
        (forward, within_q(), "ValueError: out overlaps q in memory"),
        (backward, {"accumulate": True}, "ValueError: accumulate=True without grads"),
        (backward, {"grads": (None, None)}, "TypeError: grads has type tuple"),
        (
            backward,
            {"grads": AttentionGrads(dbias=np.zeros(2))},
            "ValueError: grads.dbias was given; gradients of this call are dq, dk, dv",
        ),
        (backward, overlapping_bias(), "ValueError: grads.dbias overlaps bias in memory"),
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
