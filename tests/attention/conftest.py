"""Short sequences of paged caches share their keys among CTAs, as long ones do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from support.paged import keys_shared

SHARING = ("test_bfloat16", "test_paged", "test_paged_refusals", "test_prefill", "test_merge")


@pytest.fixture
def whole_sequences() -> None:
    """Leave short sequences to a CTA each, as users' calls do."""


@pytest.fixture(autouse=True)
def _keys_are_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    shared = request.path.stem in SHARING and "whole_sequences" not in request.fixturenames
    with keys_shared() if shared else nullcontext():
        yield


@pytest.fixture
def values_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call looks at values, as on a GPU."""
    monkeypatch.setattr("cupyattn.ops.attention.checks.checks_values", lambda _: False)
