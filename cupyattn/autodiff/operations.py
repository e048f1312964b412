"""Array operations that `vjp` differentiates, for NumPy and CuPy arrays and for traced ones.

Each derivative is written as a function that keeps only the arrays which it needs. Operators and
methods of traced arrays, and NumPy's functions, come here too. CuPy's functions do not: call those
of this module on CuPy arrays.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.autodiff.tape import (
    PartialGradient,
    Spec,
    Tape,
    TapeNode,
    Traced,
    constant,
    is_differentiable,
    is_float,
    is_traced,
    library_of,
    narrow,
    raw,
    refusal_of_values,
    spec_of,
    tape_of,
    zeros,
)
from cupyattn.ops.embedding.api import embedding_backward
from cupyattn.ops.linear.api_matmul import product_by
from cupyattn.runtime.annotations import Undescribed

Axis = int | tuple[int, ...] | None
Gradient = Callable[[Undescribed], Undescribed]


def _library(traced: Traced) -> Any:
    library = library_of(traced._value)
    if library is None:
        raise refusal_of_values(traced, f"it is a {type(traced._value).__name__}")
    return library


def _library_among(values: Sequence[object]) -> Any:
    """Return the library of the first traced array among values, else that of the first array."""
    for value in values:
        if type(value) is Traced:
            return library_of(value._value) or _library(value)
    return next((found for found in map(library_of, values) if found is not None), np)


def _recorded(
    name: str, values: Sequence[object], result: Undescribed, pulls: Sequence[Gradient | None]
) -> Undescribed:
    """Record an operation with one result.

    `pulls` has for each of `values` its gradient as a function of the result's, or None.
    """
    tape: Tape | None = None
    parents, kept = [], []
    for value, pull in zip(values, pulls, strict=True):
        if type(value) is Traced:
            if tape is None:
                tape = value._tape
                tape.require_open()
            elif value._tape is not tape:
                tape_of(values)  # raises
            if pull is not None and value._node >= 0:
                parents.append((value._node, value._output))
                kept.append(pull)
    assert tape is not None
    if not kept:
        return constant(result, tape)
    if not is_float(result.dtype):
        if result.dtype.kind in "biu":
            return constant(result, tape)
        raise tape.refuse(f"makes an array of {result.dtype} ({name})", "use floats")
    if len(kept) == 1:
        only = kept[0]
        node = TapeNode(name, tuple(parents), (spec_of(result),), lambda g: (only(g[0]),))
    else:
        node = TapeNode(
            name, tuple(parents), (spec_of(result),), lambda g: [pull(g[0]) for pull in kept]
        )
    tape.nodes.append(node)
    return Traced(result, tape, len(tape.nodes) - 1, 0)


def _same(gradient: Undescribed) -> Undescribed:
    return gradient


# The gradients of two arguments, from x, y and the result; `fitted` sums those of broadcast ones.
_Rule = Callable[[Any, Any, Any], Gradient]


def _power_base(x: Any, y: Any, _out: Any) -> Gradient:
    library = _library_among((x, y))
    if not hasattr(y, "shape"):
        if y == 2:
            return lambda g: g * (2 * x)
        return lambda g: g * (y * x ** (y - 1)) if y else library.zeros_like(g)
    return lambda g: g * library.where(y == 0, 0, y * x ** library.where(y == 0, 1, y - 1))


def _power_exponent(x: Any, _y: Any, out: Any) -> Gradient:
    if not hasattr(x, "shape"):
        factor = math.log(x) if x > 0 else math.nan if x < 0 else 0.0
        return lambda g: g * out * factor
    library = _library_among((x, out))
    base = library.where(x == 0, 1, library.where(x < 0, np.nan, x)).astype(out.dtype)
    return lambda g: g * out * library.log(base)


def _chosen(compare: Callable[[Any, Any], Any]) -> tuple[_Rule, _Rule]:
    """Return the rules of maximum and minimum; equal arguments get half of the gradient each."""

    def weight(a: Any, b: Any) -> Any:
        return compare(a, b) + 0.5 * (a == b)

    def left(x: Any, y: Any, out: Any) -> Gradient:
        chosen = weight(x, y).astype(out.dtype)
        return lambda g: g * chosen

    def right(x: Any, y: Any, out: Any) -> Gradient:
        chosen = weight(y, x).astype(out.dtype)
        return lambda g: g * chosen

    return left, right


_BINARY: dict[str, tuple[_Rule, _Rule]] = {
    "add": (lambda x, y, out: _same, lambda x, y, out: _same),
    "subtract": (lambda x, y, out: _same, lambda x, y, out: operator.neg),
    "multiply": (lambda x, y, out: lambda g: g * y, lambda x, y, out: lambda g: g * x),
    "divide": (
        lambda x, y, out: lambda g: g / y,
        lambda x, y, out: lambda g: -(g * out) / y,
    ),
    "power": (_power_base, _power_exponent),
    "maximum": _chosen(operator.gt),
    "minimum": _chosen(operator.lt),
}


def _array(value: Undescribed) -> Undescribed:
    return np.asarray(value) if isinstance(value, list) else value


def _binary(name: str, x: Undescribed, y: Undescribed) -> Undescribed:
    a, b = _array(raw(x)), _array(raw(y))
    result = getattr(_library_among((x, y)), name)(a, b)
    if not (is_traced(x) or is_traced(y)):
        return result
    left, right = _BINARY[name]
    pulls = (
        left(a, b, result) if is_differentiable(x) else None,
        right(a, b, result) if is_differentiable(y) else None,
    )
    return _recorded(name, (x, y), result, pulls)


_UNARY: dict[str, Callable[[Any, Any, Any], Gradient]] = {
    "negative": lambda xp, x, out: operator.neg,
    "positive": lambda xp, x, out: _same,
    "absolute": lambda xp, x, out: lambda g: g * xp.sign(x),
    "exp": lambda xp, x, out: lambda g: g * out,
    "log": lambda xp, x, out: lambda g: g / x,
    "sqrt": lambda xp, x, out: lambda g: g / (2 * out),
    "tanh": lambda xp, x, out: lambda g: g * (1 - out * out),
    "square": lambda xp, x, out: lambda g: g * (2 * x),
    "sin": lambda xp, x, out: lambda g: g * xp.cos(x),
    "cos": lambda xp, x, out: lambda g: -(g * xp.sin(x)),
    "log1p": lambda xp, x, out: lambda g: g / (1 + x),
    "expm1": lambda xp, x, out: lambda g: g * (out + 1),
}


def _unary(name: str, x: Undescribed) -> Undescribed:
    library = _library_among((x,))
    result = getattr(library, name)(raw(x))
    if not is_traced(x):
        return result
    return _recorded(name, (x,), result, (_UNARY[name](library, raw(x), result),))


# Results that do not change with their arguments but in steps: constants.
_CONSTANTS = (
    *("less", "less_equal", "equal", "not_equal", "greater", "greater_equal", "logical_and"),
    *("logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("invert", "isnan", "isfinite", "isinf", "sign", "signbit"),
)


def _constant(function: Callable[..., Any], *values: Undescribed, **options: Any) -> Undescribed:
    result = function(*[raw(value) for value in values], **options)
    tape = tape_of(values)
    return result if tape is None else constant(result, tape)


def _along(
    name: str, x: Traced, axis: int | None, out: object = None, keepdims: bool = False
) -> Undescribed:
    if out is not None:
        raise x._tape.refuse(f"passes out= to {name}", "leave out out=")
    options = {"keepdims": True} if keepdims else {}
    return _constant(getattr(_library(x), name), x, axis=axis, **options)


def _step(name: str, *values: Undescribed) -> Undescribed:
    return _constant(getattr(_library_among(values), name), *values)


def exp(x: Undescribed, /) -> Undescribed:
    """Exponential of each element."""
    return _unary("exp", x)


def log(x: Undescribed, /) -> Undescribed:
    """Natural logarithm of each element."""
    return _unary("log", x)


def sqrt(x: Undescribed, /) -> Undescribed:
    """Square root of each element."""
    return _unary("sqrt", x)


def tanh(x: Undescribed, /) -> Undescribed:
    """Hyperbolic tangent of each element."""
    return _unary("tanh", x)


def square(x: Undescribed, /) -> Undescribed:
    """Square of each element."""
    return _unary("square", x)


def sin(x: Undescribed, /) -> Undescribed:
    """Sine of each element."""
    return _unary("sin", x)


def cos(x: Undescribed, /) -> Undescribed:
    """Cosine of each element."""
    return _unary("cos", x)


def log1p(x: Undescribed, /) -> Undescribed:
    """Natural logarithm of 1 + x."""
    return _unary("log1p", x)


def expm1(x: Undescribed, /) -> Undescribed:
    """Exponential minus 1."""
    return _unary("expm1", x)


def abs(x: Undescribed, /) -> Undescribed:
    """Absolute value of each element; its derivative at 0 is 0."""
    return _unary("absolute", x)


def maximum(x: Undescribed, y: Undescribed, /) -> Undescribed:
    """Larger of two elements; equal ones get half of the gradient each."""
    return _binary("maximum", x, y)


def minimum(x: Undescribed, y: Undescribed, /) -> Undescribed:
    """Smaller of two elements; equal ones get half of the gradient each."""
    return _binary("minimum", x, y)


def where(condition: Undescribed, x: Undescribed, y: Undescribed, /) -> Undescribed:
    """Elements of x where the condition is true, else of y."""
    library = _library_among((condition, x, y))
    chosen, a, b = library.asarray(raw(condition)).astype(bool), _array(raw(x)), _array(raw(y))
    result = library.where(chosen, a, b)
    if tape_of((condition, x, y)) is None:
        return result
    pulls = (
        None,
        lambda g: library.where(chosen, g, g.dtype.type(0)),
        lambda g: library.where(chosen, g.dtype.type(0), g),
    )
    return _recorded("where", (condition, x, y), result, pulls)


def matmul(x: Undescribed, y: Undescribed, /) -> Undescribed:
    """Matrix product, with broadcast batch axes, as numpy.matmul."""
    a, b = _array(raw(x)), _array(raw(y))
    result = product_by(_library_among((x, y)), a, b)
    if tape_of((x, y)) is None:
        return result
    left = _matmul_left(a.shape, b) if is_differentiable(x) else None
    right = _matmul_right(a, b.shape) if is_differentiable(y) else None
    return _recorded("matmul", (x, y), result, (left, right))


def _matmul_left(shape: tuple[int, ...], b: Any) -> Gradient:
    """Return the gradient of a matrix product with respect to its left factor."""

    def left(g: Any) -> Any:
        other = (b[:, None] if b.ndim == 1 else b).swapaxes(-1, -2)
        product = product_by(library_of(g), _whole(g, len(shape) == 1, b.ndim == 1), other)
        return _summed(product, shape if len(shape) > 1 else (1, *shape)).reshape(shape)

    return left


def _matmul_right(a: Any, shape: tuple[int, ...]) -> Gradient:
    """Return the gradient of a matrix product with respect to its right factor."""

    def right(g: Any) -> Any:
        other = (a[None] if a.ndim == 1 else a).swapaxes(-1, -2)
        product = product_by(library_of(g), other, _whole(g, a.ndim == 1, len(shape) == 1))
        return _summed(product, shape if len(shape) > 1 else (*shape, 1)).reshape(shape)

    return right


def _whole(g: Any, row: bool, column: bool) -> Any:
    """Give a gradient the axes that a product with vectors has dropped."""
    if row and column:
        return g.reshape(1, 1)
    if row:
        return g[..., None, :]
    return g[..., None] if column else g


def _summed(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum a product over the batch axes that were broadcast."""
    extra = gradient.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + axis
        for axis, (had, got) in enumerate(zip(shape[:-2], gradient.shape[extra:-2], strict=True))
        if had == 1 != got
    )
    if not axes:
        return gradient
    wide = np.float32 if narrow(gradient.dtype) else gradient.dtype
    return gradient.sum(axis=axes, dtype=wide)


