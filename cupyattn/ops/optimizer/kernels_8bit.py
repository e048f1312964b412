"""AdamW with running means of eight bits, block by block and in place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.ops.optimizer.kernels import NUMBERS
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, inputs

BLOCK = 256
"""Items that share a scale; a warp has them."""

ADAMW_8BIT = KernelSpec(
    "adamw_8bit",
    "optimizer/adamw_8bit.cu",
    (
        *map(Pointer, ("param", "m", "v", "m_scales", "v_scales")),
        *inputs("grad"),
        *inputs("grad_scale", optional=True),
        *(Scalar(name, np.dtype(np.float32)) for name in NUMBERS),
        Scalar("count", np.dtype(np.int64)),
    ),
)
KERNELS = (ADAMW_8BIT,)

THREADS = 128
"""As of the element-wise kernels, whose loads are these: four blocks a CTA."""
WARP = 32


@cache
def specialise(vec: int) -> Specialisation:
    """Specialise it; `vec` is the items of one load, 4 where arrays are aligned, otherwise 1."""
    return ADAMW_8BIT.specialise(threads=THREADS, VEC=vec, BLOCK=BLOCK)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield both kinds of loads."""
    del arch  # one row serves all
    yield from map(specialise, (4, 1))
