"""Keys in int8 with a scale each: their record, and `quantize_keys`, which makes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from cupyattn.ops.attention.options import MAX_INT8_HEAD_DIM
from cupyattn.ops.attention.problem import ARRAY_FIXES
from cupyattn.ops.attention.reference import quantised as reference
from cupyattn.ops.attention.rotary import KeysArrays, KeysProblem, keys_plan
from cupyattn.ops.attention.values import counts_of, require_used
from cupyattn.ops.rope.api import Rotary, checked_rotary, require_rotary_tables
from cupyattn.ops.rope.reference import rope
from cupyattn.runtime import html
from cupyattn.runtime.arrays import (
    ALIGNMENT,
    Array,
    Description,
    Layout,
    Operands,
    adopt,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import (
    FLOATS,
    INTEGERS,
    Overlaps,
    fixes_of_results,
    require_contiguous_rows,
    require_dtype,
    require_given,
    require_output,
    require_own_items,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.errors import NotAnArray, error, shown, size_text
from cupyattn.runtime.outputs import round_into
from cupyattn.runtime.plan import Output, run
from cupyattn.runtime.records import Record, T, given_of
from cupyattn.runtime.storage import rows_aligned
from cupyattn.runtime.value_checks import checks_values, on_host, require_within

_CODES, _FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)


@dataclass(slots=True)
class KeyCodeArrays(Record[T]):
    """Arrays of quantised keys."""

    codes: T
    scales: T
    centre: T


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class QuantizedKeys(NotAnArray):
    """Keys in int8 with a scale each, for attention in the place of k.

    `quantize_keys` makes them. Letters: G key-value heads, D head dim (1 to 256).

    Parameters
    ----------
    codes : int8 array (B, S, G, D) or (total, G, D)
        From -127 to 127. (num_blocks, block_size, G, D) is a pool of blocks. The last axis is
        contiguous; the others may have any stride, so that one layer of a larger array needs no
        copy. The codes of a key start at a multiple of gcd(D, 16) bytes.
    scales : float32 array (B, S, G) or (total, G)
        With any strides. A key is ``codes * scale + centre``.
    centre : float32 array (G, D) or (B, G, D)
        Subtracted from the keys: one for all, or one for each batch element or sequence.
        The last axis is contiguous.

    Attributes
    ----------
    shape : tuple of int
        The shape of codes.
    ndim : int
        The number of its axes.
    nbytes : int
        Bytes of the three arrays.

    Raises
    ------
    TypeError
        For anything that is not an array, NumPy and CuPy arrays mixed, and other dtypes.
    ValueError
        For arrays that do not fit each other, and strides or starts that are not allowed.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> k = np.random.default_rng(0).standard_normal((1, 5, 2, 8), dtype=np.float32)
    >>> cupyattn.quantize_keys(k)
    <QuantizedKeys (1, 5, 2, 8), 184 bytes>
    """

    NOT_AN_ARRAY = (
        "attention takes it in the place of k",
        "take the arrays .codes, .scales and .centre; a key is codes * scale + centre",
    )

    codes: Array
    scales: Array
    centre: Array

    def __post_init__(self) -> None:
        arrays = KeyCodeArrays(self.codes, self.scales, self.centre)
        operands = adopt(arrays)
        for name, array in given_of(arrays).items():
            object.__setattr__(self, name, array)
        _require_pieces(operands.description)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of codes."""
        return tuple(self.codes.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.codes.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the three arrays."""
        return int(self.codes.nbytes + self.scales.nbytes + self.centre.nbytes)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<QuantizedKeys {self.shape}, {self.nbytes:,} bytes>"

    def _repr_html_(self) -> str:
        known = {
            "shape": str(self.shape),
            "centre": str(tuple(self.centre.shape)),
            "size": size_text(self.nbytes),
        }
        return html.section("QuantizedKeys", html.facts(known))


@lru_cache(maxsize=4096)
def _require_pieces(description: Description) -> None:
    layouts = layouts_of(KeyCodeArrays[Layout], description)
    starts = starts_of(KeyCodeArrays[int], description)
    for name, layout in (("codes", layouts.codes), ("scales", layouts.scales)):
        require_given(name, layout)
    require_given("centre", layouts.centre)
    codes, scales, centre = layouts.codes, layouts.scales, layouts.centre
    fix = "pass arrays that quantize_keys has made, or views of them"
    require_dtype("codes", codes, ("int8",), fix)
    require_dtype("scales", scales, ("float32",), fix)
    require_keys_shape("codes", codes)
    require_contiguous_rows("codes", codes)
    require_shape("scales", scales, codes.shape[:-1], "shaped like codes without D")
    require_whole_item_strides("scales", scales)
    unit = math.gcd(codes.shape[-1], ALIGNMENT)
    if not rows_aligned([(codes, starts.codes)], unit):
        raise error(
            ValueError,
            f"codes start {starts.codes} bytes beyond a multiple of {ALIGNMENT}, with strides "
            f"{codes.strides}",
            f"each key starts at a multiple of {unit} bytes, gcd(D, 16): kernels load as many",
            "pass a contiguous copy, codes.copy()",
        )
    if starts.scales % scales.dtype.itemsize:
        raise error(
            ValueError,
            f"scales start {starts.scales} bytes beyond a multiple of {ALIGNMENT}",
            "float32 items start at a multiple of 4",
            "pass a contiguous copy, scales.copy()",
        )
    require_centre(centre, codes.shape, None)


def require_keys_shape(name: str, layout: Layout) -> None:
    """Raise ValueError unless keys are (B, S, G, D) or (total, G, D) of a D that is allowed."""
    if len(layout.shape) not in (3, 4):
        raise error(
            ValueError,
            f"{name} has shape {layout.shape}",
            "keys are (B, S, G, D), or packed (total, G, D)",
            f"pass {name}[:, None] for the keys of one head",
        )
    if not 1 <= layout.shape[-1] <= MAX_INT8_HEAD_DIM:
        raise error(
            ValueError,
            f"{name} has head dim D = {layout.shape[-1]}",
            f"head dims of quantised keys are 1 to {MAX_INT8_HEAD_DIM}",
            "keep such keys in their dtype",
        )


def require_centre(centre: Layout, shape: tuple[int, ...], sequences: int | None) -> None:
    """Raise unless a centre fits keys of this shape; `sequences` is None where it is not known."""
    require_dtype("centre", centre, ("float32",))
    heads = shape[-2:]
    batch = shape[0] if len(shape) == 4 else sequences
    several = len(centre.shape) == 3 and centre.shape[1:] == heads
    if not (several and batch in (None, centre.shape[0])) and centre.shape != heads:
        of_each = f"({'sequences' if batch is None else batch}, {heads[0]}, {heads[1]})"
        raise error(
            ValueError,
            f"centre has shape {centre.shape}",
            f"with keys {shape} it is {heads} or {of_each}",
            "pass such an array",
        )
    require_contiguous_rows("centre", centre)


def keys_problem(operands: Operands[KeysArrays[Array]], interleaved: bool) -> KeysProblem:
    """Check a call of quantize_keys: its description, unless checked before, and its values."""
    problem = _described_keys(operands.description, interleaved)
    problem.overlaps.check(operands)
    if checks_values(operands):
        _require_values(problem, operands.arrays)
    return problem


def _require_values(problem: KeysProblem, arrays: KeysArrays[Array]) -> None:
    """Raise ValueError for cu_seqlens and positions that do not fit; a GPU is waited for."""
    longest = problem.layouts.k.shape[-3]
    counts = np.asarray(longest)
    if arrays.cu_seqlens is not None:
        counts = counts_of("cu_seqlens", arrays.cu_seqlens, longest, longest, "k")
        longest = int(counts.max(initial=0))
    if arrays.seqused_k is not None:
        require_used(on_host(arrays.seqused_k), counts, "the keys of its sequence", "k")
    if problem.layouts.cos is None:
        return
    length = problem.layouts.cos.shape[0]
    if arrays.positions is not None:
        fix = "pass longer tables, or other positions"
        require_within("positions", arrays.positions, length, "rotary's tables have", fix)
    elif longest > length:
        raise error(
            ValueError,
            f"a sequence has {longest} keys",
            f"the rotary tables have positions 0 to {length - 1}",
            "pass longer tables, or positions",
        )


@lru_cache(maxsize=4096)
def _described_keys(description: Description, interleaved: bool) -> KeysProblem:
    layouts = layouts_of(KeysArrays[Layout], description)
    k, bounds, centre = layouts.k, layouts.cu_seqlens, layouts.centre
    require_given("k", k)
    require_dtype("k", k, FLOATS)
    require_keys_shape("k", k)
    require_contiguous_rows("k", k)
    if bounds is not None:
        _require_bounds(bounds, k)
    _require_rotation(layouts)
    sequences = None if bounds is None else bounds.shape[0] - 1
    batch = k.shape[:1] if len(k.shape) == 4 else () if sequences is None else (sequences,)
    outputs = {"codes": Output(k.shape, _CODES), "scales": Output(k.shape[:-1], _FLOAT32)}
    if centre is None:
        outputs["centre_out"] = Output((*batch, *k.shape[-2:]), _FLOAT32)
    else:
        _require_given_centre(centre, k.shape, sequences)
    if layouts.seqused_k is not None:
        _require_used_keys(layouts.seqused_k, (*batch,) or (1,), computed=centre is None)
    for name, output in outputs.items():
        given = getattr(layouts, name)
        if given is not None:
            _require_result(layouts.SHOWN_AS[name], given, output)
    overlaps = Overlaps.of(layouts, (*outputs, "q"))
    starts = starts_of(KeysArrays[int], description)
    return KeysProblem(layouts, starts, outputs, overlaps, interleaved and layouts.cos is not None)


def _require_rotation(layouts: KeysArrays[Layout]) -> None:
    k, q, positions = layouts.k, layouts.q, layouts.positions
    if layouts.cos is None or layouts.sin is None:
        for name, layout in (("positions", positions), ("q", q)):
            if layout is not None:
                raise error(
                    ValueError,
                    f"{name} was given without rotary",
                    "positions and q are for rotations",
                    f"pass rotary=(cos, sin), or leave {name} out",
                )
        return
    require_rotary_tables(layouts.cos, layouts.sin, k.shape[-1])
    if positions is not None:
        require_dtype("positions", positions, INTEGERS)
        require_shape("positions", positions, k.shape[:-2], "(B, S) or (total,) of k's tokens")
        require_whole_item_strides("positions", positions)
    if q is not None:
        require_same_dtype({"q": q, "k": k})
        require_rank("q", q, "B S H D" if len(k.shape) == 4 else "total H D")
        expected = (*k.shape[:-2], q.shape[-2], k.shape[-1])
        require_shape("q", q, expected, "of k's tokens and D")
        require_output("q", q, expected, k.dtype)


def _require_given_centre(centre: Layout, shape: tuple[int, ...], sequences: int | None) -> None:
    require_centre(centre, shape, sequences)
    if len(centre.shape) == len(shape) == 3 and sequences is None:
        raise error(
            ValueError,
            f"centre has shape {centre.shape}, with packed keys {shape} and without cu_seqlens",
            f"packed keys without it are one sequence, with a centre {shape[1:]}",
            "pass cu_seqlens too",
        )


def _require_used_keys(used: Layout, shape: tuple[int, ...], *, computed: bool) -> None:
    if not computed:
        raise error(
            ValueError,
            "seqused_k was given with centre",
            "it decides the keys of which a centre is computed",
            "leave one of both out",
        )
    require_dtype("seqused_k", used, INTEGERS)
    require_shape("seqused_k", used, shape, "one of each sequence")
    require_whole_item_strides("seqused_k", used)


def _require_result(name: str, given: Layout, output: Output) -> None:
    require_shape(name, given, output.shape, "shaped as the result")
    require_own_items(name, given)


def _require_bounds(bounds: Layout, k: Layout) -> None:
    require_dtype("cu_seqlens", bounds, INTEGERS)
    require_whole_item_strides("cu_seqlens", bounds)
    if len(k.shape) == 4:
        raise error(
            ValueError,
            f"cu_seqlens was given with keys {k.shape}",
            "it is for packed keys (total, G, D)",
            "leave it out: each batch element has its own centre",
        )
    empty = 0 in k.shape[:2]
    if len(bounds.shape) != 1 or bounds.shape[0] < (1 if empty else 2):
        raise error(
            ValueError,
            f"cu_seqlens has shape {bounds.shape}, with keys {k.shape}",
            "it is (sequences + 1,), and keys belong to at least one sequence",
            "pass numpy.cumsum of the lengths, with a 0 in front",
        )


_FIXES = {
    "positions": "pass an int32 array with the position of each token, of shape k.shape[:-2]",
    "cu_seqlens": "pass numpy.cumsum of the lengths, with a 0 in front",
    "seqused_k": ARRAY_FIXES["seqused_k"],
    **fixes_of_results("q"),
}


def quantize_keys(
    k: Array,
    /,
    *,
    centre: Array | None = None,
    cu_seqlens: Array | None = None,
    seqused_k: Array | None = None,
    rotary: tuple[Array, Array] | Rotary | None = None,
    positions: Array | None = None,
    q: Array | None = None,
    out: QuantizedKeys | None = None,
) -> QuantizedKeys:
    r"""Quantise keys to int8 with one scale for each key and head, for attention with int8 scores.

    The same launch can rotate k and q. Letters: B batch, S tokens, G key-value heads, H query
    heads, D head dim (1 to 256).

    Parameters
    ----------
    k : array (B, S, G, D) or (total, G, D)
        float16, float32 or bfloat16, CuPy or NumPy. The last axis is contiguous; the others may
        have any stride.
    centre : float32 array (G, D) or (B, G, D), optional
        What is subtracted from the keys first: one for all, or one for each batch element or
        sequence. By default it is computed, see Notes. Pass the centre of a sequence's first keys
        with its later ones: keys of one sequence share a centre.
    cu_seqlens : int32 or int64 array (sequences + 1,), optional
        The keys of sequence b are rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]`` of packed keys,
        and each sequence has its own centre (sequences, G, D). Without it packed keys are one
        sequence with a centre (G, D).
    seqused_k : int32 or int64 array (B,), optional
        Number of keys in use of each batch element or sequence, as in `attention`. A centre is
        computed from these alone, so the keys after them may hold anything, NaN too. They get codes
        and scales like any others. Not with centre. A GPU clamps it to the keys that exist.
    rotary : Rotary or (cos, sin), optional
        Tables of cosines and sines (positions, R/2), as of `rope_tables`: the first R features of k
        are rotated before they are quantised, as `rope` rotates them, with no rounding in between.
        k itself stays as it is.
    positions : int32 or int64 array (B, S) or (total,), optional
        The position of each token: a row of the tables. By default key j of a sequence is at j.
    q : array (B, S, H, D) or (total, H, D), dtype of k, optional
        The queries of the same tokens, which are rotated in place. Only with rotary.
    out : QuantizedKeys, optional
        Where to write: keys of the shape of k. A computed centre is written to ``out.centre``; with
        ``centre=``, that is ``out.centre`` itself.

    Returns
    -------
    QuantizedKeys
        Codes in the shape of k, on its device.

    Raises
    ------
    TypeError
        For anything that is not an array, NumPy and CuPy arrays mixed, or a dtype or out that is
        not allowed.
    ValueError
        For shapes and strides that are not allowed, an out that does not fit, has another centre or
        overlaps an input, q or positions without rotary, and seqused_k with centre. If values
        are checked (`backend`; NumPy arrays always) for cu_seqlens that fall or reach past k, for
        seqused_k outside of 0 to the keys that exist, and for positions outside of the tables.
        Where values are not checked, a GPU gives a key at such a position the scale NaN.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    With c the centre of its sequence and head, a key k has the scale max\|k - c\| / 127 and the
    codes (k - c) * (127 / max\|k - c\|), rounded to the nearest even integer. A key whose
    differences are all below 2**-100 has codes 0 and the scale 2**-126. A key with a NaN or an
    infinity, also of k - c, has codes 0 and the scale NaN: each score of it is NaN.

    Softmax is the same for k and k - c, since q c is added to all scores of a query; what the keys
    of a head have in common then takes no part of the codes' range (Zhang et al., "SageAttention",
    arXiv:2410.02367, section 4.2). A computed centre is the mean of every n-th key in use, n
    the least for which these are at most 256. Items that are not finite count as 0, and a mean that
    overflows is 0.

    Each operation is float32 and correctly rounded, subnormal numbers are 0, and sums have a fixed
    order: without rotary results are equal on every device, bit by bit.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> k = np.float32([[5, 1], [5, -2], [5, 1]]).reshape(1, 3, 1, 2)
    >>> keys = cupyattn.quantize_keys(k)
    >>> keys.centre
    array([[[5., 0.]]], dtype=float32)
    >>> keys.codes[0, :, 0].tolist(), keys.scales.ravel() * 127
    ([[0, 127], [0, -127], [0, 127]], array([1., 2., 1.], dtype=float32))

    A fourth key of the same sequence:

    >>> more = cupyattn.quantize_keys(np.float32([6, 0.5]).reshape(1, 1, 1, 2), centre=keys.centre)
    >>> more.codes.ravel().tolist()
    [127, 64]
    """
    arrays: KeysArrays[Any] = KeysArrays(
        k, cu_seqlens, seqused_k, positions=positions, centre=centre, q=q
    )
    interleaved = False
    if rotary is not None:
        arrays.cos, arrays.sin, interleaved = checked_rotary(rotary)
    if out is not None:
        _take_keys(arrays, out)
    operands = adopt(arrays, _FIXES)
    problem = keys_problem(operands, interleaved)
    device = device_of(operands)
    if device is not None:
        run(device, keys_plan(problem), operands)
    else:
        _quantized_on_cpu(problem, cast("KeysArrays[np.ndarray]", arrays))
    if out is not None:
        return out
    made: Any = arrays
    return QuantizedKeys(
        made.codes, made.scales, made.centre_out if centre is None else made.centre
    )


def _take_keys(arrays: KeysArrays[Any], out: Any) -> None:
    """Put the arrays of out= into the fields of results."""
    if not isinstance(out, QuantizedKeys):
        raise error(
            TypeError,
            f"out is {shown(out)}",
            "it is QuantizedKeys",
            "pass keys of an earlier call, or none",
        )
    arrays.codes, arrays.scales = out.codes, out.scales
    if arrays.centre is None:
        arrays.centre_out = out.centre
        return
    both = adopt(KeyCodeArrays[Any](out.codes, arrays.centre, out.centre))
    if both.places[1] != both.places[2] or both.description[1] != both.description[2]:
        raise error(
            ValueError,
            "centre is not out.centre",
            "keys in out have the centre that out holds",
            "pass centre=out.centre, or an out = QuantizedKeys(codes, scales, centre)",
        )


def _quantized_on_cpu(problem: KeysProblem, arrays: KeysArrays[np.ndarray]) -> None:
    k, bounds, centre = arrays.k, arrays.cu_seqlens, arrays.centre
    cos, sin = arrays.cos, arrays.sin
    if cos is not None and sin is not None:
        positions = arrays.positions
        if positions is None:
            positions = reference.key_positions(k.shape, bounds)
        for tokens in (k, arrays.q):
            if tokens is None:
                continue
            several = tokens[None] if tokens.ndim == 3 else tokens
            places = np.broadcast_to(positions, several.shape[:2])
            turned = rope(several, cos, sin, places, interleaved=problem.interleaved)
            if tokens is k:
                k = turned.reshape(k.shape).astype(np.float32)
            else:
                round_into(tokens, turned.reshape(tokens.shape), tokens.dtype)
    made: dict[str, np.ndarray] = {}
    if centre is None:
        made["centre_out"] = centre = reference.key_centres(k, bounds, arrays.seqused_k)
    made["codes"], made["scales"] = reference.quantize_keys(k, centre, bounds)
    for name, array in made.items():
        target = getattr(arrays, name)
        if target is None:
            setattr(arrays, name, array)
        else:
            target[...] = array


def int8_keys(k: Any, implementation: str, seqused_k: Array | None) -> QuantizedKeys:
    """Return the int8 keys of a call, of which `seqused_k` are in use."""
    if not isinstance(k, QuantizedKeys):
        return quantize_keys(k, seqused_k=seqused_k)
    if implementation not in ("flash", "int8"):
        raise error(
            ValueError,
            f"implementation = {shown(implementation)} with QuantizedKeys",
            "int8 keys have one kernel, implementation='int8'",
            "leave it out, or pass k as it was",
        )
    return k


NO_GRADIENTS = (
    "with the lse of int8 scores the weights of a row no longer add up to 1: they are off by 0.1 "
    "to 1.5 % in the median, by up to 14 %"
)
"""Why int8 keys have no gradients. The least median is that of normal keys, the others are those of
outlier channels, peaked rows and rotated keys (measured in NumPy, 2026-11-29, as
tests/attention/test_int8.py does)."""


def require_no_int8_keys(function: str, k: Any, implementation: str = "flash") -> None:
    """Raise NotImplementedError for a backward over int8 keys."""
    if isinstance(k, QuantizedKeys) or (type(implementation) is str and implementation == "int8"):
        raise error(
            NotImplementedError,
            f"{function} over int8 keys",
            f"gradients are those of exact scores: {NO_GRADIENTS}",
            "train with k as an array, and use int8 keys for inference",
        )
