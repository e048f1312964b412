"""A fork waits for compilations, and for what is imported the first time.

A child has only the thread that forked. A lock that another thread held is locked there for ever,
and NVRTC and Python's imports have locks of their own, which nobody else can free: a child that was
forked while another thread made its first call hung in its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class NoForkWithin:
    """Work that several threads may do at once, but none while a process forks.

    A context manager makes the threads inside known. A fork waits until they are out, and those
    that want to enter wait for the fork; the forking thread itself may be inside. One object is all
    that a process can have: with two, a thread inside the one would wait at the other for a fork
    that waits for it.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._inside: set[int] = set()
        if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
            os.register_at_fork(
                before=self._close, after_in_parent=self._open, after_in_child=self._open_in_child
            )

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Mark what this thread does within the block, and within blocks in it."""
        thread = threading.get_ident()
        if thread in self._inside:  # which only the thread itself changes
            yield
            return
        try:
            with self._condition:
                self._inside.add(thread)
            yield
        finally:
            with self._condition:
                self._inside.discard(thread)
                self._condition.notify_all()

    def _close(self) -> None:
        self._condition.acquire()
        self._condition.wait_for(lambda: self._inside <= {threading.get_ident()})

    def _open(self) -> None:
        self._condition.release()

    def _open_in_child(self) -> None:
        self._inside &= {threading.get_ident()}  # after a wait that Ctrl-C cut short
        self._condition.release()


no_fork = NoForkWithin()
"""Around work under locks that others hold too, and around each import that waits for its need."""
