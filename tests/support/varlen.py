"""Packed sequences for tests: a dense problem of the longest, of which each sequence has a part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.devices import EMULATED, KERNELS, dtype_of, placed
from support.strategies import attention_problems

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.reference.varlen import PackedSequence, sequences
from cupyattn.runtime.outputs import round_into
from cupyattn.testing import PackedCase, expected
from cupyattn.testing.attention import packed

Arrays = tuple[np.ndarray, ...]
LONGEST = ("max_seqlen_q", "max_seqlen_k")


@dataclass(frozen=True)
class VarlenProblem(PackedCase):
    """A call of attention_varlen, run by the kernels."""

    def keywords(self) -> dict[str, Any]:
        """The options without the longest lengths, which are passed by position."""
        given = super().keywords()
        return {name: value for name, value in given.items() if name not in LONGEST}

    def given(self) -> dict[str, Any]:
        """The options as kernels take them."""
        return self.keywords()

    def sequences(self) -> Iterator[PackedSequence]:
        """Each sequence with its own options."""
        return sequences(*self.bounds, self.keywords())

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
        """The largest error over its bound."""
        arrays = *self.arrays(), *self.longest
        with EMULATED.running():  # bounds of kernels, also where results are of a GPU
            want = expected(cupyattn.attention_varlen, *arrays, **self.keywords(), return_lse=True)
        return max(map(reference.error_ratio, (out, lse), *want))

    def backward_inputs(self) -> tuple[Arrays, Arrays, dict[str, Any]]:
        """(dout, q, k, v, out, lse), the lengths, and the options, dlse among them.

        Kernels and reference are given the same out and lse, those of the reference's forward.
        """
        dense = self.dense
        q, k, v, *bounds = self.arrays()
        out, lse = reference.attention_varlen(q, k, v, *bounds, **self.keywords())
        out[bounds[0][-1] :], lse[:, bounds[0][-1] :] = np.nan, np.nan
        dout = self.packed(dense.gradients()[0], self.queries)
        sums = round_into(None, lse, np.dtype(np.float32))
        dlse = np.swapaxes(self.packed(np.swapaxes(dense.gradients()[1], 1, 2), self.queries), 0, 1)
        arrays = dout, q, k, v, round_into(None, out, dtype_of(dense.dtype)), sums
        return arrays, tuple(bounds), {**self.keywords(), "dlse": np.ascontiguousarray(dlse)}

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
        """Largest error over bound, of each gradient."""
        arrays, bounds, options = self.backward_inputs()
        call = *arrays, *bounds, *self.longest
        want = expected(cupyattn.attention_varlen_backward, *call, **options)
        return {
            name: reference.error_ratio(found, *(getattr(each, name) for each in want))
            for name, found in grads.items()
        }


@st.composite
def varlen_problems(draw: st.DrawFn, **dense: Any) -> VarlenProblem:
    """Draw a batch of the specialisations that this run searches."""
    case = draw(packed(attention_problems(views=("contiguous",), crowd=3, **dense)))
    return VarlenProblem(case.dense, case.queries, case.keys, case.spare)
