"""score_mod and mask_mod: what a problem knows of them, their checks, and what kernels take."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import field, make_dataclass
from functools import cache, lru_cache
from numbers import Number
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.attention.expressions import EVALUATED, evaluator
from cupyattn.ops.attention.kernels.block_mask import TILE
from cupyattn.ops.attention.kernels.modifiers import (
    ARRAYS,
    BLOCK_LISTS,
    BLOCK_STATES,
    CPP_WORDS,
    END,
    GRADIENT_NAMES,
    ITEMS,
    MASK_NAMES,
    RESULT,
    SCORE_NAMES,
    TAKEN_NAMES,
    TEXT_NAMES,
    BlockArray,
    Modifier,
    ModifierArray,
    Modifiers,
    modified_strides,
    parameter_name,
)
from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.checks import require_dtype, require_whole_item_strides
from cupyattn.runtime.compile import CompilationError
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.records import R, Record, values_of
from cupyattn.runtime.source import NAMED
from cupyattn.runtime.structs import new_struct

BLOCK_MASK = BLOCK_STATES.name
"""The name of a block mask's tiles among the arrays of a call."""
_MOST_AXES = 4


class MaskedScores(NamedTuple):
    """The scores that a block mask was made for."""

    shape: tuple[int, int, int, int]
    """(B, H, Sq, Sk); B and H may be 1 for any."""
    q_offset: int | None
    """None for any."""


class UserFunction(NamedTuple):
    """A score_mod or mask_mod apart from its arrays and its Python functions."""

    expression: str | None
    """None of a Python function alone, which no kernel runs."""
    gradient: str | None = None
    arrays: tuple[str, ...] = ()
    """Their names, as the expressions have them."""
    blocks: MaskedScores | None = None
    """The scores that its tiles are for; None of a score_mod, or a mask_mod without tiles."""


class UserFunctions(NamedTuple):
    """The score_mod and the mask_mod of a call."""

    score_mod: UserFunction | None = None
    mask_mod: UserFunction | None = None

    @property
    def given(self) -> dict[str, UserFunction]:
        """The functions that were given, by the names of the options."""
        both = zip(self._fields, self, strict=True)
        return {option: function for option, function in both if function is not None}

    @property
    def shown_names(self) -> dict[str, str]:
        """The names in errors of the expressions' arrays, by the fields of a call's record.

        Examples
        --------
        >>> UserFunctions(UserFunction("score * t[h]", arrays=("t",))).shown_names
        {'score_mod_t': "score_mod's t"}
        """
        return {
            parameter_name(option, array): f"{option}'s {array}"
            for option, function in self.given.items()
            for array in function.arrays
        }


def with_arrays_of(record: R, functions: UserFunctions, arrays: Mapping[str, Any]) -> R:
    """Return a record that has a field for each array of the expressions besides its own."""
    if not arrays:
        return record
    kind: Any = type(record)
    extended: type[R] = _extended(kind, functions)
    return extended(*values_of(record), *arrays.values())


@lru_cache(maxsize=4096)
def _extended(kind: type[R], functions: UserFunctions) -> type[R]:
    return _with_fields(kind, tuple(functions.shown_names.items()))  # type: ignore[arg-type]


@cache  # a class for all expressions whose arrays have these names
def _with_fields(kind: type[R], shown_names: tuple[tuple[str, str], ...]) -> type[R]:
    fields = [(name, object, field(default=None)) for name, _ in shown_names]
    shown_as = {"SHOWN_AS": {**kind.SHOWN_AS, **dict(shown_names)}}
    return make_dataclass(kind.__name__, fields, bases=(kind,), namespace=shown_as, slots=True)


def require_valid_arrays(functions: UserFunctions, layouts: Record[Any], *, on_cpu: bool) -> None:
    """Raise unless kernels, or the CPU, can read the arrays of the expressions."""
    for name, called in functions.shown_names.items():
        layout: Layout = getattr(layouts, name)
        require_dtype(called, layout, (*ITEMS, *(("float64",) if on_cpu else ())))
        require_whole_item_strides(called, layout)
        if len(layout.shape) > _MOST_AXES:
            raise error(
                ValueError,
                f"{called} has {len(layout.shape)} axes",
                f"arrays of expressions have at most {_MOST_AXES}",
                "merge axes by reshape, and index the result",
            )


def require_gradient(functions: UserFunctions) -> None:
    """Raise ValueError for a score_mod that a kernel cannot differentiate."""
    score_mod = functions.score_mod
    if score_mod is not None and score_mod.gradient is None:
        raise error(
            ValueError,
            "score_mod has no gradient",
            "the backward needs the expression of its derivative",
            "give ScoreMod gradient=, an expression of grad and score: 'grad' where a term is "
            "added to the score",
        )


