"""Records: the arrays of one call as fields, in a fixed order.

A record is a slotted dataclass, generic in what its fields hold: arrays in a call, layouts in its
checks, outputs and slots in its plan. A field that is None is absent. A kernel's own record has its
fields in the order of the kernel's parameters.
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
R = TypeVar("R", bound="Record[Any]")


def _getter(names: tuple[str, ...]) -> Any:
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
    """What errors call a field that callers know by another name: dx is grads.dx to them."""
    FIELDS: ClassVar[tuple[str, ...]] = ()
    VALUES: ClassVar[Any]
    """Takes a record apart: at once, as each call does it."""

    def __init_subclass__(cls) -> None:
        """Note the fields, from which a dataclass will be made: those of a base come first."""
        hints = get_annotations(cls)
        own = (name for name, hint in hints.items() if "ClassVar" not in str(hint))
        base: type[Record[Any]] = cls.__mro__[1]
        cls.FIELDS = (*base.FIELDS, *own)
        cls.VALUES = _getter(cls.FIELDS)


@cache
def record_of(*names: str) -> Callable[..., Record[Any]]:
    """Return a class of records for arrays that only the caller names; fields are by position.

    Examples
    --------
    >>> record = record_of("shards[0]", "shards[1]")("an array", "another")
    >>> values_of(record), [*record.SHOWN_AS.values()]
    (('an array', 'another'), ['shards[0]', 'shards[1]'])
    """
    shown = {f"array_{number}": name for number, name in enumerate(names)}
    space = {"SHOWN_AS": MappingProxyType(shown)}
    return make_dataclass("Arrays", shown, bases=(Record,), namespace=space, slots=True)


def fields_of(kind: type[Record[Any]]) -> tuple[str, ...]:
    """Return the names of a record's fields."""
    return (get_origin(kind) or kind).FIELDS


def values_of(record: Record[Any]) -> tuple[Any, ...]:
    """Return what a record's fields hold."""
    return record.VALUES(record)


def made(kind: type[R], values: Iterable[Any]) -> R:
    """Return a record with these values, one for each field."""
    return kind(*values)


def given_of(record: Record[Any]) -> dict[str, Any]:
    """Return what a record has, by field, for kernels that are data: their roles are names."""
    pairs = zip(record.FIELDS, record.VALUES(record), strict=True)
    return {name: value for name, value in pairs if value is not None}


def slots_of(kind: type[R], present: Iterable[Any]) -> R:
    """Return the record whose fields are their own numbers, None where `present` has None.

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
