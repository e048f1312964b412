"""What attention has to be true to, whatever its numbers: the flash kernels against themselves.

Equal to the bit where the kernel's sums are the same ones, within the derived bounds where their
order is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.backward_runs import inputs, placed, run
from support.devices import KERNELS
from support.search import deep
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import reference
from cupyattn.kernels.configs.attention.teaching.forward import TILED_TILE_K

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

each_dtype = pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
SQ, SK, GROUP = 70, 131, 2
HEAD_DIMS = {"float16": (64, 64), "float32": (24, 40)}


def problem(dtype: str, **drawn: Any) -> AttentionProblem:
    """Two query heads on each of two key-value heads, several tiles, ragged ends."""
    head_dim, head_dim_v = HEAD_DIMS[dtype]
    return AttentionProblem(
        B=1, Sq=SQ, Sk=SK, H=2 * GROUP, G=2, D=head_dim, Dv=head_dim_v, dtype=dtype,
        drawn=tuple(drawn.items()),
    )  # fmt: skip


def forward(arrays: Sequence[np.ndarray], options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Out and lse of the flash kernel, as NumPy arrays."""
    out, lse = cupyattn.attention(*map(KERNELS.put, arrays), **placed(options), return_lse=True)
    return KERNELS.get(out), KERNELS.get(lse)


