"""A paged KV cache: the allocator of its blocks, and the arrays that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cupyattn.functions import copy_blocks
from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.arguments import as_copies, as_count, uncopied
from cupyattn.kv_cache.picture import draw
from cupyattn.kv_cache.pool import Copy
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.kv_cache.statistics import CacheStatistics, statistics_of
from cupyattn.kv_cache.steps import CacheSteps
from cupyattn.kv_cache.storage import Storage, as_format, require_library
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown

SLOTS_OF_A_LOAD = 16
"""Block sizes are multiples of it: so many tokens the kernels take at once."""
MOST_SLOTS = 2**31 - 1  # they are int32
MOST_BLOCK_SIZE = MOST_SLOTS // SLOTS_OF_A_LOAD * SLOTS_OF_A_LOAD
MOST_HEAD_DIM = 256


class PagedKVCache(CacheSteps):
    """Keys and values of all layers of a model, in blocks that sequences share.

    It owns the arrays; which blocks belong to whom says its `BlockAllocator`. `Scheduler` takes it
    as it is.

    Parameters
    ----------
    num_layers : int
        Layers of the model. A block has its place in each of them.
    num_blocks : int
        Blocks of the pool.
    block_size : int
        Tokens in a block, a multiple of 16.
    num_kv_heads, head_dim : int
        G and D of keys and values; D is at most 256.
    dtype : {"float16", "float32", "bfloat16", "int8", "int4"}
        How they are kept; a NumPy dtype of such a name will do. "int8" and "int4" are quantised by
        `append`, with a float32 scale for each token and head, and dequantised in the kernel;
        "int4" holds two numbers in a byte, so that D is even.
    xp : module
        numpy or cupy: whose arrays they are. CuPy's are on the current device.
    prefix_caching, watermark, num_host_blocks : optional
        As of `BlockAllocator`. Blocks of the host are pinned memory where xp is cupy.

    Attributes
    ----------
    allocator : BlockAllocator
        ``allocator.add(tokens)`` makes a sequence. Sequences of another allocator are refused.
    k, v : array (num_layers, num_blocks, block_size, G, D)
        The pools; ``cache.k[layer]`` is the k_cache of `paged_attention`. Of "int4" they are uint8
        with ``D // 2`` bytes in the last axis.
    k_scales, v_scales : float32 array (num_layers, num_blocks, block_size, G), or None
        Only of "int8" and "int4".

    Raises
    ------
    TypeError
        If a number is no integer, dtype is none of these, or xp neither module.
    ValueError
        If a number is out of range.

    See Also
    --------
    cupyattn.kv_cache.StepTables : the tables of a step, which the methods take.
    cupyattn.kv_cache.Copy : what tells `copy` which blocks to copy.
    cupyattn.Scheduler : a loop over it; its requests are in ``cupyattn.kv_cache`` too.

    Notes
    -----
    A step is: append tokens to sequences, `copy` what that returns, make or update the
    `StepTables`, then in each layer `append` the new keys and values and `attend`. Keys and values
    are those of Kwon et al. (arXiv:2309.06180). Everything is queued on the current stream; to
    swap, too, waits for nothing.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cache = cupyattn.PagedKVCache(2, 8, 16, 2, 4, dtype="float32", xp=np)
    >>> first, second = cache.allocator.add(range(3)), cache.allocator.add(range(20))
    >>> cache.k.shape, cache.block_table([first, second]).tolist()
    ((2, 8, 16, 2, 4), [[0, -1], [1, 2]])
    >>> cache.statistics().used
    3
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any,
        xp: Any,
        prefix_caching: bool = False,
        watermark: int = 0,
        num_host_blocks: int = 0,
    ) -> None:
        form = as_format(dtype)
        require_library(xp)
        num_layers = as_count("num_layers", num_layers, 1)
        num_kv_heads = as_count("num_kv_heads", num_kv_heads, 1)
        head_dim = as_count("head_dim", head_dim, 1, MOST_HEAD_DIM)
        block_size = as_count("block_size", block_size, SLOTS_OF_A_LOAD, MOST_BLOCK_SIZE)
        most = MOST_SLOTS // block_size
        if as_count("num_blocks", num_blocks, 1) > most:
            raise error(
                ValueError,
                f"got num_blocks = {shown(num_blocks)} of {block_size} tokens",
                f"allowed is 1 to {most} of that size: a cache has at most {MOST_SLOTS} slots",
                "pass fewer blocks, or smaller ones",
            )
        for name, number, factor in (
            ("block_size", block_size, SLOTS_OF_A_LOAD),
            ("head_dim", head_dim, form.packed),
        ):
            if number % factor:
                raise error(
                    ValueError,
                    f"got {name} = {number} for dtype '{form.name}'",
                    f"it is a multiple of {factor}",
                    f"pass {-(-number // factor) * factor}, for one",
                )
        self.allocator = BlockAllocator(
            num_blocks,
            block_size,
            prefix_caching=prefix_caching,
            watermark=watermark,
            num_host_blocks=num_host_blocks,
        )
        self._dtype = form.name
        self._xp = xp
        self._storage = Storage(
            form,
            num_layers,
            num_blocks,
            self.allocator.num_host_blocks,
            (block_size, num_kv_heads, head_dim),
            xp,
        )
        arrays = self._storage.device
        self.k: Array = arrays["k"]
        self.v: Array = arrays["v"]
        self.k_scales: Array | None = arrays.get("k_scales")
        self.v_scales: Array | None = arrays.get("v_scales")
        self._layers = [
            {name: array[layer] for name, array in arrays.items()} for layer in range(num_layers)
        ]

    __reduce_ex__ = uncopied(
        "two would give the same blocks twice",
        "make another one; k, v and the scales are arrays, which can be copied into its own",
    )

    def __repr__(self) -> str:
        layers, blocks, size, heads, _ = self.k.shape
        return (
            f"<PagedKVCache of {blocks} blocks of {size} tokens in {layers} layers, {heads} heads, "
            f"{self._dtype}, {self.nbytes:,} bytes>"
        )

    @property
    def dtype(self) -> str:
        """How keys and values are kept: the name that was given."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """The size of the pools with their scales, in bytes."""
        return self._storage.nbytes

    def scales(self, layer: int) -> dict[str, Array]:
        """Return k_scales and v_scales of a layer as keyword arguments; none of a float cache."""
        arrays = self._layer(layer)
        return {name: array for name, array in arrays.items() if name.endswith("scales")}

    def copy(self, copies: Iterable[Copy], /) -> None:
        """Copy blocks in all layers: what `Sequence.append` returned, in the order of the calls.

        Parameters
        ----------
        copies : iterable of Copy
            A later one may write the block that an earlier one read.

        Raises
        ------
        TypeError
            If something is no pair of integers.
        ValueError
            If a block does not exist. Nothing is copied then.
        """
        blocks = self.allocator.num_blocks
        if pairs := as_copies(copies, blocks, blocks):
            copy_blocks(self.k, self.v, pairs, k_scales=self.k_scales, v_scales=self.v_scales)

    def copy_to_host(self, copies: Iterable[Copy], /) -> None:
        """Copy blocks to host memory: what `Sequence.swap_out` returned.

        Parameters
        ----------
        copies : iterable of Copy
            From blocks of the pool to blocks of the host.

        Raises
        ------
        TypeError
            If something is no pair of integers.
        ValueError
            If a block does not exist. Nothing is copied then.
        """
        self._storage.to_host(copies)

    def copy_from_host(self, copies: Iterable[Copy], /) -> None:
        """Copy blocks back from host memory, bit for bit: what `Sequence.swap_in` returned.

        Parameters
        ----------
        copies : iterable of Copy
            From blocks of the host to blocks of the pool.

        Raises
        ------
        TypeError
            If something is no pair of integers.
        ValueError
            If a block does not exist. Nothing is copied then.
        """
        self._storage.from_host(copies)

    def statistics(self) -> CacheStatistics:
        """Count blocks and slots: see `CacheStatistics`."""
        return statistics_of(self.allocator)

    def picture(
        self,
        sequences: Mapping[str, Sequence] | Iterable[Sequence] | None = None,
        /,
        *,
        axes: Any = None,
        columns: int = 16,
    ) -> Any:
        """Draw the pool by matplotlib: a cell for each block, in the order of their ids.

        A block that sequences use has their colours, full as far as tokens stand in it; one that is
        cached is light grey, a free one white, another's dark grey.

        Parameters
        ----------
        sequences : mapping from str to Sequence, or iterable of Sequence, optional
            Which ones, in the order of the colours, with names for the legend; freed ones keep
            their colours. By default all of the cache.
        axes : matplotlib.axes.Axes, optional
            Where to draw; a new figure otherwise.
        columns : int
            Cells in a row.

        Returns
        -------
        matplotlib.axes.Axes
            Its figure is ``axes.figure``.

        Raises
        ------
        ValueError
            If a sequence is another cache's, or columns is not 1 or more.
        RuntimeError
            If matplotlib is not installed.
        """
        return draw(self.allocator, sequences, axes, as_count("columns", columns, 1))
