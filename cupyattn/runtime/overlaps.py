"""Results may share no item with another array of the call: who could meet whom, and who does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Array, Description, Layout, Operands, layouts_of
from cupyattn.runtime.checks import require_output, require_workspace
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.plan import Output
from cupyattn.runtime.spans import share_an_item, span


class Pair(NamedTuple):
    """The names of a result and of another array of a call, and how they meet.

    What they span has bytes in common where the other's first item lies more than `least` and less
    than `most` bytes behind the result's.
    """

    result: str
    other: str
    least: int
    most: int
    may_be_same: bool
    """Whether they may be one array: each item is read before it is written."""


class Overlaps(NamedTuple):
    """What a call's arrays, as they are laid out, have to be asked before results are written."""

    pairs: tuple[tuple[str, str, int, int, bool], ...]
    """What each `Pair` holds: plain tuples come apart faster, and each call takes them apart."""
    results: tuple[str, ...]
    shown_as: Mapping[str, str]

    @classmethod
    def of(
        cls,
        layouts: Mapping[str, Layout],
        writes: Iterable[str],
        shown_as: Mapping[str, str] = MappingProxyType({}),
        in_place: Mapping[str, str] = MappingProxyType({}),
        item_by_item: bool = False,
    ) -> Overlaps:
        """Pair each array of `writes` with every other; `shown_as` has names for people.

        `in_place` has, for a result, the array that it may be itself, item for item; with
        `item_by_item` each result may be any array that is only read.
        """
        writes = frozenset(writes)
        names, spans = [*layouts], {name: span(layout) for name, layout in layouts.items()}
        results = tuple(name for name in names if name in writes)
        pairs = [
            Pair(
                result,
                other,
                least=spans[result].start - spans[other].end,
                most=spans[result].end - spans[other].start,
                may_be_same=(
                    in_place.get(result) == other or (item_by_item and other not in results)
                )
                and layouts[result] == layouts[other],
            )
            for result in results
            for other in names
            if other not in results or names.index(other) > names.index(result)
        ]
        return cls(tuple((*pair,) for pair in pairs), results, shown_as)

    def check(self, operands: Operands) -> None:
        """Raise ValueError if a result is read-only or shares an item with another array.

        Where items lie settles almost every pair.
        """
        places = operands.places
        for result, other, least, most, may_be_same in self.pairs:
            distance = places[other] - places[result]
            if least < distance < most and not (may_be_same and distance == 0):
                self._check_items(operands, result, other)
        if operands.device_id is None:
            for result in self.results:
                _require_writable(self._shown(result), operands.arrays[result])

    def _check_items(self, operands: Operands, result: str, other: str) -> None:
        layouts = layouts_of(operands.description)
        distance = operands.places[other] - operands.places[result]
        if share_an_item(layouts[result], layouts[other], distance):
            shown = self._shown(result)
            raise error(
                ValueError,
                f"{shown} overlaps {self._shown(other)} in memory",
                "both are written"
                if other in self.results
                else "results are written while inputs are still read",
                f"give {shown} memory of its own, or leave it out",
            )

    def _shown(self, name: str) -> str:
        return self.shown_as.get(name, name)


def require_apart(
    operands: Operands,
    writes: Mapping[str, Output | None],
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise unless what is written, or is scratch memory, fits and shares no item with the rest.

    `writes` has the arrays that are written, where they are given, each with the result that it has
    to be, or None where others check that; `shown_as` has names for people.
    """
    names = tuple(shown_as.items())
    _apart(operands.description, tuple(writes.items()), names).check(operands)


@lru_cache(maxsize=4096)
def _apart(
    description: Description,
    writes: tuple[tuple[str, Output | None], ...],
    shown_as: tuple[tuple[str, str], ...],
) -> Overlaps:
    layouts = layouts_of(description)
    for name, output in writes:
        if output is not None and name in layouts:
            require_output(dict(shown_as).get(name, name), layouts[name], *output)
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    return Overlaps.of(layouts, ("workspace", *dict(writes)), dict(shown_as))


def _require_writable(name: str, result: Array) -> None:
    if isinstance(result, np.ndarray) and not result.flags.writeable:
        raise error(
            ValueError,
            f"{name} is read-only",
            "results are written into it",
            made_beforehand(name),
        )
