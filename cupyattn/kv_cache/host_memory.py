"""The memory that this process can have on the host, as far as the system tells."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from cupyattn.runtime.errors import error, size_text

if sys.platform == "win32":

    def _limit() -> int | None:
        return None

else:
    import resource

    def _limit() -> int | None:
        """Return the limit of the process (``ulimit -v``), if there is one."""
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        return None if soft == resource.RLIM_INFINITY else soft


def host_memory() -> int | None:
    """Return the bytes of memory that this process can have at most; None if nothing tells.

    What other processes use is not counted.
    """
    limits = [_limit()]
    with suppress(AttributeError, OSError, ValueError):  # not every system tells
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min((each for each in limits if each is not None and each > 0), default=None)


def require_host_memory(what: str, size: int, fix: str) -> None:
    """Raise MemoryError for what takes more bytes than the host has, before it is begun."""
    memory = host_memory()
    if memory is not None and size > memory:
        raise error(
            MemoryError,
            f"got {what}, which take {size_text(size)} of the host's memory",
            f"it has {size_text(memory)}",
            fix,
        )
