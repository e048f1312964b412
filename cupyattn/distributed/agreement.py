"""Ranks that do not do alike: an error on each of them, before anything else is sent.

Each rank gathers what all ranks say of what they are about to do. On the host that costs no more
than any message, and every call does it, also of CuPy arrays where the communicator can
(`gathers_on_host`). Otherwise the host has to wait for the GPU's answer, and calls of a kind that
was agreed on are not compared again. What travels is a digest; where that differs the words follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyattn.distributed.group import Group
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error

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
    own = digest + number.to_bytes(_NUMBER, "little", signed=True)
    heads = _gather(group, own + len(text).to_bytes(_NUMBER, "little"), xp)
    other = next((rank for rank, head in enumerate(heads) if head[:_DIGEST] != digest), None)
    if other is not None:  # which every rank sees
        longest = max(int.from_bytes(head[_DIGEST + _NUMBER :], "little") for head in heads)
        texts = _gather(group, text.ljust(longest, b"\0"), xp)
        theirs = texts[other].rstrip(b"\0").decode().split(_BETWEEN)
        raise error(
            ValueError,
            f"rank {group.rank} called with {_without(said, theirs)}, "
            f"rank {other} with {_without(theirs, said)}",
            allowed,
            fix,
        )
    return [
        int.from_bytes(head[_DIGEST : _DIGEST + _NUMBER], "little", signed=True) for head in heads
    ]


def _gather(group: Group, own: bytes, xp: Any) -> list[bytes]:
    answers = group.all_gather(xp.asarray(np.frombuffer(own, np.uint8)))
    on_host = [(x if isinstance(x, np.ndarray) else x.get()).tobytes() for x in answers]
    group.check()  # of a transfer that was aborted nothing has come
    return on_host


def _without(parts: Sequence[str], others: Sequence[str]) -> str:
    """Return what only one rank says."""
    text = ", ".join(part for part in parts if part not in others) or "none of it"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def fingerprint(*arrays: Array | bytes) -> str:
    """Return eight digits that tell what is on the host apart."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array if isinstance(array, bytes) else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:8]
