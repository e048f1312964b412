"""Calls that take a row of a table in place of the usual one."""

from __future__ import annotations

import pytest
from support.devices import KERNELS

from cupyattn.runtime.tuning import Choices


def choose(monkeypatch: pytest.MonkeyPatch, question: str, name: str) -> None:
    """Have the kernels' device choose; every emulated one has the choices of its class."""
    device = KERNELS.device
    holder = device if "choices" in vars(device) else type(device)
    monkeypatch.setattr(holder, "choices", Choices({question: name}))
