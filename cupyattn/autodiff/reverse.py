"""Reverse-mode differentiation of functions on arrays, like jax.vjp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import cupyattn.autodiff.methods  # noqa: F401 (it gives traced arrays their operators)
from cupyattn.autodiff.calls import Call, record_call
from cupyattn.autodiff.tape import (
    Tape,
    TapeNode,
    is_differentiable,
    is_float,
    is_traced,
    leaves,
    library_of,
    pull_back,
    raw,
    tree_map,
    zeros,
)
from cupyattn.runtime.annotations import Undescribed
from cupyattn.runtime.differentiable import recorder
from cupyattn.runtime.errors import error

Tree = Undescribed
"""Arrays in tuples, lists, dictionaries and NamedTuples."""


def vjp(
    function: Callable[..., object],
    /,
    *arrays: object,
    wrt: tuple[str, ...] = (),
    **options: object,
) -> tuple[Any, Pullback]:
    r"""Call a function and return its result and the pullback, which computes its gradients.

    Parameters
    ----------
    function : callable
        Any function that is made of the library's differentiable functions, such as `attention`,
        `linear` and `rms_norm`, and of array operations: + - * / ** @, comparisons, indexing, the
        functions of ``cupyattn.autodiff``, and NumPy's of the same names.
    arrays : arrays, or tuples, lists, dictionaries and NamedTuples of arrays
        The positional arguments of the function. Those of float16, bfloat16, float32 and float64
        have gradients.
    wrt : tuple of str, optional
        The names of options that are arrays and whose gradients are wanted too. Options of a
        partial are allowed.
    options : optional
        The keyword arguments of the function.

    Returns
    -------
    result : array, or a structure of arrays
        The result of ``function(*arrays, **options)``.
    pullback : Pullback
        ``pullback(dout)`` takes the gradient of a scalar with respect to the result and returns
        the gradients with respect to `arrays`: the product of dout with the function's Jacobian. If
        the function has several results, it takes a tuple of their gradients, for example
        ``pullback((dout, dlse))`` for attention with ``return_lse=True``. None in the tuple means
        that the result was not used.

        It returns a tuple with an entry for each of `arrays`, of the same structure: arrays of the
        same shape and dtype, zeros for an array that was not used, and None for what has no
        gradient, such as a mask or a number. For attention(q, k, v) that is ``(dq, dk, dv)``. With
        `wrt` the last entry is a dictionary of the gradients of these options by name.

        If the function is one call of the library, it accepts the options that only the backward
        has, ``pullback(dout, deterministic=True)``: for attention deterministic, grads,
        accumulate, workspace and implementation, as `attention_backward` documents them, and
        likewise for other functions.

    Raises
    ------
    TypeError
        For an operation that has no derivative here, with its line in the function: an in-place
        write, ``float(x)``, ``if x > 0``, another function of NumPy or CuPy, ``out=``; for an array
        that is used after the function has returned; and for a name in `wrt` that is no array among
        the options or has no gradient. The pullback raises it for gradients that do not have the
        structure or dtype of the result, and for options that the backward alone does not have.
    ValueError
        For a name that is in `wrt` twice, and for the gradient of a bias of softmax along another
        axis than the last. The pullback raises it for gradients of another shape.
    TypeError, ValueError, NotImplementedError, RuntimeError
        The errors of the function, and from the pullback those of its backward.

    Notes
    -----
    The pullback keeps the arrays that the backwards need without a copy, so do not write to them
    before you call it. It may be called any number of times. Gradients that are equal, such as
    those of the two terms of a sum, may be one array. The pullback calls the function's backward,
    such as `attention_backward`, with the arguments of the call, including dropout's seed and
    ``implementation``. "tiled" has no backward on a GPU: pass
    ``pullback(dout, implementation="flash")`` there.

    The function is called with traced arrays in place of its float arrays. They have shapes and
    dtypes, but no values. `stop_gradient` gives a constant. Comparisons are constants too.
    Contributions to the gradient of one array are added in a fixed order, those of 16-bit arrays in
    float32. CuPy's own functions do not know traced arrays: use operators, methods, and the
    functions of ``cupyattn.autodiff``.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> from functools import partial
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 1, 5, 2, 8), dtype=np.float32)
    >>> out, pullback = cupyattn.vjp(cupyattn.attention, q, k, v, causal=True)
    >>> dq, dk, dv = pullback(dout)
    >>> dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
    True

    With the log-sum-exp as second result:

    >>> (out, lse), pullback = cupyattn.vjp(cupyattn.attention, q, k, v, return_lse=True)
    >>> dq, dk, dv = pullback((dout, np.ones_like(lse)))

    With the gradient of an option, and with a partial:

    >>> bias = np.zeros((5, 5), np.float32)
    >>> windowed = partial(cupyattn.attention, window_size=(2, 0))
    >>> out, pullback = cupyattn.vjp(windowed, q, k, v, bias=bias, wrt=("bias",))
    >>> dq, dk, dv, more = pullback(dout)
    >>> more["bias"].shape
    (5, 5)

    Of a whole layer, with a dictionary of weights:

    >>> def layer(x, w):
    ...     h = cupyattn.linear(cupyattn.rms_norm(x, w["norm"]), w["up"], activation="gelu")
    ...     return x + cupyattn.linear(h, w["down"])
    >>> x, w = np.ones((3, 4), np.float32), {"norm": np.ones(4, np.float32)}
    >>> w |= {"up": np.ones((4, 8), np.float32), "down": np.ones((8, 4), np.float32)}
    >>> out, pullback = cupyattn.vjp(layer, x, w)
    >>> dx, dw = pullback(np.ones_like(out))
    >>> sorted(dw)
    ['down', 'norm', 'up']

    With respect to some of the arrays only. The gradients are a tuple even if there is only one:

    >>> out, pullback = cupyattn.vjp(lambda k: cupyattn.attention(q, k, v), k)
    >>> (dk,) = pullback(dout)
    """
    if isinstance(function, partial):
        options = {**function.keywords, **options}  # as the partial itself merges them
    _require_wrt(wrt, options)
    return differentiated(function, name_of(function), arrays, wrt, options)


def differentiated(
    function: Callable[..., object],
    title: str,
    arrays: tuple[object, ...],
    wrt: tuple[str, ...] = (),
    options: Mapping[str, object] = {},
) -> tuple[Any, Pullback]:
    """Call a function as `vjp` does, with a name for messages."""
    if not callable(function):
        raise error(
            TypeError,
            f"vjp of {title}, which cannot be called",
            "a function comes first, then its arrays",
            "pass the function itself, without calling it",
        )
    tape = Tape(title)
    given = (*arrays, tuple([options[name] for name in wrt]))
    traced = tree_map(partial(_traced, tape), given)
    named = dict(zip(wrt, traced[-1], strict=True))
    # Before the call: the function may change the dictionaries and lists that it gets.
    numbers = tree_map(lambda leaf: leaf._node if is_traced(leaf) else None, traced)
    arguments = {name: leaves(value) for name, value in named.items()}
    try:
        returned = _run(tape, function, traced[:-1], {**options, **named})
        for number, used in tape.constant_inputs.items():
            _require_constant(tape, number, used, returned)
        for name, values in arguments.items():
            for leaf in values:
                _require_gradient(tape, name, leaf)
        pullback = Pullback(tape, numbers if wrt else numbers[:-1], wrt, returned)
        return tree_map(raw, returned), pullback
    finally:
        # The tape must not keep arrays alive: an error's traceback refers to it.
        tape.closed, tape.nodes, tape.refused = "after its function has returned", [], None
        del traced, named, arguments


def _traced(tape: Tape, value: object) -> object:
    if is_traced(value):
        raise value._tape.refuse(  # type: ignore[attr-defined]
            "calls vjp on a traced array", "differentiate once: gradients have no gradients here"
        )
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape"):
        return value
    if getattr(dtype, "kind", "") == "c":
        raise error(
            TypeError,
            f"vjp of {tape.title} with an array of {dtype}",
            "gradients are of float16, bfloat16, float32 and float64",
            "pass real and imaginary part as two arrays",
        )
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        if isinstance(value, np.matrix | np.ma.MaskedArray):
            raise error(
                TypeError,
                f"vjp of {tape.title} with a {type(value).__name__}",
                "arguments are plain arrays",
                "pass numpy.asarray of it",
            )
        value = value.view(np.ndarray)
    return tape.input(value) if is_float(dtype) or _is_foreign(value) else value


def _is_foreign(value: Any) -> bool:
    """Tell whether an array of another library is of floats: a torch.Tensor, for example."""
    return library_of(value) is None and "float" in str(value.dtype)


def _run(
    tape: Tape, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Call the function with traced arrays; return its result, checked."""
    token = recorder.set(record_call(tape))
    try:
        returned = function(*args, **options)
    finally:
        recorder.reset(token)
    if tape.refused is not None:
        raise tape.refused
    for leaf in leaves(returned):
        if is_traced(leaf):
            if leaf._tape is not tape:
                raise tape.refuse(
                    f"returns a traced array of {leaf._tape.title}",
                    "pass that array to the inner function as an argument",
                )
        elif not _is_plain(leaf):
            raise tape.refuse(
                f"returns {type(leaf).__name__}, in which vjp does not find arrays",
                "return arrays, or tuples, lists, dictionaries and NamedTuples of arrays",
            )
    return returned


