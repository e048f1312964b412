"""The checks of a call of attention: its description once, its values where they can be read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from cupyattn.ops.attention.block_mask import BlockMask, require_fitting_blocks
from cupyattn.ops.attention.kernels.decode import INTEGER_BITS, TILE_KEYS
from cupyattn.ops.attention.modifiers import (
    UserFunction,
    UserFunctions,
    arrays_of,
    python_function,
    require_valid_arrays,
    user_function,
    with_arrays_of,
)
from cupyattn.ops.attention.options import (
    MAX_INT8_HEAD_DIM,
    AttentionOptions,
    DropoutSeed,
    checked_seed,
)
from cupyattn.ops.attention.problem import (
    BACKWARD_RESULTS,
    FORWARD_RESULTS,
    MAX_LENGTH,
    ROWS_OF_KEYS,
    ROWS_OF_QUERIES,
    AttentionArrays,
    AttentionBackwardArrays,
    AttentionProblem,
    QuantizedKeyArrays,
    as_batch,
    forward_outputs,
    gradient_outputs,
    require_results,
    whole,
)
from cupyattn.ops.attention.values import check_values, require_rotary_positions
from cupyattn.ops.rope.api import checked_rotary, require_rotary_tables
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    Operands,
    adopt,
    exports_memory,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    FLOATS,
    INTEGERS,
    Overlaps,
    integer,
    require_arrays,
    require_bool_mask,
    require_contiguous_rows,
    require_dtype,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error
from cupyattn.runtime.records import fields_of, given_of, made, values_of
from cupyattn.runtime.tables import MAX_HEAD_DIM
from cupyattn.runtime.value_checks import checks_values

_A = TypeVar("_A", bound=AttentionArrays[Any])
_CACHED_PROBLEMS = 4096
_WINDOW_SIZE = AttentionOptions._fields.index("window_size")
_OPTIONS = len(AttentionOptions._fields)
_NO_SEED = DropoutSeed(0)
_WITH_INT8_KEYS = ("float16",)
"""The dtypes of q and v with int8 keys."""
_NO_FUNCTIONS: tuple[UserFunction | None, ...] = (None, None)


def attention_call(
    arrays: _A,
    options: tuple[Any, ...],
    q_offset: Any,
    seed: Any,
    rotary: Any,
    score_mod: Any,
    mask_mod: Any,
    *longest: Any,
) -> tuple[Operands[_A], AttentionProblem, DropoutSeed]:
    """Take the arrays and check the call, forward or backward.

    `options` are those of `AttentionOptions` before q_offset, in that order; `longest` are
    max_seqlen_q and max_seqlen_k of packed sequences. The seed is not part of the problem, of which
    a training step has the same each time; it is 0 where there is none.
    """
    if q_offset is not None and exports_memory(q_offset):
        arrays = whole(arrays)
        arrays.q_offset = q_offset
        q_offset = None
    interleaved = False
    if rotary is not None:
        arrays = whole(arrays)
        arrays.cos, arrays.sin, interleaved = checked_rotary(rotary)
    functions = _NO_FUNCTIONS
    if score_mod is not None or mask_mod is not None:
        blocks = None
        if isinstance(mask_mod, BlockMask):
            arrays = whole(arrays)
            arrays.block_mask, blocks = mask_mod.tiles_beside(arrays.q), mask_mod.blocks
            mask_mod = mask_mod.mask_mod
        of_mask = user_function("mask_mod", mask_mod)
        functions = (
            user_function("score_mod", score_mod),
            of_mask if of_mask is None else of_mask._replace(blocks=blocks),
        )
        both = arrays_of("score_mod", score_mod) | arrays_of("mask_mod", mask_mod)
        arrays = with_arrays_of(arrays, UserFunctions(*functions), both)
    operands = adopt(arrays, arrays.FIXES)
    checked = _NO_SEED if seed is None else checked_seed(seed)
    given = options + (q_offset, interleaved) + functions + longest  # noqa: RUF005  as it is fastest
    return operands, checked_problem(operands, given), checked


def checked_problem(
    operands: Operands[Any], options: tuple[Any, ...] = AttentionOptions()
) -> AttentionProblem:
    """Check a call: its description, unless that was checked before, and its values.

    `options` are those of `AttentionOptions`, in that order, and max_seqlen_q and max_seqlen_k
    where sequences are packed.
    """
    # The options go one by one, because a typed cache tells True from 1 and 1 from 1.0.
    window = options[_WINDOW_SIZE]
    sides = (*map(type, window),) if isinstance(window, tuple) else None
    kind: Any = type(operands.arrays)
    try:
        problem = _cached_problem(kind, operands.description, sides, *options)
    except TypeError:
        if _hashable(options):
            raise
        # What has no hash is of a wrong type, as its check says.
        problem = _cached_problem.__wrapped__(kind, operands.description, sides, *options)
    if problem.has_values and checks_values(operands):
        check_values(problem, operands.arrays)
    problem.overlaps.check(operands)
    return problem


def _hashable(options: tuple[Any, ...]) -> bool:
    try:
        hash(options)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=_CACHED_PROBLEMS, typed=True)
def _cached_problem(
    kind: type[AttentionArrays[Layout]], description: Description, _: Any, *options: Any
) -> AttentionProblem:
    given = layouts_of(kind, description)
    starts: Any = starts_of(kind, description)
    longest = options[_OPTIONS:]
    backward = isinstance(given, AttentionBackwardArrays)
    required = ("dout", "q", "k", "v", "out", "lse") if backward else ("q", "k", "v")
    require_arrays(given_of(given), required)
    layouts = _layouts_as_batch(given, *longest) if longest else given
    results = BACKWARD_RESULTS if backward else FORWARD_RESULTS
    checked = AttentionOptions(*options[:_OPTIONS])
    problem = described_problem(given, layouts, starts, checked, results)
    if checked.mask_mod is not None:
        require_fitting_blocks(problem)
    if given.cos is not None:
        require_rotary_positions(problem)
    if isinstance(given, AttentionBackwardArrays):
        _require_gradients(problem, given)
    else:
        require_results(given, forward_outputs(problem, return_lse=True))
    return problem


def _require_gradients(problem: AttentionProblem, given: AttentionBackwardArrays[Layout]) -> None:
    """Raise unless a backward call's gradients and the forward's results fit the problem."""
    out_axes, lse_axes = ("(B, Sq, H, Dv)", "(B, H, Sq)")
    if problem.packed:
        out_axes, lse_axes = ("(total_q, H, Dv)", "(H, total_q)")
    layouts = given_of(given)
    rows = problem.dtype, problem.out_shape, out_axes
    sums = problem.lse_dtype, problem.lse_shape, lse_axes
    expected = {"dout": rows, "out": rows, "lse": sums, "dlse": sums}
    for name, (dtype, shape, axes) in expected.items():
        if name in layouts:
            require_dtype(name, layouts[name], (dtype.name,))
            require_shape(name, layouts[name], shape, axes)
            require_contiguous_rows(name, layouts[name])
    for name in BACKWARD_RESULTS:
        if name in layouts and name[1:] not in layouts:
            passed, reason = f"grads.{name} was given", f"this call has no {name[1:]}"
            raise error(ValueError, passed, reason, "leave None there")
    require_results(given, gradient_outputs(problem))


def described_problem(
    given: AttentionArrays[Layout],
    layouts: AttentionArrays[Layout],
    starts: AttentionArrays[int],
    options: AttentionOptions,
    results: tuple[str, ...],
) -> AttentionProblem:
    """Check what forward and backward have in common; `results` are the arrays that are written."""
    q, k, v = layouts.q, layouts.k, layouts.v
    quantised = isinstance(layouts, QuantizedKeyArrays)
    for name, layout in (("q", q), ("k", k), ("v", v)):
        if quantised and name != "k":
            require_dtype(name, layout, _WITH_INT8_KEYS, "convert it, or pass k as it was")
        elif not quantised:
            require_dtype(name, layout, CPU_FLOATS)
        require_rank(
            name, layout, f"B {'Sq H' if name == 'q' else 'Sk G'} {'Dv' if name == 'v' else 'D'}"
        )
        require_contiguous_rows(name, layout)
    require_same_dtype({"q": q, "v": v} if quantised else {"q": q, "k": k, "v": v})
    if isinstance(layouts, QuantizedKeyArrays):
        _require_fitting_centre(layouts)
    batch, sq, heads, head_dim = q.shape
    _, sk, kv_heads, head_dim_v = v.shape
    _require_matching_heads(q, k, v)
    problem = AttentionProblem(
        batch=batch,
        sq=sq,
        sk=sk,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=q.dtype,
        given=given,
        layouts=layouts,
        starts=starts,
        options=options.checked(head_dim),
        overlaps=Overlaps.of(given, (*results, "workspace")),
    )
    _require_valid_option_arrays(problem)
    require_half_sums(problem)
    if quantised:
        require_int8_call(problem)
    if layouts.workspace is not None:
        require_workspace(layouts.workspace)
    return problem


def _require_fitting_centre(layouts: QuantizedKeyArrays[Layout]) -> None:
    """Raise unless there is one centre, or one for each sequence; keys were checked when made."""
    assert layouts.k_centre is not None
    centre, heads = layouts.k_centre, layouts.k.shape[2:]
    if len(centre.shape) == 3:
        fitting = (layouts.q.shape[0], *heads)
        require_shape("keys.centre", centre, fitting, "(B, G, D), one of each sequence")


def require_int8_call(problem: AttentionProblem, traits: DeviceTraits | None = None) -> None:
    """Raise NotImplementedError for what attention over int8 keys does not have.

    With the `traits` of a device this is what its kernel lacks; without them what NumPy arrays do
    not have either.
    """
    dropout_p, dims = problem.options.dropout_p, (problem.head_dim, problem.head_dim_v)
    fix, refused = "pass k as it was, or NumPy arrays", dict[str, str | bool]()
    if traits is None:
        reason = "they are for inference, and are quantised after their rotation"
        fix = "leave it out, or pass k as an array without implementation='int8'"
        refused = {
            f"dropout_p = {dropout_p}": dropout_p > 0 and reason,
            "rotary": problem.layouts.cos is not None and f"{reason}: rotate q and k before",
        }
    else:
        refused = {
            f"head dims D = {dims[0]}, Dv = {dims[1]}": max(dims) > MAX_INT8_HEAD_DIM
            and f"the kernel has head dims up to {MAX_INT8_HEAD_DIM}",
            f"head dim D = {dims[0]}": dims[0] % 2 == 1
            and "the kernel loads codes two at a time: D is even",
            "a BlockMask": problem.layouts.block_mask is not None
            and "the kernel goes through all tiles; it takes a MaskMod, and every mask",
            "a GPU without tensor cores": not traits.has_mma("float16")
            and "the products of int8 keys are those of tensor cores",
        }
    for passed, why in refused.items():
        if why:
            raise error(NotImplementedError, f"{passed} with int8 keys", str(why), fix)


def _require_matching_heads(q: Layout, k: Layout, v: Layout) -> None:
    batch, _, heads, head_dim = q.shape
    _, sk, kv_heads, _ = k.shape
    require_shape("k", k, (batch, sk, kv_heads, head_dim), "(B, Sk, G, D) with q's B and D")
    require_shape("v", v, (batch, sk, kv_heads, v.shape[3]), "(B, Sk, G, Dv) with k's B, Sk and G")
    dims = {"D": head_dim, "Dv": v.shape[3]}
    require_heads(heads, kv_heads, "k and v have", "it is the last but one", dims)


def require_heads(
    heads: int, kv_heads: int, keys_have: str, axis: str, dims: Mapping[str, int]
) -> None:
    """Raise ValueError unless numbers of heads and head dims are those that kernels take."""
    if (kv_heads == 0 and heads) or (kv_heads and heads % kv_heads):
        raise error(
            ValueError,
            f"q has H = {heads} heads, {keys_have} G = {kv_heads}",
            "H is a multiple of G (grouped-query attention), or equal to it",
            f"check the head axis: {axis}",
        )
    for letter, extent in dims.items():
        if not 1 <= extent <= MAX_HEAD_DIM:
            raise error(
                ValueError,
                f"{letter} = {extent}",
                f"head dims are 1 to {MAX_HEAD_DIM}",
                "split the head, or check that the last axis is the head dim",
            )


def _require_valid_option_arrays(problem: AttentionProblem) -> None:
    """Check the arrays among the options against the shapes of q, k and v."""
    layouts = given_of(problem.layouts)
    floats = CPU_FLOATS if problem.dtype == np.float64 else FLOATS
    for name in ("q_offset", "seqused_k"):
        if name in layouts:
            require_dtype(name, layouts[name], INTEGERS)
            require_shape(name, layouts[name], (problem.batch,), "(B,)")
            require_whole_item_strides(name, layouts[name])
    if "mask" in layouts:
        require_bool_mask("mask", layouts["mask"])
    if "bias" in layouts:
        is_mask = layouts["bias"].dtype.name == "bool"
        fix = "pass it as mask= (True = keep): a bias is added to the scores" if is_mask else ""
        require_dtype("bias", layouts["bias"], floats, fix)
    for name in ("mask", "bias"):
        if name in layouts:
            _require_broadcastable(name, layouts[name], problem.scores_shape)
    require_heads_options(problem)
    if "bias" in layouts:
        require_whole_item_strides("bias", layouts["bias"])
    if any(problem.functions):
        on_cpu = problem.dtype == np.float64
        require_valid_arrays(problem.functions, problem.layouts, on_cpu=on_cpu)
    if "cos" in layouts:
        require_rotary_tables(layouts["cos"], layouts["sin"], problem.head_dim)


def require_heads_options(problem: AttentionProblem) -> None:
    """Raise for slopes or sinks that do not fit."""
    slopes, sinks = problem.layouts.alibi_slopes, problem.layouts.sinks
    floats = CPU_FLOATS if problem.dtype == np.float64 else FLOATS
    if slopes is not None:
        require_dtype("alibi_slopes", slopes, floats)
        batch = (problem.batch,) if len(slopes.shape) == 2 else ()
        require_shape("alibi_slopes", slopes, (*batch, problem.heads), "(H,) or (B, H)")
        require_whole_item_strides("alibi_slopes", slopes)
    if sinks is not None:
        require_dtype("sinks", sinks, floats)
        require_shape("sinks", sinks, (problem.heads,), "(H,)")
        require_whole_item_strides("sinks", sinks)


def require_half_sums(problem: AttentionProblem) -> None:
    """Raise ValueError for float16 accumulators of other numbers than float16."""
    v = problem.layouts.v.dtype
    if problem.options.accumulator == "float16" and not problem.dtype == v == np.float16:
        raise error(
            ValueError,
            f"accumulator='float16' with q of {problem.dtype} and v of {v}",
            "only products of float16 arrays have float16 sums",
            "leave it out, or convert the arrays to float16",
        )


def _require_broadcastable(name: str, layout: Layout, scores_shape: tuple[int, ...]) -> None:
    try:
        fits = np.broadcast_shapes(layout.shape, scores_shape) == scores_shape
    except ValueError:
        fits = False
    if not fits:
        raise error(
            ValueError,
            f"{name} has shape {layout.shape}",
            f"it broadcasts to the scores, (B, H, queries, keys) = {scores_shape}",
            f"give it axes of 1 where it does not vary: {name}[:, None, None, :] of (B, keys)",
        )


def _layouts_as_batch(
    given: AttentionArrays[Layout], max_seqlen_q: Any, max_seqlen_k: Any
) -> AttentionArrays[Layout]:
    """Check packed arrays; return their layouts as those of a batch of the longest sequences."""
    layouts = given_of(given)
    require_arrays(layouts, ("cu_seqlens_q", "cu_seqlens_k"))
    _require_packed(given)
    batch = require_bounds("cu_seqlens_q", layouts["cu_seqlens_q"])
    require_bounds("cu_seqlens_k", layouts["cu_seqlens_k"], "k and v")
    require_shape("cu_seqlens_k", layouts["cu_seqlens_k"], (batch + 1,), "(B + 1,) as cu_seqlens_q")
    queries = checked_longest("max_seqlen_q", max_seqlen_q, given.q)
    keys = checked_longest("max_seqlen_k", max_seqlen_k, given.k)
    kind = type(given)
    named = zip(fields_of(kind), values_of(given), strict=True)
    return made(kind, (x and as_batch(name, x, batch, queries, keys) for name, x in named))


def _require_packed(given: AttentionArrays[Layout]) -> None:
    q, k, v = given.q, given.k, given.v
    for name, layout, axes in (
        ("q", q, "total_q H D"),
        ("k", k, "total_k G D"),
        ("v", v, "total_k G Dv"),
    ):
        require_rank(name, layout, axes)
        require_contiguous_rows(name, layout)
    total, kv_heads, _ = k.shape
    require_shape("k", k, (total, kv_heads, q.shape[2]), "(total_k, G, D) with q's D")
    require_shape("v", v, (total, kv_heads, v.shape[2]), "(total_k, G, Dv) with k's total_k and G")
    layouts = given_of(given)
    for name in sorted((ROWS_OF_QUERIES | ROWS_OF_KEYS) & layouts.keys()):
        rows, heads = ("total_q", "H") if name in ROWS_OF_QUERIES else ("total_k", "G")
        shown = given.SHOWN_AS.get(name, name)
        sums = name in ("lse", "dlse")
        require_rank(shown, layouts[name], f"H {rows}" if sums else f"{rows} {heads} D")


def require_bounds(name: str, bounds: Layout, of: str = "q") -> int:
    """Check the layout of cu_seqlens, which bounds the sequences in `of`; return their number."""
    require_dtype(name, bounds, INTEGERS)
    require_rank(name, bounds, "B+1")
    require_whole_item_strides(name, bounds)
    if bounds.shape[0] == 0:
        raise error(
            ValueError,
            f"{name} has no items",
            f"it has B + 1: where the rows of each sequence begin in {of}, and where the last "
            "one's end",
            "pass numpy.array([0], 'int32') for no sequence",
        )
    return bounds.shape[0] - 1


def checked_longest(name: str, given: Any, rows: Layout) -> int:
    """Return the most rows that a sequence has, as the caller says.

    Beyond what kernels count to it is no more than there are rows.
    """
    most = integer(name, given)
    if most < 0:
        raise error(
            ValueError,
            f"{name} = {most}",
            "it is the most rows of a sequence, 0 or more",
            "pass that number, or a larger one",
        )
    return min(most, max(MAX_LENGTH, rows.shape[0]))


def reference_options(
    problem: AttentionProblem,
    arrays: AttentionArrays[Array],
    seed: DropoutSeed,
    score_mod: Any,
    mask_mod: Any,
) -> dict[str, Any]:
    """Return a call's options in the words of `cupyattn.reference`."""
    if isinstance(mask_mod, BlockMask):
        mask_mod = mask_mod.mask_mod
    options = problem.options
    tables = arrays.cos, arrays.sin, options.interleaved
    return {
        **options.of_scores,
        "q_offset": options.q_offset if arrays.q_offset is None else arrays.q_offset,
        "seqused_k": arrays.seqused_k,
        "mask": arrays.mask,
        "bias": arrays.bias,
        "alibi_slopes": arrays.alibi_slopes,
        "sinks": arrays.sinks,
        "seed": seed.seed,
        "dropout_start": seed[1:],
        "rotary": None if arrays.cos is None else tables,
        "score_mod": python_function("score_mod", score_mod, arrays),
        "mask_mod": python_function("mask_mod", mask_mod, arrays),
    }