def reshape(x: Undescribed, shape: int | Sequence[int], /) -> Undescribed:
    """Give an array another shape."""
    result, before = raw(x).reshape(shape), raw(x).shape
    if not is_traced(x):
        return result
    return _recorded("reshape", (x,), result, (lambda g: g.reshape(before),))


def transpose(x: Undescribed, axes: Sequence[int] | None = None, /) -> Undescribed:
    """Permute the axes; by default reverse them."""
    result = raw(x).transpose(axes)
    if not is_traced(x):
        return result
    back = None if axes is None else tuple(np.argsort([axis % x.ndim for axis in axes]).tolist())
    return _recorded("transpose", (x,), result, (lambda g: g.transpose(back),))


def swapaxes(x: Undescribed, a: int, b: int, /) -> Undescribed:
    """Exchange two axes."""
    result = raw(x).swapaxes(a, b)
    if not is_traced(x):
        return result
    return _recorded("swapaxes", (x,), result, (lambda g: g.swapaxes(a, b),))


def moveaxis(x: Undescribed, source: Undescribed, destination: Undescribed, /) -> Undescribed:
    """Move axes to other positions."""
    library = _library_among((x,))
    result = library.moveaxis(raw(x), source, destination)
    if not is_traced(x):
        return result
    back = (lambda g: library.moveaxis(g, destination, source),)
    return _recorded("moveaxis", (x,), result, back)


