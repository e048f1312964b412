"""Records: the arrays of one call as fields, in a fixed order.

A record is a slotted dataclass, generic in the type of its fields: arrays in a call, layouts in its
checks, slots in its plan. A field that is None is absent. The record of a kernel has its fields in
the order of the kernel's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import make_dataclass
from functools import cache
from inspect import get_annotations
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar, get_origin

T = TypeVar("T")
R = TypeVar("R", bound="Record")


def _getter(names: tuple[str, ...]) -> object:
    if len(names) > 1:
        return attrgetter(*names)
    return staticmethod(lambda record: tuple(getattr(record, name) for name in names))


class Record(Generic[T]):
    """The base of all records; each is decorated with ``@dataclass(slots=True)``.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(slots=True)
    ... class Sum(Record[T]):
    ...     x: T
    ...     out: T | None = None
    >>> fields_of(Sum), values_of(Sum(3))
    (('x', 'out'), (3, None))
    >>> made(Sum[str], ["a", "b"])
    Sum(x='a', out='b')
    """

    __slots__ = ()

    SHOWN_AS: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names in errors of fields that callers know by another name, such as grads.dx for dx."""
    FIELDS: ClassVar[tuple[str, ...]] = ()
    VALUES: ClassVar[Any]
    """Returns all values of a record as a tuple, at once, because each call needs them."""

    def __init_subclass__(cls) -> None:
        """Collect the names of the fields, from which a dataclass is made; a base's come first."""
        hints = get_annotations(cls)
        own = (name for name, hint in hints.items() if "ClassVar" not in str(hint))
        base: type[Record] = cls.__mro__[1]
        cls.FIELDS = (*base.FIELDS, *own)
        cls.VALUES = _getter(cls.FIELDS)


@cache
def record_of(*names: str) -> Callable[..., Record]:
    """Return a class of records for arrays with names that are known only at run time.

    Examples
    --------
    >>> record = record_of("shards[0]", "shards[1]")("an array", "another")
    >>> values_of(record), [*record.SHOWN_AS.values()]
    (('an array', 'another'), ['shards[0]', 'shards[1]'])
    """
    shown = {f"array_{number}": name for number, name in enumerate(names)}
    space = {"SHOWN_AS": MappingProxyType(shown)}
    return make_dataclass("Arrays", shown, bases=(Record,), namespace=space, slots=True)


def fields_of(kind: type[Record]) -> tuple[str, ...]:
    """Return the names of a record's fields."""
    return (get_origin(kind) or kind).FIELDS


def values_of(record: Record) -> tuple[Any, ...]:
    """Return the values of a record's fields."""
    return record.VALUES(record)


def made(kind: type[R], values: Iterable[Any]) -> R:
    """Return a record with these values, one for each field."""
    return kind(*values)


def given_of(record: Record) -> dict[str, Any]:
    """Return the values that are not None by field, for kernel patterns that use names."""
    pairs = zip(record.FIELDS, record.VALUES(record), strict=True)
    return {name: value for name, value in pairs if value is not None}


def slots_of(kind: type[R], present: Iterable[object]) -> R:
    """Return a record whose fields have their own number, or None where `present` has None.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(slots=True)
    ... class Sum(Record[T]):
    ...     x: T
    ...     out: T | None = None
    >>> slots_of(Sum[int], ["an array", None])
    Sum(x=0, out=None)
    """
    return made(kind, (None if each is None else slot for slot, each in enumerate(present)))
