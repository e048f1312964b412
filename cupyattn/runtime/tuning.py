"""Choices among candidate configurations: the default, or the fastest as measured on a device.

If a problem has several candidates, its plan calls `Choices.pick`. ``python -m cupyattn tune``
times them on the current device and stores the fastest in the cache of compiled kernels. With
CUPYATTN_TUNED=1 calls use them. Results of all candidates are within the same error bounds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arch import flag
from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.errors import error
from cupyattn.runtime.folders import (
    CACHE_VARIABLE,
    UntrustedError,
    cache_directory,
    read_trusted,
    require_trusted_folder,
    tell_untrusted_file,
)
from cupyattn.runtime.kernel_cache import write_atomically
from cupyattn.runtime.reading import parsed
from cupyattn.runtime.source import source_root

TUNED_VARIABLE = "CUPYATTN_TUNED"

_Row = TypeVar("_Row")


class Choices:
    """Chosen candidates by `question`. Without a choice the usual candidate is used.

    An object is immutable, and a key of caches of plans by its identity.

    Examples
    --------
    >>> candidates = {"wide": 256, "narrow": 128}
    >>> Choices().pick("product", (8, 8), candidates, usual="wide")
    256
    >>> Choices({"product 8 8": "narrow"}).pick("product", (8, 8), candidates, usual="wide")
    128
    """

    def __init__(self, chosen: Mapping[str, str] | None = None) -> None:
        self.chosen = dict(chosen or {})

    def pick(
        self, kernel: str, problem: Iterable[object], among: Mapping[str, _Row], *, usual: str
    ) -> _Row:
        """Return the candidate chosen for a problem if it is in `among`, otherwise the usual."""
        name = self.chosen.get(question(kernel, problem), usual) if self.chosen else usual
        return among[name if name in among else usual]

    def because(self, *reasons: str) -> None:
        """Take the reasons for a plan's choice of kernels; nothing is kept."""


class Question(NamedTuple):
    """A call of `Choices.pick`: the problem, and the names of candidates, the usual one first."""

    text: str
    among: tuple[str, ...]


class Asked(Choices):
    """Choices that record the calls of `pick`."""

    def __init__(self, chosen: Mapping[str, str] | None = None) -> None:
        super().__init__(chosen)
        self.questions: list[Question] = []

    def pick(
        self, kernel: str, problem: Iterable[object], among: Mapping[str, _Row], *, usual: str
    ) -> _Row:
        """Record the question, and answer it."""
        problem = tuple(problem)
        names = (usual, *(name for name in among if name != usual))
        asked = Question(question(kernel, problem), names)
        if asked not in self.questions:
            self.questions.append(asked)
        return super().pick(kernel, problem, among, usual=usual)


class Explained(Choices):
    """Choices that keep the reasons for the plans' choices of kernels.

    Cached plans belong to other objects, so each plan of a call is made and gives its reasons.
    """

    def __init__(self, chosen: Mapping[str, str] | None = None) -> None:
        super().__init__(chosen)
        self.reasons: list[str] = []

    def because(self, *reasons: str) -> None:
        """Keep the reasons."""
        self.reasons += reasons


USUAL = Choices()
"""No choices: each problem uses its usual candidate."""


def question(kernel: str, problem: Iterable[object]) -> str:
    """Return the key of a choice.

    Examples
    --------
    >>> question("linear_forward", (64, 128))
    'linear_forward 64 128'
    """
    return " ".join(map(str, (kernel, *problem)))


def tuned_override() -> bool:
    """Return whether CUPYATTN_TUNED enables tuned choices.

    Raises
    ------
    ValueError
        If it is neither 0 nor 1.
    """
    on = "use the configurations that python -m cupyattn tune chose"
    return bool(flag(TUNED_VARIABLE, on=on, off="use the usual ones"))


def choices_for(device: str, arch: str) -> Choices:
    """Return the choices of calls on a device of this name and architecture."""
    if not tuned_override():
        return USUAL
    kept = read(device, arch)
    return USUAL if kept is None else Choices(kept["chosen"])


def file_of(device: str, arch: str) -> Path:
    """Return the file of choices for a device.

    Raises
    ------
    RuntimeError
        If there is no cache folder.
    """
    folder = cache_directory()
    if folder is None:
        raise error(
            RuntimeError,
            "there is no folder to keep choices in",
            "they are kept next to compiled kernels, where only this user and root can write",
            f"set {CACHE_VARIABLE} to such a folder",
        )
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return folder / f"tuned-{name}-{arch}.json"


def read(device: str, arch: str) -> Json | None:
    """Return the stored choices for a device; None if there are none for this code and NVRTC.

    A file that somebody else could have written is not read, with a warning.
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
        # RuntimeError: there is no NVRTC. Other errors: the file is damaged.
        return None
    return kept if sound else None


def _unread(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}")


def keep(device: str, arch: str, chosen: Mapping[str, str], **more: Any) -> Path:
    """Store choices for a device, in addition to those for other questions; return the file."""
    before = read(device, arch)
    merged = {**(before["chosen"] if before else {}), **chosen}
    content = {"device": device, "arch": arch, "made_from": _made_from(), **more}
    path = file_of(device, arch)
    text = json.dumps({**content, "chosen": merged}, indent=1) + "\n"
    write_atomically(path, text.encode())
    return path


def _sources() -> list[tuple[str, Path]]:
    """Return the files that measured times depend on, and their names: configurations and CUDA."""
    package, cuda = Path(__file__).parent.parent, source_root()
    patterns = (
        (package, "ops/**/kernels*.py"),
        (package, "ops/**/kernels/**/*.py"),
        (package, "ops/**/tiles.py"),
        (cuda, "**/*.cu*"),
    )
    return [
        (path.relative_to(folder).as_posix(), path)
        for folder, pattern in patterns
        for path in sorted(folder.glob(pattern))
    ]


@lru_cache(maxsize=1)
def _made_from() -> str:
    """Hash `_sources` and the version of the compiler."""
    digest = hashlib.sha256(f"{nvrtc_version()}".encode())
    for name, path in _sources():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]