def expand_dims(x: Undescribed, axis: int | tuple[int, ...], /) -> Undescribed:
    """Insert axes of length 1."""
    return _view("expand_dims", x, axis)


def squeeze(x: Undescribed, axis: Axis = None, /) -> Undescribed:
    """Remove axes of length 1."""
    return _view("squeeze", x, axis)


def _view(name: str, x: Undescribed, axis: Axis) -> Undescribed:
    result, before = getattr(_library_among((x,)), name)(raw(x), axis), raw(x).shape
    if not is_traced(x):
        return result
    return _recorded(name, (x,), result, (lambda g: g.reshape(before),))


def broadcast_to(x: Undescribed, shape: Sequence[int], /) -> Undescribed:
    """Repeat an array along axes of length 1, without a copy."""
    result = _library_among((x,)).broadcast_to(raw(x), shape)
    return _recorded("broadcast_to", (x,), result, (_same,)) if is_traced(x) else result


def astype(x: Undescribed, dtype: Undescribed, /) -> Undescribed:
    """Convert an array. The gradient is converted back; an array of integers is a constant."""
    result = raw(x).astype(dtype)
    return _recorded("astype", (x,), result, (_same,)) if is_traced(x) else result


def sum(x: Undescribed, /, axis: Axis = None, *, keepdims: bool = False) -> Undescribed:
    """Sum over axes, by default over all."""
    library = _library_among((x,))
    result = raw(x).sum(axis=axis, keepdims=keepdims)
    if not is_traced(x):
        return result
    shape, kept = x.shape, _kept(x.shape, axis)
    return _recorded("sum", (x,), result, (lambda g: library.broadcast_to(g.reshape(kept), shape),))


