"""A call of ring attention, checked before anything is sent: its arrays, its plan, its options.

A rank checks its call before it computes. Ranks compare their calls after the kernels of the own
block are queued: nothing is sent until then, and the GPU does not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn import BlockMask, attention, rope
from cupyattn.distributed.checks import (
    adopted,
    require_blocks,
    require_device,
    require_expressions,
    require_group,
    require_own_seed,
    require_places,
    require_rows,
    require_used,
)
from cupyattn.distributed.group import Group, agree, fingerprint
from cupyattn.distributed.options import RingOptions
from cupyattn.distributed.placement import Placement, placement_of, sequence_bounds, token_positions
from cupyattn.distributed.plan import RingPlan, ring_plan, sight_of
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown


@dataclass(frozen=True)
class RingProblem:
    """A checked call: arrays with an axis of the batch, which is 1 for packed sequences."""

    group: Group
    plan: RingPlan
    options: RingOptions
    packed: bool
    arrays: dict[str, Array] = field(repr=False)

    @property
    def xp(self) -> ModuleType:
        """The library of the arrays."""
        return np if isinstance(self.arrays["q"], np.ndarray) else load_cupy()

    @property
    def placement(self) -> Placement:
        """Which rank holds what."""
        return self.plan.placement

    def rotated(self, x: Array, *, inverse: bool = False) -> Array:
        """Rotate queries or keys by their positions in the whole sequence; or gradients back.

        Each rank rotates its own keys once, before they are sent.
        """
        if self.options.rotary is None:
            return x
        xp, (cos, sin, interleaved) = self.xp, (*self.options.rotary, False)[:3]
        stream = None if xp is np else xp.cuda.get_current_stream()
        where = _positions(
            self.placement, self.plan.rank, self.plan.lengths,
            *((None, None) if stream is None else (int(xp.cuda.Device().id), int(stream.ptr))),
        )  # fmt: skip
        return rope(x, cos, sin, positions=where, interleaved=interleaved, inverse=inverse)

    def agree(self) -> None:
        """Compare the calls of all ranks, before anything is sent.

        Raises ValueError if calls differ, on every rank; RankFailedError if a rank has failed, or
        did not come in time.
        """
        group = self.group
        if group.size == 1:
            return
        each_time = self.xp is np or group.gathers_on_host
        arrays = [f"{name} {x.dtype} {x.shape}" for name, x in self.arrays.items()]
        lengths = self.plan.lengths
        # A list of many lengths is shown in part; the digest compares all of it.
        each = f"lengths {shown(list(lengths))} ({fingerprint(np.array(lengths, np.int64))})"
        of_options = self.options.description(longest=max(lengths, default=0), each_time=each_time)
        described = (*arrays, self.placement.name, *of_options, each)
        if described in group.agreed:
            return
        agree(group, described, np if each_time else self.xp, allowed=_ALIKE, fix=_CALL_ALIKE)
        if not each_time:
            group.agreed.add(described)


@lru_cache(maxsize=64)
def _positions(
    placement: Placement,
    rank: int,
    lengths: tuple[int, ...],
    device: int | None,
    stream: int | None,
) -> Array:
    """Return the positions of a rank's tokens, copied once to the current device and stream.

    The key names these: a copy joins its stream's order, and a large one waits for it.
    """
    found = token_positions(placement, rank, lengths)
    return found if device is None else load_cupy().asarray(found)


def ring_problem(
    group: Any,
    arrays: dict[str, Array | None],
    options: RingOptions,
    placement: str,
    cu_seqlens: object,
    *,
    part_own: bool = False,
) -> RingProblem:
    """Check a call of `ring_attention` or its backward on this rank: see `RingProblem.agree`.

    `arrays` are q, k, v and the other arrays of the backward; `part_own` is as in `ring_plan`.
    Raises what the public functions document.
    """
    require_group(group)
    group.check()
    packed = cu_seqlens is not None
    missing = [name for name, array in arrays.items() if array is None and name != "dlse"]
    if missing:
        raise error(
            TypeError,
            f"{', '.join(missing)} is None",
            "only dlse may be left out",
            "pass an array of this rank's tokens",
        )
    require_own_seed(options.seed)
    require_expressions(options)
    taken, device_id = adopted({**arrays, **options.arrays})
    own: Keywords = {name: taken[name] for name in options.arrays}
    options = replace(options, **own)
    require_device(group, device_id)
    lifted = {name: _lifted(name, array, packed) for name, array in taken.items() if name in arrays}
    q, k, v = (lifted[name] for name in ("q", "k", "v"))
    tokens = q.shape[1]
    _require_tokens(lifted, tokens)
    lengths = _lengths(tokens * group.size, cu_seqlens)
    _require_shapes(lifted, packed)
    require_rows(options, (len(q), q.shape[2], tokens), lengths, packed)
    # A call without tokens raises what attention raises.
    nothing = [x[:, :0] for x in (q, k, v)]
    if packed:  # slopes may be of each sequence
        xp = np if isinstance(q, np.ndarray) else load_cupy()
        nothing = [xp.broadcast_to(x, (len(lengths), *x.shape[1:])) for x in nothing]
    attention(*nothing, **options.of_no_tokens())
    require_used(options.seqused_k, lengths, len(nothing[0]))
    if isinstance(options.mask_mod, BlockMask):
        require_blocks(options.mask_mod, lengths, len(nothing[0]), q.shape[2])
    dealt = placement_of(placement, group.size, lengths)
    if cu_seqlens is None and tokens % dealt.pieces:
        raise error(
            ValueError,
            f"{tokens} tokens on a rank, {placement}",
            f"a rank holds {dealt.pieces} pieces of one length",
            "cut the whole sequence with distributed.shard",
        )
    require_places(options, dealt, lengths)
    sight = sight_of(options.causal, options.window_size, max(lengths, default=0))
    plan = ring_plan(
        dealt, group.rank, lengths, sight,
        join=not options.uses_positions, packed=packed, part_own=part_own,
    )  # fmt: skip
    return RingProblem(group, plan, options, packed, lifted)


def _lifted(name: str, array: Array, packed: bool) -> Array:
    """Give packed arrays a batch of 1, and refuse what has other axes."""
    of_rows = name in ("lse", "dlse")
    expected = (2 if of_rows else 3) if packed else (3 if of_rows else 4)
    if array.ndim != expected:
        axes = ("(H, S)" if of_rows else "(S, heads, dim)") if packed else (
            "(B, H, S)" if of_rows else "(B, S, heads, dim)"
        )  # fmt: skip
        raise error(
            ValueError,
            f"{name} has shape {array.shape}",
            f"it is {axes}" + (" with cu_seqlens" if packed else ""),
            "pass cu_seqlens for packed sequences, and none for a batch",
        )
    return array[None] if packed else array


def _require_tokens(arrays: dict[str, Array], tokens: int) -> None:
    """Raise unless all arrays have the same number of tokens."""
    for name, array in arrays.items():
        found = array.shape[2] if name in ("lse", "dlse") else array.shape[1]
        if found != tokens:
            raise error(
                ValueError,
                f"q has {tokens} tokens, {name} has {found}",
                "all arrays of a rank are of the same tokens",
                "cut them all with distributed.shard",
            )


def _require_shapes(arrays: dict[str, Array], packed: bool) -> None:
    """Raise for another batch, other heads or head dims: calls would name the shapes of parts."""
    (batch, tokens, heads, dim), (*_, kv_heads, _) = arrays["q"].shape, arrays["k"].shape
    of_heads, of_rows = (heads, arrays["v"].shape[3]), (batch, heads, tokens)
    ends: dict[str, tuple[int, ...]] = {"k": (kv_heads, dim), "v": (kv_heads, of_heads[1])}
    for name, array in arrays.items():
        end = ends.get(name, (heads, dim) if name == "q" else of_heads)
        expected = of_rows if name in ("lse", "dlse") else (batch, tokens, *end)
        if array.shape != expected:
            found, wanted = (shape[packed:] for shape in (array.shape, expected))
            raise error(
                ValueError,
                f"{name} has shape {found}",
                f"it is {wanted} by the shapes of q, k and v",
                "pass an array of that shape",
            )


def _lengths(tokens: int, cu_seqlens: object) -> tuple[int, ...]:
    if cu_seqlens is None:
        return (tokens,)
    bounds = sequence_bounds(cu_seqlens)
    if bounds[-1] != tokens:
        raise error(
            ValueError,
            f"cu_seqlens end at {bounds[-1]}, but all ranks hold {tokens} tokens",
            "cu_seqlens are those of whole sequences, and every rank holds an equal share of them",
            "pass the cu_seqlens of the whole sequences, and a group with a rank for each shard",
        )
    return tuple(after - before for before, after in pairwise(bounds))


_ALIKE = "all ranks hold shards of one shape and pass the same options"
_CALL_ALIKE = "split the sequence evenly, and make the same call on every rank"
