"""Functions that are made with `vjp`: gradients of scalars, recomputation, rules of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from cupyattn.autodiff.reverse import Tree, differentiated, name_of
from cupyattn.autodiff.tape import (
    Tape,
    constant,
    dense,
    is_differentiable,
    is_float,
    is_traced,
    leaves,
    leaves_like,
    library_of,
    raw,
    rebuilt,
    spec_of,
    tape_of,
    tree_map,
    zeros,
)
from cupyattn.runtime.annotations import Undescribed
from cupyattn.runtime.differentiable import recorder
from cupyattn.runtime.errors import error


def value_and_grad(
    function: Callable[..., object], /, *, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Make a function that returns the value of a scalar function and its gradient.

    Parameters
    ----------
    function : callable
        A function as `vjp` takes, whose result is a scalar: an array of shape ().
    argnums : int or tuple of int
        The positional arguments with respect to which the gradient is: arrays or structures of
        arrays. With a tuple the gradients are a tuple.
    has_aux : bool
        The function returns ``(value, aux)``; aux is returned as it is, without a gradient.

    Returns
    -------
    callable
        It takes the arguments of the function and returns ``(value, gradient)``, or
        ``((value, aux), gradient)`` with has_aux.

    Raises
    ------
    TypeError, ValueError
        The new function raises what `vjp` raises, and TypeError for a value that is no scalar.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> step = cupyattn.value_and_grad(lambda w, x: ((x @ w) ** 2).sum())
    >>> value, gradient = step(np.array([1.0, 2.0]), np.eye(2))
    >>> float(value), gradient
    (5.0, array([2., 4.]))
    """
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    if not all(isinstance(number, int) for number in numbers):
        raise error(
            TypeError, f"argnums = {argnums!r}", "it is an integer or a tuple of integers",
            "pass for example argnums=(0, 1)",
        )  # fmt: skip

    @wraps(function)
    def value_and_gradient(*args: Any, **options: Any) -> tuple[Any, Any]:
        if not all(-len(args) <= number < len(args) for number in numbers):
            raise error(
                TypeError,
                f"{name_of(function)} was given {len(args)} arguments by position",
                f"argnums = {argnums} names those with a gradient",
                "pass these arguments by position",
            )
        chosen = tuple([args[number] for number in numbers])

        def of_chosen(*arrays: Any) -> Any:
            given = list(args)
            for number, array in zip(numbers, arrays, strict=True):
                given[number] = array
            return function(*given, **options)

        result, pullback = differentiated(of_chosen, name_of(function), chosen)
        value = result[0] if has_aux else result
        if getattr(value, "shape", None) != ():
            raise error(
                TypeError,
                f"{name_of(function)} returned {_shown(value)}",
                "the gradient is that of a scalar, an array of shape ()",
                "return for example loss.mean(), and pass has_aux=True for (loss, more)",
            )
        one = _one_like(value)
        gradients = pullback((one, None) if has_aux else one)
        for number, gradient in zip(numbers, gradients, strict=True):
            if all(leaf is None for leaf in leaves(gradient)):
                raise error(
                    TypeError,
                    f"argument {number} of {name_of(function)} has no gradient",
                    "gradients are of arrays of float16, bfloat16, float32 and float64",
                    "pass such an array, or other argnums",
                )
        return result, gradients if isinstance(argnums, tuple) else gradients[0]

    return value_and_gradient


def _shown(value: object) -> str:
    if hasattr(value, "shape"):
        return f"an array of shape {value.shape}"
    return f"an object of type {type(value).__name__}"


def _one_like(value: Any) -> Any:
    library: Any = library_of(value)
    return library.ones((), value.dtype)


def grad(
    function: Callable[..., object], /, *, argnums: int | tuple[int, ...] = 0
) -> Callable[..., Any]:
    """Make a function that returns the gradient of a scalar function.

    Parameters
    ----------
    function, argnums
        As for `value_and_grad`.

    Returns
    -------
    callable
        It takes the arguments of the function and returns the gradient.

    Raises
    ------
    TypeError, ValueError
        The new function raises what `value_and_grad` raises.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.grad(lambda x: (x**3).sum())(np.array([1.0, 2.0]))
    array([ 3., 12.])
    """
    both = value_and_grad(function, argnums=argnums)

    @wraps(function)
    def gradient(*args: Any, **options: Any) -> Any:
        return both(*args, **options)[1]

    return gradient