def _is_plain(leaf: object) -> bool:
    """Tell whether a result has no traced arrays within it."""
    if leaf is None or isinstance(leaf, int | float | complex | str | bytes):
        return True
    return library_of(leaf) is not None and leaf.dtype.kind != "O"  # type: ignore[attr-defined]


def _require_constant(tape: Tape, number: int, used: str, returned: object) -> None:
    returns = any(is_traced(leaf) and leaf._node == number for leaf in leaves(returned))
    if returns or any((number, 0) in node.parents for node in tape.nodes):
        raise tape.refuse(
            f"uses an argument that {used}, in another place too",
            "pass stop_gradient(array) in the place without a gradient",
        )


def _require_gradient(tape: Tape, name: str, leaf: object) -> None:
    used = tape.constant_inputs.get(leaf._node) if is_traced(leaf) else "has no gradient"  # type: ignore[attr-defined]
    if used is not None:
        dtype = "" if is_traced(leaf) else f" (its dtype is {getattr(leaf, 'dtype', None)})"
        raise error(
            TypeError,
            f"wrt names {name!r}, which {used}{dtype}",
            "wrt has names of options that have a gradient",
            "leave it out of wrt",
        )


@dataclass(frozen=True, slots=True)
class _Result:
    """A result of the function: its node, and what its gradient has to be."""

    node: int | None
    output: int
    shape: tuple[int, ...] | None
    dtype: Any


