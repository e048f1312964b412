"""A paged KV cache: the allocator of its blocks, and the arrays that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any

from cupyattn.arrays import Array
from cupyattn.errors import error
from cupyattn.functional import append_kv, copy_blocks, paged_attention
from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.arguments import as_count
from cupyattn.kv_cache.picture import draw
from cupyattn.kv_cache.pool import Copy
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.kv_cache.statistics import CacheStatistics, statistics_of
from cupyattn.kv_cache.storage import Storage, as_format, require_library
from cupyattn.kv_cache.tables import StepTables, as_counts, lengths_of

SLOTS_OF_A_LOAD = 16
"""Block sizes are multiples of it: so many tokens the kernels take at once."""
MOST_SLOTS = 2**31 - 1  # they are int32
MOST_HEAD_DIM = 256


class PagedKVCache:
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
        `allocator.add(tokens)` makes a sequence. Sequences of another allocator are refused.
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
    cupyattn.Scheduler : a loop over it; its requests are in `cupyattn.kv_cache` as well.

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
        block_size = as_count("block_size", block_size, SLOTS_OF_A_LOAD)
        most = MOST_SLOTS // block_size
        num_blocks = as_count("num_blocks", num_blocks, 1, most)
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

    def _layer(self, layer: int) -> dict[str, Array]:
        return self._layers[as_count("layer", layer, 0, len(self._layers) - 1)]

    def copy(self, copies: Iterable[Copy], /) -> None:
        """Copy blocks in all layers: what `Sequence.append` returned, in the order of the calls.

        Parameters
        ----------
        copies : iterable of Copy
            A later one may write the block that an earlier one read.

        Raises
        ------
        ValueError
            If a block does not exist. Nothing is copied then.
        """
        copies = tuple(copies)
        if copies:
            copy_blocks(self.k, self.v, copies, k_scales=self.k_scales, v_scales=self.v_scales)

    def copy_to_host(self, copies: Iterable[Copy], /) -> None:
        """Copy blocks to host memory: what `Sequence.swap_out` returned.

        Parameters
        ----------
        copies : iterable of Copy
            From blocks of the pool to blocks of the host.

        Raises
        ------
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
        ValueError
            If a block does not exist. Nothing is copied then.
        """
        self._storage.from_host(copies)

    def step_tables(
        self,
        sequences: Items[Sequence] = (),
        new_tokens: int | Iterable[int] = 1,
        *,
        max_batch: int | None = None,
        max_blocks: int | None = None,
        max_tokens: int | None = None,
    ) -> StepTables:
        """Make the tables of a step, which `StepTables.update` fills anew in the same place.

        Parameters
        ----------
        sequences : sequence of Sequence
            The batch.
        new_tokens : int, or an int for each sequence
            How many of each one's last tokens the step computes.
        max_batch, max_blocks, max_tokens : int, optional
            Room for so many sequences, blocks of a sequence and new tokens, for later updates; by
            default what `sequences` need. What is unused says so to the kernels: a step can be
            captured for a largest batch, and run on fewer sequences.

        Returns
        -------
        StepTables

        Raises
        ------
        TypeError, ValueError
            As `StepTables.update`.
        """
        lengths = lengths_of(self.allocator, sequences)
        counts = as_counts(sequences, new_tokens)
        most_blocks = -(-int(lengths.max(initial=0)) // self.allocator.block_size)
        tables = StepTables(
            self.allocator,
            self._xp,
            max_batch=_room("max_batch", max_batch, len(lengths)),
            max_blocks=_room("max_blocks", max_blocks, most_blocks),
            max_tokens=_room("max_tokens", max_tokens, int(counts.sum())),
        )
        tables.update(sequences, counts.tolist())
        return tables

    def block_table(self, sequences: Items[Sequence], /) -> Array:
        """Return the blocks of sequences, int32 (B, most blocks), -1 behind each one's last.

        It alone; `step_tables` uploads all that a step needs at once.
        """
        return self.step_tables(sequences, 0).block_table

    def seqlens_k(self, sequences: Items[Sequence], /) -> Array:
        """Return the tokens of sequences, int32 (B,)."""
        return self.step_tables(sequences, 0).seqlens_k

    def slot_mapping(
        self, sequences: Items[Sequence], new_tokens: int | Iterable[int] = 1, /
    ) -> Array:
        """Return the slots of the last tokens of sequences, int32 (total,), one behind the other.

        Slot ``block * block_size + offset`` is that of a token in the block's place `offset`.
        """
        return self.step_tables(sequences, new_tokens).slot_mapping

    def append(
        self,
        layer: int,
        k: Array,
        v: Array,
        tables: StepTables,
        /,
        *,
        q: Array | None = None,
        rotary: Any = None,
    ) -> None:
        """Write the keys and values of a step's new tokens in a layer: `append_kv`.

        Parameters
        ----------
        layer : int
            Which layer's.
        k, v : array (total, G, D), or (B, S, G, D)
            The new tokens in the order of the tables: as many as these have, or have room for.
        tables : StepTables
            Those of the step.
        q : array (total, H, D), or (B, S, H, D), optional
            Queries to be rotated in place; only with rotary.
        rotary : Rotary or (cos, sin), optional
            Tables by which k and q are rotated to their positions.

        Raises
        ------
        ValueError
            If the tables have another number of tokens. Nothing is written then.
        TypeError, ValueError
            As `append_kv`, for dtypes, heads and whatever else does not fit.
        """
        tables.require_of(self.allocator)
        tokens = k.shape[:-2]
        count = math.prod(tokens)
        if not tables.num_tokens <= count <= len(tables.slot_mapping):
            raise error(
                ValueError,
                f"k {tuple(k.shape)} has {count} tokens",
                f"the step's tables have {tables.num_tokens}, and room for "
                f"{len(tables.slot_mapping)}",
                "pass the new tokens of all sequences, one sequence's behind the other's",
            )
        arrays = self._layer(layer)
        append_kv(
            arrays["k"],
            arrays["v"],
            k,
            v,
            tables.slot_mapping[:count].reshape(tokens),
            q=q,
            rotary=rotary,
            positions=None if rotary is None else tables.positions[:count].reshape(tokens),
            k_scales=arrays.get("k_scales"),
            v_scales=arrays.get("v_scales"),
        )

    def attend(self, layer: int, q: Array, tables: StepTables, /, **options: Any) -> Any:
        """Let the new tokens of a step see all tokens of their sequences in a layer.

        Parameters
        ----------
        layer : int
            Which layer's keys and values.
        q : array (B, Sq, H, D), or (total, H, D)
            The queries of the new tokens, as `paged_attention` takes them: packed for sequences
            with different numbers of them. A step that a CUDA graph captures has (B, 1, H, D).
        tables : StepTables
            Those of the step.
        **options
            As of `paged_attention`: causal, softmax_scale, window_size, out and so on.

        Returns
        -------
        out or (out, lse)
            As of `paged_attention`.

        Raises
        ------
        ValueError
            If the tables are another cache's, or have more new tokens than there are packed
            queries.
        TypeError, ValueError
            As `paged_attention`.
        """
        tables.require_of(self.allocator)
        arrays, batch = self._layer(layer), len(tables.seqlens_k)
        packed = len(q.shape) == 3
        if packed and tables.num_tokens > len(q):
            raise error(
                ValueError,
                f"q {tuple(q.shape)} has {len(q)} tokens",
                f"the step's tables have {tables.num_tokens}",
                "pass the queries of all new tokens, one sequence's behind the other's",
            )
        given, decoded = options.get("out"), packed and tables.decodes(len(q))
        if decoded:  # the kernels that decode are made for one token a sequence
            q, options = q[:, None], _one_token_each(options)
        elif packed:
            queries = {"cu_seqlens_q": tables.cu_seqlens_q, "max_seqlen_q": tables.max_seqlen_q}
            options = queries | options
        if len(q.shape) == 4 and tables.num_sequences <= len(q) <= batch:
            batch = len(q)
        results = paged_attention(
            q,
            arrays["k"],
            arrays["v"],
            tables.block_table[:batch],
            tables.seqlens_k[:batch],
            k_scales=arrays.get("k_scales"),
            v_scales=arrays.get("v_scales"),
            **options,
        )
        if not decoded:
            return results
        if given is not None:
            return given
        if options.get("return_lse"):
            return results[0][:, 0], results[1][:, :, 0].T
        return results[:, 0]

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


def _one_token_each(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of packed queries as those of queries with an axis of one token."""
    out: Any = options.get("out")
    if isinstance(out, tuple) and len(out) == 2:
        return {**options, "out": (out[0][:, None], out[1].T[:, :, None])}
    return options if out is None else {**options, "out": out[:, None]}


def _room(name: str, given: int | None, needed: int) -> int:
    return needed if given is None else as_count(name, given, needed)
