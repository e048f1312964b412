"""What makes a function one that `vjp` differentiates: its backward, and a way to see its calls."""

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


class Rule:
    """How a function is differentiated: see `differentiable`."""

    def __init__(
        self,
        function: Callable[..., Any],
        backward: Callable[[], Callable[..., Any]],
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
        """The function's parameters; those by position come first."""
        return tuple(inspect.signature(self.function).parameters)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """What the function takes for parameters that a call leaves out."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    @cached_property
    def backward_parameters(self) -> tuple[inspect.Parameter, ...]:
        """The backward's parameters."""
        return tuple(inspect.signature(self.backward).parameters.values())

    @cached_property
    def required(self) -> frozenset[str]:
        """The backward's parameters that have no default."""
        return frozenset(p.name for p in self.backward_parameters if p.default is p.empty)

    @cached_property
    def backward_options(self) -> tuple[str, ...]:
        """The options that are the backward's alone: they say how it computes, not what."""
        results = {*self.results, *self.saved}
        of_the_call = {*self.parameters, *results, *map("d{}".format, results)}
        of_the_call -= {"implementation", "workspace"}
        return tuple(
            parameter.name
            for parameter in self.backward_parameters
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in of_the_call
        )


Recorder = Callable[[Rule, tuple[Any, ...], dict[str, Any]], Any]
"""What makes a call in the function's place, for whom it records."""

recorder: ContextVar[Recorder | None] = ContextVar("cupyattn_recorder", default=None)

names: list[str] = []
"""Of all differentiable functions."""


def differentiable(
    backward: Callable[[], Callable[..., Any]],
    *,
    gradients: tuple[str, ...],
    results: tuple[str, ...] = ("out",),
    saved: tuple[str, ...] = (),
    saved_by: str | None = None,
    taken_from: Mapping[str, str] = MappingProxyType({}),
    same: Mapping[str, str] = MappingProxyType({}),
    on_demand: OnDemand = MappingProxyType({}),
) -> Callable[[Callable[_Parameters, _Returned]], Callable[_Parameters, _Returned]]:
    """Decorate a function that `vjp` differentiates: a recorder, if there is one, sees its calls.

    The parameters of the backward are found by name: one that is named as a parameter of the
    function, or as one of its results, gets that; ``d`` and the name of a result is its gradient.

    Parameters
    ----------
    backward : callable
        Returns the function's backward, which may be defined after it: ``lambda: gelu_backward``.
        Both take arrays by position and options by name.
    gradients : tuple of str
        What the backward returns: each is ``d`` and the name of a parameter of the function.
    results : tuple of str
        What the function returns, or the beginning of that where it returns less.
    saved : tuple of str
        What it returns behind them for its backward, only where it is asked to.
    saved_by : str, optional
        The option that asks for it.
    taken_from : mapping, optional
        Parameters of the backward, each with the result that it takes where that is returned.
    same : mapping, optional
        Further gradients, each with the one among `gradients` that it is.
    on_demand : mapping, optional
        Arrays that the backward is given only where their gradients are asked for, which come last.
        Each with what is called then, before the backward: it takes the call's arguments and
        results by name, and raises if there is no such gradient.
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

        recorded.__module__ = "cupyattn"  # where it is public, and pickle finds it
        return recorded

    return decorate