def _result_of(leaf: Any) -> _Result:
    if not is_traced(leaf):
        return _Result(None, 0, getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
    node = leaf._node if is_differentiable(leaf) else None
    return _Result(node, leaf._output, leaf.shape, leaf.dtype)


class Pullback:
    """The second result of `cupyattn.vjp`: it computes the gradients of the arguments."""

    def __init__(self, tape: Tape, arguments: Tree, wrt: tuple[str, ...], result: Tree) -> None:
        self._title = tape.title
        self._nodes = tape.nodes
        self._arguments = arguments
        self._wrt = wrt
        self._inputs = sum([node.pull is None for node in tape.nodes])
        self.constant = dict(tape.constant_inputs)
        """Arguments by number that were passed where there is no gradient, and how."""
        self._result = tree_map(_result_of, result)
        _prune(self._nodes, self._inputs, leaves(self._result))
        last = self._nodes[-1].pull if self._nodes else None
        alone = len(self._nodes) == self._inputs + 1 and isinstance(last, Call)
        self._call: Call | None = last if alone else None  # type: ignore[assignment]

    def __call__(self, *gradients: Any, **options: object) -> tuple[Any, ...]:
        """Return the gradients. `vjp` documents the arguments and the result."""
        self._require_options(options)
        if len(gradients) != 1:
            raise self._misshapen(f"{len(gradients)} arguments")
        seeds = list(self._seeds(self._result, gradients[0], ""))
        if self._call is not None and not seeds:
            seeds = [(self._inputs, 0, None)]  # the backward is called with zeros
        found = pull_back(self._nodes, seeds, self._inputs, options)
        called = self._call is not None and any(seed[0] == self._inputs for seed in seeds)

        def gradient(number: int | None) -> Any:
            if number is None or number in self.constant:
                return None
            if called and self._uses(number):
                return found[number]
            if found[number] is not None:
                return _usable(found[number])
            (spec,) = self._nodes[number].specs
            assert spec is not None
            return zeros(spec, gradients[0])

        entries: tuple[Any, ...] = tree_map(gradient, self._arguments)
        if not self._wrt:
            return entries
        *positional, named = entries
        return (*positional, dict(zip(self._wrt, named, strict=True)))

    def _uses(self, number: int) -> bool:
        return (number, 0) in self._nodes[-1].parents

    def _seeds(self, expected: Any, given: Any, path: str) -> Iterator[tuple[int, int, Any]]:
        """Pair the results' nodes with their gradients."""
        if given is None and path:
            return
        if isinstance(expected, _Result):
            yield from self._seed(expected, given, path)
            return
        matches = (
            isinstance(given, dict) and given.keys() == expected.keys()
            if isinstance(expected, dict)
            else isinstance(given, tuple | list)
            and isinstance(given, list) <= isinstance(expected, list)
            and len(given) == len(expected)
        )
        if not matches:
            raise self._misshapen(_described(given))
        keys = expected if isinstance(expected, dict) else range(len(expected))
        for key in keys:
            yield from self._seeds(expected[key], given[key], f"{path}[{key!r}]")

    def _seed(self, result: _Result, given: Any, path: str) -> Iterator[tuple[int, int, Any]]:
        if isinstance(given, tuple | list | dict):
            raise self._misshapen(_described(given))
        if result.node is None:  # it does not depend on the arguments
            return
        if is_traced(given):
            raise given._tape.refuse("calls a pullback with a traced array", "differentiate once")
        if isinstance(given, int | float) and result.shape == ():
            given = np.full((), given, result.dtype)
        if not hasattr(given, "shape"):
            raise error(
                TypeError,
                f"dout{path} is {'None' if given is None else f'of type {type(given).__name__}'}",
                f"it is the gradient of a result of shape {result.shape} and dtype {result.dtype}",
                "pass an array of that shape and dtype",
            )
        foreign = library_of(given) is None
        if tuple(given.shape) != result.shape or not (foreign or given.dtype == result.dtype):
            raise error(
                ValueError if foreign or given.dtype == result.dtype else TypeError,
                f"dout{path} has shape {tuple(given.shape)} and dtype {given.dtype}",
                f"the result has shape {result.shape} and dtype {result.dtype}",
                "pass the gradient of the result, of its shape and dtype",
            )
        yield result.node, result.output, given

    def _misshapen(self, passed: str) -> TypeError:
        alone = isinstance(self._result, _Result)
        names = self._call.visible if self._call is not None else ()
        return error(
            TypeError,
            f"the pullback of {self._title} was given {passed}",
            f"the function returned {' and '.join(names) or _described(self._result)}",
            f"pass {f'd{names[0]}' if names else 'its gradient'}, an array"
            if alone
            else f"pass one {_described(self._result)} of gradients"
            f"{' (' + ', '.join(f'd{name}' for name in names) + ')' if names else ''}, with None "
            "for a result that was not used",
        )

    def _require_options(self, options: dict[str, object]) -> None:
        if not options:
            return
        if self._call is None:
            raise error(
                TypeError,
                f"the pullback of {self._title} was given {', '.join(options)}",
                "options of a backward reach a function that is one call of the library",
                "leave them out",
            )
        rule = self._call.rule
        others = [name for name in options if name not in rule.backward_options]
        if others:
            raise error(
                TypeError,
                f"the pullback of {rule.name} was given {', '.join(others)}",
                f"it takes the backward's own options, {', '.join(rule.backward_options)}",
                "give vjp those of the call",
            )


def _prune(nodes: list[TapeNode], inputs: int, results: list[_Result]) -> None:
    """Drop what operations keep from which no result follows."""
    needed = {result.node for result in results}
    for number in range(len(nodes) - 1, inputs - 1, -1):
        if number in needed:
            needed.update([parent for parent, _ in nodes[number].parents])
        else:
            nodes[number] = TapeNode(nodes[number].name, (), nodes[number].specs, None)


def _usable(gradient: Any) -> Any:
    """Return a gradient as a contiguous array that its owner may write to."""
    gradient = np.asarray(gradient) if isinstance(gradient, np.generic) else gradient
    if gradient.flags.c_contiguous and getattr(gradient.flags, "writeable", True):
        return gradient
    return gradient.copy(order="C")


def _described(value: object) -> str:
    if isinstance(value, _Result):
        return "an array"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, dict):
        return f"a dictionary of {', '.join(map(repr, value))}"
    return f"one {type(value).__name__}"


