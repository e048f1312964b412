"""Block masks: the tiles of a mask_mod, and the lists of them that kernels loop over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.attention import reference
from cupyattn.ops.attention.kernels import block_mask as configs
from cupyattn.ops.attention.kernels.block_mask import LIST_HEAD, TILE, WARPS
from cupyattn.ops.attention.modifiers import (
    MaskedScores,
    MaskMod,
    ScoreMod,
    UserFunction,
    UserFunctions,
    arrays_of,
    expression_error,
    modifiers_of,
    python_function,
    require_valid_arrays,
    strides_of,
    user_function,
    with_arrays_of,
)
from cupyattn.ops.attention.options import checked_q_offset
from cupyattn.ops.attention.params import AttentionPlanner, step_of
from cupyattn.ops.attention.problem import MAX_LENGTH, AttentionProblem
from cupyattn.runtime import html
from cupyattn.runtime.arrays import Array, Description, Operands, adopt, layouts_of, starts_of
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import integer, require_item_alignment
from cupyattn.runtime.compile import CompilationError
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.cuda import cuda_device, device_count
from cupyattn.runtime.errors import error
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import Record, T, given_of
from cupyattn.runtime.value_checks import on_host

_PAIR = 2  # words


@dataclass(slots=True)
class BlockMaskArrays(Record[T]):
    """The arrays of one call of block_mask, besides those of the expression."""

    tiles: T | None = None


def run_block_mask(
    device: Device,
    function: UserFunction,
    shape: tuple[int, int, int, int],
    operands: Operands[BlockMaskArrays[Array]],
) -> Array:
    """Return the tiles of a mask_mod for scores of a shape."""
    kind: Any = type(operands.arrays)
    plan = _tiles_plan(kind, operands.description, function, shape)
    try:
        tiles = run(device, plan, operands).tiles
    except CompilationError as failure:
        raise expression_error(failure, UserFunctions(mask_mod=function)) from failure
    assert tiles is not None
    return tiles


@lru_cache(maxsize=4096)
def _tiles_plan(
    kind: type[BlockMaskArrays[Any]],
    description: Description,
    function: UserFunction,
    shape: tuple[int, int, int, int],
) -> Plan:
    layouts, starts = layouts_of(kind, description), starts_of(kind, description)
    require_item_alignment(given_of(layouts), given_of(starts), kind.SHOWN_AS)
    modifiers = modifiers_of(UserFunctions(mask_mod=function), layouts)
    tiles = *shape[:2], -(-shape[2] // TILE), -(-shape[3] // TILE)
    count = math.prod(tiles)
    values = count, *shape[1:], *strides_of(modifiers, layouts)
    planner = Planner(kind, layouts, {"tiles": Output(tiles, np.dtype(np.uint8))})
    kernel = configs.tiles(modifiers)
    return planner.plan(step_of(kernel, -(-count // WARPS), planner.slots, *values))


def require_fitting_blocks(problem: AttentionProblem) -> None:
    """Raise ValueError for a block mask that was not made for scores like the problem's."""
    mask_mod = problem.options.mask_mod
    if mask_mod is None or mask_mod.blocks is None:
        return
    blocks = mask_mod.blocks
    for letter, made, given, broadcasts in zip(
        ("B", "H", "Sq", "Sk"), blocks.shape, problem.scores_shape, (True, True, False, False),
        strict=True,
    ):  # fmt: skip
        if made == given or (broadcasts and made == 1):
            continue
        raise error(
            ValueError,
            f"mask_mod is a block mask for {letter} = {made}, and the call has {letter} = {given}",
            f"it is for the call's {letter}" + (", or for 1, which broadcasts" * broadcasts),
            f"make another one with block_mask(mask_mod, Sq, Sk), {letter} = {given}",
        )
    first = problem.first_position
    if blocks.q_offset is not None and first != blocks.q_offset:
        raise error(
            ValueError,
            f"mask_mod is a block mask for q_offset = {blocks.q_offset}, and the call's is "
            f"{'another in each sequence' if first is None else first}",
            "they are the same, or the block mask was made without q_offset",
            "make another one, or leave q_offset out: expressions get the numbers of queries, "
            "whatever their positions",
        )


