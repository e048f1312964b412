"""Inputs of a step besides the cache's tables: token ids, and how each next token is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyattn.kv_cache import Sequence as CachedSequence
from cupyattn.models.generation.graph import upload
from cupyattn.models.generation.options import Sampling
from cupyattn.runtime.arrays import Array

_ALIGNMENT = 16
_KINDS = {"temperature": "f4", "top_p": "f4", "min_p": "f4", "repetition_penalty": "f4"}
_OFF = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class Draw(NamedTuple):
    """A next token to draw, from the logits behind the last token of a sequence.

    Attributes
    ----------
    sequence : Sequence
        Its last token is what the step computes.
    sampling : Sampling
        How it is drawn.
    seed : int
        Of the sample; together with the token's position it decides.
    previous : sequence of int
        What a repetition penalty weakens: all tokens so far.
    left : int
        How many tokens the sample may still have, this one included.
    """

    sequence: CachedSequence
    sampling: Sampling
    seed: int
    previous: Sequence[int]
    left: int


def used_options(draws: Iterable[Draw]) -> frozenset[str]:
    """Return the options of `cupyattn.sample` that matter to any of these."""
    return frozenset().union(*(draw.sampling.used for draw in draws))


class StepInputs:
    """Arrays of a step in one piece of memory, uploaded at once and always at the same place.

    Attributes
    ----------
    ids : int32 array (tokens,)
        The tokens to compute.
    """

    def __init__(
        self, xp: Any, tokens: int, draws: int, used: frozenset[str], vocab_size: int, width: int
    ) -> None:
        self._off = {**_OFF, "top_k": vocab_size}
        fields: dict[str, tuple[tuple[int, ...], str]] = {"ids": ((tokens,), "i4")}
        if used:
            fields |= {"seed": ((draws,), "i8"), "step": ((draws,), "i4")}
            fields |= {name: ((draws,), _KINDS.get(name, "i4")) for name in sorted(used)}
        if "repetition_penalty" in used:
            fields["previous"] = ((draws, width), "i4")
        starts, end = {}, 0
        for name, (shape, kind) in fields.items():
            starts[name] = end
            size = math.prod(shape) * np.dtype(kind).itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._staged = np.zeros(end, np.uint8)
        self._buffer: Array = xp.zeros(end, np.uint8)

        def pieces(flat: Array) -> dict[str, Array]:
            return {
                name: flat[starts[name] :][: math.prod(shape) * np.dtype(kind).itemsize]
                .view(np.dtype(kind))
                .reshape(shape)
                for name, (shape, kind) in fields.items()
            }

        self._on_host, self._placed = pieces(self._staged), pieces(self._buffer)
        self.ids: Array = self._placed["ids"]

    def load(self, ids: Sequence[int], draws: Sequence[Draw]) -> None:
        """Fill them for a step; what is unused is token 0, drawn greedily."""
        host = self._on_host
        host["ids"][: len(ids)] = ids
        host["ids"][len(ids) :] = 0
        for name, column in host.items():
            if name == "seed":
                _fill(column, [draw.seed for draw in draws], 0)
            elif name == "step":
                _fill(column, [len(draw.sequence) for draw in draws], 0)
            elif name == "previous":
                column.fill(-1)
                for row, draw in zip(column, draws, strict=False):
                    row[: len(draw.previous)] = draw.previous
            elif name != "ids":
                off = self._off[name]
                values = [getattr(draw.sampling, name) for draw in draws]
                _fill(column, [off if value is None else value for value in values], off)
        upload(self._buffer, self._staged)

    def options(self, step: Array | None = None) -> dict[str, Any]:
        """Return what `cupyattn.sample` takes beside the logits.

        The step of a token is its position: `step` if it is given.
        """
        if len(self._placed) == 1:
            return {"seed": 0, "temperature": 0.0}
        given = {name: array for name, array in self._placed.items() if name != "ids"}
        return given if step is None else {**given, "step": step}


def _fill(column: np.ndarray, values: Sequence[float], rest: float) -> None:
    column[: len(values)] = values
    column[len(values) :] = rest
