"""Short sequences share their keys here as long ones do; and a memory of a few blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from support.block_model import BlockMemory
from support.paged import keys_shared

from cupyattn import BlockAllocator


@pytest.fixture
def whole_sequences() -> None:
    """Leave short sequences to a CTA each, as users' calls do."""


@pytest.fixture(autouse=True)
def _keys_are_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if "whole_sequences" in request.fixturenames else keys_shared():
        yield


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory(BlockAllocator(8, 4, num_host_blocks=8, prefix_caching=True))
