"""The decorator of functions that `vjp` differentiates: it has the backward, and records calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cached_property, wraps
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from cupyattn.runtime.ranges import ranged

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


OnDemand = Mapping[str, Callable[[Mapping[str, Any]], None]]
"""Checks by parameter: see `on_demand` of `differentiable`."""


class Rule:
    """The derivative of a function. `differentiable` documents the attributes."""

    def __init__(
        self,
        function: Callable[..., Any],
        backward: Callable[[], Callable[..., object]],
        *,
        gradients: tuple[str, ...],
        results: tuple[str, ...],
        saved: tuple[str, ...],
        saved_by: str | None,
        taken_from: Mapping[str, str],
        same: Mapping[str, str],
        on_demand: OnDemand,
    ) -> None:
        self.function = function
        self._find_backward = backward
        self.name = function.__name__
        self.gradients = gradients
        self.results = results
        self.saved = saved
        self.saved_by = saved_by
        self.taken_from = taken_from
        self.same = same
        self.on_demand = on_demand

    @cached_property
    def backward(self) -> Callable[..., Any]:
        """The function's backward."""
        return ranged(self._find_backward())

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the function's parameters; positional ones come first."""
        return tuple(inspect.signature(self.function).parameters)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The default values of the function's parameters."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    @cached_property
    def backward_parameters(self) -> tuple[inspect.Parameter, ...]:
        """The backward's parameters."""
        return tuple(inspect.signature(self.backward).parameters.values())

    @cached_property
    def required(self) -> frozenset[str]:
        """The names of the backward's parameters without a default."""
        return frozenset(p.name for p in self.backward_parameters if p.default is p.empty)

    @cached_property
    def backward_options(self) -> tuple[str, ...]:
        """The options that only the backward has: they say how it computes, not what."""
        results = {*self.results, *self.saved}
        of_the_call = {*self.parameters, *results, *map("d{}".format, results)}
        of_the_call -= {"implementation", "workspace"}
        return tuple(
            parameter.name
            for parameter in self.backward_parameters
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in of_the_call
        )


Recorder = Callable[[Rule, tuple[Any, ...], dict[str, Any]], Any]
"""A function that makes and records the calls of differentiable functions."""

recorder: ContextVar[Recorder | None] = ContextVar("cupyattn_recorder", default=None)

names: list[str] = []
"""The names of all differentiable functions."""


def differentiable(
    backward: Callable[[], Callable[..., object]],
    *,
    gradients: tuple[str, ...],
    results: tuple[str, ...] = ("out",),
    saved: tuple[str, ...] = (),
    saved_by: str | None = None,
    taken_from: Mapping[str, str] = MappingProxyType({}),
    same: Mapping[str, str] = MappingProxyType({}),
    on_demand: OnDemand = MappingProxyType({}),
) -> Callable[[Callable[_Parameters, _Returned]], Callable[_Parameters, _Returned]]:
    """Decorate a function that `vjp` differentiates. The current recorder, if any, sees its calls.

    Arguments of the backward are found by name. A parameter with the name of a parameter or a
    result of the function gets its value. ``d`` and the name of a result is the result's gradient.

    Parameters
    ----------
    backward : callable
        Returns the function's backward, which may be defined later: ``lambda: gelu_backward``.
        Both functions take arrays by position and options by name.
    gradients : tuple of str
        The results of the backward: each is ``d`` and the name of a parameter of the function.
    results : tuple of str
        The results of the function. A call may return only the first of them.
    saved : tuple of str
        Further results after these, which the backward needs. They are returned on request only.
    saved_by : str, optional
        The option that requests them.
    taken_from : mapping, optional
        Parameters of the backward, each with the result that it gets if the call returned it.
    same : mapping, optional
        Further gradients, each with the equal one among `gradients`.
    on_demand : mapping, optional
        Arrays that the backward gets only if their gradients are requested. These gradients come
        last. Each array has a function that is called before the backward. It takes the call's
        arguments and results by name, and raises if there is no such gradient.
    """

    def decorate(function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
        rule = Rule(
            function,
            backward,
            gradients=gradients,
            results=results,
            saved=saved,
            saved_by=saved_by,
            taken_from=taken_from,
            same=same,
            on_demand=on_demand,
        )
        names.append(rule.name)

        @wraps(function)
        def recorded(*args: _Parameters.args, **options: _Parameters.kwargs) -> _Returned:
            record = recorder.get()
            return function(*args, **options) if record is None else record(rule, args, options)

        recorded.__module__ = "cupyattn"  # where it is public, for pickle
        return recorded

    return decorate
