"""The checks of a call of attention: its description once, its values where they can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from cupyattn.ops.attention.block_mask import BlockMask, require_fitting_blocks
from cupyattn.ops.attention.modifiers import (
    BLOCK_MASK,
    UserFunction,
    arrays_of,
    python_function,
    require_valid_arrays,
    shown_names,
    user_function,
)
from cupyattn.ops.attention.options import (
    AttentionOptions,
    DropoutSeed,
    checked_dropout_p,
    checked_q_offset,
    checked_seed,
    checked_softcap,
    checked_softmax_scale,
    checked_window,
    require_valid_choices,
)
from cupyattn.ops.attention.problem import (
    ARRAY_FIXES,
    BACKWARD_RESULTS,
    FORWARD_FIXES,
    FORWARD_RESULTS,
    SHOWN_AS,
    AttentionProblem,
)
from cupyattn.ops.attention.values import check_values, require_rotary_positions
from cupyattn.ops.rope.api import checked_rotary
from cupyattn.runtime.arrays import Array, Layout, exports_memory
from cupyattn.runtime.by_name import Description, Operands, Overlaps, adopt, layouts_of, starts_of
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    FLOATS,
    INTEGERS,
    require_arrays,
    require_bool_mask,
    require_contiguous_rows,
    require_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.errors import error
from cupyattn.runtime.tables import MAX_HEAD_DIM
from cupyattn.runtime.value_checks import checks_values

_CACHED_PROBLEMS = 4096
_WINDOW_SIZE = AttentionOptions._fields.index("window_size")


def forward_problem(operands: Operands, options: tuple[Any, ...]) -> AttentionProblem:
    """Check a forward call; its description, unless that was checked before, and its values.

    `options` are those of `AttentionOptions`, in that order.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    return checked_problem(_cached_forward_problem, operands, options)


def backward_problem(operands: Operands, options: tuple[Any, ...]) -> AttentionProblem:
    """Check a backward call; its description, unless that was checked before, and its values.

    `options` are those of `AttentionOptions`, in that order.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    return checked_problem(_cached_backward_problem, operands, options)


def checked_problem(
    check: Any,
    operands: Operands,
    options: tuple[Any, ...],
    values: Callable[[Any, dict[str, Array]], None] = check_values,
) -> Any:
    """Return what `check`, which has a cache, says of a description; and check values.

    `options` begin with those of `AttentionOptions`, in that order.
    """
    # The options go one by one, because a typed cache tells True from 1 and 1 from 1.0.
    window = options[_WINDOW_SIZE]
    sides = (*map(type, window),) if isinstance(window, tuple) else None
    problem: AttentionProblem
    try:
        problem = check(operands.description, sides, *options)
    except TypeError:
        if _hashable(options):
            raise
        # What has no hash is of a wrong type, as its check says.
        problem = check.__wrapped__(operands.description, sides, *options)
    if checks_values(operands):
        values(problem, operands.arrays)
    problem.overlaps.check(operands)
    return problem


def _hashable(options: tuple[Any, ...]) -> bool:
    try:
        hash(options)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=_CACHED_PROBLEMS, typed=True)
def _cached_forward_problem(description: Description, _: Any, *options: Any) -> AttentionProblem:
    require_arrays(layouts_of(description), ("q", "k", "v"))
    problem = described_problem(description, AttentionOptions(*options), FORWARD_RESULTS)
    require_fitting_blocks(problem)
    require_rotary_positions(problem)
    results = {
        "out": (problem.out_shape, problem.dtype),
        "lse": (problem.lse_shape, problem.lse_dtype),
    }
    for name in FORWARD_RESULTS:
        if name in problem.layouts:
            require_output(name, problem.layouts[name], *results[name])
    return problem


@lru_cache(maxsize=_CACHED_PROBLEMS, typed=True)
def _cached_backward_problem(description: Description, _: Any, *options: Any) -> AttentionProblem:
    require_arrays(layouts_of(description), ("dout", "q", "k", "v", "out", "lse"))
    problem = described_problem(description, AttentionOptions(*options), BACKWARD_RESULTS)
    require_fitting_blocks(problem)
    require_rotary_positions(problem)
    require_gradients(problem, problem.layouts, "(B, Sq, H, Dv)", "(B, H, Sq)")
    return problem


def require_gradients(
    problem: AttentionProblem, layouts: dict[str, Layout], out_axes: str, lse_axes: str
) -> None:
    """Raise unless a backward call's gradients and the forward's results fit the problem.

    `layouts` are the arrays as the caller gave them, `out_axes` and `lse_axes` what errors say.
    """
    for name in ("dout", "out"):
        require_dtype(name, layouts[name], (problem.dtype.name,))
        require_shape(name, layouts[name], problem.out_shape, out_axes)
        require_contiguous_rows(name, layouts[name])
    for name in ("lse", "dlse"):
        if name in layouts:
            require_dtype(name, layouts[name], (problem.lse_dtype.name,))
            require_shape(name, layouts[name], problem.lse_shape, lse_axes)
            require_contiguous_rows(name, layouts[name])
    for name in BACKWARD_RESULTS:
        if name in layouts:
            of = layouts.get(name[1:])
            if of is None:
                raise error(
                    ValueError,
                    f"{SHOWN_AS[name]} was given",
                    f"this call has no {name[1:]}",
                    "leave None there",
                )
            require_output(SHOWN_AS[name], layouts[name], of.shape, of.dtype)


def described_problem(
    description: Description, options: AttentionOptions, results: tuple[str, ...]
) -> AttentionProblem:
    """Check what forward and backward have in common; `results` are the arrays that are written.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    layouts = layouts_of(description)
    q, k, v = layouts["q"], layouts["k"], layouts["v"]
    for name, layout in (("q", q), ("k", k), ("v", v)):
        require_dtype(name, layout, CPU_FLOATS)
        require_rank(
            name, layout, f"B {'Sq H' if name == 'q' else 'Sk G'} {'Dv' if name == 'v' else 'D'}"
        )
        require_contiguous_rows(name, layout)
    require_same_dtype(layouts, ("q", "k", "v"))
    batch, sq, heads, head_dim = q.shape
    _, sk, kv_heads, head_dim_v = v.shape
    _require_matching_heads(q, k, v)
    require_valid_choices(options)
    softmax_scale = checked_softmax_scale(options.softmax_scale, head_dim)
    functions = {"score_mod": options.score_mod, "mask_mod": options.mask_mod}
    shown_as = {**SHOWN_AS, **shown_names(functions)}

    problem = AttentionProblem(
        batch=batch,
        sq=sq,
        sk=sk,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=q.dtype,
        layouts=layouts,
        starts=starts_of(description),
        softmax_scale=softmax_scale,
        q_offset=checked_q_offset(options.q_offset),
        window=checked_window(options.window_size, options.causal),
        softcap=checked_softcap(options.softcap, softmax_scale),
        dropout_p=checked_dropout_p(options.dropout_p, options.seeded),
        interleaved=options.interleaved,
        functions=functions,
        implementation=options.implementation,
        overlaps=Overlaps.of(layouts, (*results, "workspace"), shown_as),
    )
    _require_valid_option_arrays(problem)
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    return problem


