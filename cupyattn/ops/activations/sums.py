"""Sums in float32 of arrays in any dtype."""

from __future__ import annotations

from cupyattn.ops.activations import reference
from cupyattn.ops.activations.kernels_add_to import ADD_TO, AddToArrays
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.call_elements import call_elements


def add_to(total: Array, x: Array, /) -> None:
    r"""Add an array to a sum in float32, in place: ``total += x``, in one pass over memory.

    So gradients of several steps, or of several GPUs, are added up without the rounding of 16 bits.

    Parameters
    ----------
    total : float32 array of any shape
        What is changed. Its last axis is contiguous, the others may have any stride.
    x : array of that shape
        float16, float32 or bfloat16, on NumPy arrays outside of the emulator float64 too; last axis
        contiguous. It overlaps total nowhere, unless it is total itself.

    Returns
    -------
    None

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For shapes that differ, a last axis that is not contiguous, or a total that is read-only or
        overlaps x; for kernels also if more than four axes before the last lie unevenly in memory.
    RuntimeError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> total = np.ones(3, np.float32)
    >>> cupyattn.add_to(total, np.array([1, 2, 2**-11], np.float16))
    >>> total
    array([2.       , 3.       , 1.0004883], dtype=float32)
    """
    call_elements(ADD_TO, AddToArrays(total, x), reference.add_to)
