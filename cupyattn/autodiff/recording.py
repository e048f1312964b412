"""Recording of the one library call that a function makes, for `vjp`.

The function gets stand-ins for its arrays, which it can only pass on, and stand-ins for the results
of the call. So it cannot compute anything else with them, and its derivative is that of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import is_
from traceback import walk_tb
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.differentiable import Rule, names, recorder
from cupyattn.runtime.errors import RefusalError, error

_FUNCTIONS = "cupyattn.ops."


@dataclass(slots=True)
class Place:
    """The position of an array among the arguments of a call."""

    parameter: str
    index: int | None
    """The index in a tuple of arrays; None for an argument that is one array."""

    @property
    def gradient(self) -> str:
        """The name of the argument's gradient."""
        return f"d{self.parameter}"


class StandIn:
    """A placeholder of an array, with shape, ndim, dtype and class only."""

    __slots__ = ("_array", "_name", "_place", "_recording")

    def __init__(self, recording: Recording, name: str, array: Array) -> None:
        self._recording = recording
        self._name = name
        self._array = array
        self._place: Place | None = None

    def __repr__(self) -> str:
        return f"<{self._name} of {self._recording.title}>"

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim", "dtype"):
            return getattr(self._array, name)
        _refuse(self)

    @property  # type: ignore[misc]  # for isinstance: a CuPy or a NumPy array
    def __class__(self) -> type:
        return type(self._array) if is_array(self._array) else StandIn  # a pair for rope

    __hash__ = object.__hash__


def _refuse(stand_in: StandIn, *_: object, **__: object) -> NoReturn:
    recording = stand_in._recording
    recording.refused = recording.refusal(f"uses {stand_in._name} itself")
    raise recording.refused


# Python looks up operators in the class, and so does NumPy for the conversion.
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_OTHER = (
    "lt le eq ne gt ge neg pos abs invert bool int float complex index len iter contains getitem "
    "setitem delitem array copy deepcopy reduce_ex"
)
for _operator in f"{_BINARY} r{_BINARY.replace(' ', ' r')} {_OTHER}".split():
    setattr(StandIn, f"__{_operator}__", _refuse)


class Call(NamedTuple):
    """A recorded call with its arguments and all its results."""

    rule: Rule
    arguments: Keywords
    results: dict[str, Array]
    """Results by name, including those that are only saved for the backward."""
    visible: tuple[str, ...]
    """The names of the results that the caller gets."""

    @property
    def returned(self) -> Any:
        """The value that the call returns to its caller."""
        return _one_or_all([self.results[name] for name in self.visible])


