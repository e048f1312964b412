"""Checks of a ring's arguments: unsupported options, arrays that do not fit the ranks' tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cupyattn import BlockMask, DropoutSeed, MaskMod, ScoreMod
from cupyattn.distributed.group import Group
from cupyattn.distributed.options import OF_ROWS, RingOptions, with_four_axes
from cupyattn.distributed.placement import Placement
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.records import record_of, values_of

DROPOUT_KEYS = 32
"""Keys whose dropout one call of Philox draws: a piece begins at a multiple of them."""

_WITHOUT: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "q_offset": (
        (None, 0),
        "queries are of the same tokens as keys, at the same positions",
        "leave q_offset out; attend to a prefix by merge_attention",
    ),
    "implementation": (
        ("flash",),
        "a ring makes the calls of 'flash'",
        "leave implementation out; the others are for comparison on one device",
    ),
    "workspace": (
        (None,),
        "the calls of a ring allocate scratch memory, from CuPy's pool",
        "leave workspace out; cupy.get_default_memory_pool() keeps that memory between calls",
    ),
}
"""Options of one device: the values that a ring takes, why no others, and what to do."""
_KINDS = {"score_mod": ScoreMod, "mask_mod": MaskMod}


def require_group(group: object) -> None:
    """Raise TypeError for an object that is not a group."""
    if not isinstance(group, Group):
        raise error(
            TypeError,
            f"group has type {type(group).__module__}.{type(group).__qualname__}",
            "it must be a cupyattn.distributed.Group",
            "wrap the communicator once: group = distributed.Group(communicator)",
        )


class Adopted(NamedTuple):
    """Arrays of one library and one device, by their names in errors."""

    arrays: dict[str, Array]
    device_id: int | None
    """CUDA ordinal; None for NumPy arrays."""


def adopted(
    given: Mapping[str, object], fixes: Mapping[str, str] = MappingProxyType({})
) -> Adopted:
    """Take arrays as `cupyattn.runtime.arrays.adopt` does; None is an array that was left out."""
    operands = adopt(record_of(*given)(*given.values()), fixes)
    pairs = zip(given, values_of(operands.arrays), strict=True)
    return Adopted({name: array for name, array in pairs if array is not None}, operands.device_id)


def require_array(x: object) -> tuple[Array, int | None]:
    """Return an array with its device, or raise TypeError for another object."""
    arrays, device_id = adopted({"x": x})
    if not arrays:
        raise error(TypeError, "x is None", "it must be an array", "pass this rank's, or all of it")
    return arrays["x"], device_id


def require_device(group: Group, device: int | None) -> None:
    """Raise ValueError for arrays that a rank's communicator does not carry."""
    if group.device is not None and device != group.device:
        where = "NumPy's" if device is None else f"on device {device}"
        raise error(
            ValueError,
            f"arrays that are {where}, of rank {group.rank} on device {group.device}",
            "a rank's arrays are on the device of its communicator",
            f"make them inside 'with cupy.cuda.Device({group.device})'",
        )


def refuse(function: str, others: Mapping[str, object]) -> None:
    """Raise for options that a function does not have.

    Raises NotImplementedError for the options of attention on one device, unless the value is what
    a ring does anyway, and TypeError for any other.
    """
    for name, given in others.items():
        if name in _WITHOUT:
            as_done, why, fix = _WITHOUT[name]
            if any(given is each or (_is_plain(given) and given == each) for each in as_done):
                continue
            raise error(
                NotImplementedError, f"{name} = {shown(given)} was given to {function}", why, fix
            )
        raise error(
            TypeError, f"{function} was given {name}", "it has no such option",
            f"see help(cupyattn.distributed.{function})",
        )  # fmt: skip


def _is_plain(given: object) -> bool:
    return isinstance(given, int | np.integer | str) and not isinstance(given, bool)


def require_own_seed(seed: object) -> None:
    """Raise TypeError for a seed with offsets of a part."""
    if isinstance(seed, DropoutSeed):
        raise error(
            TypeError,
            "seed is a DropoutSeed",
            "it is an integer: a ring sets the offsets of its parts itself",
            f"pass {seed.seed}",
        )


def require_expressions(options: RingOptions) -> None:
    """Raise TypeError for a score_mod or mask_mod of another type."""
    given_of = options.expressions
    for name, kind in _KINDS.items():
        given = given_of.get(name)
        if not (given is None or isinstance(given, kind)) and (
            isinstance(given, tuple(_KINDS.values())) or not callable(given)
        ):
            raise error(
                TypeError,
                f"{name} has type {type(given).__name__}",
                f"it must be a {kind.__name__}, or for NumPy arrays a function",
                f"pass a cupyattn.{kind.__name__}",
            )


