"""Short sequences share their keys here as long ones do: tests are of short ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from support.paged import keys_shared


@pytest.fixture
def whole_sequences() -> None:
    """Leave short sequences to a CTA each, as users' calls do."""


@pytest.fixture(autouse=True)
def _keys_are_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if "whole_sequences" in request.fixturenames else keys_shared():
        yield