def mean(x: Undescribed, /, axis: Axis = None, *, keepdims: bool = False) -> Undescribed:
    """Average over axes, by default over all."""
    library = _library_among((x,))
    result = raw(x).mean(axis=axis, keepdims=keepdims)
    if not is_traced(x):
        return result
    shape, kept = x.shape, _kept(x.shape, axis)
    count = x.size // builtins.max(1, result.size)
    wide = np.float32 if narrow(result.dtype) else result.dtype  # a count may exceed float16

    def pull(g: Any) -> Any:
        return library.broadcast_to((g.astype(wide) / count).reshape(kept), shape)

    return _recorded("mean", (x,), result, (pull,))


def max(x: Undescribed, /, axis: Axis = None, *, keepdims: bool = False) -> Undescribed:
    """Largest element over axes; equal ones share the gradient evenly."""
    return _extreme("max", x, axis, keepdims)


def min(x: Undescribed, /, axis: Axis = None, *, keepdims: bool = False) -> Undescribed:
    """Smallest element over axes; equal ones share the gradient evenly."""
    return _extreme("min", x, axis, keepdims)


def _extreme(name: str, x: Undescribed, axis: Axis, keepdims: bool) -> Undescribed:
    result = getattr(raw(x), name)(axis=axis, keepdims=keepdims)
    if not is_traced(x):
        return result
    kept = _kept(x.shape, axis)
    found = raw(x) == result.reshape(kept)
    wide = np.float64 if x.itemsize == 8 else np.float32
    count = found.sum(axis=axis, keepdims=True, dtype=wide).reshape(kept)
    return _recorded(name, (x,), result, (lambda g: found * (g.reshape(kept) / count),))