def require_blocks(blocks: BlockMask, lengths: Sequence[int], batch: int, heads: int) -> None:
    """Raise ValueError for a block mask that was not made for whole sequences."""
    longest = max(lengths, default=0)
    of_batch, of_heads, *sizes = blocks.shape
    if (
        of_batch not in (1, batch)
        or of_heads not in (1, heads)
        or sizes != [longest, longest]
        or blocks.q_offset not in (None, 0)
    ):
        raise error(
            ValueError,
            f"mask_mod is a block mask of (B, H, Sq, Sk) = {blocks.shape}"
            + ("" if blocks.q_offset is None else f", q_offset = {blocks.q_offset}"),
            f"the whole sequences are ({batch}, {heads}, {longest}, {longest}); B and H may be 1",
            f"make it on each rank by block_mask(mask_mod, {longest}, {longest})",
        )


def require_rows(
    options: RingOptions, of_queries: Sequence[int], lengths: Sequence[int], packed: bool
) -> None:
    """Raise unless mask and bias are of this rank's queries (B, H, S) and of all keys."""
    for name in OF_ROWS:
        array = getattr(options, name)
        if array is None:
            continue
        if packed:
            raise error(
                NotImplementedError,
                f"{name} with cu_seqlens",
                "a rank's rows of it are those of one sequence",
                f"pass {'a mask_mod' if name == 'mask' else 'a score_mod'}, which may name rows "
                "of packed arrays",
            )
        scores, found = (*of_queries, *lengths), with_four_axes(array).shape
        if len(found) > 4 or any(n not in (1, m) for n, m in zip(found, scores, strict=True)):
            raise error(
                ValueError,
                f"{name} has shape {array.shape}",
                f"it broadcasts to (B, H, S, Sk) = {scores}: the S = {scores[2]} queries of this "
                f"rank and all Sk = {scores[3]} keys",
                "give it axes of 1 where it does not vary, and cut its rows alone: "
                f"distributed.shard({name}, rank, ranks, axis=-2)",
            )


def require_used(used: Array | None, lengths: Sequence[int], batch: int) -> None:
    """Raise unless seqused_k is a number of keys for each sequence."""
    if used is None:
        return
    if used.dtype not in (np.int32, np.int64):
        raise error(
            TypeError,
            f"seqused_k has dtype {used.dtype}",
            "allowed are int32 and int64",
            "convert it with .astype('int32')",
        )
    if used.shape != (batch,):
        raise error(
            ValueError,
            f"seqused_k has shape {used.shape}",
            f"it has a number of keys for each of the {batch} sequences",
            "pass those of whole sequences",
        )
    if isinstance(used, np.ndarray) and ((used < 0) | (used > np.asarray(lengths))).any():
        raise error(
            ValueError,
            f"seqused_k = {shown(used.tolist())}",
            f"sequences have {shown(list(lengths))} keys",
            "pass how many keys of each whole sequence are in use",
        )


def require_places(options: RingOptions, placement: Placement, lengths: Sequence[int]) -> None:
    """Raise for options that depend on positions and cannot be computed with a placement."""
    longest = max(lengths, default=0)
    if options.rotary is not None and options.rotary[0].shape[0] < longest:
        raise error(  # on a GPU positions are not checked
            ValueError,
            f"rotary's tables have {options.rotary[0].shape[0]} rows, for sequences of {longest} "
            "tokens",
            "positions are those of whole sequences",
            "make longer tables with rope_tables",
        )
    if placement.ranks == 1:
        return
    for name, given in (
        ("alibi_slopes", options.alibi_slopes is not None),
        ("dropout_p", options.dropout_p > 0),
    ):
        if given and placement.name == "striped":
            raise error(
                NotImplementedError,
                f"{name} with placement='striped'",
                "it needs tokens of a rank that are neighbours in the sequence",
                "use placement='zigzag', which balances causal attention too",
            )
    for extent in map(placement.piece_length, lengths if options.dropout_p > 0 else ()):
        if extent % DROPOUT_KEYS:
            raise error(
                ValueError,
                f"dropout with pieces of {extent} tokens",
                f"its mask is drawn for {DROPOUT_KEYS} keys at a time: pieces are multiples",
                f"pad sequences to multiples of "
                f"{DROPOUT_KEYS * placement.pieces * placement.ranks} tokens",
            )