class BlockLists(NamedTuple):
    """The lists of a call's block mask for one kernel; nothing for a call without one."""

    steps: tuple[Step, ...]
    """The launches that make the lists."""
    slot: int | None
    """The slot of the lists in scratch memory."""


NO_LISTS = BlockLists((), None)


def block_lists(
    problem: AttentionProblem,
    planner: AttentionPlanner,
    rows: int,
    keys: int,
    part: int | None = None,
    *,
    of_keys: bool = False,
) -> BlockLists:
    """Plan the lists for a kernel whose tiles have so many rows and keys.

    Its CTAs own rows and loop over keys, or with `of_keys` own keys and loop over rows. `part` is
    how many of its own rows, or keys, a warp has; None where warps do not ask for theirs. Warps
    with fewer than 16 share a part.
    """
    mask = problem.layouts.block_mask
    if mask is None:
        return NO_LISTS
    batch, heads, *counts = mask.shape
    spans = [rows // TILE, keys // TILE]
    own, visited = (-(-count // span) for count, span in zip(counts, spans, strict=True))
    if of_keys:
        own, visited = visited, own
        spans.reverse()
    part_span = spans[0] if part is None else max(part // TILE, 1)
    group = problem.heads // problem.kv_heads if of_keys and heads > 1 else 1
    count, groups = batch * heads * own, batch * heads // group
    lists, slots = planner.scratch(count * (LIST_HEAD + visited) * _PAIR), planner.slots
    spread = *counts, *spans, part_span
    sizes = groups, group, own, visited
    steps = (
        step_of(configs.lists(of_keys), count, slots, *spread, lists=lists),
        step_of(configs.order(), -(-count // WARPS), slots, *sizes, lists=lists),
    )
    return BlockLists(steps, lists)


class BlockMask:
    """A mask_mod and the tiles that it leaves: what `block_mask` returns. Notebooks draw them.

    Attributes
    ----------
    mask_mod : MaskMod
    shape : (B, H, Sq, Sk)
        Of the scores that it was made for; B and H of 1 are for any.
    q_offset : int or None
        Of the calls that it was made for; None for any.
    tile : (int, int)
        Queries and keys of a tile, (16, 16).
    tiles : uint8 array (B, H, ceil(Sq / 16), ceil(Sk / 16))
        0 where no score of a tile is seen, 1 where some are, 2 where all are. On the device of the
        expression's arrays; calls read it.
    sparsity : float
        The share of tiles in which nothing is seen; a GPU is waited for, once.
    """

    tile = (TILE, TILE)

    def __init__(self, mask_mod: Any, blocks: MaskedScores, tiles: Array) -> None:
        self.mask_mod = mask_mod
        self.shape, self.q_offset = blocks
        self.tiles = tiles

    @property
    def blocks(self) -> MaskedScores:
        """The scores that it was made for."""
        return MaskedScores(self.shape, self.q_offset)

    @cached_property
    def sparsity(self) -> float:
        """The share of tiles in which nothing is seen."""
        tiles = on_host(self.tiles)
        return float((tiles == 0).mean()) if tiles.size else 0.0

    def tiles_beside(self, q: Any) -> Array | None:
        """Return what a call on q reads: all but what lies on a GPU, with NumPy arrays.

        An expression without arrays may have been evaluated there; the call does without its tiles.
        """
        elsewhere = isinstance(q, np.ndarray) and not isinstance(self.tiles, np.ndarray)
        return None if elsewhere and not getattr(self.mask_mod, "arrays", None) else self.tiles

    def __repr__(self) -> str:
        sizes = zip(("B", "H", "Sq", "Sk"), self.shape, strict=True)
        return f"BlockMask({self.mask_mod!r}, {', '.join(f'{n}={size}' for n, size in sizes)})"

    def _repr_html_(self) -> str:
        """Draw the tiles of the first masks; several tiles are one cell where they are many."""
        tiles = on_host(self.tiles)
        if not tiles.size:
            title = "BlockMask: it has no tiles"
            return html.section(title, html.paragraph(repr(self)))
        counts = np.bincount(tiles.reshape(-1), minlength=3).tolist()
        shares = [
            html.Share(f"tiles {what}", counts[kind], colour)
            for kind, what, colour in (
                (2, "seen in full", html.BLUE),
                (1, "seen in part", html.ORANGE),
                (0, "skipped", "none"),
            )
        ]
        masks = tiles.reshape(-1, *tiles.shape[2:])
        drawn = masks[:_MOST_DRAWN]
        for most in _CELLS:
            span = -(-max(1, *tiles.shape[2:]) // most)
            pictures = [
                html.grid(_coarser(mask, span).tolist(), {2: html.BLUE, 1: html.ORANGE})
                for mask in drawn
            ]
            if sum(map(len, pictures)) <= _MOST_CHARACTERS:
                break
        captions = [
            f"batch {at // self.shape[1]}, head {at % self.shape[1]}" for at in range(len(drawn))
        ]
        batch, heads, queries, keys = self.shape
        where = {
            "queries, keys": f"{queries:,} down, {keys:,} to the right",
            "batch, heads": f"{batch:,}, {heads:,}; 1 is for any",
            "a cell": f"{TILE * span} queries and keys"
            + ("; orange where its tiles are not the same" if span > 1 else ""),
            "q_offset": "any" if self.q_offset is None else self.q_offset,
            "not drawn": f"{len(masks) - len(drawn)} more" if len(masks) > len(drawn) else None,
        }
        title = f"BlockMask: {self.sparsity:.1%} of its tiles are skipped"
        parts = (
            html.side_by_side(zip(captions, pictures, strict=True)),
            html.legend(shares),
            html.facts(where),
        )
        return html.section(title, html.paragraph(repr(self.mask_mod)), *parts)


_MOST_DRAWN = 4
_CELLS = (96, 64, 44, 32, 22)
"""The most cells along a side of a picture: as many as the limit of characters allows."""
_MOST_CHARACTERS = 16_000


def _coarser(tiles: np.ndarray, span: int) -> np.ndarray:
    """Return one cell for span x span tiles: 0 where all are 0, 2 where all are 2, otherwise 1."""
    down, across = (range(0, extent, span) for extent in tiles.shape)
    least, most = (
        reduce.reduceat(reduce.reduceat(tiles, down, axis=0), across, axis=1)
        for reduce in (np.minimum, np.maximum)
    )
    return np.where(least == most, least, 1)


ScoreModLike = ScoreMod | Callable[..., Any]
"""A score_mod as calls take it: a function of NumPy arrays too."""
MaskModLike = MaskMod | BlockMask | Callable[..., Any]
"""A mask_mod as calls take it: a function of NumPy arrays too."""


def block_mask(
    mask_mod: MaskMod | Callable[..., Any],
    Sq: int,  # noqa: N803
    Sk: int,  # noqa: N803
    /,
    *,
    B: int = 1,  # noqa: N803
    H: int = 1,  # noqa: N803
    q_offset: int | None = None,
) -> BlockMask:
    r"""Ask a mask_mod for every score once: `attention` then skips the tiles that it leaves empty.

    What it returns is passed as ``mask_mod=`` to any number of calls of `attention`,
    `attention_varlen`, their backwards and `vjp`. Kernels neither read nor multiply tiles in which
    nothing is seen, and do not ask the expression in those that are seen in full.

    Parameters
    ----------
    mask_mod : MaskMod
        Without `backend` ("emulator"), on NumPy arrays, also a function as `attention` takes it.
        What its arrays hold must not change afterwards.
    Sq, Sk : int
        Query and key length of the calls; of packed sequences max_seqlen_q and max_seqlen_k. The
        expression is evaluated for all these scores, also where a sequence is shorter.
    B, H : int
        Batch elements (or packed sequences) and query heads of the calls; 1 where the mask is the
        same for all of them; it is evaluated for the first.
    q_offset : int, optional
        q_offset of the calls; others are refused then. The expression gets the number of a
        query, whatever its position, so None is right for calls with any.

    Returns
    -------
    BlockMask
        With ``tiles``, an array to look at, and ``sparsity``, the share of them that is skipped.
        They are computed on the device of the expression's arrays; without arrays on the current
        GPU, and where there is none, on the CPU.

    Raises
    ------
    TypeError
        For a mask_mod that is none, or lengths that are no integers.
    ValueError
        For lengths out of range, and an expression that does not compile.
    NotImplementedError
        On NumPy arrays for an expression that they do not evaluate and that has no ``python=``; on
        the emulator for a function.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    `attention` needs scratch memory for it: 8 bytes for each tile of its kernel, of 16 to 64 keys
    of some 128 queries. causal, window_size, seqused_k and mask hide further scores, as they do
    with any mask_mod. The idea is FlexAttention's (Dong et al., arXiv:2412.05496, section 3.2). A
    call runs on the current stream and does not synchronise.

    Examples
    --------
    Three documents of 16 tokens each in one sequence:

    >>> import numpy as np, cupyattn
    >>> same = cupyattn.MaskMod(
    ...     "document[q_idx] == document[k_idx]",
    ...     document=np.repeat(np.arange(3), 16),
    ... )
    >>> blocks = cupyattn.block_mask(same, 48, 48)
    >>> blocks.tiles[0, 0]
    array([[2, 0, 0],
           [0, 2, 0],
           [0, 0, 2]], dtype=uint8)
    >>> round(blocks.sparsity, 2)
    0.67
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 48, 2, 8), dtype=np.float32)
    >>> out = cupyattn.attention(q, k, v, mask_mod=blocks)
    >>> np.array_equal(out, cupyattn.attention(q, k, v, mask_mod=same))
    True
    """
    if isinstance(mask_mod, BlockMask):
        raise error(
            TypeError,
            "mask_mod is a BlockMask already",
            "block_mask takes the MaskMod that it is of",
            "pass its mask_mod",
        )
    function = user_function("mask_mod", mask_mod)
    if function is None:
        raise error(
            TypeError,
            "mask_mod is None",
            "block_mask takes a MaskMod",
            "write one, or leave mask_mod= of attention out",
        )
    shape = (_size("B", B), _size("H", H), _size("Sq", Sq), _size("Sk", Sk))
    blocks = MaskedScores(shape, checked_q_offset(q_offset, array=False))
    arrays: BlockMaskArrays[Any] = BlockMaskArrays()
    own = arrays_of("mask_mod", mask_mod)
    operands = adopt(with_arrays_of(arrays, UserFunctions(mask_mod=function), own))
    device = _mask_device(operands, mask_mod)
    layouts = layouts_of(type(operands.arrays), operands.description)
    require_valid_arrays(UserFunctions(mask_mod=function), layouts, on_cpu=device is None)
    if device is None:
        python = python_function("mask_mod", mask_mod, operands.arrays)
        return BlockMask(mask_mod, blocks, reference.block_mask(python, shape, TILE))
    if function.expression is None:
        raise error(
            NotImplementedError,
            "mask_mod in block_mask on the emulator, a Python function",
            "kernels are compiled from a MaskMod",
            "pass a MaskMod, or leave backend('emulator')",
        )
    return BlockMask(mask_mod, blocks, run_block_mask(device, function, shape, operands))


def _mask_device(operands: Operands[Any], mask_mod: Any) -> Device | None:
    device = device_of(operands)
    anywhere = isinstance(mask_mod, MaskMod) and not given_of(operands.arrays)
    if device is None and anywhere and device_count():
        return cuda_device(load_cupy().cuda.runtime.getDevice())
    return device


def _size(name: str, given: Any) -> int:
    size = integer(name, given)
    if not 0 <= size <= MAX_LENGTH:
        raise error(
            ValueError,
            f"{name} = {size}",
            f"it is 0 to {MAX_LENGTH}",
            f"pass the {name} of the calls",
        )
    return size
