"""Evaluation of the expressions of score_mod and mask_mod on NumPy arrays.

An expression of CUDA C++ is parsed into functions of NumPy arrays, as far as it is plain
arithmetic. Integers are int64 and floats float64, whatever the kernels have: results are more
precise, and do not overflow. As in C++, ``&&``, ``||`` and ``?:`` evaluate a side only where it
counts: each function is also given where that is, so that an index may be out of range elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.errors import error

Values = Mapping[str, Any]
Where = Any
"""The scores for which a part of an expression is evaluated: bools, or True for all."""
Part = Callable[[Values, Where], Any]


EVALUATED = (
    "numbers, names, indexed arrays, operators, ?:, casts to float, int and bool, and abs, min, "
    "max, exp, log, tanh, sqrt, pow and the like, with and without f"
)
"""The parts of expressions that are evaluated, for errors."""


class NotEvaluated(Exception):  # noqa: N818 - it says what was not
    """A part of an expression that NumPy arrays do not evaluate, with the place in the text."""


_TOKEN = re.compile(
    r"""
    \s+ | \\\r?\n | /\*.*?\*/
    | (?P<hexadecimal> 0[xX][0-9a-fA-F]+ ) [lL]{0,2} (?!\w)
    | (?P<float> (?:\d+\.\d*|\.\d+) (?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+ )
      (?P<suffix> [fFlL]? ) (?!\w)
    | (?P<integer> 0 | [1-9]\d* ) [lL]{0,2} (?![\w.])
    | (?P<name> [A-Za-z_]\w* )
    | (?P<symbol>
        <<= | >>= | [-+*/%&|^]= | \+\+ | -- | -> | :: | << | >> | <= | >= | == | != | && | \|\|
        | [-+*/%<>!~&|^?:(),\[\]] )
    """,
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int
    value: Any = None


def _tokens(text: str) -> list[_Token]:
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            word = re.compile(r"[\w.]+|.", re.DOTALL).match(text, at)
            assert word is not None
            raise NotEvaluated(f"{word[0]!r} at {at}")
        at = match.end()
        if match["name"] or match["symbol"]:
            kind = "name" if match["name"] else "symbol"
            found.append(_Token(kind, match[0], match.start()))
        elif match["float"]:
            value = float(match["float"])
            if match["suffix"] in ("f", "F"):
                with np.errstate(over="ignore"):
                    value = float(np.float32(value))
            found.append(_Token("number", match[0], match.start(), np.float64(value)))
        elif match["hexadecimal"] or match["integer"]:
            value = int(match["hexadecimal"] or match["integer"], 0)
            if value >= 2**63:
                raise NotEvaluated(f"{match[0]!r} at {match.start()}")
            found.append(_Token("number", match[0], match.start(), np.int64(value)))
    return [*found, _Token("end", "its end", len(text))]


def _is_float(value: Any) -> bool:
    return np.asarray(value).dtype.kind == "f"


def _number(value: Any) -> Any:
    """Return a value as C++ promotes it: bool and small integers are int, here int64."""
    array = np.asarray(value)
    if array.dtype.kind in "biu":
        return array.astype(np.int64, copy=False)
    return array.astype(np.float64, copy=False)


def _floating(value: Any) -> Any:
    return np.asarray(value, dtype=np.float64)


def _truth(value: Any) -> Any:
    array = np.asarray(value)
    return array if array.dtype == np.bool_ else array != 0


def _whole(value: Any, operator: str) -> Any:
    number = _number(value)
    if _is_float(number):
        raise NotEvaluated(f"{operator!r} of a float")
    return number


def _divided(a: Any, b: Any, where: Where) -> tuple[Any, Any]:
    """Return quotient and remainder of integers, rounded toward 0."""
    if np.any((b == 0) & where):
        raise error(
            ZeroDivisionError,
            "an integer of an expression is divided by 0",
            "kernels give a meaningless number there",
            "write a condition before it, as in n != 0 && k_idx / n == 0",
        )
    b = np.where(b == 0, 1, b)
    quotient = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
    return quotient, a - quotient * b


def _quotient(a: Any, b: Any, where: Where) -> Any:
    a, b = _number(a), _number(b)
    return a / b if _is_float(a) or _is_float(b) else _divided(a, b, where)[0]


def _remainder(a: Any, b: Any, where: Where) -> Any:
    return _divided(_whole(a, "%"), _whole(b, "%"), where)[1]


def _arithmetic(function: Callable[..., Any]) -> Callable[[Any, Any, Where], Any]:
    return lambda a, b, where: function(_number(a), _number(b))


def _of_integers(operator: str, function: Callable[..., Any]) -> Callable[[Any, Any, Where], Any]:
    return lambda a, b, where: function(_whole(a, operator), _whole(b, operator))


_BINARY: dict[str, tuple[int, Callable[[Any, Any, Where], Any]]] = {
    "|": (3, _of_integers("|", np.bitwise_or)),
    "^": (4, _of_integers("^", np.bitwise_xor)),
    "&": (5, _of_integers("&", np.bitwise_and)),
    "==": (6, _arithmetic(np.equal)),
    "!=": (6, _arithmetic(np.not_equal)),
    "<": (7, _arithmetic(np.less)),
    ">": (7, _arithmetic(np.greater)),
    "<=": (7, _arithmetic(np.less_equal)),
    ">=": (7, _arithmetic(np.greater_equal)),
    "<<": (8, _of_integers("<<", np.left_shift)),
    ">>": (8, _of_integers(">>", np.right_shift)),
    "+": (9, _arithmetic(np.add)),
    "-": (9, _arithmetic(np.subtract)),
    "*": (10, _arithmetic(np.multiply)),
    "/": (10, _quotient),
    "%": (10, _remainder),
}
"""The binary operators but ``&&`` (2) and ``||`` (1), with their precedence."""


def _smaller(a: Any, b: Any) -> Any:
    a, b = _number(a), _number(b)
    return np.fmin(a, b)  # as fminf, it returns the other number for a NaN


def _larger(a: Any, b: Any) -> Any:
    a, b = _number(a), _number(b)
    return np.fmax(a, b)


_CASTS: dict[str, Callable[[Any], Any]] = {
    "float": _floating,
    "double": _floating,
    "int": lambda x: np.trunc(_floating(x)).astype(np.int64) if _is_float(x) else _number(x),
    "bool": _truth,
}
_OF_FLOATS: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "fabs": np.abs,
}
_FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    **{name: (1, lambda x, of=of: of(_floating(x))) for name, of in _OF_FLOATS.items()},
    **{f"{name}f": (1, lambda x, of=of: of(_floating(x))) for name, of in _OF_FLOATS.items()},
    **{name: (1, cast) for name, cast in _CASTS.items()},
    **{name: (2, lambda a, b: _smaller(_floating(a), b)) for name in ("fmin", "fminf")},
    **{name: (2, lambda a, b: _larger(_floating(a), b)) for name in ("fmax", "fmaxf")},
    **{name: (2, lambda a, b: np.power(_floating(a), b)) for name in ("pow", "powf")},
    "abs": (1, lambda x: np.abs(_number(x))),
    "min": (2, _smaller),
    "max": (2, _larger),
}
_CONSTANTS = {
    "INFINITY": np.float64(np.inf),
    "NAN": np.float64(np.nan),
    "true": np.True_,
    "false": np.False_,
}


class _Parser:
    """A parser of one expression, by precedence climbing."""

    def __init__(self, text: str, names: tuple[str, ...], arrays: tuple[str, ...]) -> None:
        self.tokens, self.position = _tokens(text), 0
        self.names, self.arrays = names, arrays

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def whole(self) -> Part:
        """Parse all of the text."""
        part = self.conditional()
        if self.token.kind != "end":
            raise self.refuse()
        return part

    def refuse(self, token: _Token | None = None) -> NotEvaluated:
        token = token or self.token
        shown = token.text if token.kind == "end" else repr(token.text)
        return NotEvaluated(f"{shown} at {token.at}")

    def take(self, symbol: str) -> bool:
        """Go on if the next token is that symbol; return whether it was."""
        found = self.token.kind == "symbol" and self.token.text == symbol
        self.position += found
        return found

    def expect(self, symbol: str) -> None:
        if not self.take(symbol):
            raise self.refuse()

    def conditional(self) -> Part:
        condition = self.binary(1)
        if not self.take("?"):
            return condition
        chosen = self.conditional()
        self.expect(":")
        other = self.conditional()

        def part(values: Values, where: Where) -> Any:
            first = _truth(condition(values, where))
            either = chosen(values, where & first), other(values, where & ~first)
            if _is_float(either[0]) or _is_float(either[1]):
                either = _floating(either[0]), _floating(either[1])
            return np.where(first, *either)

        return part

    def binary(self, least: int) -> Part:
        left = self.unary()
        while True:
            symbol = self.token.text if self.token.kind == "symbol" else ""
            if symbol in ("&&", "||"):
                precedence = 2 if symbol == "&&" else 1
            elif symbol in _BINARY:
                precedence = _BINARY[symbol][0]
            else:
                return left
            if precedence < least:
                return left
            self.position += 1
            right = self.binary(precedence + 1)
            left = (
                _logical(symbol, left, right) if precedence < 3 else _operation(symbol, left, right)
            )

    def unary(self) -> Part:
        for symbol, function in _UNARY.items():
            if self.take(symbol):
                return _applied(function, self.unary())
        cast = self.tokens[self.position : self.position + 3]
        if [each.text for each in cast[::2]] == ["(", ")"] and cast[1].text in _CASTS:
            self.position += 3
            return _applied(_CASTS[cast[1].text], self.unary())
        return self.primary()

    def primary(self) -> Part:
        token = self.token
        self.position += 1
        if token.kind == "number":
            return lambda values, where: token.value
        if token.text == "(":
            part = self.conditional()
            self.expect(")")
            return part
        if token.kind != "name":
            raise self.refuse(token)
        name = token.text
        if name in self.arrays:
            return self.indexed(name)
        if name in self.names:
            return lambda values, where: values[name]
        if name in _CONSTANTS:
            return lambda values, where: _CONSTANTS[name]
        if name == "static_cast" and self.take("<") and self.token.text in _CASTS:
            name = self.token.text
            self.position += 1
            self.expect(">")
        if name not in _FUNCTIONS or not self.take("("):
            raise self.refuse(token)
        count, function = _FUNCTIONS[name]
        arguments = [self.conditional()]
        for _ in range(count - 1):
            self.expect(",")
            arguments.append(self.conditional())
        self.expect(")")
        return _applied(function, *arguments)

    def indexed(self, name: str) -> Part:
        indices = []
        while self.take("["):
            indices.append(self.conditional())
            self.expect("]")

        def part(values: Values, where: Where) -> Any:
            return _item(name, values[name], [index(values, where) for index in indices], where)

        return part


_UNARY: dict[str, Callable[[Any], Any]] = {
    "-": lambda x: -_number(x),
    "+": _number,
    "!": lambda x: ~_truth(x),
    "~": lambda x: ~_whole(x, "~"),
}


def _applied(function: Callable[..., Any], *parts: Part) -> Part:
    return lambda values, where: function(*[part(values, where) for part in parts])


def _operation(symbol: str, left: Part, right: Part) -> Part:
    _, function = _BINARY[symbol]
    return lambda values, where: function(left(values, where), right(values, where), where)


def _logical(symbol: str, left: Part, right: Part) -> Part:
    def part(values: Values, where: Where) -> Any:
        first = _truth(left(values, where))
        if symbol == "&&":
            return first & _truth(right(values, where & first))
        return first | _truth(right(values, where & ~first))

    return part


def _item(name: str, array: np.ndarray, indices: list[Any], where: Where) -> Any:
    if len(indices) != array.ndim:
        raise error(
            ValueError,
            f"{name} has {len(indices)} indices in an expression",
            f"it has {array.ndim} axes, and each needs an index",
            f"write {name}{'[...]' * array.ndim}",
        )
    found = []
    for axis, (index, extent) in enumerate(zip(indices, array.shape, strict=True)):
        index = _CASTS["int"](index)
        outside = ((index < 0) | (index >= extent)) & where
        if np.any(outside):
            first = np.broadcast_to(index, np.shape(outside))[outside].flat[0]
            raise error(
                IndexError,
                f"an expression reads item {first} of {name}'s axis {axis}",
                f"the axis has {extent} items; indices lie within it, for hidden scores too",
                f"limit the index, for example min(max(index, 0), {max(extent - 1, 0)})",
            )
        found.append(np.clip(index, 0, max(extent - 1, 0)))
    if 0 in array.shape:  # nothing is read where it counts
        return np.zeros(np.broadcast_shapes(*(index.shape for index in found)), array.dtype)
    items = array[tuple(found)]
    return items if items.dtype == np.bool_ else _number(items)


_NESTING = "parts nested so deeply"


@lru_cache(maxsize=1024)
def _parsed(text: str, names: tuple[str, ...], arrays: tuple[str, ...]) -> Part:
    try:
        return _Parser(text, names, arrays).whole()
    except RecursionError:
        raise NotEvaluated(_NESTING) from None


def evaluator(
    text: str,
    names: tuple[str, ...],
    arrays: tuple[str, ...],
    result: str,
    refused: Callable[[str], Exception],
) -> Callable[..., np.ndarray]:
    """Return a function of NumPy arrays that evaluates an expression.

    Its arguments are the values of `names` by position, and the arrays by name. `result` is what it
    returns, "float" or "bool".

    Raises
    ------
    Exception
        The exception that `refused` makes of a part that is no plain arithmetic. Also in a call,
        where the dtypes of the arrays decide.
    IndexError, ZeroDivisionError, ValueError
        In a call, for an index out of range, an integer that is divided by 0, and an array with
        another number of axes than indices.

    Examples
    --------
    >>> text = "i >= j ? table[i - j] : 0.5f"
    >>> function = evaluator(text, ("i", "j"), ("table",), "float", NotImplementedError)
    >>> function(np.arange(2)[:, None], np.arange(2), table=np.array([1, 2]))
    array([[1. , 0.5],
           [2. , 1. ]])
    """
    try:
        part = _parsed(text, names, arrays)
    except NotEvaluated as failure:
        raise refused(str(failure)) from None

    def evaluated(*operands: Any, **given: Any) -> np.ndarray:
        values = {**dict(zip(names, operands, strict=True)), **given}
        try:
            with np.errstate(all="ignore"):  # NaN and infinities, as kernels have them
                return np.asarray(_CASTS[result](part(values, np.True_)))
        except RecursionError:
            raise refused(_NESTING) from None
        except NotEvaluated as failure:
            raise refused(str(failure)) from None

    return evaluated