_PLACES = {RESULT: "its result", END: "its end"}
_COMPLAINT = re.compile(
    rf"^{NAMED}({'|'.join(TEXT_NAMES.values())})"
    rf"({'|'.join(map(re.escape, (ARRAYS, *_PLACES)))})?\((\d+)\): "
    r"(?:catastrophic )?error: (.*(?:\n {9,}.*)*)\n(.*)\n(\s*)\^",
    re.MULTILINE,
)
_INDENT = 2  # NVRTC's, of the line that it quotes


def expression_error(failure: CompilationError, functions: UserFunctions) -> Exception:
    """Return what to raise where kernels did not compile: of an expression, where it is wrong."""
    found = _COMPLAINT.search(failure.log)
    if found is None:
        return failure
    name, around, line, complaint, text, margin = found.groups()
    complaint = " ".join(complaint.split())
    function = functions.mask_mod if name == "mask_mod" else functions.score_mod
    if around == ARRAYS and function is not None:  # a line for each, which declares its name alone
        return error(
            ValueError,
            f"{name} does not compile: it has an array named {function.arrays[int(line) - 1]!r}",
            "that is a macro of the kernel's, or of the compiler's",
            "give it another name, in the expression too",
        )
    known = {"score_mod": SCORE_NAMES, "mask_mod": MASK_NAMES}.get(name, GRADIENT_NAMES)
    names = ", ".join((*known, *(function.arrays if function else ())))
    before = text.encode()[: len(margin)].decode(errors="ignore")  # the compiler counts bytes
    place = _PLACES.get(around, f"line {line}, column {len(before) - _INDENT + 1}")
    mark = "" if around in _PLACES else f":\n{text}\n{margin[: len(before)]}^"
    return error(
        ValueError,
        f"{name} does not compile: {place}: {complaint}",
        f"it is an expression in CUDA C++, of {names}",
        f"mend it there{mark}",
    )


def modifiers_of(
    functions: UserFunctions, layouts: Record[Any], *, blocks: BlockArray | None = None
) -> Modifiers | None:
    """Return what kernels compile of a call's expressions; None without any.

    `blocks`: what they read of a block mask, if there is one.
    """
    given = {
        option: _modifier(option, function, layouts) for option, function in functions.given.items()
    }
    if not given:
        return None
    blocks = None if getattr(layouts, BLOCK_MASK, None) is None else blocks
    return Modifiers(given.get("score_mod"), given.get("mask_mod"), blocks)


def _modifier(option: str, function: UserFunction, layouts: Record[Any]) -> Modifier:
    of = {name: getattr(layouts, parameter_name(option, name)) for name in function.arrays}
    arrays = (ModifierArray(name, x.dtype.name, len(x.shape)) for name, x in of.items())
    return Modifier(str(function.expression), function.gradient, tuple(arrays))