def _kept(shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    """Return the shape of a reduction with keepdims."""
    if axis is None:
        return (1,) * len(shape)
    axes = {each % len(shape) for each in (axis if isinstance(axis, tuple) else (axis,))}
    return tuple([1 if number in axes else extent for number, extent in enumerate(shape)])


def concatenate(arrays: Iterable[Undescribed], /, axis: int | None = 0) -> Undescribed:
    """Join arrays along an axis; with axis=None the flattened arrays."""
    return _joined("concatenate", arrays, axis)


def stack(arrays: Iterable[Undescribed], /, axis: int = 0) -> Undescribed:
    """Join arrays along a new axis."""
    return _joined("stack", arrays, axis)


def _joined(name: str, arrays: Iterable[Undescribed], axis: int | None) -> Undescribed:
    arrays = list(arrays)
    if axis is None:
        arrays, axis = [reshape(array, -1) for array in arrays], 0
    values = [_array(raw(array)) for array in arrays]
    result = getattr(_library_among(arrays), name)(values, axis=axis)
    if tape_of(arrays) is None:
        return result
    axis %= result.ndim
    if name == "stack":
        pulls = [_part(axis, number) for number in range(len(values))]
    else:
        ends = np.cumsum([0, *(value.shape[axis] for value in values)]).tolist()
        pulls = [_part(axis, slice(*pair)) for pair in pairwise(ends)]
    return _recorded(name, arrays, result, pulls)


def _part(axis: int, key: int | slice) -> Gradient:
    index = (*(slice(None),) * axis, key)
    return lambda g: g[index]


def split(x: Undescribed, sections: int | Sequence[int], /, axis: int = 0) -> list[Undescribed]:
    """Cut an array along an axis, as numpy.split."""
    library = _library_among((x,))
    values = library.split(raw(x), sections, axis=axis)
    tape = tape_of((x,))
    if tape is not None and builtins.sum(v.shape[axis] for v in values) != x.shape[axis]:
        raise tape.refuse("splits into parts that overlap", "use slices")
    if tape is None:
        return list(values)
    if not is_differentiable(x):
        return [constant(value, tape) for value in values]
    specs = [spec_of(value) for value in values]

    def pull(gradients: list[Undescribed]) -> list[Undescribed]:
        parts = [
            zeros(spec) if gradient is None else gradient
            for gradient, spec in zip(gradients, specs, strict=True)
        ]
        return [library.concatenate(parts, axis=axis)]

    return list(tape.record("split", (x,), values, pull))


def pad(x: Undescribed, width: Undescribed, /) -> Undescribed:
    """Add zeros around an array, as numpy.pad with mode="constant"."""
    result = _library_among((x,)).pad(raw(x), width)
    if not is_traced(x):
        return result
    pairs = np.broadcast_to(np.asarray(width), (x.ndim, 2)).tolist()
    index = tuple(
        [slice(before, before + n) for (before, _), n in zip(pairs, x.shape, strict=True)]
    )
    return _recorded("pad", (x,), result, (lambda g: g[index],))


def take(x: Undescribed, indices: Undescribed, /, axis: int | None = None) -> Undescribed:
    """Select elements along an axis by integers; without an axis of the flattened array."""
    indices = _plain(indices)
    if axis is None:
        return getitem(reshape(x, -1), indices)
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(f"axis = {axis} of an array with {x.ndim} axes")
    return getitem(x, (*(slice(None),) * (axis % x.ndim), indices))


def getitem(x: Undescribed, key: Undescribed, /) -> Undescribed:
    """Select elements: ``x[key]`` with integers, slices, and arrays of integers or booleans."""
    key = tuple(map(_plain, key)) if isinstance(key, tuple) else _plain(key)
    result = raw(x)[key]
    if not is_traced(x):
        return result
    spec, repeats = spec_of(raw(x)), _repeats(key)
    if repeats:
        return _recorded("getitem", (x,), result, (lambda g: _scattered(spec, key, g),))
    return _recorded("getitem", (x,), result, (lambda g: PartialGradient(key, g),))


def _plain(key: Undescribed) -> Undescribed:
    if is_differentiable(key):
        raise refusal_of_values(key, "it is an index")
    key = raw(key)
    if isinstance(key, np.ndarray) or library_of(key) is not None:
        return key.copy()  # the caller may fill it again
    if key is None or key is Ellipsis or isinstance(key, int | slice):
        return key
    found = np.asarray(key)
    return found if found.size else found.astype(np.intp)


def _repeats(key: Undescribed) -> bool:
    """Tell whether a key may select an element twice: it has an array of integers."""
    keys = key if isinstance(key, tuple) else (key,)
    return any(hasattr(each, "dtype") and each.ndim and each.dtype.kind in "iu" for each in keys)


def _scattered(spec: Spec, key: Undescribed, gradient: Any) -> Any:
    """Return zeros with the gradient added at the selected elements."""
    library: Any = spec.library
    if not gradient.size:
        return zeros(spec)
    if library is np or spec.dtype.itemsize == 8:
        wide = np.float32 if narrow(spec.dtype) else spec.dtype
        whole = library.zeros(spec.shape, wide)
        library.add.at(whole, key, gradient.astype(wide))  # on a GPU in any order: 64 bits only
        return whole
    if hasattr(key, "dtype"):  # rows
        ids, rows = key, spec.shape[0]
    else:
        positions = library.arange(int(np.prod(spec.shape))).reshape(spec.shape)
        ids, rows = positions[key], positions.size
    ids = library.ascontiguousarray(ids).reshape(-1) % rows
    gradient = library.ascontiguousarray(gradient).reshape(len(ids), -1)
    table = library.empty((rows, gradient.shape[1]), spec.dtype)
    return embedding_backward(gradient, table, ids).reshape(spec.shape)
