"""Sampling: the next token of each row of logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.sampling import reference
from cupyattn.ops.sampling.options import SampleNumbers
from cupyattn.ops.sampling.plan import run_sample, sample_problem
from cupyattn.runtime.arrays import Array, exports_memory
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import adopt
from cupyattn.runtime.checks import fixes_of_results

_FIXES = {"previous": "pass an int32 array of shape (B, T)", **fixes_of_results("out")}
_NUMBERS = (float, int, type(None))
"""What most options are: to ask whether these export memory takes a microsecond."""


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
    r"""Draw a token of each row of logits, from the softmax over those that filters leave.

    Every option is a number for all rows, or an array (rows,) with one for each. A GPU reads arrays
    when the kernels run, so that they may change between replays of a CUDA graph.

    Parameters
    ----------
    logits : array (rows, V)
        float16, float32 or bfloat16, CuPy or NumPy; V is 1 to 262,144. The last axis is contiguous,
        rows may lie at any stride. -inf is never drawn, nor is NaN; of +inf the first.
    seed : int or array of uint64 or int64, or None
        What tokens are drawn from, 0 to 2**64 - 1. A number s gives row i the seed s + i (modulo
        2**64); an array gives each row its own, so that a request draws the same whatever row it
        has. None only with ``temperature=0``.
    step : int or array of int32 or int64
        Which draw with this seed it is, from 0 on: another one for each token of a text.
    temperature : float or array of float32
        Divides the logits. 0 (or less than 1e-6) takes the largest, of equal ones the first,
        whatever the filters.
    top_k : int or array of int32 or int64, optional
        How many of the largest logits to keep. None, 0 and V or more keep all.
    top_p : float or array of float32, optional
        Keep the fewest of the most probable tokens whose probabilities add up to this one (above 0,
        at most 1). The last token kept is the one with which the sum reaches top_p; tokens as
        probable as that one are kept too. None and 1 keep all.
    min_p : float or array of float32, optional
        Keep tokens with at least this share of the largest probability, 0 to 1. None and 0 keep
        all.
    repetition_penalty : float or array of float32
        Divides the logits of previous tokens where they are positive, and multiplies the others.
    previous : int32 array (rows, width), optional
        The tokens that repetition_penalty weakens, each once however often it is there; -1 is none.
    out : int32 array (rows,), optional
        Where to write the result; must not overlap the others.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. With filters it is about 83,000 bytes a row and 12 for each 4,096
        tokens of a row, without them less; an error says how many.

    Returns
    -------
    int32 array (rows,)
        Ids of tokens; -1 for a row without a logit above -inf.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, dtypes that are not allowed,
        options of another kind, no seed, and repetition_penalty without previous.
    ValueError
        For shapes or strides that do not fit, more than 262,144 tokens, and numbers out of range.
        Those in arrays are looked at on the CPU, and with ``backend(checks=True)``. Otherwise a GPU
        takes a negative top_k, a min_p below 0 and a top_p above 1 as none, a negative temperature
        as 0, and leaves out previous tokens that are not in the vocabulary.
    RuntimeError
        As `attention`.

    Notes
    -----
    The filters act in this order: repetition_penalty (Keskar et al., "CTRL", arXiv:1909.05858,
    section 4.1); temperature; top_k; top_p of the probability that top_k leaves (nucleus sampling,
    Holtzman et al., "The curious case of neural text degeneration", arXiv:1904.09751, section 3.1);
    min_p relative to the largest probability (Nguyen et al., "Turning up the heat",
    arXiv:2407.01082, section 3). Each keeps an upper part of the scores, equal ones together: ties
    at its end are kept. Scores are equal that differ by less than 2**-24 in base 2. A sum reaches
    top_p from ``top_p * (1 - 2**-18)`` on, and a score min_p's up to 2**-18 below it, because
    float32 logits, scores and sums are rounded: of the probabilities .5, .3, .1 and .1 a top_p of
    .8 keeps two, and so does a min_p of .6.

    Of the kept tokens the one with the largest ``s - log2(-log2(u))`` is taken, which draws each
    with its probability (the Gumbel-max trick: Maddison, Tarlow and Minka, "A* sampling",
    arXiv:1411.0030, section 2). s is its score in base 2: the logit less the row's largest, times
    ``log2(e) / temperature``. u is ``(word | 1) / 2**32``, where token j has word j % 4 of
    Philox4x32-10 with the seed as key and the counter ``(j // 4, step % 2**32, step // 2**32, 2**31
    + 1)``. Its 31 bits never draw a token that is 2**37 times less probable than the first.

    A draw depends on a row's logits and options alone, not on other rows, strides or the device.
    Sums are of integers, and the float32 arithmetic is that of NumPy to the last bit:
    ``cupyattn.reference.sample`` gives the same ids. Nothing is read by the host and nothing waits;
    with out and workspace nothing is allocated. Logits are read once with ``temperature=0``,
    otherwise twice, and three times with top_k or top_p.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> logits = np.array([[1.0, 3.0, 2.0], [0.0, 0.0, 9.0]], np.float32)
    >>> cupyattn.sample(logits, seed=None, temperature=0)
    array([1, 2], dtype=int32)
    >>> cupyattn.sample(logits, seed=0, top_k=2, step=1)
    array([2, 2], dtype=int32)

    Each row its own seed and share, and tokens not to be repeated:

    >>> cupyattn.sample(logits, seed=np.array([7, 8]), top_p=np.array([0.5, 0.9], np.float32),
    ...                 repetition_penalty=2.0, previous=np.array([[1, -1], [2, 2]], np.int32))
    array([2, 2], dtype=int32)
    """
    arrays: dict[str, Any] = {"logits": logits}
    numbers: dict[str, Any] = {}
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
        (arrays if not is_number and exports_memory(value) else numbers)[name] = value
    operands = adopt({**arrays, "previous": previous, "out": out, "workspace": workspace}, _FIXES)
    told = SampleNumbers.of(numbers)
    problem = sample_problem(operands, told)
    device = device_of(operands)
    if device is not None:
        return run_sample(device, problem, told, operands)
    given = {name: operands.arrays.get(name, getattr(told, name)) for name in told._fields}
    ids = reference.sample(
        operands.arrays["logits"], **given, previous=operands.arrays.get("previous")
    )
    if "out" not in operands.arrays:
        return ids
    result = operands.arrays["out"]
    result[...] = ids
    return result
