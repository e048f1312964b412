"""The CUDA sources: their folder, and the texts of a source and its includes for the compiler.

The compiler gets every file of ours and of the user's as text, with a name that does not depend on
the file's folder. It can read no other files but the toolkit's headers. So these texts determine
the compiled code, and the cache's keys are computed from them.

``#include`` directives are read as the compiler reads them: comments may be anywhere in one, lines
may be continued, and ``%:`` means ``#``. A quote without a closing one (``#error don't``) ends
with its line. The file of ``#include MACRO`` or ``#include_next`` cannot be known without running
the preprocessor.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cupyattn.runtime.errors import error

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


_PACKAGE = Path(__file__).resolve().parent.parent
_MARK = Path("common", "config.cuh")  # in every copy of the folder of CUDA sources

NAMED = "/cupyattn/"
"""The beginning of all names. It is an absolute path, so compilers add no other folder."""

_FILE = re.compile(r'^\s*\.file\s+\d+\s+"([^"]+)"', re.MULTILINE)


@lru_cache(maxsize=1)
def source_root() -> Path:
    """Return the folder of CUDA sources: in the installed package, or next to it in a checkout.

    Raises
    ------
    FileNotFoundError
        If neither folder exists, which means that the installation is broken.
    """
    candidates = (_PACKAGE / "_cuda_src", _PACKAGE.parent / "cuda_src")
    for candidate in candidates:
        if (candidate / _MARK).is_file():
            return candidate
    raise FileNotFoundError(
        f"the CUDA sources are in neither {candidates[0]} nor {candidates[1]}; "
        "reinstall cupyattn, or run it from a complete checkout"
    )


_texts: dict[Path, bytes] = {}
"""Sources that are no files, by the paths that are used for them."""


def path_of_text(name: str, text: str) -> Path:
    """Return a path for a source that is not in a file; this process reads the text for it.

    It is the only file of its folder, which does not exist. So includes are found in the folder of
    CUDA sources alone.
    """
    contents = text.encode()
    folder = f"/source-text-{hashlib.sha256(contents).hexdigest()[:12]}"
    path = Path(folder, f"{name}.cu").absolute()
    _texts[path] = contents
    return path


def bytes_of(path: Path) -> bytes:
    """Return the contents of a file, or the text that `path_of_text` was given."""
    text = _texts.get(path)
    return path.read_bytes() if text is None else text


@dataclass(frozen=True)
class Unit:
    """A source with all files that it includes, directly or not.

    Attributes
    ----------
    source : Path
        The file that is compiled.
    files : dict of Path to str
        The compiler's name of each file; the source is the first.
    texts : dict of str to bytes
        The texts for the compiler by these names. They include each other by these names too.
    looked_at : frozenset of Path
        All paths that were searched for files, with or without success.
    """

    source: Path
    files: dict[Path, str]
    texts: dict[str, bytes]
    looked_at: frozenset[Path]

    @property
    def digest(self) -> str:
        """A hash of names and texts."""
        digest = hashlib.sha256()
        for name, text in self.texts.items():
            digest.update(f"{name}\0{len(text)}\0".encode(errors="surrogateescape") + text)
        return digest.hexdigest()

    def with_paths(self, log: str) -> str:
        """Return the compiler's log with the paths of files instead of their names."""
        for path, name in sorted(self.files.items(), key=lambda item: -len(item[1])):
            log = log.replace(name, str(path))
        return log


_Stamp = tuple[int, int, int]
_remembered: dict[tuple[Path, Path], tuple[dict[Path, _Stamp | None], str, dict[Path, str]]] = {}
"""Stamps, digest and files, by source and folder of CUDA sources."""
_SETTLED = 2.0  # seconds after a change until the next one is sure to have another time stamp


def source_digest(source: Path) -> str:
    """Hash the texts of `source` and of all files that it includes."""
    return _digest_and_files(source)[0]


