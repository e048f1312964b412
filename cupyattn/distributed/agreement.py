"""Ranks that do not do alike: an error on each of them, before anything else is sent.

Each rank gathers what all ranks say of what they are about to do. On the host that costs no more
than any message, and every call does it, also of CuPy arrays where the communicator can
(`gathers_on_host`). Otherwise the host has to wait for the GPU's answer, and calls of a kind that
was agreed on are not compared again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyattn.arrays import Array
from cupyattn.distributed.group import Group
from cupyattn.errors import error

_TEXT = 480  # bytes of a description that other ranks are shown
_DIGEST = 32
_NUMBER = 8
_BETWEEN = "\n"
_SHOWN = 180  # characters of a rank: errors have room for two


def agree(
    group: Group, said: Sequence[str], xp: Any, *, allowed: str, fix: str, number: int = 0
) -> list[int]:
    """Return the number of each rank, if all say the same of what they are about to do.

    Arrays of `xp` carry both. `allowed` and `fix` are the error's.

    Raises
    ------
    ValueError
        If they do not, on every rank, with what differs.
    RankFailedError
        If a rank has failed, or did not come in time.
    """
    if group.size == 1:
        return [number]
    text = _BETWEEN.join(said).encode()
    digest = hashlib.sha256(text).digest()
    own = digest + number.to_bytes(_NUMBER, "little", signed=True) + text[:_TEXT].ljust(_TEXT)
    answers = group.all_gather(xp.asarray(np.frombuffer(own, np.uint8)))
    on_host = [(x if isinstance(x, np.ndarray) else x.get()).tobytes() for x in answers]
    group.check()  # of a transfer that was aborted nothing has come
    for rank, answer in enumerate(on_host):
        if answer[:_DIGEST] != digest:
            ours, theirs = (_parts(each) for each in (own, answer))
            raise error(
                ValueError,
                f"rank {group.rank} called with {_without(ours, theirs)}, "
                f"rank {rank} with {_without(theirs, ours)}",
                allowed,
                fix,
            )
    return [
        int.from_bytes(answer[_DIGEST : _DIGEST + _NUMBER], "little", signed=True)
        for answer in on_host
    ]


def _parts(answer: bytes) -> list[str]:
    text = answer[_DIGEST + _NUMBER :].decode(errors="replace").rstrip()
    return text.split(_BETWEEN)


def _without(parts: list[str], others: list[str]) -> str:
    """Return what only one rank says; where that was not sent, how its text begins."""
    differs = [part for part in parts if part not in others] or ["none of it"]
    text = ", ".join(differs if parts != others else parts)
    return text if parts != others and len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def fingerprint(*arrays: Array | bytes) -> str:
    """Return eight digits that tell what is on the host apart."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array if isinstance(array, bytes) else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:8]
