"""The options out= and grads=: several results are a tuple, gradients are a named tuple."""

from __future__ import annotations

from typing import Any

from cupyattn.runtime.errors import error
from cupyattn.runtime.records import R


def named_out(out: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arrays of out=, one array or a tuple of several, by the names of the results.

    Raises
    ------
    TypeError
        If there are more or fewer arrays than results, or None among several.
    """
    if out is None:
        return {}
    if len(names) == 1 and not isinstance(out, tuple):
        return {names[0]: out}
    if isinstance(out, tuple) and len(out) == len(names) > 1 and all(a is not None for a in out):
        return dict(zip(names, out, strict=True))
    passed = f"a tuple of {len(out)}" if isinstance(out, tuple) else f"a {type(out).__name__}"
    if len(names) == 1:
        raise error(TypeError, f"out is {passed}", "this call has one result", "pass one array")
    listed = ", ".join(names)
    raise error(
        TypeError,
        f"out is {passed}",
        f"it is a tuple of arrays, one for each of the {len(names)} results of this call",
        f"pass out=({listed})",
    )


def named_grads(
    kind: type[Any], grads: object, accumulate: bool, fields: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the arrays of grads=, a named tuple of this kind, by name.

    `fields` are those that error messages propose, by default all.

    Raises
    ------
    TypeError
        If `grads` is anything else.
    ValueError
        If `accumulate` is True without `grads`.
    """
    fix = f"pass grads={kind.__name__}({', '.join(fields or kind._fields)})"
    if isinstance(grads, kind):
        return dict(grads._asdict())
    if grads is not None:
        article = "an" if kind.__name__.startswith(("A", "RMS")) else "a"
        raise error(
            TypeError,
            f"grads is a {type(grads).__name__}",
            f"it is {article} {kind.__name__} of {', '.join(kind._fields)}: arrays or None",
            fix,
        )
    require_grads(grads, accumulate, fix)
    return {}


def take_out(arrays: R, out: object, names: tuple[str, ...]) -> R:
    """Put the arrays of out= into a record's fields: one array, or a tuple of several.

    Raises
    ------
    TypeError
        If there are more or fewer arrays than names, or None among several.
    """
    if out is None:
        return arrays
    for name, array in named_out(out, names).items():
        setattr(arrays, name, array)
    return arrays


def take_grads(arrays: R, kind: type[Any], grads: object, accumulate: bool) -> R:
    """Put the arrays of grads=, a named tuple of this kind, into a record's fields.

    Raises
    ------
    TypeError, ValueError
        As `named_grads`.
    """
    if grads is None and not accumulate:
        return arrays
    for name, array in named_grads(kind, grads, accumulate).items():
        setattr(arrays, name, array)
    return arrays


def require_grads(
    grads: object, accumulate: bool, fix: str = "pass an array to add to", shown: str = "grads"
) -> None:
    """Raise ValueError for accumulate=True without gradients; `shown` names them in the error."""
    if accumulate and grads is None:
        passed = f"accumulate=True without {shown}"
        raise error(ValueError, passed, f"it adds to what is in {shown}", fix)
