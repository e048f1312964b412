"""Recording of the library's own functions: their backwards are nodes of the tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from cupyattn.autodiff.tape import (
    Tape,
    Traced,
    constant,
    contiguous_axis,
    dense,
    is_differentiable,
    is_traced,
    raw,
    spec_of,
    tape_of,
    zeros,
)
from cupyattn.ops.attention.quantized_keys import NO_GRADIENTS, QuantizedKeys
from cupyattn.runtime.annotations import Keywords, Undescribed
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.differentiable import Rule
from cupyattn.runtime.errors import error

Place = tuple[str, int | None]
"""A parameter of a call, and the index in it if it is a tuple of arrays."""


class Call:
    """A recorded call: what its backward needs, and where its traced arguments are.

    Attributes
    ----------
    rule : Rule
        The function.
    known : dict
        Arguments and results by name: only those that the backward takes.
    visible : tuple of str
        The names of the results that the caller gets.
    """

    def __init__(
        self, rule: Rule, known: Keywords, visible: tuple[str, ...], places: list[Place]
    ) -> None:
        taken = {parameter.name for parameter in rule.backward_parameters}
        self.rule = rule
        self.visible = visible
        self._places = places
        asked = {parameter for parameter, _ in places}
        self._taken = taken
        # A result that is a tuple of arrays has a tuple of gradients, without a None in it.
        self._tuples = {
            name: [spec_of(each) for each in known[name]]
            for name in visible
            if isinstance(known[name], tuple)
        }
        self._specs = {
            name: spec_of(known[name])
            for name in visible
            if f"d{name}" in rule.required and name not in self._tuples
        }
        self._axes = [
            -1 if item is None else contiguous_axis(item)
            for name in visible
            for item in _items(known[name])
        ]
        for parameter, result in rule.taken_from.items():
            if result in known:
                known[parameter] = known[result]
        for name, require in rule.on_demand.items():
            if name in asked:
                require({**rule.defaults, **known})
            else:
                known.pop(name, None)
        known = {**rule.defaults, **known}
        known.pop("workspace", None)  # the forward's: the backward needs another size
        self.known = {name: value for name, value in known.items() if name in taken}
        self.like = next((value for value in self.known.values() if hasattr(value, "dtype")), None)

    def __call__(
        self, gradients: list[Undescribed], options: Mapping[str, object] = MappingProxyType({})
    ) -> list[Undescribed]:
        """Return the gradients of the traced arguments from those of the results."""
        rule = self.rule
        known = {**self.known, **self._by_name(gradients), **options}
        args, keywords = [], {}
        for parameter in rule.backward_parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(known.get(parameter.name, parameter.default))
            elif parameter.name in known:
                keywords[parameter.name] = known[parameter.name]
        returned = rule.backward(*args, **keywords)
        several = len(rule.gradients) > 1 and isinstance(returned, tuple)
        values = returned if several or hasattr(returned, "_fields") else (returned,)
        found = dict(zip(rule.gradients, values, strict=not rule.on_demand))
        found |= {name: found[other] for name, other in rule.same.items()}
        return [
            found[f"d{parameter}"] if index is None else found[f"d{parameter}"][index]
            for parameter, index in self._places
        ]

    def _by_name(self, gradients: list[Undescribed]) -> Keywords:
        """Name the gradients of the results; zeros where the backward cannot do without."""
        given: Keywords = {}
        waiting = map(dense, gradients, self._axes)
        for name in self.visible:
            if name in self._tuples:
                given[f"d{name}"] = tuple(
                    [
                        zeros(spec) if gradient is None else gradient
                        for spec, gradient in zip(self._tuples[name], waiting, strict=False)
                    ]
                )
                continue
            gradient = next(waiting)
            if f"d{name}" in self._taken:
                if gradient is None and name in self._specs:
                    gradient = zeros(self._specs[name], self.like)
                given[f"d{name}"] = gradient
            elif gradient is not None:
                raise error(
                    TypeError,
                    f"the pullback of {self.rule.name} was given d{name}",
                    f"{self.rule.name} is not differentiated through {name}",
                    "pass None there, or use the result only within stop_gradient",
                )
        return given


def record_call(tape: Tape) -> Callable[[Rule, tuple[Any, ...], dict[str, Any]], Any]:
    """Return a recorder: it makes each call, and records it if it has traced arguments."""

    def record(rule: Rule, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        traced: list[tuple[Traced, Place]] = []

        def taken(parameter: str, value: Any) -> Any:
            if is_traced(value):
                if is_differentiable(value):
                    traced.append((value, (parameter, None)))
                return raw(value)
            if isinstance(value, tuple) and any(map(is_traced, value)):
                traced.extend(
                    [
                        (item, (parameter, index))
                        for index, item in enumerate(value)
                        if is_differentiable(item)
                    ]
                )
                items = map(raw, value)
                return value._make(items) if hasattr(value, "_make") else tuple(items)
            return value

        every = (*args, *options.values())
        found = tape_of([item for value in every for item in _items(value)])
        if found is None:
            return rule.function(*args, **options)
        if any(map(is_traced, _items(options.get("out")))):
            raise found.refuse(f"passes a traced array as out= to {rule.name}", "leave out out=")
        names = (*rule.parameters, *[""] * len(args))  # too many: the function itself raises
        plain = [taken(name, value) for name, value in zip(names, args, strict=False)]
        plain_options = {name: taken(name, value) for name, value in options.items()}
        return _made(found, rule, plain, plain_options, traced)

    return record


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _made(
    tape: Tape,
    rule: Rule,
    args: list[Any],
    options: dict[str, Any],
    traced: list[tuple[Traced, Place]],
) -> Any:
    if options.get("quantize") is not None:
        raise tape.refuse(
            f"quantises the result of {rule.name}",
            'leave out quantize=, and call linear(..., activations="int8")',
        )
    traced = _with_gradients(tape, rule, traced)
    if not traced:
        return _wrapped(rule.function(*args, **options), lambda value: constant(value, tape))
    if options.get("implementation") == "int8" or any(isinstance(x, QuantizedKeys) for x in args):
        raise tape.refuse(
            f"calls {rule.name} over int8 keys: {NO_GRADIENTS}",
            "pass k as an array, without implementation='int8'",
        )
    if options.get("out") is not None:
        raise error(
            TypeError,
            f"vjp of {rule.name} with out=",
            "the pullback keeps the result, which must stay as it is",
            "leave out out=, or call the function and its backward yourself",
        )
    asked = True
    if rule.saved_by is not None:
        asked = options.get(rule.saved_by, False)
        require_bool(rule.saved_by, asked)
        options[rule.saved_by] = True
    returned = rule.function(*args, **options)
    several = len(rule.results) + len(rule.saved) > 1  # one result may be a tuple: rope of (q, k)
    values = returned if several and isinstance(returned, tuple) else (returned,)
    visible = rule.results[: len(values) - len(rule.saved)]
    names = visible + rule.saved
    if asked:
        visible = names
    arguments = dict(zip(rule.parameters, args, strict=False)) | options
    known = arguments | dict(zip(names, values, strict=True))
    call = Call(rule, known, visible, [place for _, place in traced])

    shown = [value for name, value in zip(names, values, strict=True) if name in visible]
    arrays = [item for value in shown for item in _items(value)]
    operands = [value for value, _ in traced]
    results = iter(tape.record(rule.name, operands, arrays, call))
    returned = [_wrapped(value, lambda _: next(results)) for value in shown]
    return returned[0] if len(returned) == 1 else tuple(returned)


def _wrapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        items = [function(item) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return function(value)


def _with_gradients(
    tape: Tape, rule: Rule, traced: list[tuple[Traced, Place]]
) -> list[tuple[Traced, Place]]:
    """Return the traced arguments that have a gradient.

    An argument of the function may be passed where there is none, as rotary tables: its gradient is
    None. A computed array may not: its gradient would be wrong.
    """
    kept = []
    for value, place in traced:
        name = place[0]
        if f"d{name}" in rule.gradients or f"d{name}" in rule.same:
            kept.append((value, place))
            continue
        listed = ", ".join(gradient[1:] for gradient in (*rule.gradients, *rule.same))
        used = f"is {name} of {rule.name}, which has gradients of {listed}"
        if tape.nodes[value._node].pull is not None:
            raise tape.refuse(
                f"passes a computed array that {used},", f"pass stop_gradient({name})"
            )
        tape.constant_inputs[value._node] = used
    return kept
