"""Ring attention on NumPy ranks against one device: every option, every placement, 1 to 8 ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyattn import (
    AttentionGrads,
    Rotary,
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    rope_tables,
)
from cupyattn.distributed import (
    ring_attention,
    ring_attention_backward,
    run,
    shard,
    unshard,
)
from cupyattn.distributed.placement import PLACEMENTS, Placement

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # of float64: sums of up to 300 terms in other orders


class Case(NamedTuple):
    """Whole arrays, and how ranks hold them."""

    ranks: int
    placement: str
    arrays: dict[str, Any]
    options: dict[str, Any]
    cu_seqlens: Any = None

    def __repr__(self) -> str:
        shapes = {name: array.shape for name, array in self.arrays.items()}
        return f"Case({self.ranks}, {self.placement}, {shapes}, {self.options}, {self.cu_seqlens})"

    @property
    def packed(self) -> dict[str, Any]:
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}

    def shard(self, name: str, rank: int) -> Any:
        """A rank's part of an array."""
        axis = None
        if name in ("lse", "dlse"):
            axis = 2 if self.cu_seqlens is None else 1
        x = self.arrays[name]
        return shard(x, rank, self.ranks, placement=self.placement, axis=axis, **self.packed)

    def unshard(self, shards: Any, *, of_rows: bool = False) -> Any:
        axis = None
        if of_rows:
            axis = 2 if self.cu_seqlens is None else 1
        return unshard(list(shards), placement=self.placement, axis=axis, **self.packed)


def case(
    ranks: int,
    placement: str,
    size: int = 3,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 6),
    dtype: str = "float64",
    batch: int = 2,
    draw: int = 0,
    sizes: tuple[int, ...] | None = None,
    **options: Any,
) -> Case:
    """Draw the arrays: `size` tokens a piece, or packed sequences of `sizes` a piece."""
    rng = np.random.default_rng(draw)
    unit = Placement(placement, ranks).pieces * ranks
    h, g = heads
    d, dv = dims
    bounds = None
    if sizes is None:
        lead: tuple[int, ...] = (batch, size * unit)
    else:
        bounds = np.concatenate([[0], np.cumsum(np.array(sizes) * unit)])
        lead = (int(bounds[-1]),)
    shapes = {"q": (*lead, h, d), "k": (*lead, g, d), "v": (*lead, g, dv), "dout": (*lead, h, dv)}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    exact = "float64" if dtype == "float64" else "float32"
    arrays["dlse"] = rng.standard_normal((*lead[:-1], h, lead[-1])).astype(exact)
    return Case(ranks, placement, arrays, options, bounds)


def one_device(case: Case) -> tuple[Any, Any, AttentionGrads]:
    """The results of one call, on all tokens."""
    arrays, options = case.arrays, case.options
    inputs = [arrays[name] for name in "qkv"]
    lengths: list[Any] = []
    forward, backward = attention, attention_backward
    if case.cu_seqlens is not None:
        longest = int(np.diff(case.cu_seqlens).max(initial=0))
        lengths = [case.cu_seqlens, case.cu_seqlens, longest, longest]
        forward, backward = attention_varlen, attention_varlen_backward
    out, lse = forward(*inputs, *lengths, return_lse=True, **options)
    grads = backward(arrays["dout"], *inputs, out, lse, *lengths, dlse=arrays["dlse"], **options)
    return out, lse, grads


def ring(case: Case, group: Any) -> tuple[Any, Any, AttentionGrads]:
    """What one rank computes."""
    q, k, v, dout, dlse = (case.shard(name, group.rank) for name in ("q", "k", "v", "dout", "dlse"))
    given = {"group": group, "placement": case.placement, **case.packed, **case.options}
    out, lse = ring_attention(q, k, v, return_lse=True, **given)
    grads = ring_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **given)
    return out, lse, grads


def on_ranks(case: Case) -> tuple[Any, Any, AttentionGrads]:
    """The results of all ranks, put together."""
    outs, lses, grads = zip(
        *run(lambda group: ring(case, group), case.ranks, timeout=60), strict=True
    )
    whole = {name: case.unshard([getattr(g, name) for g in grads]) for name in ("dq", "dk", "dv")}
    for each in grads[1:]:  # the gradient of sinks is that of all ranks, on each
        np.testing.assert_array_equal(each.dsinks, grads[0].dsinks)
    return (
        case.unshard(outs),
        case.unshard(lses, of_rows=True),
        AttentionGrads(**whole, dsinks=grads[0].dsinks),
    )


def assert_same(case: Case) -> None:
    """Everything is what one device gives."""
    out, lse, grads = on_ranks(case)
    expected_out, expected_lse, expected = one_device(case)
    np.testing.assert_allclose(out, expected_out, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    for name in ("dq", "dk", "dv", "dsinks"):
        if getattr(expected, name) is not None:
            np.testing.assert_allclose(
                getattr(grads, name), getattr(expected, name), **CLOSE, err_msg=name
            )


def tables(length: int, dim: int, interleaved: bool) -> Rotary:
    return Rotary(*rope_tables(length, dim, dtype="float64"), interleaved)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 8))
    placement = draw(st.sampled_from(PLACEMENTS))
    side = st.one_of(st.none(), st.integers(0, 50))
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window_size"] = (draw(side), draw(side))
    heads = draw(st.sampled_from([(4, 2), (2, 2), (3, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    for name, value in {
        "softmax_scale": 0.4,
        "softcap": 1.5,
        "sinks": rng.standard_normal(heads[0]),
        "alibi_slopes": rng.random(heads[0]),
        "rotary": tables(8 * 16 * 5, 6, draw(st.booleans())),
    }.items():
        if draw(st.booleans()) and not (name == "alibi_slopes" and placement == "striped"):
            options[name] = value
    sizes = draw(st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple))
    return case(
        ranks, placement, draw(st.integers(1, 5)), heads=heads, sizes=sizes,
        draw=draw(st.integers(0, 99)), **options,
    )  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(cases())
def test_ranks_give_what_one_device_gives(case):
    assert_same(case)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_causal_on_any_number_of_ranks(ranks, placement):
    assert_same(case(ranks, placement, causal=True))


@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
@pytest.mark.parametrize("sizes", [None, (32, 0, 64)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dropout_is_that_of_one_device(ranks, placement, sizes):
    assert_same(case(ranks, placement, 32, sizes=sizes, causal=True, dropout_p=0.3, seed=5))
