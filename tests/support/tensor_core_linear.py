"""Linear by its tensor-core kernels alone, with a tile of the test's choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cupyattn.ops.linear import backward, choice, forward, quantised_tile, tensor_core
from cupyattn.ops.linear.kernels_tiles import Shape
from cupyattn.ops.linear.tiles import Product, Tiling


def _forget_plans() -> None:
    forward._plan.cache_clear()
    backward._plan.cache_clear()
    tensor_core.gradient.cache_clear()


@contextmanager
def tensor_core_alone(shape: Shape | None = None, splits: int = 1) -> Iterator[None]:
    """Inside, small arrays too go to these kernels, whatever tile they would be given.

    With a shape, a tile's sum is that of so many parts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "PLANS", tensor_core.PLANS)
        patch.setattr(choice, "QUANTISED_PLANS", quantised_tile.PLANS)
        if shape is not None:
            patch.setattr(Product, "tiling", lambda *_, **__: Tiling(shape, splits))
        _forget_plans()
        yield
    _forget_plans()
