"""The kernels that rotate q and k before those of attention, and their gradients after them.

Every call with rotary runs one, but for the queries of the tensor-core forward, whose module says
what a rotation within the loop would cost. The backward's loop has no registers to spare either.
"""

from __future__ import annotations

from collections.abc import Iterator

from cupyattn.ops.attention.kernels.parameters import PACKED, POSITIONS
from cupyattn.ops.attention.structs import ATTENTION_STRUCT, ROTARY_STRUCT, VARLEN_STRUCT
from cupyattn.ops.rope.kernels import TABLE, specialise_rotation
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.tables import pairs, rows_for

_ARRAYS = inputs("x0", "x1", "cos", "sin")
_RESULTS = Pointer("out0"), Pointer("out1")
DENSE = KernelSpec(
    "attention_rotary",
    "attention/rotary.cu",
    (*_ARRAYS, *POSITIONS, *_RESULTS, ATTENTION_STRUCT, ROTARY_STRUCT),
)
VARLEN = KernelSpec(
    "attention_rotary_varlen",
    "attention/rotary.cu",
    (*_ARRAYS, *PACKED, *POSITIONS, *_RESULTS, VARLEN_STRUCT, ROTARY_STRUCT),
)
KERNELS = (DENSE, VARLEN)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield both kernels, rope's rows, dtypes, loads, tables and choices in pairs."""
    rows, flags = rows_for(TABLE, arch), (False, True)
    axes = STORAGE, rows, flags, STORAGE, KERNELS, flags, flags
    for dtype, limit, whole, table, spec, interleaved, accumulate in pairs(*axes):
        vec = vector_items(dtype) if whole else 1
        yield specialise_rotation(spec, rows[limit], dtype, vec, table, interleaved, accumulate)
