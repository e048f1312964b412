"""The ``#include`` directives of a source, as the compiler sees them.

Comments may be anywhere in a directive, lines may be continued, and ``%:`` means ``#``. A quote
without a closing one, as in ``#error don't``, ends with its line. The file of ``#include MACRO`` or
``#include_next`` cannot be known without running the preprocessor.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

_SPACE = rb"(?:[ \t\f\v\r]|//[^\n]*|/\*[\s\S]*?\*/)*"
_SPLICE = re.compile(rb"\\\r?\n")
_TOKEN = re.compile(
    rb"""
    (?P<space> [ \t\f\v\r]+ | //[^\n]* | /\*[\s\S]*?(?:\*/|\Z) )
    | (?P<newline> \n )
    | (?P<hash> (?: \#\# | %:%: | \# | %: ) )
    | (?P<raw> (?:u8|[uUL])?R"(?P<delimiter>[^()\\\s"]{0,16})\( )
    | (?:u8|[uUL])?(?: "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? )
    | \.?[0-9](?:[eEpP][+-]|'?\w|\.)*
    | (?P<word> [A-Za-z_$\x80-\xff][\w$\x80-\xff]* )
    | [^\s\w"'/\#%.$\x80-\xff]+ | .
    """,
    re.VERBOSE,
)
_DIRECTIVE = re.compile(_SPACE + rb"(include|include_next)\b(?![$\x80-\xff])" + _SPACE)
_OPERAND = re.compile(rb'(?:"(?P<quoted>[^"\n]+)"|<(?P<angled>[^>\n]+)>)')


class Include(NamedTuple):
    """A directive that names its file."""

    name: bytes
    quoted: bool
    """Whether the folder of the including file is searched first."""
    start: int
    stop: int
    """The range of the name in the text, with its quotes or brackets."""


class Unfollowed(NamedTuple):
    """A line that includes a file, or checks for one, without naming it."""

    line: int
    text: str


@lru_cache(maxsize=1024)  # about 5 kB each: kernels share headers
def includes_in(text: bytes) -> tuple[Include | Unfollowed, ...]:
    r"""Return the directives of a text in order, among them those that cannot be followed.

    Examples
    --------
    >>> [found] = includes_in(b'%:include /* why */ "near.cuh"')
    >>> found.name, found.quoted
    (b'near.cuh', True)
    >>> includes_in(b"// #include <none>\n#include HEADER")
    (Unfollowed(line=2, text='#include HEADER'),)
    """
    removed = [match.span() for match in _SPLICE.finditer(text)]
    plain = _SPLICE.sub(b"", text)
    starts, shift, shifts = [0], 0, [0]
    for first, last in removed:
        starts.append(first - shift)
        shift += last - first
        shifts.append(shift)

    def original(position: int, *, end: bool = False) -> int:
        """Map a position in the plain text to the original; an end is before removed characters."""
        if end and position:
            return original(position - 1) + 1
        return position + shifts[bisect_right(starts, position) - 1]

    def end_of_raw(opened: re.Match[bytes]) -> int:
        """Return where a raw string ends: backslashes do not continue lines in it."""
        closing = b")" + opened["delimiter"] + b'"'
        end = text.find(closing, original(opened.end(), end=True))
        if end < 0:
            return len(plain)
        end += len(closing)
        return end - shifts[bisect_right(removed, (end,))]

    def unfollowed(position: int) -> Unfollowed:
        at = original(position)
        line = plain[plain.rfind(b"\n", 0, position) + 1 :].partition(b"\n")[0]
        return Unfollowed(text.count(b"\n", 0, at) + 1, line.decode(errors="replace").strip())

    found: list[Include | Unfollowed] = []
    first_in_line, position = True, 0
    while (token := _TOKEN.match(plain, position)) is not None:
        position = token.end()
        kind = token.lastgroup
        if kind == "raw":
            position, first_in_line = end_of_raw(token), False
        elif kind == "newline":
            first_in_line = True
        elif kind == "hash" and first_in_line and len(token[0]) == len(b"#") + (token[0] == b"%:"):
            first_in_line = False
            directive = _DIRECTIVE.match(plain, position)
            if directive is None:
                continue
            operand = _OPERAND.match(plain, directive.end())
            if operand is None or directive[1] != b"include":
                found.append(unfollowed(token.start()))
                position = directive.end()
                continue
            position = operand.end()
            name = operand["quoted"] or operand["angled"]
            span = original(operand.start()), original(operand.end(), end=True)
            found.append(Include(name, operand["quoted"] is not None, *span))
        elif kind == "word" and token[0].startswith(b"__has_include"):
            found.append(unfollowed(token.start()))
        elif kind != "space":
            first_in_line = False
    return tuple(found)


def with_names(text: bytes, names: dict[Include, bytes]) -> bytes:
    """Replace the names of included files in a text; line numbers do not change."""
    parts, position = [], 0
    for include, name in sorted(names.items(), key=lambda item: item[0].start):
        splices = len(_SPLICE.findall(text[include.start : include.stop]))
        parts += [text[position : include.start], b'"', name, b'"', b"\\\n" * splices]
        position = include.stop
    return b"".join([*parts, text[position:]])
