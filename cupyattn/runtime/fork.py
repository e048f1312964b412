"""Safe forks: a fork waits until no thread compiles or imports.

A child process has only the thread that forked. A lock that another thread held stays locked there
for ever. NVRTC and Python's imports have such locks: a child that was forked during another
thread's first call would hang in its own first call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class NoForkWithin:
    """A context manager for blocks that no fork may interrupt.

    Several threads may be in such blocks at once. A fork waits until all other threads have left
    them, and threads that want to enter wait for the fork. The forking thread itself may be inside.
    There must be one object for each process: with two, a thread inside the first could wait at the
    second for a fork that waits for the thread.
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
        """Let no other thread fork during the block. Blocks may be nested."""
        thread = threading.get_ident()
        if thread in self._inside:  # no lock: only the thread itself adds or removes its id
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
        self._inside &= {threading.get_ident()}  # others are left if Ctrl-C ended the wait
        self._condition.release()


no_fork = NoForkWithin()
"""The process's one `NoForkWithin`, for work under shared locks and for each lazy import."""
