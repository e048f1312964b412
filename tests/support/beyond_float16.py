"""Problems whose scores have gradients beyond float16's range, and results within it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from support.devices import KERNELS
from support.strategies import AttentionProblem

from cupyattn.arrays import array_within
from cupyattn.kernels.device.cuda import CudaDevice
from cupyattn.ops import plan

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Beyond(AttentionProblem):
    """Small q and k, large v and dout; v has larger ones where keys are not in use."""

    def arrays(self) -> Arrays:
        q, k, v = super().arrays()
        v = np.where(np.isnan(v), np.float16(6_000), v * np.float16(200))
        return q * np.float16(0.01), k * np.float16(0.05), v

    def gradients(self) -> tuple[np.ndarray, np.ndarray]:
        dout, dlse = super().gradients()
        return dout * np.float16(2048), dlse


@dataclass(frozen=True)
class Uneven(Beyond):
    """The first sequence's are within float16's range, and those of first heads are smaller."""

    def arrays(self) -> Arrays:
        q, k, v = super().arrays()
        v[0] /= np.float16(256)
        v[:, :, 0] /= np.float16(8)
        return q, k, v


@contextmanager
def recorded_scales() -> Iterator[list[np.ndarray]]:
    """What launches inside leave as the scales of each head: 2^-k and 2^k."""
    written: list[np.ndarray] = []
    original = plan.start
    at: dict[int, Any] = {}

    def argument_within(_: CudaDevice, *place: Any) -> int:
        array = array_within(*place)
        at[array.data.ptr] = array
        return int(array.data.ptr)

    def start(device: Any, specialisation: Any, ctas: int, given: Any, values: Any) -> None:
        original(device, specialisation, ctas, given, values)
        if specialisation.spec.entry.startswith("attention_backward_scales"):
            names = [pointer.name for pointer in specialisation.spec.pointers]
            scales = given[names.index("scales")]
            written.append(
                np.array(scales if isinstance(scales, np.ndarray) else KERNELS.get(at[scales]))
            )

    with (
        mock.patch.object(plan, "start", start),
        mock.patch.object(CudaDevice, "argument_within", argument_within),  # gives an address alone
    ):
        yield written