def _require_matching_heads(q: Layout, k: Layout, v: Layout) -> None:
    batch, _, heads, head_dim = q.shape
    _, sk, kv_heads, _ = k.shape
    require_shape("k", k, (batch, sk, kv_heads, head_dim), "(B, Sk, G, D) with q's B and D")
    require_shape("v", v, (batch, sk, kv_heads, v.shape[3]), "(B, Sk, G, Dv) with k's B, Sk and G")
    if (kv_heads == 0 and heads) or (kv_heads and heads % kv_heads):
        raise error(
            ValueError,
            f"q has H = {heads} heads, k and v have G = {kv_heads}",
            "H is a multiple of G (grouped-query attention), or equal to it",
            "check the head axis: it is the last but one",
        )
    for letter, extent in (("D", head_dim), ("Dv", v.shape[3])):
        if not 1 <= extent <= MAX_HEAD_DIM:
            raise error(
                ValueError,
                f"{letter} = {extent}",
                f"head dims are 1 to {MAX_HEAD_DIM}",
                "split the head, or check that the last axis is the head dim",
            )


def _require_valid_option_arrays(problem: AttentionProblem) -> None:
    """Check the arrays among the options against the shapes of q, k and v."""
    layouts = problem.layouts
    batch, heads = problem.batch, problem.heads
    floats = CPU_FLOATS if problem.dtype == np.float64 else FLOATS
    for name in ("q_offset", "seqused_k"):
        if name in layouts:
            require_dtype(name, layouts[name], INTEGERS)
            require_shape(name, layouts[name], (batch,), "(B,)")
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
    if "alibi_slopes" in layouts:
        require_dtype("alibi_slopes", layouts["alibi_slopes"], floats)
        if len(layouts["alibi_slopes"].shape) != 2:
            require_shape("alibi_slopes", layouts["alibi_slopes"], (heads,), "(H,) or (B, H)")
        else:
            require_shape("alibi_slopes", layouts["alibi_slopes"], (batch, heads), "(H,) or (B, H)")
    if "sinks" in layouts:
        require_dtype("sinks", layouts["sinks"], floats)
        require_shape("sinks", layouts["sinks"], (heads,), "(H,)")
    for name in ("bias", "alibi_slopes", "sinks"):
        if name in layouts:
            require_whole_item_strides(name, layouts[name])
    require_valid_arrays(problem.functions, layouts, on_cpu=problem.dtype == np.float64)
    if "cos" in layouts:
        _require_rotary_tables(layouts["cos"], layouts["sin"], problem.head_dim)


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


