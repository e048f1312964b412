"""Reverse-mode differentiation of the library's functions, like jax.vjp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from cupyattn.autodiff.recording import Call, Place, Recording, each, is_array, place_of
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.errors import error
from cupyattn.runtime.records import record_of


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
        A function of this library that has a backward, such as `cupyattn.attention`,
        `cupyattn.linear` or `cupyattn.rms_norm`; a ``functools.partial`` of one; or a function that
        passes its arguments unchanged to one call of one of these and returns the call's result.
    arrays : arrays
        The positional arguments of the function.
    wrt : tuple of str, optional
        The names of options that are arrays and whose gradients are wanted too. Options of a
        partial are allowed.
    options : optional
        The keyword arguments of the function.

    Returns
    -------
    result : array or tuple
        The result of ``function(*arrays, **options)``.
    pullback : Pullback
        ``pullback(dout)`` takes the gradient of a scalar with respect to the result and returns
        the gradients with respect to `arrays`: the product of dout with the function's Jacobian. If
        the function has several results, it takes a tuple of their gradients, for example
        ``pullback((dout, dlse))`` for attention with ``return_lse=True``. None in the tuple means
        that the result was not used.

        It returns a tuple with an entry for each of `arrays`: an array of the same shape and dtype,
        or None for arguments without a gradient, such as a mask or a number. For attention(q, k, v)
        that is ``(dq, dk, dv)``. With `wrt` the last entry is a dictionary of the gradients of
        these options by name.

        It accepts the options that only the backward has, ``pullback(dout, deterministic=True)``:
        for attention deterministic, grads, accumulate, workspace and implementation, as
        `attention_backward` documents them, and likewise for other functions.

    Raises
    ------
    TypeError
        For a function of any other kind; for ``out=``, which could be overwritten before the
        pullback is called; and for a name in `wrt` that is no array among the options or has no
        gradient. The pullback raises it for gradients that do not have the structure of the result,
        and for options that the backward alone does not have.
    ValueError
        For a name that is in `wrt` twice, and for the gradient of a bias of softmax along another
        axis than the last.
    TypeError, ValueError, NotImplementedError, RuntimeError
        The errors of the function, and from the pullback those of its backward.

    Notes
    -----
    The pullback keeps the arrays of the call and its results without a copy, so do not write to
    them before you call it. It may be called any number of times. Gradients that are equal, such as
    those of the two terms of a sum, may be one array. The pullback calls the function's backward,
    such as `attention_backward`, with the arguments of the call, including dropout's seed and
    ``implementation``. "tiled" has no backward on a GPU: pass
    ``pullback(dout, implementation="flash")`` there.

    A function of your own gets stand-ins for its arrays and for the results of the library's
    function. They have a shape, ndim, dtype and class (for isinstance) and nothing else. Any
    computation with them is an error, even if the function catches the exception, because the
    pullback would miss it. The function must not depend on ``type`` of its arguments, which is not
    that of an array, or on their identity: one array that is passed twice is two stand-ins.

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

    With respect to some of the arrays only. The gradients are a tuple even if there is only one:

    >>> out, pullback = cupyattn.vjp(lambda k: cupyattn.attention(q, k, v), k)
    >>> (dk,) = pullback(dout)
    """
    recording = Recording(function)
    if isinstance(function, partial):
        options = {**function.keywords, **options}  # as the partial itself merges them
    _require_wrt(wrt, options)
    args = tuple([recording.stand_in(f"argument {i}", value) for i, value in enumerate(arrays)])
    named = {name: recording.stand_in(name, options[name]) for name in wrt}
    call = recording.run(args, {**options, **named})
    places = {name: each(place_of, value) for name, value in named.items()}
    for name, place in places.items():
        each(partial(_require_gradient, call, name), place)
    return call.returned, Pullback(call, [each(place_of, arg) for arg in args], places)