def forward_bounds(
    arrays: Sequence[np.ndarray], options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    dtype = arrays[0].dtype.name
    return reference.attention_bound(
        *arrays, dtype=dtype, tile_k=TILED_TILE_K, float32_weights=dtype == "float32", **options
    )


def backward_bounds(arrays: Sequence[np.ndarray], options: dict[str, Any]) -> dict[str, np.ndarray]:
    bounds = reference.attention_backward_bound(*arrays, dtype=arrays[1].dtype, **options)
    return {name: bound for name, bound in bounds._asdict().items() if bound is not None}


def assert_within(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    assert reference.error_ratio(actual, expected.astype(np.float64), bound) <= 1


@pytest.mark.parametrize("deterministic", [True, *deep(False)])
@each_dtype
def test_keys_may_be_permuted_with_their_values(dtype: str, deterministic: bool):
    """And with their biases; another maximum comes first, other keys share a tile."""
    sinks = {} if deterministic else {"sinks": "float32"}
    arrays, options = inputs(problem(dtype, bias=((SQ, SK), "float32"), **sinks))
    dout, q, k, v, out, lse = arrays
    dlse = options.pop("dlse")
    order = np.random.default_rng(0).permutation(SK)
    moved = (q, k[:, order], v[:, order])
    moved_options = {**options, "bias": np.ascontiguousarray(options["bias"][:, order])}
    expected, bounds = forward((q, k, v), options), forward_bounds((q, k, v), options)
    for actual, result, bound in zip(forward(moved, moved_options), expected, bounds, strict=True):
        assert_within(actual, result, 2 * bound)

    given = (dout, *moved, out, lse)
    of_moved = run(given, {**moved_options, "dlse": dlse}, "flash", deterministic=deterministic)
    gradients = run(arrays, {**options, "dlse": dlse}, "flash", deterministic=deterministic)
    bounds_of = backward_bounds(arrays, {**options, "dlse": dlse})
    there = {"dk": np.s_[:, order], "dv": np.s_[:, order], "dbias": np.s_[:, order]}
    for name, gradient in gradients.items():
        at = there.get(name, ...)
        assert_within(of_moved[name], gradient[at], 2 * bounds_of[name][at])


@pytest.mark.parametrize(
    ("dtype", "q_offset"),
    [("float16", 0), ("float16", SK - SQ), ("float32", SK - SQ), *deep(("float32", 0))],
)
def test_causal_rows_ignore_later_keys(dtype: str, q_offset: int):
    """Where the later keys lie in a tile of theirs too; numbers there are large.

    To the bit, but in float16: a warp raises the maxima of all its rows together, and when it does
    changes how each is rounded.
    """
    options = {"causal": True, "q_offset": q_offset}
    dout, _ = problem(dtype).gradients()
    q, k, v = problem(dtype).arrays()
    cut = q_offset + SQ // 2 + 3
    later_k, later_v = k.copy(), v.copy()
    later_k[:, cut:] += 1
    later_v[:, cut:] *= -1000
    before, after = forward((q, k, v), options), forward((q, later_k, later_v), options)
    dq, later_dq = (
        run((dout, q, *keys, *before), options, "flash", deterministic=True)["dq"]
        for keys in ((k, v), (later_k, later_v))
    )
    rows = cut - q_offset
    bounds = forward_bounds((q, k, v), options)
    for actual, expected, bound, seen in zip(
        after, before, bounds, (np.s_[:, :rows], np.s_[..., :rows]), strict=True
    ):
        if dtype == "float16":
            assert_within(actual[seen], expected[seen], 2 * bound[seen])
        else:
            assert_array_equal(actual[seen], expected[seen])
    if dtype == "float16":  # which scales gradients of scores by the largest row of V
        in_error = sum(
            backward_bounds((dout, q, *keys, *results), options)["dq"]
            for keys, results in (((k, v), before), ((later_k, later_v), after))
        )
        assert_within(later_dq[:, :rows], dq[:, :rows], in_error[:, :rows])
    else:
        assert_array_equal(later_dq[:, :rows], dq[:, :rows])
    assert (after[0][:, rows] != before[0][:, rows]).any(), "the keys were not changed"


@each_dtype
def test_grouped_heads_equal_repeated_heads(dtype: str):
    """To the bit; a key's gradient is the sum of those of its copies."""
    arrays, options = inputs(problem(dtype, causal=True))
    dout, q, k, v, out, lse = arrays
    dlse = options.pop("dlse")
    repeated = [np.repeat(x, GROUP, axis=2) for x in (k, v)]
    alone = forward((q, *repeated), options)
    for actual, expected in zip(forward((q, k, v), options), alone, strict=True):
        assert_array_equal(actual, expected)

    options["dlse"] = dlse
    of_repeated = (dout, q, *repeated, out, lse)
    grads, grads_alone = (
        run(given, options, "flash", deterministic=True) for given in (arrays, of_repeated)
    )
    assert_array_equal(grads["dq"], grads_alone["dq"])
    bounds, bounds_alone = (backward_bounds(given, options) for given in (arrays, of_repeated))
    for name in ("dk", "dv"):
        by_group = (1, SK, 2, GROUP, -1)
        together = grads_alone[name].astype(np.float64).reshape(by_group).sum(axis=3)
        bound = bounds_alone[name].reshape(by_group).sum(axis=3)
        assert_within(grads[name], together, bounds[name] + bound)


@each_dtype
def test_parts_of_the_keys_make_the_whole(dtype: str):
    """Merged by their lse; and given the whole's out and lse, each part has its share of dq."""
    arrays, options = inputs(problem(dtype, causal=True, q_offset=SK - SQ))
    dout, q, k, v, out, lse = arrays
    dlse = options.pop("dlse")
    exact, exact_lse = reference.attention(q, k, v, **options)
    exact_grads = reference.attention_backward(*arrays, **options, dlse=dlse)
    merged, merged_bound = np.zeros(exact.shape), np.zeros(exact.shape)
    dq, dq_bound = np.zeros(q.shape), np.zeros(q.shape)
    for keys in (slice(0, 50), slice(50, SK)):
        part = (q, k[:, keys], v[:, keys])
        part_options = {**options, "q_offset": options["q_offset"] - keys.start}
        part_out, part_lse = forward(part, part_options)
        out_bound, lse_bound = forward_bounds(part, part_options)
        weight, weight_error = (
            x.transpose(0, 2, 1)[..., None]
            for x in (np.exp(part_lse - exact_lse), np.expm1(lse_bound))
        )
        merged += weight * part_out
        merged_bound += weight * (out_bound + 2 * weight_error * (np.abs(part_out) + out_bound))

        whole = (dout, *part, out, lse)
        part_options["dlse"] = dlse
        grads, bounds = run(whole, part_options, "flash"), backward_bounds(whole, part_options)
        dq, dq_bound = dq + grads["dq"], dq_bound + bounds["dq"]
        for name in ("dk", "dv"):
            assert_within(grads[name], getattr(exact_grads, name)[:, keys], bounds[name])
    assert_within(merged, exact, merged_bound)
    assert_within(dq, exact_grads.dq, dq_bound)