def _require_rotary_tables(cos: Layout, sin: Layout, head_dim: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        require_dtype(f"rotary's {name}", table, CPU_FLOATS)
        require_rank(f"rotary's {name}", table, "positions R/2")
        require_contiguous_rows(f"rotary's {name}", table)
    require_shape("rotary's sin", sin, cos.shape, "(positions, R/2) like cos")
    require_same_dtype({"cos": cos, "sin": sin}, ("cos", "sin"))
    if 2 * cos.shape[1] > head_dim:
        raise error(
            ValueError,
            f"rotary tables of {cos.shape[1]} columns rotate {2 * cos.shape[1]} features",
            f"at most D = {head_dim} features can be rotated",
            "make tables of at most D / 2 columns",
        )


_NO_SEED = DropoutSeed(0)
_Problem = TypeVar("_Problem", bound=AttentionProblem)


def attention_call(
    check: Callable[[Operands, tuple[Any, ...]], _Problem],
    arrays: dict[str, Any],
    options: tuple[Any, ...],
    q_offset: Any,
    seed: Any,
    rotary: Any,
    score_mod: Any,
    mask_mod: Any,
) -> tuple[Operands, _Problem, DropoutSeed]:
    """Take the arrays (None for those not given) and `check` the call, forward or backward.

    `options` are those of `AttentionOptions` before q_offset, in that order. The seed stands beside
    the problem, of which a training step has the same each time; it is 0 where there is none.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the public functions document.
    """
    if q_offset is not None and exports_memory(q_offset):
        arrays["q_offset"] = q_offset
        q_offset = None
    interleaved = False
    if rotary is not None:
        arrays["cos"], arrays["sin"], interleaved = checked_rotary(rotary)
    shown_as = SHOWN_AS
    functions: tuple[UserFunction | None, ...] = (None, None)
    blocks = None
    if isinstance(mask_mod, BlockMask):
        arrays[BLOCK_MASK], blocks = mask_mod.tiles_beside(arrays["q"]), mask_mod.blocks
        mask_mod = mask_mod.mask_mod
    if score_mod is not None or mask_mod is not None:
        given = {"score_mod": score_mod, "mask_mod": mask_mod}
        described = {option: user_function(option, value) for option, value in given.items()}
        for option, value in given.items():
            arrays |= arrays_of(option, value)
        if described["mask_mod"] is not None:
            described["mask_mod"] = described["mask_mod"]._replace(blocks=blocks)
        shown_as = {**SHOWN_AS, **shown_names(described)}
        functions = (described["score_mod"], described["mask_mod"])
    fixes = ARRAY_FIXES if "dout" in arrays else FORWARD_FIXES
    operands = adopt(arrays, fixes, shown_as)
    checked = _NO_SEED if seed is None else checked_seed(seed)
    problem = check(operands, (*options, q_offset, interleaved, *functions))
    return operands, problem, checked


def reference_options(
    problem: AttentionProblem,
    arrays: Mapping[str, Any],
    seed: DropoutSeed,
    score_mod: Any,
    mask_mod: Any,
) -> dict[str, Any]:
    """Return a call's options in the words of `cupyattn.reference`."""
    if isinstance(mask_mod, BlockMask):
        mask_mod = mask_mod.mask_mod
    return {
        "softmax_scale": problem.softmax_scale,
        "window_size": problem.window,
        "q_offset": arrays.get("q_offset", problem.q_offset),
        "seqused_k": arrays.get("seqused_k"),
        "mask": arrays.get("mask"),
        "bias": arrays.get("bias"),
        "alibi_slopes": arrays.get("alibi_slopes"),
        "softcap": problem.softcap,
        "sinks": arrays.get("sinks"),
        "dropout_p": problem.dropout_p,
        "seed": seed.seed,
        "dropout_start": seed[1:],
        "rotary": (arrays["cos"], arrays["sin"], problem.interleaved) if "cos" in arrays else None,
        "score_mod": python_function("score_mod", score_mod, arrays),
        "mask_mod": python_function("mask_mod", mask_mod, arrays),
    }
