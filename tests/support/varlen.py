"""Packed sequences for tests: a dense problem of the longest, of which each sequence has a part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.devices import FLOAT_DTYPES, KERNELS, dtype_of, placed
from support.strategies import AttentionProblem, attention_problems

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.kernels.teaching.forward import TILED_TILE_K
from cupyattn.ops.attention.kernels.tensor_core.forward import flash_row
from cupyattn.ops.attention.reference.varlen import PackedSequence, score_index, sequences
from cupyattn.runtime.outputs import round_into

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class VarlenProblem:
    """A call of attention_varlen.

    q, k and v are slices of wider arrays; `spare` rows of NaN follow the last sequence.
    """

    dense: AttentionProblem
    """Its Sq and Sk are max_seqlen_q and max_seqlen_k."""
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    spare: int = 0

    @property
    def bounds(self) -> Arrays:
        """cu_seqlens_q and cu_seqlens_k."""
        return tuple(
            np.cumsum((0, *lengths), dtype=np.int32) for lengths in (self.queries, self.keys)
        )

    def packed(self, array: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
        """The rows of a batch (B, longest, ...) one after the other, in every second one."""
        rows = [array[b, :length] for b, length in enumerate(lengths)]
        rows.append(np.full((self.spare, *array.shape[2:]), np.nan, array.dtype))
        packed = np.concatenate(rows)
        wide = np.full((len(packed), 2, *array.shape[2:]), np.nan, array.dtype)
        wide[:, 1] = packed
        return wide[:, 1]

    def arrays(self) -> Arrays:
        """q, k, v, cu_seqlens_q, cu_seqlens_k."""
        q, k, v = self.dense.arrays()
        lengths = self.queries, self.keys, self.keys
        packed = (self.packed(*each) for each in zip((q, k, v), lengths, strict=True))
        return *packed, *self.bounds

    def options(self) -> dict[str, Any]:
        """The dense options; no sequence uses more keys than it has."""
        options = self.dense.options()
        if "seqused_k" in options:
            options["seqused_k"] = np.minimum(options["seqused_k"], self.keys).astype(np.int32)
        return options

    def given(self) -> dict[str, Any]:
        """The arrays as kernels take them."""
        return self.options()

    @property
    def longest(self) -> tuple[int, int]:
        """max_seqlen_q and max_seqlen_k."""
        return self.dense.Sq, self.dense.Sk

    def sequences(self) -> Iterator[PackedSequence]:
        """Each sequence with its own options."""
        return sequences(*self.bounds, self.options())

    def run(self, **more: Any) -> tuple[np.ndarray, np.ndarray]:
        """Out and lse of the kernels, on the GPU if there is one, otherwise on the emulator."""
        options = {**self.given(), **more}
        with KERNELS.running():
            results = cupyattn.attention_varlen(
                *map(KERNELS.put, self.arrays()),
                *self.longest,
                return_lse=True,
                **{name: placed(KERNELS, value) for name, value in options.items()},
            )
        out, lse = map(KERNELS.get, results)
        return out, lse

    def ratio(self, out: np.ndarray, lse: np.ndarray) -> float:
        """The largest error of any sequence over its bound, that of a dense call."""
        dense = self.dense
        q, k, v, *_ = self.arrays()
        tile_k = min(TILED_TILE_K, flash_row(75, dense.D, dense.Dv).tile_k)
        worst = 0.0
        for rows, keys, options in self.sequences():
            own = q[None, rows], k[None, keys], v[None, keys]
            exact = reference.attention(*own, **options)
            bounds = reference.attention_bound(
                *own,
                dtype=dense.dtype,
                tile_k=tile_k,
                float32_weights=dense.dtype in FLOAT_DTYPES,
                **options,
            )
            found = out[None, rows], lse[None, :, rows]
            ratios = map(reference.error_ratio, found, exact, bounds)
            worst = max(worst, *ratios)
        return worst

    def backward_inputs(self) -> tuple[Arrays, Arrays, dict[str, Any]]:
        """(dout, q, k, v, out, lse), the lengths, and the options, dlse among them.

        Kernels and reference are given the same out and lse, those of the reference's forward.
        """
        dense = self.dense
        q, k, v, *bounds = self.arrays()
        out, lse = reference.attention_varlen(q, k, v, *bounds, **self.options())
        out[bounds[0][-1] :], lse[:, bounds[0][-1] :] = np.nan, np.nan
        dout = self.packed(dense.gradients()[0], self.queries)
        sums = round_into(None, lse, np.dtype(np.float32))
        dlse = np.swapaxes(self.packed(np.swapaxes(dense.gradients()[1], 1, 2), self.queries), 0, 1)
        arrays = dout, q, k, v, round_into(None, out, dtype_of(dense.dtype)), sums
        return arrays, tuple(bounds), {**self.options(), "dlse": np.ascontiguousarray(dlse)}

    def run_backward(self, **more: Any) -> dict[str, np.ndarray]:
        """Gradients of the kernels by name."""
        arrays, bounds, options = self.backward_inputs()
        options = {**self.given(), "dlse": options["dlse"], **more}
        with KERNELS.running():
            grads = cupyattn.attention_varlen_backward(
                *map(KERNELS.put, (*arrays, *bounds)),
                *self.longest,
                **{name: placed(KERNELS, value) for name, value in options.items()},
            )
        return {name: KERNELS.get(x) for name, x in grads._asdict().items() if x is not None}

    def backward_ratios(self, grads: dict[str, np.ndarray]) -> dict[str, float]:
        """Largest error over bound, of each gradient: those of a dense call a sequence.

        What sequences share is a sum of theirs, and so is its bound.
        """
        (dout, q, k, v, out, lse), bounds, options = self.backward_inputs()
        dlse = options.pop("dlse")
        ratios = dict.fromkeys(grads, 0.0)
        shared: dict[str, list[np.ndarray]] = {}
        for b, (rows, keys, own) in enumerate(sequences(*bounds, options)):
            arrays = (
                *(dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows]),
                lse[None, :, rows],
            )
            own["dlse"] = dlse[None, :, rows]
            exact = reference.attention_backward(*arrays, **own)
            errors = reference.attention_backward_bound(*arrays, dtype=q.dtype, **own)
            for name, place in (("dq", rows), ("dk", keys), ("dv", keys)):
                each = grads[name][None, place], getattr(exact, name), getattr(errors, name)
                ratios[name] = max(ratios[name], reference.error_ratio(*each))
            for name in ("dbias", "dsinks"):
                if name in grads:
                    at: Any = slice(None)
                    if name == "dbias":
                        lengths = rows.stop - rows.start, keys.stop - keys.start
                        at = score_index(grads[name].shape, b, *lengths)
                    total = shared.setdefault(name, [np.zeros(grads[name].shape) for _ in range(2)])
                    total[0][at] += getattr(exact, name)
                    total[1][at] += getattr(errors, name)
        for name, (total, error) in shared.items():
            tiny = np.finfo(np.float32).tiny  # items that no sequence has are 0
            ratios[name] = reference.error_ratio(grads[name], total, error + tiny)
        return ratios


@st.composite
def varlen_problems(draw: st.DrawFn, **dense: Any) -> VarlenProblem:
    """Draw a batch: sequences from none to the longest, some without queries or without keys."""
    problem = draw(attention_problems(views=("contiguous",), crowd=3, **dense))
    return VarlenProblem(
        problem,
        queries=tuple(draw(_length(problem.Sq)) for _ in range(problem.B)),
        keys=tuple(draw(_length(problem.Sk)) for _ in range(problem.B)),
        spare=draw(st.sampled_from((0, 3))),
    )


def _length(longest: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from((0, longest)), st.integers(0, longest))
