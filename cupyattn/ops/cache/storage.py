"""The caches of a call: storage formats, shapes, scales; and checks of what names their slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Array, Layout
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    fixes_of_results,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_own_items,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.errors import error
from cupyattn.runtime.tables import MAX_HEAD_DIM
from cupyattn.runtime.value_checks import on_host

CACHES = ("k_cache", "v_cache")
SCALES = ("k_scales", "v_scales")
SCALES_DTYPE = np.dtype(np.float32)
_FORMATS = {"int8": "int8", "uint8": "int4"}
"""Quantised formats by the dtype of the array: two items of 4 bits share an unsigned byte."""
WRITTEN_FIXES = fixes_of_results(*CACHES, *SCALES)
"""What to pass instead of what is no cache that could be written."""
LAYER_AXES = "num_blocks block_size G D"
POOL_AXES = f"num_layers {LAYER_AXES}"


class Caches(NamedTuple):
    """What the caches of a call are."""

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype

    @property
    def quantised(self) -> bool:
        """Whether there are scales."""
        return self.dtype.name in _FORMATS

    @property
    def format(self) -> str:
        """Name of the storage format: that of the dtype, int4 for nibbles."""
        return _FORMATS.get(self.dtype.name, self.dtype.name)


def require_caches(
    layouts: dict[str, Layout], *, written: bool = False, pools: bool = False
) -> Caches:
    """Check k_cache and v_cache, and their scales, which quantised ones have.

    `pools`: they may have an axis of layers before the others.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    require_arrays(layouts, CACHES)
    k = layouts["k_cache"]
    axes = POOL_AXES if pools and len(k.shape) == len(POOL_AXES.split()) else LAYER_AXES
    fixes = WRITTEN_FIXES if written else {}
    for name in CACHES:
        require_dtype(name, layouts[name], (*CPU_FLOATS, *_FORMATS), fixes.get(name, ""))
        require_rank(name, layouts[name], axes)
        require_contiguous_rows(name, layouts[name], fixes.get(name, ""))
    require_same_dtype(layouts, CACHES)
    require_shape("v_cache", layouts["v_cache"], k.shape, "shaped like k_cache")
    num_blocks, block_size, kv_heads, items = k.shape[-4:]
    head_dim = 2 * items if _FORMATS.get(k.dtype.name) == "int4" else items
    caches = Caches(num_blocks, block_size, kv_heads, head_dim, k.dtype)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise error(
            ValueError,
            f"k_cache has shape {k.shape}, D = {head_dim}",
            f"head dims are 1 to {MAX_HEAD_DIM}",
            "check that the last axis is the head dim",
        )
    if block_size == 0:
        raise error(
            ValueError,
            f"k_cache has shape {k.shape}: blocks of no token",
            "a block has at least one",
            f"check the axes: caches are ({', '.join(axes.split())})",
        )
    _require_scales(layouts, caches, k.shape[:-1], axes.split()[:-1], fixes)
    if written:
        for name in (*CACHES, *SCALES):
            if name in layouts:
                require_own_items(name, layouts[name])
    return caches


def _require_scales(
    layouts: dict[str, Layout],
    caches: Caches,
    shape: tuple[int, ...],
    axes: list[str],
    fixes: dict[str, str],
) -> None:
    for name in SCALES:
        if not caches.quantised:
            if name in layouts:
                raise error(
                    ValueError,
                    f"{name} was given with caches of {caches.dtype.name}",
                    "only caches of int8 and uint8 (two items of 4 bits) have scales",
                    "leave it out",
                )
            continue
        if name not in layouts:
            raise error(
                TypeError,
                f"{name} is None, and the caches have dtype {caches.dtype.name}",
                f"quantised caches have a float32 scale for each token and head, "
                f"({', '.join(axes)})",
                f"pass {name}, here of shape {shape}",
            )
        require_dtype(name, layouts[name], (SCALES_DTYPE.name,), fixes.get(name, ""))
        require_shape(name, layouts[name], shape, f"({', '.join(axes)}) as its cache")
        require_whole_item_strides(name, layouts[name], fixes.get(name, ""))


def require_slots(slot_mapping: Array, caches: Caches) -> None:
    """Raise ValueError for a slot that is neither in the caches nor -1, or that stands twice.

    Waits for a GPU.
    """
    slots = on_host(slot_mapping)
    count = caches.num_blocks * caches.block_size
    at = first_where((slots < -1) | (slots >= count))
    if at is not None:
        raise error(
            ValueError,
            f"slot_mapping[{_index(at)}] is {slots[at]}",
            f"the caches have slots 0 to {count - 1} ({caches.num_blocks} blocks of "
            f"{caches.block_size}), and -1 leaves a token out",
            "pass block * block_size + offset of a block that there is",
        )
    flat = slots.ravel()
    order = np.argsort(flat, kind="stable")
    same = first_where((flat[order[1:]] == flat[order[:-1]]) & (flat[order[1:]] >= 0))
    if same is not None:
        first, second = (np.unravel_index(order[same[0] + i], slots.shape) for i in (0, 1))
        raise error(
            ValueError,
            f"slot_mapping[{_index(first)}] and slot_mapping[{_index(second)}] are both "
            f"{slots[second]}",
            "a slot is written once in a call: the tokens' order is nobody's",
            "pass -1 for the token that is to be left out",
        )


def require_positions(positions: Array, slot_mapping: Array | None, length: int) -> None:
    """Raise ValueError if a token stands outside of the tables, unless its slot is -1."""
    places = on_host(positions)
    outside = (places < 0) | (places >= length)
    at = first_where(outside if slot_mapping is None else outside & (on_host(slot_mapping) >= 0))
    if at is not None:
        raise error(
            ValueError,
            f"positions[{_index(at)}] is {places[at]}",
            f"the tables of rotary have rows 0 to {length - 1}",
            "pass longer tables, or other positions",
        )


def first_where(wrong: np.ndarray) -> tuple[int, ...] | None:
    """Return the index of the first item that is true, None if none is."""
    if not wrong.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))


def _index(at: Iterable[int]) -> str:
    return ", ".join(map(str, at))
