"""A call of ring attention, checked before anything is sent: its arrays, its plan, its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn import DropoutSeed, attention, rope
from cupyattn.arrays import Array, adopt
from cupyattn.cupy_library import load_cupy
from cupyattn.distributed.group import Group
from cupyattn.distributed.placement import (
    Placement,
    placement_of,
    sequence_bounds,
    token_positions,
)
from cupyattn.distributed.plan import RingPlan, ring_plan, sight_of
from cupyattn.errors import error, shown

_ARRAY_OPTIONS = ("alibi_slopes", "sinks", "rotary")
DROPOUT_KEYS = 32
"""Keys whose dropout one call of Philox draws: a piece begins at a multiple of them."""


@dataclass(frozen=True)
class RingOptions:
    """The options of a ring's calls, as `attention` takes them."""

    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    alibi_slopes: Array | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout_p: float = 0.0
    seed: int | None = None
    rotary: Any = None

    @property
    def uses_positions(self) -> bool:
        """Whether more depends on where queries and keys stand than what is seen."""
        return self.alibi_slopes is not None or self.dropout_p > 0


@dataclass(frozen=True)
class RingProblem:
    """A checked call: arrays with an axis of the batch, which is 1 for packed sequences."""

    group: Group
    plan: RingPlan
    options: RingOptions
    packed: bool
    arrays: dict[str, Array] = field(repr=False)

    @property
    def xp(self) -> Any:
        """The library of the arrays."""
        return np if isinstance(self.arrays["q"], np.ndarray) else load_cupy()

    @property
    def placement(self) -> Placement:
        """Which rank holds what."""
        return self.plan.placement

    def rotated(self, x: Array, *, inverse: bool = False) -> Array:
        """Turn queries or keys by where they stand in the whole sequence; or turn gradients back.

        Each rank turns what it holds, once: turned keys travel.
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


@lru_cache(maxsize=64)
def _positions(
    placement: Placement,
    rank: int,
    lengths: tuple[int, ...],
    device: int | None,
    stream: int | None,
) -> Array:
    """Return where a rank's tokens stand, copied once to the current device and stream, if any.

    The key names these: a copy joins its stream's order, and a large one waits for it.
    """
    found = token_positions(placement, rank, lengths)
    return found if device is None else load_cupy().asarray(found)


def ring_problem(
    group: Any,
    arrays: dict[str, Array | None],
    options: RingOptions,
    placement: str,
    cu_seqlens: Any,
    *,
    part_own: bool = False,
) -> RingProblem:
    """Check a call of `ring_attention` or its backward, on this rank and then with all others.

    `arrays` are q, k, v and what the backward has besides; `part_own` is as in `ring_plan`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the public functions document.
    RankFailedError
        If a rank has failed.
    """
    if not isinstance(group, Group):
        raise error(
            TypeError,
            f"group is a {type(group).__module__}.{type(group).__qualname__}",
            "it is a cupyattn.distributed.Group",
            "wrap what carries the bytes once: group = distributed.Group(communicator)",
        )
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
    operands = adopt(arrays)
    if group.device is not None and operands.device_id != group.device:
        where = "NumPy's" if operands.device_id is None else f"on device {operands.device_id}"
        raise error(
            ValueError,
            f"arrays that are {where}, of rank {group.rank} on device {group.device}",
            "a rank's arrays are on the device of its communicator",
            f"make them inside 'with cupy.cuda.Device({group.device})'",
        )
    lifted = {name: _lifted(name, array, packed) for name, array in operands.arrays.items()}
    q, k, v = (lifted[name] for name in ("q", "k", "v"))
    tokens = q.shape[1]
    _require_tokens(lifted, tokens)
    lengths = _lengths(tokens * group.size, cu_seqlens)
    # What attention refuses is refused here, in its words: a call of no tokens checks the same.
    nothing = [x[:, :0] for x in (q, k, v)]
    if packed:  # slopes may be of each sequence
        xp = np if isinstance(q, np.ndarray) else load_cupy()
        nothing = [xp.broadcast_to(x, (len(lengths), *x.shape[1:])) for x in nothing]
    attention(
        *nothing, causal=options.causal, softmax_scale=options.softmax_scale,
        window_size=options.window_size, alibi_slopes=options.alibi_slopes,
        softcap=options.softcap, sinks=options.sinks, dropout_p=options.dropout_p,
        seed=options.seed, rotary=options.rotary,
    )  # fmt: skip
    if isinstance(options.seed, DropoutSeed):
        raise error(
            TypeError,
            "seed is a DropoutSeed",
            "it is an integer: a ring says itself where its parts stand",
            f"pass {options.seed.seed}",
        )
    dealt = placement_of(placement, group.size, lengths)
    if cu_seqlens is None and tokens % dealt.pieces:
        raise error(
            ValueError,
            f"{tokens} tokens on a rank, {placement}",
            f"a rank holds {dealt.pieces} pieces of one length",
            "cut the whole sequence with distributed.shard",
        )
    _require_places(options, dealt, lengths)
    _require_table(options, lengths)
    sight = sight_of(options.causal, options.window_size, max(lengths, default=0))
    plan = ring_plan(
        dealt, group.rank, lengths, sight,
        join=not options.uses_positions, packed=packed, part_own=part_own,
    )  # fmt: skip
    problem = RingProblem(group, plan, options, packed, lifted)
    with group.on_device(operands.device_id):
        group.agree(_description(problem), problem.xp)
    return problem


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
    """Raise unless all arrays are of as many tokens: calls take rows of them, and would not see."""
    for name, array in arrays.items():
        found = array.shape[2] if name in ("lse", "dlse") else array.shape[1]
        if found != tokens:
            raise error(
                ValueError,
                f"q has {tokens} tokens, {name} has {found}",
                "all arrays of a rank are of the same tokens",
                "cut them all with distributed.shard",
            )


def _require_table(options: RingOptions, lengths: tuple[int, ...]) -> None:
    """Raise unless rotary's tables are as long as sequences: on a GPU nobody looks at positions."""
    longest = max(lengths, default=0)
    if options.rotary is not None and options.rotary[0].shape[0] < longest:
        raise error(
            ValueError,
            f"rotary's tables have {options.rotary[0].shape[0]} rows, for sequences of {longest} "
            "tokens",
            "positions are those of whole sequences",
            "make longer tables with rope_tables",
        )


