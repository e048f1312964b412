"""From a planned call to the public functions."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn import (
    AttentionGrads,
    BlockMask,
    DropoutSeed,
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
)
from cupyattn.distributed.options import (
    OF_ROWS,
    ScoreOffsets,
    blocks_of,
    moved,
    place_of,
    with_four_axes,
)
from cupyattn.distributed.plan import AttentionCall
from cupyattn.distributed.problem import RingProblem
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy

BLOCK = ("k", "v")
"""Arrays of which a call takes a block's rows; of all others it takes the rank's own rows."""


class RingCalls:
    """The calls of one problem."""

    def __init__(self, problem: RingProblem) -> None:
        self._problem, self._xp = problem, problem.xp
        self._plan, self._options = problem.plan, problem.options

    def forward(
        self, call: AttentionCall, arrays: dict[str, Array], results: tuple[Array, Array]
    ) -> None:
        """Attend: write out (B, rows, H, Dv) and lse (B, H, rows) of the call's queries.

        `arrays` has q, and k and v of the block.
        """
        given = _rows_of(call, arrays)
        out, lse = results
        if not self._problem.packed:
            attention(*given.values(), return_lse=True, out=results, **self._dense(call, 0))
        elif not self._options.dropout_p:
            packed = [array[0] for array in given.values()]
            attention_varlen(*packed, return_lse=True, out=(out[0], lse[0]), **self._packed(call))
        else:
            for b, rows in self._sequences():
                attention(
                    *_cut(given, rows).values(), return_lse=True,
                    out=(out[:, rows], lse[:, :, rows]), **self._dense(call, b),
                )  # fmt: skip

    def backward(
        self, call: AttentionCall, arrays: dict[str, Array], deterministic: bool
    ) -> AttentionGrads:
        """Return the call's share of the gradients, of its rows.

        `arrays` has dout, q, k, v, out, lse and perhaps dlse, in the order of the public function.
        """
        given = _rows_of(call, arrays)
        dlse = given.pop("dlse", None)
        if not self._problem.packed:
            return attention_backward(
                *given.values(), dlse=dlse, deterministic=deterministic, **self._dense(call, 0)
            )
        if not self._options.dropout_p:
            packed = [array[0] for array in given.values()]
            grads = attention_varlen_backward(
                *packed, dlse=None if dlse is None else dlse[0], deterministic=deterministic,
                **self._packed(call),
            )  # fmt: skip
            return grads._replace(dq=grads.dq[None], dk=grads.dk[None], dv=grads.dv[None])
        total = AttentionGrads(*(self._xp.empty_like(given[name]) for name in "qkv"))
        for b, rows in self._sequences():
            part = attention_backward(
                *_cut(given, rows).values(), dlse=None if dlse is None else dlse[:, :, rows],
                deterministic=deterministic, **self._dense(call, b),
            )  # fmt: skip
            for name in ("dq", "dk", "dv"):
                getattr(total, name)[:, rows] = getattr(part, name)
            if part.dsinks is not None:
                before = total.dsinks
                total = total._replace(
                    dsinks=part.dsinks if before is None else before + part.dsinks
                )
        return total

    def _sequences(self) -> list[tuple[int, slice]]:
        """Return the number of each packed sequence, and its rows in a piece."""
        bounds = self._plan.cu_seqlens.tolist()
        return [(b, slice(*rows)) for b, rows in enumerate(pairwise(bounds))]

    def _common(self, call: AttentionCall) -> Keywords:
        options = self._options
        given: dict[str, object] = {
            **options.of_scores,
            "sinks": options.sinks if call.own else None,
        }
        if call.left is None and call.right == 0:
            given["causal"] = True
        elif call.left is not None or call.right is not None:
            given["window_size"] = (call.left, call.right)
        return given

    def _needs_offset(self, call: AttentionCall) -> bool:
        banded = call.left is not None or call.right is not None
        return banded or self._options.alibi_slopes is not None

    def _dense(self, call: AttentionCall, b: int) -> Keywords:
        """Return the options of a batch of sequences of one length, or of one that was packed."""
        options, given = self._options, self._common(call)
        alone = slice(b, b + 1) if self._problem.packed else slice(None)
        given["q_offset"] = call.q_offsets[b] if self._needs_offset(call) else 0
        if options.alibi_slopes is not None and options.alibi_slopes.ndim == 2:
            given["alibi_slopes"] = options.alibi_slopes[alone]
        if options.seqused_k is not None:
            extent = self._plan.placement.piece_length(self._plan.lengths[b])
            given["seqused_k"] = self._used(options.seqused_k[alone], call.key_starts[b], extent)
        for name, array in options.arrays.items():
            if name in OF_ROWS:
                scores = with_four_axes(array)
                given[name] = scores[place_of(scores, call, self._plan.placement)]
        given |= self._moved(((b,), (call.query_starts[b],), (call.key_starts[b],)), packed=False)
        if isinstance(options.mask_mod, BlockMask) and not self._problem.packed:
            given["mask_mod"] = blocks_of(
                options.mask_mod, given["mask_mod"], call, self._plan.placement
            )
        if options.dropout_p:
            given["dropout_p"] = options.dropout_p
            given["seed"] = DropoutSeed(
                int(options.seed or 0), batch=b, query=call.query_starts[b], key=call.key_starts[b]
            )
        return given

    def _packed(self, call: AttentionCall) -> Keywords:
        options, given = self._options, self._common(call)
        bounds = tuple(self._plan.cu_seqlens.tolist())
        extents = tuple(after - before for before, after in pairwise(bounds))
        for side in "qk":
            given[f"cu_seqlens_{side}"] = self._integers(bounds)
            given[f"max_seqlen_{side}"] = max(extents, default=0)
        given["q_offset"] = self._integers(call.q_offsets) if self._needs_offset(call) else 0
        if options.seqused_k is not None:
            starts, most = self._integers(call.key_starts), self._integers(extents)
            given["seqused_k"] = self._used(options.seqused_k, starts, most)
        begins = ((0,) * len(extents), call.query_starts, call.key_starts)
        return given | self._moved(begins, packed=True)

    def _used(self, used: Array, start: object, extent: object) -> Array:
        """Return how many keys of a piece that begins at `start` are among the first `used`."""
        step = self._plan.placement.step
        return self._xp.clip((used - start + (step - 1)) // step, 0, extent)

    def _moved(self, starts: tuple[tuple[int, ...], ...], *, packed: bool) -> Keywords:
        """Return the expressions with the offsets of a call: see `ScoreOffsets`."""
        given = self._options.expressions
        if not given:
            return {}
        places = ScoreOffsets(self._integers(starts), packed, self._plan.placement.step)
        return {name: moved(option, places) for name, option in given.items()}

    def _integers(self, values: tuple[Any, ...]) -> Array:
        if self._xp is np:
            return np.asarray(values, np.int64)
        stream = load_cupy().cuda.get_current_stream()
        return _on_device(values, int(load_cupy().cuda.Device().id), int(stream.ptr))


@lru_cache(maxsize=1024)
def _on_device(values: tuple[Any, ...], device: int, stream: int) -> Array:
    """Copy integers to the current device, once for each device and stream."""
    return load_cupy().asarray(values, np.int64)


def _rows_of(call: AttentionCall, arrays: dict[str, Array]) -> dict[str, Array]:
    """Take the call's rows of each array."""
    return {
        name: _take(name, array, (call.keys if name in BLOCK else call.queries).slice)
        for name, array in arrays.items()
    }


def _cut(arrays: dict[str, Array], rows: slice) -> dict[str, Array]:
    """Take one packed sequence's rows of each array, the same for queries and keys."""
    return {name: _take(name, array, rows) for name, array in arrays.items()}


def _take(name: str, array: Array, rows: slice) -> Array:
    return array[:, :, rows] if name in ("lse", "dlse") else array[:, rows]
