"""Calls that may keep the host for ever, on a thread beside the one that waits for them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_SECONDS_BETWEEN_LOOKS = 0.02

_Result = TypeVar("_Result")


def aside(call: Callable[[], _Result], look: Callable[[], None]) -> _Result:
    """Return what a call returns, or raise what it raises; `look` raises once it took too long.

    Then the call is left to itself, on a thread that the end of the program does not wait for.

    Examples
    --------
    >>> aside(lambda: 6 * 7, lambda: None)
    42
    """
    future: Future[_Result] = Future()

    def act() -> None:
        try:
            future.set_result(call())
        except BaseException as raised:  # the caller's, whatever it is
            future.set_exception(raised)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(act,), name="cupyattn-aside", daemon=True).start()
    while wait([future], _SECONDS_BETWEEN_LOOKS).not_done:
        look()
    return future.result()