def name_of(function: object) -> str:
    """Return the name of a function for messages; of a partial, the name of its function."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or f"an object of type {type(function).__name__}"


def _is_array(value: object) -> bool:
    return (
        is_traced(value)
        or hasattr(value, "__dlpack__")
        or hasattr(value, "__cuda_array_interface__")
    )


def _require_wrt(wrt: object, options: Mapping[str, object]) -> None:
    if not isinstance(wrt, tuple) or not all(isinstance(name, str) for name in wrt):
        unnamed = " with items that are no names" if isinstance(wrt, tuple) else ""
        raise error(
            TypeError,
            f"wrt has type {type(wrt).__name__}{unnamed}",
            "it must be a tuple of names of options",
            f"pass wrt=({wrt!r},)" if isinstance(wrt, str) else 'pass for example wrt=("bias",)',
        )
    for name in wrt:
        if wrt.count(name) > 1:
            raise error(
                ValueError,
                f"wrt names {name!r} {wrt.count(name)} times",
                "each name is in it once",
                "leave out the others: an option has one gradient",
            )
        value = options.get(name)
        if not leaves(value) or not all(map(_is_array, leaves(value))):
            given = f"has type {type(value).__name__}" if name in options else "was not given"
            raise error(
                TypeError,
                f"wrt names {name!r}, which {given}",
                "wrt has names of options that are arrays",
                "give vjp an array of that name, or leave it out of wrt",
            )
