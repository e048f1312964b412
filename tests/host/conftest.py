"""A stream of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def stream() -> Iterator[Any]:
    """A stream that does not wait for the default one, nor the other way round."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    yield stream
    stream.synchronize()