def stop_gradient(arrays: Tree, /) -> Tree:
    """Return the arrays as constants: `vjp` does not differentiate through them.

    Parameters
    ----------
    arrays : array, or a structure of arrays
        Outside of `vjp` they are returned as they are.

    Returns
    -------
    array, or a structure of arrays

    Raises
    ------
    TypeError
        For a traced array that is used after its function has returned.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.grad(lambda x: (x * cupyattn.stop_gradient(x)).sum())(np.array([1.0, 2.0]))
    array([1., 2.])
    """
    tape = tape_of(leaves(arrays))
    if tape is None:
        return arrays
    return tree_map(lambda x: constant(raw(x), tape) if is_traced(x) else x, arrays)


def checkpoint(function: Callable[..., Any], /) -> Callable[..., Any]:
    """Make a function whose backward computes it again, instead of keeping its arrays.

    Parameters
    ----------
    function : callable
        A function as `vjp` takes. It must be repeatable: the same arguments give the same result.
        It gets traced arrays as arguments only, not from the variables of an outer function.

    Returns
    -------
    callable
        It takes and returns the same. Within `vjp` only its arguments are kept.

    Raises
    ------
    TypeError
        The new function raises what `vjp` raises.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> layer = cupyattn.checkpoint(lambda x, w: cupyattn.gelu(cupyattn.linear(x, w)))
    >>> out, pullback = cupyattn.vjp(layer, np.eye(2), np.ones((2, 3)))
    >>> [gradient.shape for gradient in pullback(np.ones_like(out))]
    [(2, 2), (2, 3)]
    """

    @wraps(function)
    def checkpointed(*args: Any, **options: Any) -> Any:
        given = (args, options)
        flat = leaves(given)
        tape = tape_of(flat)
        if tape is None:
            return function(*args, **options)
        given, plain = tree_map(raw, given), list(map(raw, flat))
        places = [number for number, leaf in enumerate(flat) if is_differentiable(leaf)]
        title = name_of(function)
        structure: list[Any] = []

        def of_arrays(*arrays: Any) -> tuple[Any, ...]:
            values = list(plain)
            for place, array in zip(places, arrays, strict=True):
                values[place] = array
            new_args, new_options = rebuilt(given, values)
            returned = function(*new_args, **new_options)
            structure[:] = [tree_map(raw, returned)]
            found = leaves(returned)
            return tuple([leaf for leaf in found if is_float(getattr(leaf, "dtype", None))])

        arrays = tuple([plain[place] for place in places])
        with _suspended(tape):  # refusals are raised here; the recorded operations are dropped
            _, pullback = differentiated(of_arrays, title, arrays)
        kept = []
        for number, place in enumerate(places):
            if number in pullback.constant:
                operand, used = flat[place], pullback.constant[number]
                if tape.nodes[operand._node].pull is not None:
                    raise tape.refuse(
                        f"passes a computed array to {title}, where it {used},",
                        "pass stop_gradient(array)",
                    )
                tape.constant_inputs[operand._node] = used
            else:
                kept.append(number)
        del pullback
        returned = structure.pop()
        results = leaves(returned)
        floats = [n for n, leaf in enumerate(results) if is_float(getattr(leaf, "dtype", None))]

        def pull(gradients: list[Undescribed]) -> list[Any]:
            found = differentiated(of_arrays, title, arrays)[1](tuple(gradients))
            structure.clear()
            return [found[number] for number in kept]

        operands = [flat[places[number]] for number in kept]
        return _recorded(tape, title, operands, returned, floats, pull)

    return checkpointed


@contextmanager
def _suspended(tape: Tape) -> Iterator[None]:
    """Let the tape's arrays not be used: a function gets other arrays."""
    before, tape.closed = tape.closed, "that a checkpointed or custom function did not get"
    token = recorder.set(None)
    try:
        yield
    finally:
        recorder.reset(token)
        tape.closed = before


