"""Records: the arrays of one call as fields, in a fixed order.

A record is a slotted dataclass, generic in what its fields hold: arrays in a call, layouts in its
checks, outputs and slots in its plan. A field that is None is absent. A kernel's own record has its
fields in the order of the kernel's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar, cast, get_origin

T = TypeVar("T")
R = TypeVar("R", bound="Record[Any]")


class Record(Generic[T]):
    """The base of all records; each is decorated with ``@dataclass(slots=True)``.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(slots=True)
    ... class Sum(Record[T]):
    ...     x: T
    ...     out: T | None = None
    >>> fields_of(Sum), values_of(Sum)(Sum(3))
    (('x', 'out'), (3, None))
    >>> made(Sum[str], ["a", "b"])
    Sum(x='a', out='b')
    """

    __slots__ = ()

    SHOWN_AS: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """What errors call a field that callers know by another name: dx is grads.dx to them."""


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(get_origin(kind) or kind))


@cache
def _values(kind: Any) -> Callable[[Record[Any]], tuple[Any, ...]]:
    names = _fields(kind)
    if len(names) > 1:
        return cast("Callable[[Record[Any]], tuple[Any, ...]]", attrgetter(*names))
    return lambda record: tuple(getattr(record, name) for name in names)


# (mypy takes no class for hashable whose instances are not.)
fields_of: Callable[[type[Record[Any]]], tuple[str, ...]] = _fields  # type: ignore[assignment]
"""Return the names of a record's fields, for its class."""
values_of: Callable[[type[Record[Any]]], Callable[[Record[Any]], tuple[Any, ...]]] = _values  # type: ignore[assignment]
"""Return the function that takes records of a class apart."""


def made(kind: type[R], values: Iterable[Any]) -> R:
    """Return a record with these values, one for each field."""
    return kind(*values)


def given_of(record: Record[Any]) -> dict[str, Any]:
    """Return what a record has, by field, for kernels that are data: their roles are names."""
    kind = type(record)
    pairs = zip(fields_of(kind), values_of(kind)(record), strict=True)
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