class Recording:
    """A run of a function, whose one library call is recorded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._stand_ins: list[StandIn] = []
        self._passed_on = 0
        self._call: Call | None = None
        self._returned: object = None
        self.refused: RefusalError | None = None
        """The error that a stand-in raised. It is raised again if the function caught it."""

    @property
    def title(self) -> str:
        """The function's name in messages."""
        return name_of(self._function)

    def refusal(self, did: str) -> RefusalError:
        """Make the error for a function that `vjp` does not support."""
        return error(
            RefusalError,
            f"vjp of {self.title}, which {did}",
            "a function passes its arguments on as they are, to one call of "
            f"{', '.join(names)}, and returns its result",
            "do other computations outside of it, and chain pullbacks for several calls",
        )

    def stand_in(self, name: str, value: Any) -> Any:
        """Return a stand-in for an array or the arrays in a tuple; other values are unchanged."""
        if isinstance(value, tuple):
            return each(lambda item: self.stand_in(name, item) if is_array(item) else item, value)
        if not is_array(value):
            return value
        stand_in = StandIn(self, name, value)
        self._stand_ins.append(stand_in)
        return stand_in

    def run(self, args: tuple[Any, ...], options: dict[str, object]) -> Call:
        """Call the function and return the call that it made.

        Raises
        ------
        TypeError
            If the function did anything else with its arguments.
        """
        if not callable(self._function):
            raise self.refusal("cannot be called")
        token = recorder.set(self._record)
        try:
            return self._checked(self._function(*args, **options))
        except RefusalError as failure:
            name = _function_without_backward(failure.__traceback__)
            if name is None:
                raise
            called = "" if name == self.title else f"calls {name}, which "
            raise self.refusal(f"{called}has no backward") from None
        finally:
            recorder.reset(token)
            # Stand-ins refer to the recording: this cycle would keep the arrays alive.
            self._stand_ins.clear()
            self._returned = self.refused = None

    def _checked(self, returned: object) -> Call:
        if self.refused is not None:
            raise self.refused
        if self._call is None:
            raise self.refusal("makes no such call with its arguments")
        if not _same(returned, self._returned):
            raise self.refusal(f"returns something else than {self._call.rule.name} returned")
        for stand_in in self._stand_ins:
            if stand_in._place is None:
                raise self.refusal(f"does not pass {stand_in._name} on")
        return self._call

    def _record(self, rule: Rule, args: tuple[object, ...], options: dict[str, object]) -> object:
        """Make a call of a differentiable function; record it if stand-ins are among its arrays."""
        passed_on = self._passed_on
        taken = [self._take(rule, *given) for given in zip(rule.parameters, args, strict=False)]
        taken_options = {name: self._take(rule, name, value) for name, value in options.items()}
        if self._passed_on == passed_on:
            return rule.function(*args, **options)
        taken += args[len(taken) :]  # too many: the function itself raises
        self._call = call = _call(rule, taken, taken_options)
        self._returned = _one_or_all(
            [StandIn(self, f"the result {name}", call.results[name]) for name in call.visible]
        )
        return self._returned

    def _take(self, rule: Rule, parameter: str, value: object, index: int | None = None) -> object:
        """Return the array of a stand-in, or of those in a tuple, and save its place."""
        if isinstance(value, StandIn):
            self._pass_on(rule, value, parameter, index)
            return value._array
        if isinstance(value, tuple) and index is None:
            places = count()
            return each(lambda item: self._take(rule, parameter, item, next(places)), value)
        return value

    def _pass_on(self, rule: Rule, stand_in: StandIn, parameter: str, index: int | None) -> None:
        if stand_in._recording is not self:
            _refuse(stand_in)
        if self._call is not None:
            raise self.refusal(f"calls {self._call.rule.name} and then {rule.name}")
        if stand_in._place is not None:
            first = stand_in._place.parameter
            raise self.refusal(f"passes {stand_in._name} on as {first} and as {parameter}")
        stand_in._place = Place(parameter, index)
        self._passed_on += 1


def _call(rule: Rule, args: list[object], options: dict[str, Any]) -> Call:
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
    all_names = visible + rule.saved
    return Call(
        rule,
        {**dict(zip(rule.parameters, args, strict=False)), **options},
        dict(zip(all_names, values, strict=True)),
        all_names if asked else visible,
    )


def _function_without_backward(traceback: TracebackType | None) -> str | None:
    """Return the library function without a backward that a stand-in was passed to, if any.

    It is the outermost library function in the traceback, without stand-ins and vjp.
    """
    for frame, _ in walk_tb(traceback):
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith(_FUNCTIONS) and name in frame.f_globals:
            return None if name in names else name
    return None


def each(function: Callable[[Any], Any], value: object) -> Any:
    """Apply a function to a value, or to every item of a tuple."""
    if not isinstance(value, tuple):
        return function(value)
    items = map(function, value)
    return value._make(items) if hasattr(value, "_make") else tuple(items)


def place_of(value: object) -> Place | None:
    """Return the place of a stand-in in the call; None for other values."""
    return value._place if isinstance(value, StandIn) else None


def name_of(function: object) -> str:
    """Return the name of a function for messages; of a partial, the name of its function."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or f"an object of type {type(function).__name__}"


def is_array(value: object) -> bool:
    """Tell whether a value exports memory as an array, of any library."""
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def _one_or_all(values: list[object]) -> object:
    return values[0] if len(values) == 1 else tuple(values)


def _same(returned: object, expected: object) -> bool:
    """Tell whether two values are the same object, or tuples of the same objects."""
    if isinstance(returned, tuple) and isinstance(expected, tuple):
        return len(returned) == len(expected) and all(map(is_, returned, expected))
    return returned is expected
