"""Short sequences share their keys here as long ones do: tests are of short ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupyattn.ops.attention import decode


@pytest.fixture
def whole_sequences() -> None:
    """Leave short sequences to a CTA each, as users' calls do."""


@pytest.fixture(autouse=True)
def _keys_are_shared(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if "whole_sequences" not in request.fixturenames:
        monkeypatch.setattr(decode, "WHOLE_KEYS", 0)
    decode._plan.cache_clear()  # a plan is remembered for its problem
    yield
    decode._plan.cache_clear()
