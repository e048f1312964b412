"""Results may share no item with another array of the call: who could meet whom, and who does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Array, Description, Layout, Operands, layouts_of
from cupyattn.runtime.checks import require_output, require_workspace
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.plan import Output
from cupyattn.runtime.records import Record, fields_of, values_of
from cupyattn.runtime.spans import share_an_item, span


class Pair(NamedTuple):
    """A result and another array of a call, and how they meet.

    What they span has bytes in common where the other's first item lies more than `least` and less
    than `most` bytes behind the result's.
    """

    result: str
    other: str
    least: int
    most: int
    may_be_same: bool
    """Whether they may be one array: each item is read before it is written."""


class Meeting(NamedTuple):
    """A result and another array of a call, numbered by the record's fields, and how they meet.

    What they span has bytes in common where the other's first item lies more than `least` and less
    than `most` bytes behind the result's.
    """

    result: int
    other: int
    least: int
    most: int
    may_be_same: bool
    """Whether they may be one array: each item is read before it is written."""


class Overlaps(NamedTuple):
    """Which arrays of a call may meet in memory, by their layouts.

    Arrays are numbered by the fields of the call's record.
    """

    pairs: tuple[tuple[int, int, int, int, bool], ...]
    """What each `Meeting` holds: plain tuples come apart faster, and each call takes them apart."""
    results: tuple[int, ...]
    names: tuple[str, ...]
    """What callers call each array."""

    @classmethod
    def of(
        cls,
        layouts: Record[Layout],
        writes: Iterable[str],
        in_place: Mapping[str, str] = MappingProxyType({}),
        item_by_item: bool = False,
    ) -> Overlaps:
        """Pair each array of `writes` with every other.

        `in_place` has, for a result, the array that it may be itself, item for item; with
        `item_by_item` each result may be any array that is only read.
        """
        fields = fields_of(type(layouts))
        there = {n: each for n, each in enumerate(values_of(layouts)) if each}
        spans = {n: span(layout) for n, layout in there.items()}
        writes = frozenset(writes)
        results = tuple(n for n in there if fields[n] in writes)
        pairs = [
            Meeting(
                result,
                other,
                least=spans[result].start - spans[other].end,
                most=spans[result].end - spans[other].start,
                may_be_same=(
                    in_place.get(fields[result]) == fields[other]
                    or (item_by_item and other not in results)
                )
                and there[result] == there[other],
            )
            for result in results
            for other in there
            if other not in results or other > result
        ]
        names = tuple(layouts.SHOWN_AS.get(field, field) for field in fields)
        return cls(tuple((*pair,) for pair in pairs), results, names)

    def check(self, operands: Operands[Any]) -> None:
        """Raise ValueError if a result is read-only or shares an item with another array.

        Where items lie settles almost every pair.
        """
        places = operands.places
        for result, other, least, most, may_be_same in self.pairs:
            distance = places[other] - places[result]
            if least < distance < most and not (may_be_same and distance == 0):
                self._check_items(operands, result, other)
        if operands.device_id is None:
            arrays = values_of(operands.arrays)
            for result in self.results:
                require_writable(self.names[result], arrays[result])

    def _check_items(self, operands: Operands[Any], result: int, other: int) -> None:
        kind = type(operands.arrays)
        layouts = values_of(layouts_of(kind, operands.description))
        distance = operands.places[other] - operands.places[result]
        if share_an_item(layouts[result], layouts[other], distance):
            shown = self.names[result]
            raise error(
                ValueError,
                f"{shown} overlaps {self.names[other]} in memory",
                "both are written"
                if other in self.results
                else "results are written while inputs are still read",
                f"give {shown} memory of its own, or leave it out",
            )


def require_apart(operands: Operands[Any], writes: Mapping[str, Output | None]) -> None:
    """Raise unless what is written, or is scratch memory, fits and shares no item with the rest.

    `writes` has the arrays that are written, where they are given, each with the result that it has
    to be, or None where others check that.
    """
    kind = type(operands.arrays)
    writing = tuple(writes.items())
    _apart(kind, operands.description, writing).check(operands)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _apart(
    kind: type[Record[Any]], description: Description, writes: tuple[tuple[str, Output | None], ...]
) -> Overlaps:
    layouts = layouts_of(kind, description)
    for name, output in writes:
        layout = getattr(layouts, name)
        if output is not None and layout is not None:
            require_output(kind.SHOWN_AS.get(name, name), layout, *output)
    workspace = getattr(layouts, "workspace", None)
    if workspace is not None:
        require_workspace(workspace)
    return Overlaps.of(layouts, ("workspace", *dict(writes)))


def require_writable(name: str, result: Array) -> None:
    """Raise ValueError if a NumPy array cannot be written."""
    if isinstance(result, np.ndarray) and not result.flags.writeable:
        raise error(
            ValueError,
            f"{name} is read-only",
            "results are written into it",
            made_beforehand(name),
        )
