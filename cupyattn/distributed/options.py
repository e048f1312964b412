"""The options of a ring's calls: what they ask of a placement, and what ranks pass alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays import Array
from cupyattn.distributed.agreement import fingerprint
from cupyattn.distributed.placement import Placement
from cupyattn.errors import error

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

    def require_places(self, placement: Placement, lengths: Sequence[int]) -> None:
        """Raise where what depends on positions cannot be had from the calls of a placement.

        Raises
        ------
        ValueError
            For tables of rotary that are shorter than sequences, and pieces that dropout cannot
            begin at.
        NotImplementedError
            For what needs neighbours in the sequence, where a rank has none.
        """
        longest = max(lengths, default=0)
        if self.rotary is not None and self.rotary[0].shape[0] < longest:
            raise error(  # on a GPU nobody looks at positions
                ValueError,
                f"rotary's tables have {self.rotary[0].shape[0]} rows, for sequences of {longest} "
                "tokens",
                "positions are those of whole sequences",
                "make longer tables with rope_tables",
            )
        if placement.ranks == 1:
            return
        for name, given in (
            ("alibi_slopes", self.alibi_slopes is not None),
            ("dropout_p", self.dropout_p > 0),
        ):
            if given and placement.name == "striped":
                raise error(
                    NotImplementedError,
                    f"{name} with placement='striped'",
                    "it needs tokens of a rank that are neighbours in the sequence",
                    "use placement='zigzag', which balances causal attention too",
                )
        for extent in map(placement.piece_length, lengths if self.dropout_p > 0 else ()):
            if extent % DROPOUT_KEYS:
                raise error(
                    ValueError,
                    f"dropout with pieces of {extent} tokens",
                    f"its mask is drawn for {DROPOUT_KEYS} keys at a time: pieces are multiples",
                    f"pad sequences to multiples of "
                    f"{DROPOUT_KEYS * placement.pieces * placement.ranks} tokens",
                )

    def description(self, *, longest: int, on_host: bool) -> list[str]:
        """Say what all ranks have to pass alike, without what was left out.

        Arrays on the host are told by what is in them, of tables as many rows as sequences have.
        Those on a GPU are told by shape, and the seed is left out there, since it changes from
        call to call: whoever says something new waits for the other ranks.
        """
        said = ["causal=True"] if self.causal else []
        said += [f"window_size={self.window_size}"] if self.window_size is not None else []
        numbers = {
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p or None,
        }
        said += [f"{name}={float(x)}" for name, x in numbers.items() if x is not None]
        if self.dropout_p and on_host:
            said.append(f"seed={self.seed}")
        for name, array in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            if array is not None:
                said.append(f"{name} {_told(array, on_host)}")
        if self.rotary is not None:
            cos, sin, interleaved = (*self.rotary, False)[:3]
            tables = " and ".join(_told(table[:longest], on_host) for table in (cos, sin))
            said.append(f"rotary {tables}{' interleaved' if interleaved else ''}")
        return said


def _told(array: Array, on_host: bool) -> str:
    return f"{array.dtype} {array.shape}" + (f" {fingerprint(array)}" if on_host else "")
