"""Linear by its tensor-core kernels alone, with a tile of the test's choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cupyattn.ops.linear import kernels_quantised_tile, kernels_tensor_core, plan
from cupyattn.ops.linear.tiles import Shape, TensorCoreProduct, Tiling


def forget_plans() -> None:
    plan.forward_plan.cache_clear()
    plan.backward_plan.cache_clear()


@contextmanager
def tensor_core_alone(shape: Shape | None = None, splits: int = 1) -> Iterator[None]:
    """Inside, small arrays too go to these kernels, whatever tile they would be given.

    With a shape, a tile's sum is that of so many parts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PLANS", kernels_tensor_core.PLANS)
        patch.setattr(plan, "QUANTISED_PLANS", kernels_quantised_tile.PLANS)
        if shape is not None:
            patch.setattr(TensorCoreProduct, "tiling", lambda *_, **__: Tiling(shape, splits))
        forget_plans()
        yield
    forget_plans()
