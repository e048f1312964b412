"""Copies of whole blocks, in order, on a device."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.cache.copies_problem import WRITTEN, CopiesProblem, Pairs
from cupyattn.ops.cache.kernels import COPY_THREADS, WORDS, specialise_copies
from cupyattn.ops.cache.structs import COPIES_PASSED, COPY_AXES, COPY_BLOCKS_PARAMS
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.axes import merge_axes
from cupyattn.runtime.by_name import Operands, Plan, Step, run
from cupyattn.runtime.checks import require_item_alignment
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error
from cupyattn.runtime.structs import new_struct

_MOST_THREADS = 2**32 - 1
_POOL_RANK = 5


class BlockBytes(NamedTuple):
    """What is in a block of an array: the extents and strides of its bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The last one is 1."""
    block_stride: int

    @classmethod
    def of(cls, layout: Layout, block_axis: int) -> BlockBytes:
        """Merge the axes but that of blocks; what lies evenly is one.

        Examples
        --------
        >>> BlockBytes.of(Layout((9, 2, 3), (24, 12, 4), np.dtype(np.float32)), 0)
        BlockBytes(shape=(24,), strides=(1,), block_stride=24)
        """
        axes = [axis for axis in range(len(layout.shape)) if axis != block_axis]
        axes.sort(key=lambda axis: -abs(layout.strides[axis]))  # as they lie in memory
        extents = (*(layout.shape[axis] for axis in axes), layout.dtype.itemsize)
        shape, (strides,) = merge_axes(extents, [(*(layout.strides[axis] for axis in axes), 1)])
        if not strides or strides[-1] != 1:  # of one byte, which is no axis
            shape, strides = (*shape, 1), (*strides, 1)
        return cls(shape, strides, layout.strides[block_axis])

    def fits(self, start: int, word: int) -> bool:
        """Tell whether it is words of so many bytes, where the array starts so far from one."""
        places = (start, self.block_stride, *self.strides[:-1], self.shape[-1])
        return not any(place % word for place in places)


class Launches(NamedTuple):
    """What the launches of a call share."""

    params: Any
    """The C struct, without copies that are passed."""
    ctas: int
    word: int
    """Bytes that a thread copies."""


def run_copies(
    device: Device, problem: CopiesProblem, operands: Operands, pairs: Pairs | None
) -> None:
    """Copy; `pairs` go by value, some in each launch, and are None where copies are an array."""
    params, ctas, word = _launches(problem)
    if pairs is None:
        copies = problem.layouts["copies"].dtype.name
        steps = [Step.of(specialise_copies(word, copies), ctas, params[()])]
    else:
        steps = []
        for first in range(0, len(pairs), COPIES_PASSED):
            ids = np.array(pairs[first : first + COPIES_PASSED], np.int32)
            mine = params.copy()
            mine["passed"] = len(ids)
            mine["src"][: len(ids)], mine["dst"][: len(ids)] = ids.T
            steps.append(Step.of(specialise_copies(word, "int32"), ctas, mine[()]))
    run(device, Plan(tuple(steps), ()).for_arrays(operands.arrays), operands)


@lru_cache(maxsize=4096)
def _launches(problem: CopiesProblem) -> Launches:
    layouts, starts = problem.layouts, problem.starts
    require_item_alignment(layouts, starts)
    block_axis = 1 if len(layouts["k_cache"].shape) == _POOL_RANK else 0
    blocks = {name: BlockBytes.of(layouts[name], block_axis) for name in WRITTEN if name in layouts}
    word = next(
        word
        for word in WORDS
        if all(each.fits(starts[name], word) for name, each in blocks.items())
    )
    params = new_struct(COPY_BLOCKS_PARAMS)
    params["shape"] = 1
    params["src"] = params["dst"] = -1
    threads = 0
    for i, name in enumerate(WRITTEN):
        params["first_thread"][i] = threads
        if name not in blocks:
            continue
        block = blocks[name]
        shape = (*block.shape[:-1], block.shape[-1] // word)
        strides = (*(stride // word for stride in block.strides[:-1]), 1)
        params["shape"][i][COPY_AXES - len(shape) :] = shape
        params["strides"][i][COPY_AXES - len(shape) :] = strides
        params["block_stride"][i] = block.block_stride // word
        threads += math.prod(shape)
        if threads > _MOST_THREADS - COPY_THREADS:
            raise error(
                ValueError,
                f"a block of all layers has more than {threads} words of {word} bytes",
                f"a launch of copy_blocks takes at most {_MOST_THREADS - COPY_THREADS}",
                "copy the layers in several calls",
            )
    params["first_thread"][len(WRITTEN)] = threads
    params["num_blocks"] = problem.caches.num_blocks
    if "copies" in layouts:
        copies = layouts["copies"]
        params["copies"] = copies.shape[0]
        strides = tuple(stride // copies.dtype.itemsize for stride in copies.strides)
        params["copy_stride"], params["end_stride"] = strides
    nothing = params["copies"] == 0 and "copies" in layouts
    return Launches(params, 0 if nothing else -(-threads // COPY_THREADS), word)
