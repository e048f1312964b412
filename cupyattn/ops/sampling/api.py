"""Sampling: the next token of each row of logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.sampling import reference
from cupyattn.ops.sampling.kernels import SampleArrays, SampleNumbers, run_sample, sample_problem
from cupyattn.runtime.arrays import Array, adopt, exports_memory
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import fixes_of_results

_FIXES = {"previous": "pass an int32 array of shape (B, T)", **fixes_of_results("out")}
_NUMBERS = (float, int, type(None))
"""Types of most options. Testing whether a number exports memory would take a microsecond."""


def sample(
    logits: Array,
    /,
    *,
    seed: int | Array | None,
    step: int | Array = 0,
    temperature: float | Array = 1.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    min_p: float | Array | None = None,
    repetition_penalty: float | Array = 1.0,
    previous: Array | None = None,
    out: Array | None = None,
    workspace: Array | None = None,
) -> Array:
    r"""Draw a token of each row of logits, from the softmax over the tokens that the filters keep.

    Every option is a number for all rows, or an array (rows,) with one number for each. The kernels
    read such arrays when they run, so they may change between replays of a CUDA graph.

    Parameters
    ----------
    logits : array (rows, V)
        float16, float32 or bfloat16, CuPy or NumPy; V is 1 to 262,144. The last axis is contiguous;
        rows may have any stride. -inf and NaN are never drawn; if there is a +inf, the first one
        is.
    seed : int or array of uint64 or int64, or None
        The random seed, 0 to 2**64 - 1. A number s gives row i the seed s + i (modulo 2**64). An
        array gives each row its own seed, so that a request draws the same tokens in any row. None
        is allowed only with ``temperature=0``.
    step : int or array of int32 or int64
        The number of this draw with this seed, counted from 0: another one for each token of a
        text.
    temperature : float or array of float32
        Divides the logits. 0 (or less than 1e-6) takes the largest logit, the first of equal ones,
        whatever the filters are.
    top_k : int or array of int32 or int64, optional
        How many of the largest logits to keep. None, 0 and V or more keep all.
    top_p : float or array of float32, optional
        Keep the fewest of the most probable tokens whose probabilities add up to this one (above 0,
        at most 1). The last token kept is the one with which the sum reaches top_p; equally
        probable tokens are kept too. None and 1 keep all.
    min_p : float or array of float32, optional
        Keep tokens whose probability is at least this fraction of the largest, 0 to 1. None and 0
        keep all.
    repetition_penalty : float or array of float32
        Divides positive logits of previous tokens, and multiplies the negative ones.
    previous : int32 array (rows, width), optional
        The tokens that repetition_penalty weakens. A token that occurs several times is weakened
        once; -1 is no token.
    out : int32 array (rows,), optional
        Where to write the result; must not overlap the others.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. With filters a row needs about 83,000 bytes, and 12 more for each
        4,096 tokens; without filters less. The error for a smaller one reports the size.

    Returns
    -------
    int32 array (rows,)
        The drawn tokens' ids; -1 for a row without a logit above -inf.

    Raises
    ------
    TypeError
        For logits that are not an array, NumPy and CuPy arrays mixed, dtypes that are not allowed,
        options of another type, no seed, and repetition_penalty without previous.
    ValueError
        For shapes or strides that are not allowed, more than 262,144 tokens, and numbers out of
        range. Numbers in arrays are checked on the CPU, and with ``backend(checks=True)``. Without
        these checks a GPU ignores a negative top_k, a min_p below 0, a top_p above 1 and previous
        tokens that are not in the vocabulary, and takes a negative temperature as 0.
    RuntimeError
        As `attention`.

    Notes
    -----
    The filters act in this order: repetition_penalty (Keskar et al., "CTRL",
    arXiv:1909.05858, section 4.1); temperature; top_k; top_p of the probability that top_k
    leaves (nucleus sampling, Holtzman et al., "The curious case of neural text degeneration",
    arXiv:1904.09751, section 3.1); min_p relative to the largest probability (Nguyen et al.,
    "Turning up the heat", arXiv:2407.01082, section 3). Each filter keeps the largest scores,
    and all that are equal to the smallest one kept. Scores that differ by less than 2**-24 in
    base 2 are equal. Because float32 logits, scores and sums are rounded, a sum reaches top_p
    at ``top_p * (1 - 2**-18)``, and a score reaches that of min_p at 2**-18 below it. From the
    probabilities .5, .3, .1 and .1 a top_p of .8 keeps two tokens, and so does a min_p of .6.

    The kept token with the largest ``s - log2(-log2(u))`` is taken, which draws each token with
    its probability (the Gumbel-max trick: Maddison, Tarlow and Minka, "A* sampling",
    arXiv:1411.0030, section 2). s is the token's score in base 2: its logit minus the row's
    largest, times ``log2(e) / temperature``. u is ``(word | 1) / 2**32``, where token j has word
    j % 4 of Philox4x32-10 with the seed as key and the counter
    ``(j // 4, step % 2**32, step // 2**32, 2**31 + 1)``. With these 31 bits a token that is
    2**37 times less probable than the first is never drawn.

    A draw depends only on a row's logits and options, not on other rows, strides or the device.
    Sums are integers and the float32 arithmetic is that of NumPy to the last bit, so
    ``cupyattn.reference.sample`` gives the same ids. The host reads nothing and does not wait; with
    out and workspace nothing is allocated. Logits are read once with ``temperature=0``, three times
    with top_k or top_p, and otherwise twice.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> logits = np.array([[1.0, 3.0, 2.0], [0.0, 0.0, 9.0]], np.float32)
    >>> cupyattn.sample(logits, seed=None, temperature=0)
    array([1, 2], dtype=int32)
    >>> cupyattn.sample(logits, seed=0, top_k=2, step=1)
    array([2, 2], dtype=int32)

    Each row has its own seed and top_p, and tokens that should not be repeated:

    >>> cupyattn.sample(logits, seed=np.array([7, 8]), top_p=np.array([0.5, 0.9], np.float32),
    ...                 repetition_penalty=2.0, previous=np.array([[1, -1], [2, 2]], np.int32))
    array([2, 2], dtype=int32)
    """
    arrays = SampleArrays(logits, previous=previous, out=out, workspace=workspace)
    numbers: dict[str, object] = {}
    for name, value in (
        ("seed", seed),
        ("step", step),
        ("temperature", temperature),
        ("top_k", top_k),
        ("top_p", top_p),
        ("min_p", min_p),
        ("repetition_penalty", repetition_penalty),
    ):
        is_number = type(value) in _NUMBERS or isinstance(value, np.generic)
        if is_number or not exports_memory(value):
            numbers[name] = value
        else:
            setattr(arrays, name, value)
    operands = adopt(arrays, _FIXES)
    checked = SampleNumbers.of(numbers)
    problem = sample_problem(operands, checked)
    device = device_of(operands)
    if device is not None:
        return run_sample(device, problem, checked, operands)
    return _on_cpu(arrays, checked)


def _on_cpu(arrays: SampleArrays[Any], numbers: SampleNumbers) -> Array:
    options = {
        name: number if getattr(arrays, name) is None else getattr(arrays, name)
        for name, number in numbers._asdict().items()
    }
    ids = reference.sample(arrays.logits, **options, previous=arrays.previous)
    if arrays.out is None:
        return ids
    arrays.out[...] = ids
    return arrays.out