def _lengths(tokens: int, cu_seqlens: Any) -> tuple[int, ...]:
    if cu_seqlens is None:
        return (tokens,)
    bounds = sequence_bounds(cu_seqlens)
    if bounds[-1] != tokens:
        raise error(
            ValueError,
            f"cu_seqlens end at {bounds[-1]}, and the ranks together hold {tokens} tokens",
            "cu_seqlens are those of whole sequences, and every rank holds an equal share of them",
            "pass those of before the cut, and a group of as many ranks as the cut had",
        )
    return tuple(after - before for before, after in pairwise(bounds))


def _require_places(options: RingOptions, placement: Placement, lengths: tuple[int, ...]) -> None:
    """Raise where what depends on positions cannot be had from the calls of a placement."""
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
    if options.dropout_p > 0:
        for length in lengths:
            if placement.piece_length(length) % DROPOUT_KEYS:
                raise error(
                    ValueError,
                    f"dropout with pieces of {placement.piece_length(length)} tokens",
                    f"its mask is drawn for {DROPOUT_KEYS} keys at a time: pieces are multiples",
                    f"pad sequences to multiples of "
                    f"{DROPOUT_KEYS * placement.pieces * placement.ranks} tokens",
                )


def _description(problem: RingProblem) -> str:
    """Say what all ranks have to pass alike; the seed may change without asking again."""
    options = vars(problem.options)
    arrays = [f"{name} {x.dtype} {x.shape}" for name, x in problem.arrays.items()]
    present = [name for name in _ARRAY_OPTIONS if options[name] is not None]
    given = [
        f"{name}={shown(value)}"
        for name, value in options.items()
        if name not in (*_ARRAY_OPTIONS, "seed") and value not in (None, False, 0.0)
    ]
    # A list of many lengths is shown in part, and told apart whole.
    lengths = f"{shown(list(problem.plan.lengths))} ({hash(problem.plan.lengths):x})"
    return ", ".join((*arrays, problem.placement.name, *given, *present, f"lengths {lengths}"))