def _digest_and_files(source: Path) -> tuple[str, dict[Path, str]]:
    """Return the digest and the files of a source's unit.

    Reading thirty files takes ten milliseconds. So the result is cached while each file has the
    same size and times, and missing files are still missing.
    """
    place = source, source_root()
    stamps, digest, files = _remembered.get(place, ({}, "", {}))
    if digest and all(_stamp(path) == stamp for path, stamp in stamps.items()):
        return digest, files
    unit = read_unit(source)
    stamps, digest = {path: _stamp(path) for path in unit.looked_at}, unit.digest
    newest = max(max(stamp[:2]) for stamp in stamps.values() if stamp is not None)
    if time.time() - newest / 1e9 > _SETTLED:
        _remembered[place] = stamps, digest, unit.files
    return digest, unit.files


def read_unit(source: Path) -> Unit:
    """Read a source and all files that it includes.

    A name in quotes is searched in the folder of the including file first. Then, like a name in
    angle brackets, in the folder of `source` and in the folder of CUDA sources. Other names are
    left to the compiler, which has the toolkit's headers and its own. Its version is in the cache
    key.

    Raises
    ------
    ValueError
        If a line includes a file without naming it, or uses ``__has_include``.
    """
    source = source.absolute()
    looked_at: set[Path] = set()
    read: dict[Path, bytes] = {}
    found: dict[Path, dict[Include, Path]] = {}
    pending = [source]
    while pending:
        spelled = pending.pop()
        path = spelled.resolve()
        looked_at |= {spelled, path}
        if path in found:
            continue
        read[path] = bytes_of(path)
        found[path] = {}
        for include in includes_in(read[path]):
            if isinstance(include, Unfollowed):
                raise _unfollowed(path, include)
            nearby = (spelled.parent, path.parent) if include.quoted else ()
            for folder in dict.fromkeys((*nearby, source.parent, source_root())):
                candidate = folder / os.fsdecode(include.name)
                looked_at.add(candidate)
                if candidate.is_file():
                    found[path][include] = candidate.resolve()
                    pending.append(candidate)
                    break
    first = source.resolve()
    files = dict(_named(first, [first, *sorted(found.keys() - {first})]))
    texts = {
        name: with_names(
            read[path],
            {include: os.fsencode(files[there]) for include, there in found[path].items()},
        )
        for path, name in files.items()
    }
    return Unit(source, files, texts, frozenset(looked_at))


def texts_named_in(ptx: str, source: Path) -> dict[str, str]:
    """Return the texts of the files that the PTX of a source names, by these names."""
    paths = {name: path for path, name in _digest_and_files(source)[1].items()}
    texts = {}
    for name in _FILE.findall(ptx):
        known = name.replace("\\\\", "/")
        known = known[max(known.find(NAMED), 0) :]  # on Windows a drive comes first
        if known in paths:
            text = bytes_of(paths[known]).decode(errors="replace")
            texts[name] = text.replace("\r\n", "\n")
    return texts


def _unfollowed(path: Path, line: Unfollowed) -> ValueError:
    return error(
        ValueError,
        f"{path}, line {line.line}, is {line.text!r}",
        'a file is included by its name, as in #include "name.cuh" or #include <name>, so that the '
        "kernel can be recompiled when the file changes",
        "write the name there, in each branch of an #if if need be",
    )


def _named(source: Path, paths: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield names that do not depend on where the folders of sources are."""
    ours = source_root().resolve()
    copies = (folder for folder in source.parents if (folder / _MARK).is_file())
    tree = ours if ours in source.parents else next(copies, None)
    folders = {source.parent: "kernel", ours: "cuda_src"}
    if tree is not None:
        folders = {tree: "cuda_src"} | ({} if tree == ours else {ours: "library"})
    for path in paths:
        for folder, name in folders.items():
            if folder in path.parents:
                yield path, f"{NAMED}{name}/{path.relative_to(folder).as_posix()}"
                break
        else:
            try:
                relative = Path(os.path.relpath(path, source.parent))
            except ValueError:  # on another drive
                relative = path
            yield path, f"{NAMED}kernel/{relative.as_posix()}"


def _stamp(path: Path) -> _Stamp | None:
    if path in _texts:  # never changes
        return 0, 0, len(_texts[path])
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size