class Pullback:
    """The second result of `vjp`, which computes gradients of arrays from gradients of results."""

    def __init__(self, call: Call, places: list[Any], wrt: dict[str, object]) -> None:
        self._call = call
        self._places = places
        self._wrt = wrt
        self._asked: set[str] = set()
        for place in (*places, *wrt.values()):
            each(self._ask, place)
        for name, require in call.rule.on_demand.items():
            if f"d{name}" in self._asked:
                require({**call.rule.defaults, **call.arguments, **call.results})

    def _ask(self, place: Place | None) -> None:
        if place is not None:
            self._asked.add(place.gradient)

    def __call__(self, *result_gradients: Any, **backward_options: object) -> tuple[Any, ...]:
        """Return the gradients. `vjp` documents the arguments and the result."""
        gradients = self._backward(self._by_name(result_gradients), self._own(backward_options))

        def at(place: Place | None) -> Any:
            gradient = None if place is None else gradients.get(place.gradient)
            if place is None or place.index is None or gradient is None:
                return gradient
            return gradient[place.index]

        entries = tuple([each(at, place) for place in self._places])
        if not self._wrt:
            return entries
        return (*entries, {name: each(at, place) for name, place in self._wrt.items()})

    def _backward(
        self, result_gradients: dict[str, object], backward_options: dict[str, object]
    ) -> Keywords:
        """Call the backward with arguments found by name; return its gradients by name."""
        rule = self._call.rule
        results = self._call.results
        known = {**rule.defaults, **self._call.arguments, **results, **result_gradients}
        known |= {
            name: results[result] for name, result in rule.taken_from.items() if result in results
        }
        known.pop("workspace", None)  # the forward's: the backward needs another size
        known |= backward_options
        args, options = [], {}
        for name in rule.on_demand:
            if f"d{name}" not in self._asked:
                known.pop(name, None)
        for parameter in rule.backward_parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(known.get(parameter.name, parameter.default))
            elif parameter.name in known:
                options[parameter.name] = known[parameter.name]
        returned = rule.backward(*args, **options)
        several = len(rule.gradients) > 1 and isinstance(returned, tuple)
        values = returned if several or hasattr(returned, "_fields") else (returned,)
        gradients = dict(zip(rule.gradients, values, strict=not rule.on_demand))
        return gradients | {name: gradients[other] for name, other in rule.same.items()}

    def _by_name(self, given: tuple[Any, ...]) -> dict[str, object]:
        """Return the results' gradients by name; zeros for None if the backward needs an array."""
        call = self._call
        names = tuple([f"d{name}" for name in call.visible])
        several = len(names) > 1
        results = [call.results[name] for name in call.visible]
        expected = results if several else results[0]
        if len(given) != 1 or isinstance(given[0], tuple) != isinstance(expected, tuple | list):
            raise self._misshapen(given, names)
        if isinstance(given[0], tuple) and len(given[0]) != len(expected):
            raise self._misshapen(given, names)
        if not several and isinstance(expected, tuple):
            pairs = zip(given[0], expected, strict=True)
            return {names[0]: tuple([_zeros_like(r) if g is None else g for g, r in pairs])}
        values = given[0] if several else given
        gradients = dict(zip(names, values, strict=True))
        _require_taken(call, gradients)
        for name, result in zip(names, call.visible, strict=True):
            if several and gradients[name] is None and name in call.rule.required:
                gradients[name] = _zeros_like(call.results[result])
        return gradients

    def _misshapen(self, given: tuple[object, ...], names: tuple[str, ...]) -> TypeError:
        if len(given) != 1:
            passed = f"{len(given)} arguments"
        elif isinstance(given[0], tuple):
            passed = f"a tuple of {len(given[0])}"
        else:
            passed = f"one {type(given[0]).__name__}"
        listed = ", ".join(names)
        return error(
            TypeError,
            f"the pullback of {self._call.rule.name} was given {passed}",
            f"the call returned {' and '.join(self._call.visible)}",
            f"pass {listed}, an array"
            if len(names) == 1
            else f"pass one tuple ({listed}), with None for a result that was not used",
        )

    def _own(self, options: dict[str, object]) -> dict[str, Any]:
        """Return the options; raise TypeError unless only the backward has them."""
        rule = self._call.rule
        others = [name for name in options if name not in rule.backward_options]
        if others:
            raise error(
                TypeError,
                f"the pullback of {rule.name} was given {', '.join(others)}",
                f"it takes the backward's own options, {', '.join(rule.backward_options)}",
                "give vjp those of the call",
            )
        return options


def _require_taken(call: Call, gradients: Mapping[str, object]) -> None:
    """Raise TypeError for the gradient of a result that the backward does not support."""
    taken = {parameter.name for parameter in call.rule.backward_parameters}
    lost = [name for name, value in gradients.items() if value is not None and name not in taken]
    if lost:
        raise error(
            TypeError,
            f"the pullback of {call.rule.name} was given {', '.join(lost)}",
            f"{call.rule.name} is not differentiated through {', '.join(n[1:] for n in lost)}",
            "pass None there",
        )


def _zeros_like(result: Array) -> Array:
    """Return zeros on the result's device; cupy.zeros_like would use the current device."""
    device = device_of(adopt(record_of("result")(result)))
    if device is None:
        return np.zeros_like(result)
    zeros = device.empty(result.shape, result.dtype)
    device.zero(zeros)
    return zeros


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
        items = value if isinstance(value, tuple) else (value,)
        if not all(map(is_array, items)):
            given = f"has type {type(value).__name__}" if name in options else "was not given"
            raise error(
                TypeError,
                f"wrt names {name!r}, which {given}",
                "wrt has names of options that are arrays",
                "give vjp an array of that name, or leave it out of wrt",
            )


def _require_gradient(call: Call, name: str, place: Place | None) -> None:
    rule = call.rule
    gradients = (*rule.gradients, *rule.same)
    if place is not None and place.gradient not in gradients:
        raise error(
            TypeError,
            f"wrt names {name!r}, which is {place.parameter} of {rule.name}",
            f"{rule.name} has gradients of {', '.join(gradient[1:] for gradient in gradients)}",
            "leave it out of wrt",
        )
