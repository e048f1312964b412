"""A thread that checks whether transfers end, and whether a rank has failed.

The host does not wait for a transfer on a GPU, so it cannot see that one never ends. An event is
recorded before and after each transfer, and the time counts from the first. Where the host does
wait, it checks for the failure that this thread posts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cupyattn.distributed.failures import ALIKE, PATIENCE, Failures
from cupyattn.runtime.cupy_library import load_cupy

_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_TO_LAST_LOOK = 0.5

_DONE = SimpleNamespace(done=True)
"""The event of work on the host."""


@dataclass(eq=False)
class _Transfer:
    number: int
    """The count of this rank's transfers up to this one, from 1 on."""
    begun: Any
    peer: int
    waits_for: str
    done: Any = None
    """None while the host is still inside the communicator, which may wait there too."""
    since: float | None = None
    """When it was first seen to have begun."""


class Watch:
    """Watches the transfers of one rank."""

    def __init__(
        self, rank: int, timeout: float, failures: Failures, abort: Callable[[], None]
    ) -> None:
        self._rank, self._timeout = rank, timeout
        self._failures, self._abort = failures, abort
        self._transfers: deque[_Transfer] = deque()
        self._begun = 0
        self._device: Any = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @contextmanager
    def over(self, stream: object, peer: int, waits_for: str) -> Iterator[None]:
        """Watch the work that a block enqueues on a stream; without a stream, the block itself."""
        if stream is not None and self._device is None:
            self._device = current_device()
        self._begun += 1
        transfer = _Transfer(self._begun, _mark(stream), peer, waits_for)
        self._transfers.append(transfer)
        self._start()
        yield
        transfer.done = _mark(stream)

    def drain(self) -> None:
        """Wait until all transfers are done, or a rank has failed."""
        while self._transfers and self._failures.first() is None and not self._stopped.is_set():
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_SECONDS_TO_LAST_LOOK)

    def _start(self) -> None:
        if self._thread is None:
            name = f"cupyattn-watch-{self._rank}"
            self._thread = threading.Thread(target=self._look, name=name, daemon=True)
            self._thread.start()

    def _look(self) -> None:
        used = None
        while not self._stopped.wait(_SECONDS_BETWEEN_LOOKS):
            if self._device is not used:  # otherwise querying an event makes a context on GPU 0
                used = self._device
                used.use()
            while self._transfers and _is_done(self._transfers[0]):
                self._transfers.popleft()
            if self._is_late():
                self._blame(self._transfers[0])
            self._failures.answer(self._begun)
            self._failures.look()
            if self._failures.first() is not None:
                self._abort()
                self._transfers.clear()
                return

    def _blame(self, late: _Transfer) -> None:
        """Post the rank that a transfer waits for, unless it is done by then."""
        waited = f"rank {self._rank} waited {self._timeout:g} s"
        missing = self._failures.missing(late.number, self._begun)
        if _is_done(late):
            return
        culprit, why = missing or (late.peer, "")
        message = f"{why}; {waited} for it" if why else f"{waited} for {late.waits_for}"
        self._failures.post(culprit, f"{message}; {ALIKE}; {PATIENCE}")

    def _is_late(self) -> bool:
        if not self._transfers:
            return False
        transfer = self._transfers[0]
        if transfer.since is None:
            if transfer.begun.done:
                transfer.since = time.monotonic()
            return False
        return time.monotonic() - transfer.since > self._timeout


def current_device() -> Any:
    """Return CuPy's current device."""
    return load_cupy().cuda.Device()


def _is_done(transfer: _Transfer) -> bool:
    return transfer.done is not None and transfer.done.done


def _mark(stream: object) -> Any:
    if stream is None:
        return _DONE
    event = load_cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    return event
