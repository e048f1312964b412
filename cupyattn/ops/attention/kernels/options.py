"""The options of a call of attention, as the kernels' macros have them."""

from __future__ import annotations

from typing import NamedTuple

from cupyattn.ops.attention.kernels.modifiers import Modifiers


class FlashOptions(NamedTuple):
    """Which options a call has; dtype names of arrays, "void" for those it has not."""

    bias: str = "void"
    bias_vec: int = 1
    """Neighbouring keys of the bias that are read at once: 4, 2 or 1."""
    mask: bool = False
    mask_vec: int = 1
    """Neighbouring keys of the mask that are read at once."""
    slopes: str = "void"
    softcap: bool = False
    sinks: str = "void"
    dropout: bool = False
    modified: Modifiers | None = None
    """The expressions of score_mod and mask_mod."""

    @property
    def adds_items(self) -> bool:
        """Whether kernels read items of a bias or mask, or cap scores: registers that they take."""
        return self.bias != "void" or self.mask or self.softcap

    @property
    def keeps_items(self) -> bool:
        """Whether a backward keeps more of each score: the slope of capped ones, random words."""
        return self.softcap or self.dropout or self.modified is not None


PLAIN = FlashOptions()

SCORE_MACROS = ("bias", "mask", "slopes", "softcap", "dropout", "modified")
"""The options among the macros of every backward kernel of the scores."""
DQ_MACROS = ("bias", "mask", "score_vec", "slopes", "softcap", "dropout", "modified")
"""The options among the macros of the tensor-core kernel of dq."""
SUMMED_DBIAS_MACROS = (*DQ_MACROS, "dbias")
"""The options among the macros of the kernel for a reduced dbias."""
DECODE_MACROS = ("slopes", "softcap", "sinks")
"""The options among the macros of the decode kernels."""
EVERYTHING = FlashOptions(bias="float32", mask=True, slopes="float32", softcap=True, dropout=True)
"""Every option of the scores that a backward kernel has, but for expressions."""

EACH_OPTION = (
    FlashOptions(bias="float16"),
    FlashOptions(bias="float16", bias_vec=2),
    FlashOptions(bias="float32", bias_vec=2),
    FlashOptions(mask=True),
    FlashOptions(mask=True, mask_vec=2),
    FlashOptions(slopes="float32"),
    FlashOptions(softcap=True),
    FlashOptions(sinks="float32"),
    FlashOptions(dropout=True),
)
"""One option each: the resource gates hold them, as they hold the plain kernels."""

EACH_PAGED_OPTION = (
    FlashOptions(slopes="float32"),
    FlashOptions(softcap=True),
    FlashOptions(sinks="float32"),
)
"""One option each of the kernels over a paged cache."""


class BackwardOptions(NamedTuple):
    """Which options a backward on tensor cores has; dtype names as of `FlashOptions`.

    dbias names what the kernel writes: the bias's dtype, or float32 for scratch memory. With
    dbias_accumulate that of dk and dv adds each term to what its own item holds.
    """

    bias: str = "void"
    mask: bool = False
    score_vec: int = 1
    """Neighbouring keys of bias, mask and dbias that are read or written at once: up to 4, or 1."""
    slopes: str = "void"
    softcap: bool = False
    dropout: bool = False
    modified: Modifiers | None = None
    dbias: str = "void"
    dbias_accumulate: bool = False

    @classmethod
    def of(cls, scores: FlashOptions, score_vec: int) -> BackwardOptions:
        """Return those of a forward's options that a backward has."""
        same = {name: getattr(scores, name) for name in SCORE_MACROS}
        return cls(score_vec=score_vec, **same)


PLAIN_BACKWARD = BackwardOptions()

EACH_BACKWARD_OPTION = (
    BackwardOptions(bias="float16", dbias="float16"),
    BackwardOptions(bias="float32"),
    BackwardOptions(mask=True),
    BackwardOptions(slopes="float32"),
    BackwardOptions(softcap=True),
    BackwardOptions(dropout=True),
)
"""One option each, as above."""
BACKWARD_QUADS = (
    BackwardOptions(bias="float16", dbias="float16", score_vec=4),
    BackwardOptions(bias="float32", score_vec=4),
    BackwardOptions(mask=True, score_vec=4),
)
"""Options with items of bias or mask that are read four at a time."""