def strides_of(modifiers: Modifiers | None, layouts: Record[Any]) -> tuple[Any, ...]:
    """Return the C struct of the arrays' strides in items, for kernels that take one."""
    struct = None if modifiers is None else modified_strides(modifiers)
    if struct is None:
        return ()
    strides = new_struct(struct.dtype)
    for name in struct.dtype.names or ():
        if name in (BLOCK_LISTS.name, BLOCK_STATES.name):
            batch, heads, rows, columns = getattr(layouts, BLOCK_MASK).shape
            strides[name] = heads if batch > 1 else 0, int(heads > 1), rows * TILE, columns * TILE
            continue
        layout: Layout = getattr(layouts, name)
        strides[name] = [stride // layout.dtype.itemsize for stride in layout.strides]
    return (strides[()],)


_NAMES_OF_SCORES = re.compile(r"\b(score|grad)\b")
_REFUSED = (
    (
        re.compile("[\0\ud800-\udfff]"),  # surrogates have no UTF-8
        "the compiler reads UTF-8 up to a null character",
        "take that character out",
    ),
    (
        re.compile(r"#|%(?:\\\r?\n)*:|__has_include"),  # %: is another spelling of #
        "in C++ that is of directives, which read files and define macros; an expression has none",
        "write the expression without it; a number that changes is an array without axes",
    ),
    (
        re.compile(r"/(?:\\\r?\n)*/"),
        "in C++ that begins a comment; / divides integers and rounds toward 0",
        "write one slash to divide; a comment is between /* and */",
    ),
    (
        re.compile(r"\\(?=\s*$)"),
        "in C++ a backslash joins its line with the next, and there is no next line",
        "take it out",
    ),
)


def _shown_as_call(given: ScoreMod | MaskMod) -> str:
    arrays = "".join(f", {name}=..." for name in given.arrays)
    return f"{type(given).__name__}({given.expression!r}{arrays})"


def _rewritten(
    given: ScoreMod | MaskMod,
    rewrite: Callable[[str, str], str],
    python: Callable[[Callable[..., Any]], Any],
    arrays: Mapping[str, Array],
) -> Any:
    """Return a copy with other texts, Python functions and arrays.

    `rewrite` is given each text and its name in compilation errors. What it returns may have
    directives, such as #line: the expressions of users, which were checked, may not. `python` is
    given the functions for NumPy arrays.
    """
    made = copy(given)
    made.expression = rewrite(given.expression, given._option)
    made.python = python(_function_of(given))
    made.arrays = dict(arrays)
    if isinstance(made, ScoreMod):
        made.gradient = made.gradient and rewrite(made.gradient, f"{given._option}'s gradient")
        if given.python_gradient is not None or given.gradient is not None:
            made.python_gradient = python(_function_of(given, gradient=True))
    return made


class ScoreMod:
    r"""A change of each score of `attention`, as an expression that is compiled into its kernels.

    Parameters
    ----------
    expression : str
        CUDA C++, with the names ``score`` (a float: scaled, capped, with bias and ALiBi), ``b``,
        ``h``, ``q_idx``, ``k_idx`` (ints: batch element, query head, query, key) and those of the
        arrays, which are indexed by them. With packed sequences ``b`` is the sequence's number,
        and ``q_idx`` and ``k_idx`` count within it. Masks come after it, so it is evaluated for
        hidden scores too. ``INFINITY`` and ``NAN`` are floats. C++ differs from Python: a chain of
        comparisons is ``0 <= x && x <= 3``, ``/`` of integers rounds toward 0, and numbers need an
        f, ``0.1f``: without it the kernel computes in double, which is slow.
    gradient : str, optional
        The same for the gradient with respect to score, from ``grad``, that with respect to what
        the expression gives, and the names above. Needed for the backward. The arrays get none.
    python : callable, or (callable, callable), optional
        For expressions that NumPy arrays do not evaluate themselves outside of the emulator. They
        evaluate numbers, names, indexed arrays, operators, ``?:``, casts, and functions such as
        ``abs``, ``min``, ``expf`` and ``tanhf``. ``python(score, b, h, q_idx, k_idx, **arrays)`` of
        NumPy arrays that broadcast together returns the scores. The second callable is that of
        gradient: ``(score, grad, b, h, q_idx, k_idx, **arrays)``.
    **arrays : array
        What the expressions name: of float16, float32, bfloat16, bool, uint8, int32 or int64 (on a
        CPU, with float64 arrays, float64 too), with up to four axes of any strides, on the device
        of q. ``slopes[h]``, ``table[b][h]``; without axes, for a number that changes, ``t``.
        Indices have to lie within the array, for hidden scores too (``table[max(q_idx - k_idx,
        0)]`` in causal order): a GPU does not check them, the emulator and NumPy arrays do.

    Raises
    ------
    TypeError
        For an expression that is no string, and for None or a number as an array.
    ValueError
        For a name of an array that expressions cannot have, and for a null character, a surrogate,
        ``#``, ``%:``, ``//`` or a backslash at the end of an expression.

    Notes
    -----
    Kernels are compiled for each expression once, and kept on the disk; arrays, also of other
    shapes, may change. An expression that does not compile is a ValueError of the call that first
    needs it, with the line and column. The idea is FlexAttention's (Dong et al., arXiv:2412.05496).

    Examples
    --------
    Linear biases, as alibi_slopes has them:

    >>> import numpy as np, cupyattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 8), dtype=np.float32)
    >>> slopes = np.array([0.5, 0.25], np.float32)
    >>> alibi = cupyattn.ScoreMod(
    ...     "score - slopes[h] * abs(q_idx - k_idx)",
    ...     gradient="grad",
    ...     slopes=slopes,
    ... )
    >>> out = cupyattn.attention(q, k, v, score_mod=alibi)
    >>> np.allclose(out, cupyattn.attention(q, k, v, alibi_slopes=slopes), atol=1e-6)
    True
    """

    _option = "score_mod"
    _names = "score, b, h, q_idx, k_idx"
    _example = "score - slopes[h] * abs(q_idx - k_idx)"
    _rewritten = _rewritten

    def __repr__(self) -> str:
        return _shown_as_call(self)

    def __init__(
        self,
        expression: str,
        /,
        *,
        gradient: str | None = None,
        python: Any = None,
        **arrays: Array,
    ) -> None:
        self.expression, self.gradient, self.arrays = expression, gradient, arrays
        both = python if isinstance(python, tuple) else (python, None)
        if len(both) != 2 or not all(each is None or callable(each) for each in both):
            raise error(
                TypeError,
                f"ScoreMod's python is {shown(python)}",
                f"it is a function of ({self._names}) and the arrays, or a tuple of it and that of "
                "the gradient",
                "pass a lambda, or leave it out for kernels alone; an array needs another name",
            )
        self.python, self.python_gradient = both
        _require_valid(self)


class MaskMod:
    r"""Which keys a query of `attention` sees, as an expression that is compiled into its kernels.

    Parameters
    ----------
    expression : str
        CUDA C++, true to attend, with the names ``b``, ``h``, ``q_idx``, ``k_idx`` (ints: batch
        element, query head, query, key) and those of the arrays, as in `ScoreMod`.
    python : callable, optional
        For expressions that NumPy arrays do not evaluate themselves, as in `ScoreMod`.
        ``python(b, h, q_idx, k_idx, **arrays)`` of NumPy arrays that broadcast together returns
        bool.
    **arrays : array
        As in `ScoreMod`.

    Raises
    ------
    TypeError, ValueError
        As `ScoreMod`; ValueError for an expression that names score or grad as well.

    Examples
    --------
    Documents that were packed into one sequence do not see each other:

    >>> import numpy as np, cupyattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 8), dtype=np.float32)
    >>> same = cupyattn.MaskMod(
    ...     "document[q_idx] == document[k_idx]",
    ...     document=np.array([0, 0, 0, 0, 1, 1], np.int32),
    ... )
    >>> out = cupyattn.attention(q, k, v, mask_mod=same)
    >>> np.allclose(out[:, 4:], cupyattn.attention(q[:, 4:], k[:, 4:], v[:, 4:]))
    True
    """

    _option = "mask_mod"
    _names = "b, h, q_idx, k_idx"
    _example = "document[q_idx] == document[k_idx]"
    _rewritten = _rewritten

    def __repr__(self) -> str:
        return _shown_as_call(self)

    def __init__(self, expression: str, /, *, python: Any = None, **arrays: Array) -> None:
        self.expression, self.python, self.arrays = expression, python, arrays
        self.gradient = self.python_gradient = None
        if python is not None and not callable(python):
            raise error(
                TypeError,
                f"MaskMod's python is {shown(python)}",
                f"it is a function of ({self._names}) and the arrays",
                "pass a lambda, or leave it out for kernels alone; an array needs another name",
            )
        _require_valid(self)
        of_scores = _NAMES_OF_SCORES.search(expression)
        if of_scores is not None:
            raise error(
                ValueError,
                f"MaskMod's expression names {of_scores[0]!r}",
                f"it has {self._names} and its arrays: what is masked is known before any score is",
                "have a ScoreMod give -INFINITY where a score is not to count",
            )


def _require_valid(given: ScoreMod | MaskMod) -> None:
    """Raise unless the texts may be compiled, and the arrays be named so."""
    kind = type(given)
    for name, text in (("expression", given.expression), ("gradient", given.gradient)):
        whose = f"{kind.__name__}'s {name}"
        if name == "gradient" and text is None:
            continue
        if not isinstance(text, str) or not text.strip():
            raise error(
                TypeError,
                f"{whose} is {shown(text)}",
                "it is a string, a CUDA C++ expression",
                f"pass for example {kind._example!r}",
            )
        for pattern, *reason in _REFUSED:
            if (found := pattern.search(text)) is not None:
                passed = f"{whose} has {found[0]!r} at {found.start()}"
                raise error(ValueError, passed, *reason)
    for name, array in given.arrays.items():
        _require_usable(kind.__name__, name, array)


def _function_of(given: ScoreMod | MaskMod, *, gradient: bool = False) -> Callable[..., Any]:
    """Return a function for NumPy arrays: the Python function, or one of the expression."""
    function = given.python_gradient if gradient else given.python
    if function is not None:
        return function

    def evaluated(*operands: Any, **arrays: Any) -> np.ndarray:
        return _evaluator(given, gradient)(*operands, **arrays)

    return evaluated


def _evaluator(given: ScoreMod | MaskMod, gradient: bool) -> Callable[..., np.ndarray]:
    """Return a function that evaluates the expression, or raise NotImplementedError."""
    kind = type(given).__name__
    text = given.gradient if gradient else given.expression
    whose = f"{kind}'s {'gradient' if gradient else 'expression'}"
    is_mask = isinstance(given, MaskMod)
    names = MASK_NAMES if is_mask else GRADIENT_NAMES if gradient else SCORE_NAMES

    def refused(part: str) -> Exception:
        return error(
            NotImplementedError,
            f"{whose} has {part}, which NumPy arrays do not evaluate",
            f"they evaluate {EVALUATED}",
            f"give {kind} {'python=(function, gradient)' if gradient else 'python='} as well, or "
            "run it within backend('emulator')",
        )

    result = "bool" if is_mask else "float"
    return evaluator(str(text), tuple(names), tuple(given.arrays), result, refused, whose)


def _require_usable(kind: str, name: str, array: Any) -> None:
    taken = name in {*TAKEN_NAMES, *CPP_WORDS.split()} or keyword.iskeyword(name)
    if taken or name.startswith("__") or not (name.isascii() and name.isidentifier()):
        raise error(
            ValueError,
            f"{kind} was given an array named {name!r}",
            "a name has letters, digits and underscores, not two in front; expressions have "
            f"{', '.join(TAKEN_NAMES)} already, and the words of C++",
            "give it another name, in the expression too",
        )
    if array is None or isinstance(array, Number | np.generic):
        raise error(
            TypeError,
            f"{kind} was given {name} = {shown(array)}",
            "what its expression names are arrays, of no axes too",
            "pass one (of a number numpy.asarray or cupy.asarray), or an expression without it",
        )


def user_function(option: str, given: Any) -> UserFunction | None:
    """Return what a problem knows of a score_mod or mask_mod.

    Raises
    ------
    TypeError
        If it is none.
    """
    kind = ScoreMod if option == "score_mod" else MaskMod
    if given is None:
        return None
    if isinstance(given, kind):
        return UserFunction(given.expression, given.gradient, tuple(given.arrays))
    if callable(given):
        return UserFunction(None)
    raise error(
        TypeError,
        f"{option} has type {type(given).__name__}",
        f"it must be a {kind.__name__}, or for NumPy arrays a function {option}({kind._names})",
        f"pass for example {kind.__name__}({kind._example!r}, ...)",
    )


def arrays_of(option: str, given: Any) -> dict[str, Array]:
    """Return the arrays of an expression by their names among those of a call."""
    arrays = given.arrays if isinstance(given, ScoreMod | MaskMod) else {}
    return {parameter_name(option, name): array for name, array in arrays.items()}


def python_function(option: str, given: Any, arrays: Record[Any], *, gradient: bool = False) -> Any:
    """Return what NumPy arrays run, or the gradient of that: a function that is checked.

    Its arguments are those that `ScoreMod` and `MaskMod` document.

    Raises
    ------
    NotImplementedError
        If there is none, and NumPy arrays do not evaluate the expression.
    """
    if given is None:
        return None
    has_gradient = isinstance(given, ScoreMod) and (given.gradient or given.python_gradient)
    if gradient and not has_gradient:
        raise error(
            NotImplementedError,
            f"{option} = {given!r} has no gradient",
            "the backward needs its derivative, an expression or for NumPy arrays a function of "
            f"{', '.join(GRADIENT_NAMES)}",
            "give ScoreMod gradient=, an expression of grad and score: 'grad' where a term is "
            "added to the score"
            if isinstance(given, ScoreMod)
            else "give ScoreMod python=(function, gradient), or write both as expressions",
        )
    if isinstance(given, ScoreMod | MaskMod):
        function = given.python_gradient if gradient else given.python
        function = function or _evaluator(given, gradient)
    else:
        function = given
    names = getattr(given, "arrays", ())
    own = {name: getattr(arrays, parameter_name(option, name)) for name in names}
    return _checked_result(f"{option}'s gradient" if gradient else option, function, own)


def _checked_result(name: str, function: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    """Wrap a user's function so that what it returns is checked."""
    mask = name == "mask_mod"

    def checked(*operands: np.ndarray) -> np.ndarray:
        result = np.asarray(function(*operands, **arrays))
        if (result.dtype != np.bool_) if mask else (result.dtype.kind not in "fiu"):
            raise error(
                TypeError,
                f"{name} returned {result.dtype.name}",
                "it returns bool, True to attend" if mask else "it returns floats",
                "return a comparison, for example q_idx >= k_idx" if mask else "convert it",
            )
        block = np.broadcast_shapes(*(operand.shape for operand in operands))
        try:
            return np.broadcast_to(result, block)
        except ValueError:
            raise error(
                ValueError,
                f"{name} returned shape {result.shape} for scores {block}",
                f"what it returns broadcasts to {block}",
                "compute it from its arguments by elementwise operations",
            ) from None

    return checked
