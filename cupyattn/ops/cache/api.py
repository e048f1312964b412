"""New tokens into a paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.cache import reference
from cupyattn.ops.cache.append import run_append
from cupyattn.ops.cache.append_problem import AppendProblem, append_problem
from cupyattn.ops.cache.storage import WRITTEN_FIXES
from cupyattn.ops.rope.api import Rotary, checked_rotary
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import Operands, adopt
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.rounding import round_into

_FIXES = {
    "slot_mapping": "pass an int32 array with a slot for each token, of shape k.shape[:-2]",
    "positions": "pass an int32 array shaped like slot_mapping",
    **WRITTEN_FIXES,
    **fixes_of_results("q"),
}


def append_kv(
    k_cache: Array,
    v_cache: Array,
    k: Array,
    v: Array,
    slot_mapping: Array,
    /,
    *,
    q: Array | None = None,
    rotary: Rotary | tuple[Array, Array] | None = None,
    positions: Array | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
) -> None:
    r"""Write the keys and values of new tokens to their slots of a paged cache, in place.

    In the same launch k, and q if it is given, get their rotary position embedding, and k and v are
    quantised if the caches are. Letters: G key-value heads, H query heads, D head dim (1 to 256).

    Parameters
    ----------
    k_cache, v_cache : array (num_blocks, block_size, G, D)
        The pools of blocks, written in place. float16, float32 or bfloat16 (NumPy arrays outside of
        the emulator float64 too), int8, or uint8 of shape (num_blocks, block_size, G, D / 2): 4
        bits an item. They do not overlap each other. The last axis is contiguous; the others may
        have any stride, so that one layer of a pool ``(num_layers, num_blocks, ...)`` is a cache.
    k, v : array (total, G, D) or (B, S, G, D)
        The tokens: float16, float32 or bfloat16, and the caches' own dtype where those are not
        quantised. The last axis is contiguous; the others may have any stride, so that slices of
        packed q, k and v need no copy.
    slot_mapping : int32 or int64 array (total,) or (B, S)
        Where each token goes: ``block * block_size + offset``. -1 leaves a token out.
    q : array (total, H, D) or (B, S, H, D), dtype of k, optional
        Is rotated in place, also for tokens that are left out. Only with rotary.
    rotary : Rotary or (cos, sin), optional
        Tables of cosines and sines (positions, R/2), as of `rope_tables`. The first R features of k
        are rotated before they are stored, as `rope` rotates them.
    positions : int32 or int64 array, shaped like slot_mapping, optional
        Where each token stands: a row of the tables. Required with rotary.
    k_scales, v_scales : float32 array (num_blocks, block_size, G), optional
        Of quantised caches, which require them: the scale of each token and head, written in place.

    Returns
    -------
    None

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, a dtype that is not allowed,
        quantised caches without scales, and rotary without positions.
    ValueError
        For shapes or strides that do not fit, arrays that are written and overlap others, q without
        rotary, and scales of caches that are not quantised. Where values are checked (`backend`;
        NumPy arrays always) for slots that are not in the caches or stand twice, and for positions
        outside of the tables, but those of tokens that are left out if q is not given. Otherwise a
        GPU skips such a slot, and stores NaN in the rotated features of such a token.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    Slots of a call are distinct. Of two tokens with one slot a GPU that does not check values
    writes both, in any order, so that the slot may hold parts of each.

    A quantised item is ``q * scale`` with ``scale = max|x| / 127`` over the D items of a token and
    head and q an int8, or ``(nibble - 8) * scale`` with ``scale = max|x| / 7``, item 2 i in the low
    nibble of byte i and item 2 i + 1 in the high one. Both are of the rotated float32 numbers,
    rounded to nearest even, with scales below 2**-126 flushed to 0. Items that are not all finite
    have a scale that is not, and are read back as NaN; float32's largest number, whose scale is
    rounded up, comes back from 8 bits as infinity. Such scales for rows are those of Dettmers
    et al., arXiv:2208.07339, section 3.1; rotary position embedding is that of `rope`.

    A call runs on the current stream of its arrays' device, does not synchronise, and allocates
    nothing: a CUDA graph can capture it, and the arrays' contents may differ between replays.

    Examples
    --------
    Three tokens in blocks of 2, the second of them left out:

    >>> import numpy as np, cupyattn
    >>> k_cache, v_cache = np.zeros((2, 4, 2, 1, 2), np.float32)
    >>> k, v = np.arange(12, dtype=np.float32).reshape(2, 3, 1, 2)
    >>> cupyattn.append_kv(k_cache, v_cache, k, v, np.array([5, -1, 0]))
    >>> k_cache[2, 1, 0], k_cache[0, 0, 0]
    (array([0., 1.], dtype=float32), array([4., 5.], dtype=float32))

    Rotated, and stored in 8 bits:

    >>> cos, sin = cupyattn.rope_tables(16, 2)
    >>> k_cache, v_cache = np.zeros((2, 4, 2, 1, 2), np.int8)
    >>> k_scales, v_scales = np.zeros((2, 4, 2, 1), np.float32)
    >>> cupyattn.append_kv(k_cache, v_cache, k, v, np.array([5, -1, 0]), rotary=(cos, sin),
    ...     positions=np.array([0, 1, 2]), k_scales=k_scales, v_scales=v_scales)
    >>> k_cache[2, 1, 0] * k_scales[2, 1]
    array([0., 1.], dtype=float32)
    """
    operands, interleaved = _adopted(
        {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "slot_mapping": slot_mapping,
         "q": q, "positions": positions, "k_scales": k_scales, "v_scales": v_scales},
        rotary,
    )  # fmt: skip
    problem = append_problem(operands, interleaved=interleaved)
    device = device_of(operands)
    if device is None:
        _on_cpu(problem, operands.arrays)
    else:
        run_append(device, problem, operands)


def _adopted(arrays: dict[str, Any], rotary: Any) -> tuple[Operands, bool]:
    if rotary is None:
        return adopt(arrays, _FIXES), False
    tables = checked_rotary(rotary)
    adopted = adopt({**arrays, "cos": tables.cos, "sin": tables.sin}, _FIXES)
    return adopted, tables.interleaved


def _on_cpu(problem: AppendProblem, arrays: dict[str, Array]) -> None:
    slots = arrays["slot_mapping"]

    def rotated(x: Array) -> np.ndarray:
        return reference.rotated(
            x, arrays["cos"], arrays["sin"], arrays["positions"], interleaved=problem.interleaved
        )

    k, v = arrays["k"], arrays["v"]
    if "cos" in arrays:
        k = rotated(k)
        if not problem.caches.quantised:
            k = round_into(None, k, problem.caches.dtype)
    reference.append_kv(arrays["k_cache"], k, slots, arrays.get("k_scales"))
    reference.append_kv(arrays["v_cache"], v, slots, arrays.get("v_scales"))
    if "q" in arrays:
        round_into(arrays["q"], rotated(arrays["q"]), problem.dtype)
