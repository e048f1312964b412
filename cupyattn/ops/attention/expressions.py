"""Evaluation of the expressions of score_mod and mask_mod on NumPy arrays.

An expression of CUDA C++ is parsed into functions of NumPy arrays, as far as it is plain
arithmetic. Floats are float64, whatever the kernels have: results are more precise, and do not
overflow. Integers have the types of C++ and wrap, as in kernels: int32, but int64 with an array or
a literal of int64, and uint32 with a hexadecimal literal beyond int32. As in C++, ``&&``, ``||``
and ``?:`` evaluate a side only where it counts: each function is also given where that is, so that
an index may be out of range elsewhere.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.attention.kernels.modifiers import CPP_WORDS
from cupyattn.runtime.errors import error

Values = Mapping[str, Any]
_WHOLE = (np.int32, np.uint32, np.int64)
Where = Any
"""The scores for which a part of an expression is evaluated: bools, or True for all."""
Part = Callable[[Values, Where], Any]


EVALUATED = (
    "numbers, names, indexed arrays, operators, ?:, casts to float, int and bool, and abs, min, "
    "max, exp, log, tanh, sqrt, pow and the like, with and without f"
)
"""The parts of expressions that are evaluated, for errors."""


class _Malformed(Exception):  # noqa: N818 - it is never raised to users
    """A complaint about an expression that is no C++, with its place in the text."""

    def __init__(self, complaint: str, at: int) -> None:
        super().__init__(complaint, at)
        self.complaint, self.at = complaint, at


class NotEvaluated(Exception):  # noqa: N818 - it says what was not
    """A part of an expression that NumPy arrays do not evaluate, with the place in the text."""


_TOKEN = re.compile(
    r"""
    \s+ | \\\r?\n | /\*.*?\*/
    | (?P<hexadecimal> 0[xX][0-9a-fA-F]+ ) (?P<long> [lL]{0,2} ) (?!\w)
    | (?P<float> (?:\d+\.\d*|\.\d+) (?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+ )
      (?P<suffix> [fFlL]? ) (?!\w)
    | (?P<integer> 0 | [1-9]\d* ) (?P<longer> [lL]{0,2} ) (?![\w.])
    | (?P<name> [A-Za-z_]\w* )
    | (?P<symbol>
        <<= | >>= | [-+*/%&|^]= | \+\+ | -- | -> | :: | << | >> | <= | >= | == | != | && | \|\|
        | [-+*/%<>!~&|^?:(),\[\]] )
    """,
    re.VERBOSE | re.DOTALL,
)


_NUMBER = re.compile(
    r"0[xX][\da-fA-F]*\.?[\da-fA-F]*([pP]\d*)?[uUlLfF]*|0[bB][01]+[uUlL]*|\d+\.?\d*([eE]\d*)?[uUlLfF]*"
)
"""Numbers of C++ up to a sign, also those that are not evaluated."""


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
            number = word[0][0].isdigit() and not _NUMBER.fullmatch(word[0])
            if number or (word[0] in _NO_OPERATORS and "{" not in text):
                raise _Malformed(f"unexpected {word[0]!r}", at)
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
            long = match["long"] or match["longer"] or value >= 2**32
            unsigned = np.uint32 if match["hexadecimal"] else np.int64
            integer: Any = np.int64 if long else np.int32 if value < 2**31 else unsigned
            found.append(_Token("number", match[0], match.start(), integer(value)))
    return [*found, _Token("end", "its end", len(text))]


def _is_float(value: Any) -> bool:
    return np.asarray(value).dtype.kind == "f"


def _number(value: Any) -> Any:
    """Return a value as C++ promotes it: bool and small integers are int."""
    array = np.asarray(value)
    if array.dtype.kind not in "biu":
        return array.astype(np.float64, copy=False)
    return array if array.dtype in _WHOLE else array.astype(np.int32)


def _index_value(value: Any) -> Any:
    """Return a variable of kernels: indices are int there."""
    array = np.asarray(value)
    return array.astype(np.int32, copy=False) if array.dtype.kind in "iu" else value


def _common(a: Any, b: Any) -> tuple[Any, Any]:
    """Return two values as C++ converts operands: with int, unsigned is unsigned."""
    a, b = _number(a), _number(b)
    if a.dtype == b.dtype or _is_float(a) or _is_float(b):
        return a, b
    kind = np.int64 if np.int64 in (a.dtype, b.dtype) else np.uint32
    return a.astype(kind), b.astype(kind)


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
    b = np.where(b == 0, b.dtype.type(1), b)
    remainder = np.fmod(a, b)
    return (a - remainder) // b, remainder


def _quotient(a: Any, b: Any, where: Where) -> Any:
    a, b = _common(a, b)
    return a / b if _is_float(a) or _is_float(b) else _divided(a, b, where)[0]


def _remainder(a: Any, b: Any, where: Where) -> Any:
    return _divided(*_common(_whole(a, "%"), _whole(b, "%")), where)[1]


def _arithmetic(function: Callable[..., Any]) -> Callable[[Any, Any, Where], Any]:
    return lambda a, b, where: function(*_common(a, b))


def _of_integers(operator: str, function: Callable[..., Any]) -> Callable[[Any, Any, Where], Any]:
    return lambda a, b, where: function(*_common(_whole(a, operator), _whole(b, operator)))


def _shift(operator: str, function: Callable[..., Any]) -> Callable[[Any, Any, Where], Any]:
    def shifted(a: Any, b: Any, where: Where) -> Any:
        a, b = _whole(a, operator), _whole(b, operator)
        return function(a, b.astype(a.dtype))  # C++ has the left operand's type

    return shifted


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
    "<<": (8, _shift("<<", np.left_shift)),
    ">>": (8, _shift(">>", np.right_shift)),
    "+": (9, _arithmetic(np.add)),
    "-": (9, _arithmetic(np.subtract)),
    "*": (10, _arithmetic(np.multiply)),
    "/": (10, _quotient),
    "%": (10, _remainder),
}
"""The binary operators but ``&&`` (2) and ``||`` (1), with their precedence."""


def _smaller(a: Any, b: Any) -> Any:
    return np.fmin(*_common(a, b))  # as fminf, it returns the other number for a NaN


def _larger(a: Any, b: Any) -> Any:
    return np.fmax(*_common(a, b))


def _int(value: Any) -> Any:
    if not _is_float(value):
        return np.asarray(value).astype(np.int32)
    limits = np.iinfo(np.int32)  # kernels saturate, and give 0 for a NaN
    whole = np.clip(np.trunc(np.nan_to_num(value)), limits.min, limits.max)
    return whole.astype(np.int32)


_CASTS: dict[str, Callable[[Any], Any]] = {
    "float": _floating,
    "double": _floating,
    "int": _int,
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
_NO_OPERATORS = ("=", ";", "@", "$", "`")
_OTHER_SYMBOLS = (",", "->", "::", "[")
"""Symbols of C++ that are not evaluated where no other rule takes them."""
_WORDS = frozenset((*CPP_WORDS.split(), "and", "or", "not"))
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

    def refuse(self, token: _Token | None = None) -> NotEvaluated | _Malformed:
        token = token or self.token
        shown = token.text if token.kind == "end" else repr(token.text)
        if token.kind == "name" and not self.is_cpp(token):
            given = token.text in (*self.names, *self.arrays, *_FUNCTIONS, *_CONSTANTS)
            known = given or keyword.iskeyword(token.text)
            return _Malformed(f"{'unexpected' if known else 'unknown name'} {shown}", token.at)
        if token.kind != "name" and token.text not in _OTHER_SYMBOLS:
            return _Malformed(f"unexpected {'end' if token.kind == 'end' else shown}", token.at)
        return NotEvaluated(f"{shown} at {token.at}")

    def is_cpp(self, token: _Token) -> bool:
        """Tell whether C++ may have a name at its place that is not evaluated."""
        text, at = token.text, self.tokens.index(token)
        before, after = self.tokens[at - 1], self.tokens[at + 1]
        if text in _WORDS or text.startswith("__"):
            return True
        if at > 0 and (before.kind != "symbol" or before.text in ")]"):  # after an operand
            return False
        if after.text in ("(", "::") or text in _FUNCTIONS:
            return True
        cast = at > 0 and (before.text, after.text) == ("(", ")")  # (type)value
        following = self.tokens[at + 2] if cast else after
        return cast and (following.kind in ("name", "number") or following.text == "(")

    def take(self, symbol: str) -> bool:
        """Go on if the next token is that symbol; return whether it was."""
        found = self.token.kind == "symbol" and self.token.text == symbol
        self.position += found
        return found

    def expect(self, symbol: str) -> None:
        if not self.take(symbol):
            raise self.refuse()

    def end_argument(self, symbol: str, function: str, count: int) -> None:
        if self.token.text in (",", ")") and self.token.text != symbol:
            plural = "s" * (count > 1)
            raise _Malformed(f"{function} takes {count} argument{plural}", self.token.at)
        self.expect(symbol)

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
            elif np.asarray(either[0]).dtype != np.asarray(either[1]).dtype:
                either = _common(*either)
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
            return lambda values, where: _index_value(values[name])
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
            self.end_argument(",", name, count)
            arguments.append(self.conditional())
        self.end_argument(")", name, count)
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
        index = np.asarray(np.trunc(index) if _is_float(index) else index).astype(np.int64)
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
    called: str = "an expression",
) -> Callable[..., np.ndarray]:
    """Return a function of NumPy arrays that evaluates an expression.

    Its arguments are the values of `names` by position, and the arrays by name. `result` is what it
    returns, "float" or "bool". `called` is the name of the expression in errors.

    Raises
    ------
    Exception
        The exception that `refused` makes of a part that is no plain arithmetic. Also in a call,
        where the dtypes of the arrays decide.
    ValueError
        For an unknown name or a mistake of syntax.
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
    except _Malformed as failure:
        before = text[: failure.at].split("\n")
        line = text.split("\n")[len(before) - 1]
        raise error(
            ValueError,
            f"{called} does not compile: {failure.complaint} at line "
            f"{len(before)}, column {len(before[-1]) + 1}",
            f"it is an expression in CUDA C++, of {', '.join((*names, *arrays))}",
            f"mend it there:\n{line}\n{' ' * len(before[-1])}^",
        ) from None

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
