"""Choices among the admissible rows of a table: the table's own, or those that a card was timed at.

Where a problem has several rows, its plan asks `Choices.pick`. ``python -m cupyattn tune`` times
them on the card at hand and keeps the fastest beside the compiled kernels; CUPYATTN_TUNED=1 has
calls take them. Whatever is picked gives a result within the same bounds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.errors import error
from cupyattn.runtime.folders import CACHE_VARIABLE, cache_directory, tell_untrusted_file
from cupyattn.runtime.kernel_cache import write_atomically
from cupyattn.runtime.reading import parsed
from cupyattn.runtime.source import source_root
from cupyattn.runtime.target import flag
from cupyattn.runtime.trust import UntrustedError, read_trusted, require_trusted_folder

TUNED_VARIABLE = "CUPYATTN_TUNED"

_Row = TypeVar("_Row")


class Choices:
    """Names of rows by the question that they answer; where there is none, the usual row stands.

    Plans are remembered by this object, not by what is in it: it does not change.

    Examples
    --------
    >>> rows = {"wide": 256, "narrow": 128}
    >>> Choices().pick("product", (8, 8), rows, usual="wide")
    256
    >>> Choices({"product 8 8": "narrow"}).pick("product", (8, 8), rows, usual="wide")
    128
    """

    def __init__(self, chosen: Mapping[str, str] | None = None) -> None:
        self.chosen = dict(chosen or {})

    def pick(
        self, kernel: str, problem: Iterable[object], among: Mapping[str, _Row], *, usual: str
    ) -> _Row:
        """Return the row that was chosen for a problem if it is admissible, otherwise the usual."""
        name = self.chosen.get(question(kernel, problem), usual) if self.chosen else usual
        return among[name if name in among else usual]

    def because(self, *reasons: str) -> None:
        """Hear why a plan has the kernels that it has; nothing is kept."""


class Question(NamedTuple):
    """What a plan asked: the names that `Choices.pick` could choose among, the usual one first."""

    text: str
    among: tuple[str, ...]


class Asked(Choices):
    """Choices that note what they are asked."""

    def __init__(self, chosen: Mapping[str, str] | None = None) -> None:
        super().__init__(chosen)
        self.questions: list[Question] = []

    def pick(
        self, kernel: str, problem: Iterable[object], among: Mapping[str, _Row], *, usual: str
    ) -> _Row:
        """Note the question, and answer it."""
        problem = tuple(problem)
        names = (usual, *(name for name in among if name != usual))
        asked = Question(question(kernel, problem), names)
        if asked not in self.questions:
            self.questions.append(asked)
        return super().pick(kernel, problem, among, usual=usual)


class Explained(Choices):
    """Choices that keep why plans have the kernels that they have.

    No plan that was remembered before is of this object, so each plan of a call is made, and heard.
    """

    def __init__(self, chosen: Mapping[str, str] | None = None) -> None:
        super().__init__(chosen)
        self.reasons: list[str] = []

    def because(self, *reasons: str) -> None:
        """Keep the reasons."""
        self.reasons += reasons


USUAL = Choices()
"""None: every table as it is."""


def question(kernel: str, problem: Iterable[object]) -> str:
    """Return what a choice is kept under.

    Examples
    --------
    >>> question("linear_forward", (64, 128))
    'linear_forward 64 128'
    """
    return " ".join(map(str, (kernel, *problem)))


def tuned_override() -> bool:
    """Return whether CUPYATTN_TUNED asks for what was tuned.

    Raises
    ------
    ValueError
        If it is neither 0 nor 1.
    """
    on = "take the rows that python -m cupyattn tune chose"
    return bool(flag(TUNED_VARIABLE, on=on, off="take the usual ones"))


def choices_for(device: str, arch: str) -> Choices:
    """Return what calls on a device of that name and architecture take: usually `USUAL`."""
    if not tuned_override():
        return USUAL
    kept = read(device, arch)
    return USUAL if kept is None else Choices(kept["chosen"])


def file_of(device: str, arch: str) -> Path:
    """Return where the choices for a device are kept.

    Raises
    ------
    RuntimeError
        If there is no folder to keep them in.
    """
    folder = cache_directory()
    if folder is None:
        raise error(
            RuntimeError,
            "there is no folder to keep choices in",
            "they are kept beside compiled kernels, where this user and root alone can write",
            f"set {CACHE_VARIABLE} to such a folder",
        )
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return folder / f"tuned-{name}-{arch}.json"


def read(device: str, arch: str) -> dict[str, Any] | None:
    """Return what was kept for a device; None if nothing, or of other tables, kernels or NVRTC.

    A file that somebody else could have written is not read; the user is told.
    """
    try:
        path = file_of(device, arch)
        require_trusted_folder(path.parent)
        kept = parsed(read_trusted(path), str(path), _unread)
        rows = kept["chosen"].values()
        sound = kept["made_from"] == _made_from() and all(isinstance(row, str) for row in rows)
    except UntrustedError as failure:
        tell_untrusted_file(failure)
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        # RuntimeError: there is no NVRTC. The others: the file is damaged.
        return None
    return kept if sound else None


def _unread(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}")


def keep(device: str, arch: str, chosen: Mapping[str, str], **beside: object) -> Path:
    """Keep choices for a device, beside those for other questions; return the file."""
    before = read(device, arch)
    merged = {**(before["chosen"] if before else {}), **chosen}
    content = {"device": device, "arch": arch, "made_from": _made_from(), **beside}
    path = file_of(device, arch)
    text = json.dumps({**content, "chosen": merged}, indent=1) + "\n"
    write_atomically(path, text.encode())
    return path


@lru_cache(maxsize=1)
def _made_from() -> str:
    """Hash what times depend on: tables, kernels, the compiler."""
    digest = hashlib.sha256(f"{nvrtc_version()}".encode())
    tables = Path(__file__).parent / "configs"
    for folder, kind in ((tables, "*.py"), (source_root(), "*.cu*")):
        for path in sorted(folder.rglob(kind)):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]
