"""What the planted bugs of linear's kernels are run with."""

from __future__ import annotations

import sys

import pytest
from support import linear_problems
from support.devices import EMULATED
from support.linear_problems import LinearCase, backward_ratio, forward_ratio
from support.planted_bugs import Bug, PlantedDevice, plant

from cupyattn.emulator import Checks


@pytest.fixture
def ratio_with(tmp_path, monkeypatch):
    """The largest error over its bound of a problem, forward or backward, with bugs planted."""

    def ratio(case: LinearCase, backward: bool, *bugs: Bug) -> float:
        plant(tmp_path / "cuda_src", *bugs)
        device = PlantedDevice(tmp_path / "cuda_src", Checks.all())
        for name in ("forward", "backward"):
            module = sys.modules[f"cupyattn.functional.linear.{name}"]
            monkeypatch.setattr(module, "device_of", lambda operands: device)
        monkeypatch.setattr(linear_problems, "KERNELS", EMULATED)
        return backward_ratio(case) if backward else forward_ratio(case)[0]

    return ratio
