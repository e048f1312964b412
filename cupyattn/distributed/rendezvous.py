"""How processes that see one folder find one another: all have come, and all have one id."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from pathlib import Path

from cupyattn.distributed.communicators.nccl import ID_BYTES, new_id
from cupyattn.distributed.failures import leave_in
from cupyattn.runtime.errors import error
from cupyattn.runtime.reading import read_bytes

_ID, _GO = "id", "go"
_MOST_BYTES = 1 << 20
"""The limit of a file of the folder, which has an id and 33 bytes for each rank."""
_TOKEN = re.compile(rb"[0-9a-f]{32}")
_SECONDS_BETWEEN_LOOKS = 0.02


def shared_id(folder: Path, rank: int, size: int, timeout: float) -> bytes:
    """Return the id of NCCL that rank 0 makes, once all ranks have come.

    Each leaves a token, drawn anew. Rank 0 writes the id beside the tokens that it finds; who finds
    their own there signs that, and all go on when all have signed. What an earlier run has left in
    the folder bears neither token nor signature of this one.

    Raises
    ------
    TimeoutError
        If a rank does not come in time, which it names.
    """
    token = secrets.token_hex(16).encode()
    leave_in(folder, _card(folder, rank).name, token)
    made = new_id() if rank == 0 else b""
    until = time.monotonic() + timeout
    invitation = signature = b""
    while True:
        if rank == 0:
            cards = _cards(folder, size)
            if all(cards):
                seen = made + b" ".join(card[0] for card in cards)
                if seen != invitation:  # of a rank that comes now, an earlier run's was there
                    invitation, signature = seen, _sign(seen)
                    leave_in(folder, _ID, invitation)
                if all(card[1:] == [signature] for card in cards[1:]):
                    leave_in(folder, _GO, signature)
                    return made
        else:
            seen = _read(folder / _ID)
            if seen != invitation and token in seen[ID_BYTES:].split():
                invitation, signature = seen, _sign(seen)
                leave_in(folder, _card(folder, rank).name, token + b" " + signature)
            if signature and _read(folder / _GO) == signature:
                return invitation[:ID_BYTES]
        if time.monotonic() > until:
            missing = ", ".join(map(str, _missing(_cards(folder, size), signature)))
            raise error(
                TimeoutError,
                f"rank {rank} waited {timeout:g} s in {folder} for rank {missing} of {size}",
                "all ranks come there before any goes on",
                "look whether that rank runs and sees the same folder, or pass a longer timeout",
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _card(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _cards(folder: Path, size: int) -> list[list[bytes]]:
    """Return each rank's token and signature, as far as they are there."""
    cards = [_read(_card(folder, rank)).split() for rank in range(size)]
    return [card if card and _TOKEN.fullmatch(card[0]) else [] for card in cards]


def _missing(cards: list[list[bytes]], signature: bytes) -> list[int]:
    """Tell who has left nothing; otherwise who has not signed; otherwise it is rank 0."""
    absent = [rank for rank, card in enumerate(cards) if not card]
    unsigned = [rank for rank, card in enumerate(cards) if rank and card[1:] != [signature]]
    return absent or (unsigned if signature else []) or [0]


def _sign(invitation: bytes) -> bytes:
    return hashlib.sha256(invitation).hexdigest().encode()


def _read(path: Path) -> bytes:
    """Return what a file holds: nothing if it is not there, or no rank can have written it."""
    try:
        return read_bytes(path, _MOST_BYTES, _garbage)
    except (FileNotFoundError, ValueError):
        return b""


def _garbage(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}")
