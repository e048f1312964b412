"""C++ names in messages: ``_ZZ6kernelPfE4tile`` is the shared variable `tile`."""

import re

__all__ = ["readable"]

_LOCAL = re.compile(r"E(\d+)")
_NESTED = re.compile(r"_Z(?:N|L)*(?=\d)")
_NUMBERED = re.compile(r"(?:_\d+_?)?")  # which of several variables of one name


def _source_name(text: str) -> str:
    """Return the name that `text` starts with, as ``4tile`` does, or nothing."""
    match = re.match(r"(\d+)", text)
    if not match:
        return ""
    start, length = match.end(), int(match.group())
    return text[start : start + length] if len(text) >= start + length else ""


def readable(name: str) -> str:
    """Return the C++ name of a mangled variable or function, without its types.

    A variable inside a function is named without the function. What is not mangled, or in a way
    that is not known (Itanium C++ ABI, "Mangling"), is returned as it is.

    Examples
    --------
    >>> readable("_ZZ6kernelPfE4tile"), readable("_ZN4math5tableE"), readable("_Z6kernelPf")
    ('tile', 'math::table', 'kernel')
    """
    if name.startswith("_ZZ"):
        for match in _LOCAL.finditer(name):
            found = _source_name(name[match.start() + 1 :])
            rest = name[match.end() + len(found) :]
            if found and _NUMBERED.fullmatch(rest):
                return found
        return name
    prefix = _NESTED.match(name)
    if not prefix:
        return name
    parts, rest = [], name[prefix.end() :]
    while found := _source_name(rest):
        parts.append(found)
        rest = rest[len(str(len(found))) + len(found) :]
        if "N" not in prefix.group():
            break
    return "::".join(parts) or name
