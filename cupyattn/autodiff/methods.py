"""Operators and methods of traced arrays, and NumPy's functions of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupyattn.autodiff.operations import (
    _BINARY,
    _CONSTANTS,
    _UNARY,
    Axis,
    _along,
    _binary,
    _constant,
    _library,
    _recorded,
    _same,
    _step,
    _unary,
    astype,
    broadcast_to,
    concatenate,
    expand_dims,
    getitem,
    matmul,
    max,
    mean,
    min,
    moveaxis,
    pad,
    reshape,
    split,
    squeeze,
    stack,
    sum,
    swapaxes,
    take,
    transpose,
    where,
)
from cupyattn.autodiff.tape import (
    Traced,
    is_differentiable,
    is_traced,
    library_of,
    raw,
    refuses_values,
    tape_of,
)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Traced, *args: Any, **options: Any) -> Any:
        return function(self, *args, **options)

    return method


def _reshape_method(self: Traced, *shape: Any, order: str = "C", **named: Any) -> Any:
    _in_c_order(self, order)
    shape = shape or (named.pop("shape"),)
    return reshape(self, shape[0] if len(shape) == 1 else shape)


def _sum_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method with the arguments of NumPy's and CuPy's, by position too."""

    def method(
        a: Traced, axis: Axis = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> Any:
        _require_defaults(a, function.__name__, dtype=dtype, out=out)
        return function(a, axis, keepdims=bool(keepdims))

    return method


def _extreme_method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(a: Traced, axis: Axis = None, out: Any = None, keepdims: bool = False) -> Any:
        _require_defaults(a, function.__name__, out=out)
        return function(a, axis, keepdims=bool(keepdims))

    return method


def _require_defaults(traced: Traced, name: str, **options: Any) -> None:
    for option, value in options.items():
        if value is not None:
            raise traced._tape.refuse(f"passes {option}= to {name}", f"leave out {option}=")


def _transpose_method(self: Traced, *axes: Any) -> Any:
    if len(axes) == 1 and isinstance(axes[0], tuple | list):
        return transpose(self, axes[0])
    return transpose(self, axes or None) if axes != (None,) else transpose(self)


def _iterate(self: Traced) -> Any:
    return iter([getitem(self, number) for number in range(len(self))])


def _length(self: Traced) -> int:
    if not self.ndim:
        raise TypeError("len() of an array without axes")
    return self.shape[0]


def _copy(self: Traced, order: str = "C") -> Any:
    return _recorded("copy", (self,), self._value.copy(), (_same,))


def _operators() -> None:
    """Give traced arrays the operators and methods of arrays."""
    for symbol, name in (
        *(("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("truediv", "divide")),
        ("pow", "power"),
    ):
        setattr(Traced, f"__{symbol}__", lambda x, y, name=name: _binary(name, x, y))
        setattr(Traced, f"__r{symbol}__", lambda x, y, name=name: _binary(name, y, x))
    for symbol, name in (
        *(("lt", "less"), ("le", "less_equal"), ("eq", "equal"), ("ne", "not_equal")),
        *(("gt", "greater"), ("ge", "greater_equal"), ("and", "bitwise_and")),
        *(("or", "bitwise_or"), ("xor", "bitwise_xor")),
    ):
        setattr(Traced, f"__{symbol}__", lambda x, y, name=name: _step(name, x, y))
        if symbol in ("and", "or", "xor"):
            setattr(Traced, f"__r{symbol}__", lambda x, y, name=name: _step(name, y, x))
    for symbol, name in (("neg", "negative"), ("pos", "positive"), ("abs", "absolute")):
        setattr(Traced, f"__{symbol}__", lambda x, name=name: _unary(name, x))
    for symbol in ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod", "and", "or"):
        setattr(Traced, f"__i{symbol}__", _written)
    setattr(Traced, "__setitem__", _written)  # noqa: B010 (a type checker sees no such method)
    for symbol in (
        *("bool", "int", "float", "complex", "index", "contains", "delitem", "copy", "deepcopy"),
        *("reduce_ex", "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod"),
    ):
        setattr(Traced, f"__{symbol}__", refuses_values(symbol))
    methods: dict[str, Any] = {
        "__matmul__": matmul,
        "__rmatmul__": lambda x, y: matmul(y, x),
        "__invert__": lambda x: _step("invert", x),
        "__getitem__": getitem,
        "__iter__": _iterate,
        "__len__": _length,
        "__array_ufunc__": _UfuncProtocol(),
        "__array_function__": _function,
        "T": property(transpose),
        "reshape": _reshape_method,
        "transpose": _transpose_method,
        "ravel": _np_ravel,
        "astype": lambda x, dtype, order="K", casting="unsafe", subok=True, copy=True: astype(
            x, dtype
        ),
        "copy": _copy,
        "take": _np_take,
        **{each.__name__: _sum_method(each) for each in (sum, mean)},
        **{each.__name__: _extreme_method(each) for each in (max, min)},
        **{each.__name__: _method(each) for each in (swapaxes, squeeze)},
        **{
            name: lambda x, axis=None, out=None, keepdims=False, name=name: _along(
                name, x, axis, out, keepdims
            )
            for name in ("argmax", "argmin", "argsort", "any", "all")
        },
    }
    for name, method in methods.items():
        setattr(Traced, name, method)


def _written(self: Traced, *_: object) -> Any:
    raise self._tape.refuse(
        "writes to a traced array",
        "make a new array: y = x + 1 for x += 1, and where(...) or concatenate(...) for x[i] = y",
    )


class _UfuncProtocol:
    """The attribute ``__array_ufunc__``.

    NumPy finds it on the class. CuPy asks an instance, and calls its reflected operator for None.
    """

    def __get__(self, traced: Traced | None, owner: type) -> Any:
        if traced is None:
            return _ufunc
        return None if library_of(traced._value) is not np else partial(_ufunc, traced)


_UFUNCS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_CONSTANTS, _step),
}


def _ufunc(self: Traced, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
    name, tape = ufunc.__name__, tape_of([each for each in inputs if is_traced(each)]) or self._tape
    if options.get("out") is not None:
        raise tape.refuse(f"passes out= to numpy.{name}", "leave out out=")
    if method == "__call__" and not options and not any(map(is_differentiable, inputs)):
        return _constant(ufunc, *inputs)
    if method != "__call__" or options or (name not in _UFUNCS and name != "matmul"):
        did = name if method == "__call__" else f"{name}.{method}"
        extra = f" with {', '.join(options)}" if options else ""
        raise tape.refuse(f"calls numpy.{did}{extra}, which has no derivative here,", _LISTED)
    return matmul(*inputs) if name == "matmul" else _UFUNCS[name](name, *inputs)


_LISTED = (
    "use + - * / ** @, indexing, and the functions of cupyattn.autodiff, or compute it from "
    "stop_gradient(array)"
)


def _like(name: str) -> Callable[..., Any]:
    return lambda x, *args, **options: getattr(_library(x), name)(raw(x), *args, **options)


def _in_c_order(traced: Traced, order: str, allowed: str = "CK") -> None:
    if order not in allowed:
        raise traced._tape.refuse(f"passes order={order!r}", "leave out order=")


def _np_reshape(a: Traced, /, shape: Any = None, order: str = "C", **options: Any) -> Any:
    _in_c_order(a, order)
    return reshape(a, shape if shape is not None else options.pop("newshape"), **options)


def _np_ravel(a: Traced, order: str = "C") -> Any:
    _in_c_order(a, order)
    return reshape(a, -1)


def _np_copy(a: Traced, order: str = "K", subok: bool = False) -> Any:
    return _copy(a)


def _np_take(
    a: Any, indices: Any, axis: int | None = None, out: Any = None, mode: str = "raise"
) -> Any:
    traced = a if is_traced(a) else indices
    if out is not None or mode != "raise":
        raise traced._tape.refuse("passes out= or mode= to numpy.take", "leave them out")
    return take(a, indices, axis)


def _np_where(condition: Any, *choices: Any) -> Any:
    if len(choices) != 2:
        traced = next(each for each in (condition, *choices) if is_traced(each))
        raise traced._tape.refuse(
            "calls numpy.where with a condition alone", "pass where(condition, x, y)"
        )
    return where(condition, *choices)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: _np_where,
    np.sum: _sum_method(sum),
    np.mean: _sum_method(mean),
    np.max: _extreme_method(max),
    np.min: _extreme_method(min),
    np.concatenate: lambda arrays, /, axis=0: concatenate(arrays, axis),
    np.stack: lambda arrays, axis=0: stack(arrays, axis),
    np.split: lambda ary, indices_or_sections, axis=0: split(ary, indices_or_sections, axis),
    np.take: _np_take,
    np.transpose: lambda a, axes=None: transpose(a, axes),
    np.swapaxes: lambda a, axis1, axis2: swapaxes(a, axis1, axis2),
    np.moveaxis: lambda a, source, destination: moveaxis(a, source, destination),
    np.expand_dims: lambda a, axis: expand_dims(a, axis),
    np.squeeze: lambda a, axis=None: squeeze(a, axis),
    np.broadcast_to: lambda array, shape: broadcast_to(array, shape),
    np.reshape: _np_reshape,
    np.pad: lambda array, pad_width, mode="constant": _padded(array, pad_width, mode),
    np.dot: lambda a, b: _dot(a, b),
    np.ravel: _np_ravel,
    np.copy: _np_copy,
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a: a.size,
    **{
        getattr(np, name): _like(name)
        for name in ("zeros_like", "ones_like", "full_like", "empty_like")
    },
    **{
        getattr(np, name): lambda a, axis=None, name=name: _along(name, a, axis)
        for name in ("argmax", "argmin", "argsort", "any", "all")
    },
}


def _padded(x: Traced, width: Any, mode: str) -> Any:
    if mode != "constant":
        raise x._tape.refuse(f"calls numpy.pad with mode={mode!r}", 'pad with mode="constant"')
    return pad(x, width)


def _dot(x: Any, y: Any) -> Any:
    if np.ndim(raw(x)) > 2 or np.ndim(raw(y)) > 2 or not (np.ndim(raw(x)) and np.ndim(raw(y))):
        traced = x if is_traced(x) else y
        raise traced._tape.refuse("calls numpy.dot of other arrays than matrices", "use @ or *")
    return matmul(x, y)


def _function(self: Traced, function: Any, _types: Any, args: Any, options: Any) -> Any:
    options = {name: value for name, value in options.items() if value is not np._NoValue}
    if options.get("out") is not None:
        raise self._tape.refuse(f"passes out= to numpy.{function.__name__}", "leave out out=")
    options.pop("out", None)
    found = _FUNCTIONS.get(function)
    if found is None:
        raise self._tape.refuse(
            f"calls numpy.{function.__name__}, which has no derivative here,", _LISTED
        )
    try:
        inspect.signature(found).bind(*args, **options)
    except TypeError:
        raise self._tape.refuse(
            f"calls numpy.{function.__name__} with arguments that are not supported here", _LISTED
        ) from None
    return found(*args, **options)


_operators()
