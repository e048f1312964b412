"""How the arrays of a paged cache lie in memory: strides in items, and what is aligned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cupyattn.runtime.arrays import Layout


def slot_strides(layout: Layout) -> tuple[int, ...]:
    """Strides in items of (outer, inner, head): of a block or batch element, a token in it, a head.

    Arrays without a batch axis are one batch element.
    """
    axes = [stride // layout.dtype.itemsize for stride in layout.strides]
    return tuple(axes[:3] if len(axes) == 4 else [0, *axes[:2]])


def scale_strides(layout: Layout) -> tuple[int, ...]:
    """Strides in items of scales (num_blocks, block_size, G)."""
    return tuple(stride // layout.dtype.itemsize for stride in layout.strides)


def token_strides(layout: Layout) -> tuple[int, int]:
    """Strides in items of a number for each token: of a batch element, and of a token of it."""
    axes = [stride // layout.dtype.itemsize for stride in layout.strides]
    return (axes[0], axes[1]) if len(axes) == 2 else (0, axes[0])


def rows_aligned(
    layouts: Mapping[str, Layout], starts: Mapping[str, int], names: Iterable[str], unit: int
) -> bool:
    """Tell whether every row of the arrays that are there starts at a multiple of `unit` bytes."""
    return all(
        _aligned(layouts[name], starts.get(name, 0), unit) for name in names if name in layouts
    )


def _aligned(layout: Layout, start: int, unit: int) -> bool:
    return start % unit == 0 and all(
        stride % unit == 0
        for extent, stride in zip(layout.shape[:-1], layout.strides[:-1], strict=True)
        if extent > 1
    )
