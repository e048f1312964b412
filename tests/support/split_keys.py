"""Dense attention whose keys are split into as many parts as a test says, of as few keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cupyattn.ops.attention import choice
from cupyattn.ops.attention import forward as attention_forward


@contextmanager
def split(into: int, least_keys: int = 1) -> Iterator[None]:
    """Let every dense forward split its keys; parts are whole tiles, of so many keys at least."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "num_splits", lambda *_: into)
        for module in (choice, attention_forward):
            patch.setattr(module, "LEAST_KEYS", least_keys)
        patch.setattr(choice, "_decodes_faster", lambda *_: False)
        attention_forward._plan.cache_clear()  # a plan is remembered for its problem
        yield
    attention_forward._plan.cache_clear()
