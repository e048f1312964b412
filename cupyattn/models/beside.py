"""Work that runs beside other work: on a GPU, on a stream of its own."""

from __future__ import annotations

from typing import Any

import numpy as np


class Beside:
    """Between ``with`` and `join` a GPU runs what stands within beside what follows.

    What is begun within sees all that was queued before, and after `join` everything sees its
    results. Both hold in a CUDA graph that is captured around them. On NumPy arrays one thing is
    done after the other.

    Parameters
    ----------
    xp : module
        numpy or cupy.

    Notes
    -----
    Memory of arrays that are made within is reused within alone, where the next ``with`` makes it
    wait for all readers. So one is used from one stream at a time.

    Examples
    --------
    >>> import numpy as np
    >>> beside = Beside(np)
    >>> with beside:
    ...     x = np.arange(3) + 1
    >>> y = np.arange(3)
    >>> beside.join()
    >>> x + y
    array([1, 3, 5])
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._stream: Any = None

    def __enter__(self) -> None:
        if self._xp is np:
            return
        if self._stream is None:
            self._stream = self._xp.cuda.Stream(non_blocking=True)
        self._stream.wait_event(self._xp.cuda.get_current_stream().record())
        self._stream.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._xp is not np:
            self._stream.__exit__(*raised)

    def join(self) -> None:
        """Let all that is queued from here on wait for what was begun within."""
        if self._xp is not np:
            self._xp.cuda.get_current_stream().wait_event(self._stream.record())
