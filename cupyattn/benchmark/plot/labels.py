"""What tells the cases of a command from each other, in few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Case = Mapping[str, Any]

LENGTHS = ("seqlen", "context", "prompt", "width", "M", "tokens")
"""Labels along which a call grows, the first that differs being drawn along."""

_FORMS = {
    "seqlen": "{:,} tokens",
    "context": "{:,} keys",
    "prompt": "prompt of {:,}",
    "tokens": "{:,} tokens",
    "width": "width {:,}",
    "rows": "{:,} rows",
    "queries": "{:,} queries",
    "batch": "batch {}",
    "heads": "{} heads",
    "kv_heads": "{} kv heads",
    "head_dim": "D {}",
    "head_dim_v": "Dv {}",
    "cache": "{} cache",
    "M": "M {:,}",
    "N": "N {:,}",
    "K": "K {:,}",
}
_FOLLOWING_LENGTH = ("batch", "rows")
_FIRST = ("model", "kind", "operation", "what", "head_dim", *LENGTHS)


def distinguishing(cases: Sequence[Case], beside: str | None = None) -> tuple[str, ...]:
    """Return the fewest labels, the telling ones first, that tell all cases from each other.

    Those that differ in `beside` are told from each other by that.

    Examples
    --------
    >>> cases = [{"heads": 32, "head_dim": 64, "causal": False},
    ...          {"heads": 32, "head_dim": 64, "causal": True},
    ...          {"heads": 16, "head_dim": 128, "causal": True}]
    >>> distinguishing(cases)  # heads follow from the head dim
    ('head_dim', 'causal')
    """
    every = dict.fromkeys(name for case in cases for name in case)
    ordered = [*(name for name in _FIRST if name in every), *every]
    kept = [] if beside is None else [beside]
    for name in dict.fromkeys(ordered):
        if _count(cases, [*kept, name]) > _count(cases, kept):
            kept.append(name)
    return tuple(name for name in kept if name != beside)


def shared(cases: Sequence[Case]) -> str:
    """Write the labels that all cases have alike and that say something.

    Examples
    --------
    >>> shared([{"batch": 4, "head_dim": 64, "window": 512, "dtype": "float16"},
    ...         {"batch": 4, "head_dim": 80, "window": 512, "dtype": "float16"}])
    'batch 4, float16'
    """
    names = dict.fromkeys(name for case in cases for name in case)
    alike = [name for name in names if len({case.get(name) for case in cases}) == 1]
    telling = [
        name
        for name in alike
        if (name in _FORMS or isinstance(cases[0].get(name), str) or cases[0].get(name) is True)
        and cases[0].get(name) != "plain"
        and not (name == "head_dim_v" and "head_dim" in names)
    ]
    return text_of(cases[0], telling)


def text_of(case: Case, names: Sequence[str]) -> str:
    """Write some labels of a case.

    Examples
    --------
    >>> text_of({"head_dim": 64, "causal": False, "window": 8, "layout": None, "dtype": "float16"},
    ...         ("head_dim", "causal", "window", "layout", "dtype"))
    'D 64, not causal, window 8, float16'
    >>> text_of({"queries": 1, "kv_heads": 1, "heads": 8}, ("queries", "kv_heads", "heads"))
    '1 query, 1 kv head, 8 heads'
    >>> text_of({"block_size": None}, ("block_size",))
    'no block size'
    """
    told = [_text(name, case[name]) for name in names if case.get(name) is not None]
    return ", ".join(told or (f"no {name.replace('_', ' ')}" for name in names))


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name.replace("_", " ") if value else f"not {name.replace('_', ' ')}"
    if name in _FORMS and not isinstance(value, str):
        written = _FORMS[name].format(value)
        return written.replace("queries", "query").removesuffix("s") if value == 1 else written
    return value if isinstance(value, str) else f"{name.replace('_', ' ')} {value}"


def length_of(cases: Sequence[Case]) -> str | None:
    """Return the label that cases grow along, with all others alike; None if they do not.

    Examples
    --------
    >>> length_of([{"operation": "rope", "width": 768}, {"operation": "gelu", "width": 2048}])
    >>> length_of([{"operation": "rope", "width": 768}, {"operation": "rope", "width": 2048}])
    'width'
    """
    for name in LENGTHS:
        if any(len(panel) > 1 for panel in panels(cases, name)):
            return name
    return None


def panels(cases: Sequence[Case], along: str) -> list[list[Case]]:
    """Return the cases that are alike but for their length, the shortest first.

    Where calls have as many tokens at each length, the number of sequences follows from it.
    """
    names = _beside(cases, along)
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        if isinstance(case.get(along), int):
            found.setdefault(tuple(case.get(name) for name in names), []).append(case)
    return [sorted(panel, key=lambda case: case[along]) for panel in found.values()]


def titles(every: Sequence[Sequence[Case]], along: str) -> list[str]:
    """Write what tells panels from each other."""
    names = _beside([case for panel in every for case in panel], along)
    cases = [{name: panel[0].get(name) for name in names} for panel in every]
    telling = distinguishing(cases)
    return [text_of(case, telling) for case in cases]


def _beside(cases: Sequence[Case], along: str) -> list[str]:
    """Return the labels that are to be alike within a panel."""
    needed = distinguishing(cases, beside=along)
    every = dict.fromkeys(name for case in cases for name in case)
    return [
        name
        for name in every
        if name != along and (name not in _FOLLOWING_LENGTH or name in needed)
    ]


def _count(cases: Sequence[Case], names: Sequence[str]) -> int:
    return len({tuple(case.get(name) for name in names) for case in cases})