def require_cache_dtypes(layouts: dict[str, Layout], quantised: bool) -> None:
    """Raise unless q and the caches have dtypes that go together."""
    q, k, v = "q", "k_cache", "v_cache"
    if quantised:
        for name in (q, v):
            fix = "convert it, or pass a cache of keys in q's dtype"
            require_dtype(name, layouts[name], ("float16",), fix)
        if len(layouts["k_cache.centre"].shape) == 3:
            raise error(
                ValueError,
                f"k_cache.centre has shape {layouts['k_cache.centre'].shape}",
                "sequences share the blocks of a cache, so it has one centre: (G, D)",
                "quantise the keys of all sequences with one centre",
            )
        return
    require_dtype(q, layouts[q], CPU_FLOATS)
    for name in (k, v):
        require_dtype(name, layouts[name], (*CPU_FLOATS, *INTEGER_BITS))
    require_same_dtype(layouts, (k, v))
    if layouts[k].dtype.name not in INTEGER_BITS:
        require_same_dtype(layouts, (q, k, v))


def require_caches(q: Layout, k: Layout, v: Layout) -> None:
    """Raise unless heads, head dims and blocks of q and the caches fit."""
    *_, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k.shape
    stored, meaning = head_dim, "(num_blocks, block_size, G, D) with q's D"
    if k.dtype == np.uint8:
        if head_dim % 2:
            raise error(
                ValueError,
                f"D = {head_dim} with caches of uint8",
                "a byte holds two items of 4 bits: D is even",
                "pad the head by an item of 0, or use caches of int8",
            )
        stored, meaning = head_dim // 2, "(num_blocks, block_size, G, D / 2): two items a byte"
    require_shape("k_cache", k, (*k.shape[:3], stored), meaning)
    require_shape("v_cache", v, k.shape, "shaped like k_cache")
    axes = "caches are (num_blocks, block_size, heads, head dim)"
    require_heads(heads, kv_heads, "the caches have", axes, {"D": head_dim})
    if block_size == 0 or block_size % TILE_KEYS:
        raise error(
            ValueError,
            f"k_cache has blocks of {block_size} tokens",
            f"block sizes are multiples of {TILE_KEYS}",
            f"make the caches with a block_size of {TILE_KEYS} or 256, say",
        )


def require_scales(layouts: dict[str, Layout]) -> None:
    """Raise unless caches of integers, and only these, come with scales of their shape."""
    cache = layouts["k_cache"]
    for name in ("k_scales", "v_scales"):
        if name in layouts and cache.dtype.name not in INTEGER_BITS:
            raise error(
                ValueError,
                f"{name} was given with caches of {cache.dtype.name}",
                f"only caches of {' and '.join(INTEGER_BITS)} have scales",
                "leave it out, or pass the caches that the scales belong to",
            )
        if name not in layouts and cache.dtype.name in INTEGER_BITS:
            raise error(
                ValueError,
                f"caches of {cache.dtype.name} without {name}",
                "an integer counts as many times its value as the scale of its token and head",
                f"pass {name}, float32 (num_blocks, block_size, G), as append_kv has filled it",
            )
        if name in layouts:
            require_dtype(name, layouts[name], ("float32",))
            shape, meaning = cache.shape[:3], "(num_blocks, block_size, G), as the caches are"
            require_shape(name, layouts[name], shape, meaning)