def _recorded(
    tape: Tape, name: str, operands: list[Any], returned: Any, floats: list[int], pull: Any
) -> Any:
    """Record a function as one operation; return its result with traced arrays."""
    results = leaves(returned)
    values = [results[number] for number in floats]
    if operands and values:
        traced = tape.record(name, operands, values, pull)
        for number, value in zip(floats, traced, strict=True):
            results[number] = value
    return rebuilt(returned, results)


class custom_vjp:  # noqa: N801 (used as a function, as jax.custom_vjp is)
    """A function with a derivative of your own.

    `vjp` calls ``forward(*args)``, which returns the result and what the backward needs, and then
    ``backward(kept, dout)``, which returns a tuple with a gradient, or None, for each argument.
    Without `vjp` the function itself is called.

    Parameters
    ----------
    function : callable
        A function of arrays by position.

    Raises
    ------
    TypeError
        A call within `vjp` raises it if `defvjp` was not called.

    Examples
    --------
    A step whose gradient passes unchanged (a straight-through estimator):

    >>> import numpy as np, cupyattn
    >>> rounded = cupyattn.custom_vjp(lambda x: x.round())
    >>> rounded.defvjp(lambda x: (x.round(), None), lambda kept, dout: (dout,))
    >>> cupyattn.grad(lambda x: (3 * rounded(x)).sum())(np.array([0.2, 1.7]))
    array([3., 3.])
    """

    def __init__(self, function: Callable[..., Any], /) -> None:
        self._function = function
        self._forward: Callable[..., Any] | None = None
        self._backward: Callable[..., Any] | None = None

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any], /) -> None:
        """Set the forward, which keeps what the backward needs, and the backward."""
        self._forward, self._backward = forward, backward

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        flat = leaves(args)
        tape = tape_of(flat)
        if tape is None:
            return self._function(*args)
        title = name_of(self._function)
        if self._forward is None or self._backward is None:
            raise tape.refuse(
                f"calls {title}, which has no backward yet,", "call defvjp(forward, backward) first"
            )
        forward, backward = self._forward, self._backward
        with _suspended(tape):
            pair = forward(*rebuilt(args, list(map(raw, flat))))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise error(
                TypeError,
                f"the forward of {title} returned {type(pair).__name__}",
                "it returns a tuple of two: the result, and what the backward needs",
                "return (result, kept)",
            )
        returned, kept = pair
        structure, empty = tree_map(lambda _: None, args), tree_map(lambda _: None, returned)
        places = [number for number, leaf in enumerate(flat) if is_differentiable(leaf)]
        shapes = [flat[number].shape for number in places]
        results = leaves(returned)
        count = len(results)
        floats = [n for n, leaf in enumerate(results) if is_float(getattr(leaf, "dtype", None))]
        specs = [spec_of(results[number]) for number in floats]

        def pull(gradients: list[Undescribed]) -> list[Any]:
            douts = [
                zeros(spec) if gradient is None else dense(gradient)
                for gradient, spec in zip(gradients, specs, strict=True)
            ]
            given: list[Any] = [None] * count
            for number, dout in zip(floats, douts, strict=True):
                given[number] = dout
            found = _of_arguments(title, structure, backward(kept, rebuilt(empty, given)))
            chosen = [found[number] for number in places]
            for gradient, shape in zip(chosen, shapes, strict=True):
                if gradient is not None and getattr(gradient, "shape", None) != shape:
                    raise error(
                        ValueError,
                        f"the backward of {title} returned {_shown(gradient)} as a gradient",
                        f"the argument has shape {shape}",
                        "return a gradient of the argument's shape, or None",
                    )
            return chosen

        return _recorded(tape, title, [flat[n] for n in places], returned, floats, pull)


def _of_arguments(title: str, structure: Tree, gradients: object) -> list[Any]:
    """Return the gradients of the leaves of the arguments."""
    if not isinstance(gradients, tuple) or len(gradients) != len(structure):
        count = f" of {len(gradients)}" if isinstance(gradients, tuple) else ""
        raise error(
            TypeError,
            f"the backward of {title} returned {type(gradients).__name__}{count}",
            f"it returns a tuple of {len(structure)}, a gradient or None for each argument",
            "return for example (dx,)",
        )
    return leaves_like(structure, gradients)
