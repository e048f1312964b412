"""A paged KV cache: the allocator of its blocks, the arrays that hold them, and how full it is.

A picture of the pool shows which blocks are free or cached, whose they are and how far each is
filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyattn.functions import QuantizedKeys, copy_blocks
from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.arguments import as_copies, as_count, uncopied
from cupyattn.kv_cache.pool import Copy
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.kv_cache.steps import CacheSteps
from cupyattn.kv_cache.storage import FORMATS, Storage, as_format, require_library
from cupyattn.runtime import html
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.errors import error, shown, size_text
from cupyattn.runtime.fork import no_fork


class CacheStatistics(NamedTuple):
    """How full a cache is.

    Attributes
    ----------
    used, free, cached : int
        Blocks that sequences use (or `BlockAllocator.allocate` gave), that hold nothing, and that
        no sequence uses but `BlockAllocator.add` may find. Together they are the pool.
    fragmentation : float
        The share of the slots in used blocks that hold no token, 0 if no block is used.
    prefix_hit_rate : float
        The share of the tokens of all sequences so far that `BlockAllocator.add` found cached, 0
        if there was none. A scheduler counts each prompt once and whole, in whatever parts it is
        computed.
    """

    used: int
    free: int
    cached: int
    fragmentation: float
    prefix_hit_rate: float


def statistics_of(allocator: BlockAllocator) -> CacheStatistics:
    """Count the blocks of a pool, and the slots in them."""
    used, added = allocator.num_used, allocator.num_added_tokens
    slots = used * allocator.block_size
    return CacheStatistics(
        used,
        allocator.num_free,
        allocator.num_cached,
        allocator.num_unused_slots / slots if slots else 0.0,
        allocator.num_found_tokens / added if added else 0.0,
    )


BACKGROUNDS = {"free": "white", "cached": "0.85", "used": "0.4"}
"""The backgrounds of blocks that belong to none of the sequences drawn, by the block's state."""
EDGE = "0.6"
MARGIN = 0.06  # of a cell
FAINT = 0.25  # the opacity of slots without a token


def draw(
    allocator: BlockAllocator,
    sequences: Mapping[str, Sequence] | Iterable[Sequence] | None,
    axes: Any,
    columns: int,
) -> Any:
    """Draw the pool into axes, which are made if they are None; see `PagedKVCache.picture`."""
    try:
        with no_fork():
            from matplotlib.patches import Rectangle
    except ImportError:
        raise error(
            RuntimeError,
            "no matplotlib, which draws the picture",
            "it is not a dependency of the library; the extra notebooks installs it",
            "pip install matplotlib",
        ) from None
    named = _named(allocator, sequences)
    if axes is not None and not hasattr(axes, "add_patch"):
        raise error(
            TypeError, f"got axes = {shown(axes)}", "it is an Axes of matplotlib, or None",
            "pass the second result of matplotlib.pyplot.subplots",
        )  # fmt: skip
    size, count = allocator.block_size, allocator.num_blocks
    rows = -(-count // columns)
    if axes is None:
        with no_fork():
            import matplotlib.pyplot as plt

        _, axes = plt.subplots(figsize=(0.45 * columns + 2, 0.45 * rows + 0.6))
    owners: dict[int, list[tuple[Any, float]]] = {}  # of each block: a colour, the filled share
    for number, (name, sequence) in enumerate(named.items()):
        colour = f"C{number % 10}"
        note = _note(allocator, sequence)
        axes.add_patch(Rectangle((0, 0), 0, 0, color=colour, label=f"{name}: {note}"))
        if sequence in allocator and not sequence.is_swapped:
            for place, block in enumerate(sequence.block_ids):
                filled = min(1.0, (len(sequence) - place * size) / size)
                if block >= 0:
                    owners.setdefault(block, []).append((colour, filled))
    for block in range(count):
        x, y = block % columns + MARGIN, block // columns + MARGIN
        side = 1 - 2 * MARGIN
        of_block = owners.get(block, [])
        background = "none" if of_block else BACKGROUNDS[allocator.state(block)]
        for part, (colour, filled) in enumerate(of_block):
            # Sharers are drawn above each other; filled slots are opaque, from the left.
            height = side / len(of_block)
            top = y + part * height
            axes.add_patch(Rectangle((x, top), side, height, color=colour, alpha=FAINT, lw=0))
            axes.add_patch(Rectangle((x, top), side * filled, height, color=colour, lw=0))
        axes.add_patch(Rectangle((x, y), side, side, facecolor=background, edgecolor=EDGE))
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_frame_on(False)
    if named:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    return axes


def _no_sequences(name: str, passed: object) -> TypeError:
    return error(
        TypeError,
        f"got {name}, {shown(passed)}",
        "a picture is of Sequences: a mapping of names to them, a list, or None for all",
        "pass sequences that this cache's allocator.add returned, [sequence] for one",
    )


def _named(
    allocator: BlockAllocator, sequences: Mapping[str, Sequence] | Iterable[Sequence] | None
) -> dict[str, Sequence]:
    if sequences is None:
        sequences = allocator.sequences
    if isinstance(sequences, Sequence) or not isinstance(sequences, Iterable):
        raise _no_sequences("sequences", sequences)
    if not isinstance(sequences, Mapping):
        sequences = {f"sequence {number}": each for number, each in enumerate(sequences)}
    for name, sequence in sequences.items():
        if not isinstance(sequence, Sequence):
            raise _no_sequences(name, sequence)
        if not sequence.is_freed and sequence not in allocator:
            raise error(
                ValueError,
                f"got {name}, {sequence!r} of another allocator",
                "a picture shows the sequences of one pool",
                "pass sequences that this cache's allocator made",
            )
    return dict(sequences)


def _note(allocator: BlockAllocator, sequence: Sequence) -> str:
    if sequence.is_freed:
        return "finished"
    swapped = ", swapped out" if sequence.is_swapped else ""
    return f"{len(sequence)} tokens{swapped}"


SLOTS_OF_A_LOAD = 16
"""Block sizes are multiples of it: so many tokens the kernels take at once."""
MOST_SLOTS = 2**31 - 1  # they are int32
MOST_BLOCK_SIZE = MOST_SLOTS // SLOTS_OF_A_LOAD * SLOTS_OF_A_LOAD
MOST_HEAD_DIM = 512
MOST_INT8_HEAD_DIM = 256
"""The largest head dim of attention over int8 keys."""
Pools = Array | tuple[Array, ...]
"""Blocks of all layers in an array whose first axis is the layer, or an array for each layer."""


def as_counts_of_layers(
    name: str, given: int | list[int] | tuple[int, ...], num_layers: int, most: int | None = None
) -> list[int]:
    """Read a count for each layer, which may be one for all."""
    if not isinstance(given, list | tuple):
        return [as_count(name, given, 1, most)] * num_layers
    if len(given) != num_layers:
        raise error(
            ValueError,
            f"got {len(given)} values of {name}",
            f"the cache has {num_layers} layers",
            "pass an int for all, or one for each layer",
        )
    return [as_count(f"{name}[{layer}]", each, 1, most) for layer, each in enumerate(given)]


class PagedKVCache(CacheSteps):
    """Keys and values of all layers of a model, in blocks that sequences share.

    It owns the arrays; its `BlockAllocator` owns the block ids. `Scheduler` takes it
    as it is.

    Parameters
    ----------
    num_layers : int
        Layers of the model. A block has its place in each of them.
    num_blocks : int
        Blocks of the pool.
    block_size : int
        Tokens in a block, a multiple of 16.
    num_kv_heads, head_dim : int, or list or tuple of an int for each layer
        G and D of keys and values; D is at most 512.
    dtype : {"float16", "float32", "bfloat16", "int8", "int4"}
        How they are kept; a NumPy dtype of such a name will do. "int8" and "int4" are quantised by
        `append`, with a float32 scale for each token and head, and dequantised in the kernel;
        "int4" stores two numbers in a byte, so D must be even.
    xp : module
        numpy or cupy: whose arrays they are. CuPy's are on the current device.
    int8_keys : bool
        Keep keys as `QuantizedKeys`, for attention with int8 scores: codes of their differences
        from ``k_centre``, with a scale for each token and head. Values have dtype, "float16"; D is
        even and at most 256.
    prefix_caching, watermark, num_host_blocks : optional
        As of `BlockAllocator`. Blocks of the host are pinned memory where xp is cupy.

    Attributes
    ----------
    allocator : BlockAllocator
        ``allocator.add(tokens)`` makes a sequence. Sequences of another allocator are refused.
    k, v : array (num_layers, num_blocks, block_size, G, D)
        The pools; ``cache.k[layer]`` is the k_cache of `paged_attention`. Of "int4" they are uint8
        with ``D // 2`` bytes in the last axis. Where layers differ in G or D, these and the arrays
        below are tuples of an array for each layer.
    k_scales, v_scales : float32 array (num_layers, num_blocks, block_size, G), or None
        Only of "int8" and "int4"; with int8_keys k_scales alone.
    k_centre : float32 array (num_layers, G, D), or None
        Only with int8_keys: the centre of each layer's keys, zeros at first. Before the first
        `append` set it to that of typical keys as they are stored, normed and rotated, for example
        ``cache.k_centre[layer] = quantize_keys(k).centre[0]``. Sequences share blocks, and so this
        centre; keys that were stored keep theirs, so it does not change while blocks are in use.

    Raises
    ------
    TypeError
        If a number is no integer, dtype is none of these, or xp neither module.
    ValueError
        If a number is out of range.

    See Also
    --------
    cupyattn.kv_cache.StepTables : the tables of a step, which the methods take.
    cupyattn.kv_cache.Copy : an argument of `copy`.
    cupyattn.Scheduler : a loop over it; its requests are in ``cupyattn.kv_cache`` too.

    Notes
    -----
    A step is: append tokens to sequences, `copy` the result, make or update the
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

    Keys in int8, with the centre of a first prompt:

    >>> cache = cupyattn.PagedKVCache(1, 8, 16, 2, 4, dtype="float16", int8_keys=True, xp=np)
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 20, 2, 4)).astype(np.float16)
    >>> cache.k_centre[0] = cupyattn.quantize_keys(k).centre
    >>> tables = cache.step_tables([cache.allocator.add(range(20))], 20)
    >>> cache.append(0, k, v, tables)
    >>> cache.keys(0), cache.attend(0, q, tables, causal=True).shape
    (<QuantizedKeys (8, 16, 2, 4), 2,080 bytes>, (20, 2, 4))
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int | list[int] | tuple[int, ...],
        head_dim: int | list[int] | tuple[int, ...],
        *,
        dtype: object,
        xp: ModuleType,
        int8_keys: bool = False,
        prefix_caching: bool = False,
        watermark: int = 0,
        num_host_blocks: int = 0,
    ) -> None:
        form = as_format(dtype)
        require_bool("int8_keys", int8_keys)
        if int8_keys and form is not FORMATS["float16"]:
            raise error(
                ValueError,
                f"got int8_keys=True with dtype = {shown(dtype)}",
                "attention over int8 keys takes values in float16",
                'pass dtype="float16", or leave int8_keys out',
            )
        of_keys = FORMATS["int8"] if int8_keys else form
        require_library(xp)
        num_layers = as_count("num_layers", num_layers, 1)
        of_heads = as_counts_of_layers("num_kv_heads", num_kv_heads, num_layers)
        most = MOST_INT8_HEAD_DIM if int8_keys else MOST_HEAD_DIM
        dims = as_counts_of_layers("head_dim", head_dim, num_layers, most)
        odd = next((dim for dim in dims if dim % 2), None)
        if int8_keys and odd is not None:
            raise error(
                ValueError,
                f"got head_dim = {odd} with int8_keys=True",
                "kernels of prompts load two codes at a time: D is even",
                "leave int8_keys out, or pad the heads by an item of 0",
            )
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
            *(("head_dim", dim, form.packed) for dim in dict.fromkeys(dims)),
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
        self._sizes = tuple(zip(of_heads, dims, strict=True))
        self._storages: list[Storage] = []
        self._layers: list[dict[str, Array]] = [{} for _ in range(num_layers)]
        centres: list[Array] = []
        for heads, dim in dict.fromkeys(self._sizes):
            alike = [i for i, size in enumerate(self._sizes) if size == (heads, dim)]
            host_blocks, slots = self.allocator.num_host_blocks, (block_size, heads, dim)
            storage = Storage(form, len(alike), num_blocks, host_blocks, slots, xp, of_keys)
            self._storages.append(storage)
            arrays = storage.device
            if int8_keys:
                centres.append(xp.zeros((len(alike), heads, dim), np.float32))
                arrays = {**arrays, "k_centre": centres[-1]}
            for place, layer in enumerate(alike):
                self._layers[layer] = {name: array[place] for name, array in arrays.items()}
        self.k: Pools = self._pools("k")
        self.v: Pools = self._pools("v")
        names = self._layers[0]
        self.k_scales: Pools | None = self._pools("k_scales") if "k_scales" in names else None
        self.v_scales: Pools | None = self._pools("v_scales") if "v_scales" in names else None
        self.k_centre: Pools | None = None
        if int8_keys:
            whole = len(centres) == 1
            self.k_centre = centres[0] if whole else tuple(e["k_centre"] for e in self._layers)

    def _pools(self, name: str) -> Pools:
        """Return an array of all layers, or an array for each layer if these differ in size."""
        if len(self._storages) == 1:
            return self._storages[0].device[name]
        return tuple([arrays[name] for arrays in self._layers])

    __reduce_ex__ = uncopied(
        "two would give the same blocks twice",
        "make another one; k, v and the scales are arrays, which can be copied into its own",
    )

    def __repr__(self) -> str:
        blocks, size = self.allocator.num_blocks, self.allocator.block_size
        return (
            f"<PagedKVCache of {blocks} blocks of {size} tokens in {len(self._layers)} layers, "
            f"{self._heads} heads, {self._kept}, {self.nbytes:,} bytes>"
        )

    @property
    def _heads(self) -> str:
        return " or ".join(map(str, dict.fromkeys(heads for heads, _ in self._sizes)))

    def _repr_html_(self) -> str:
        blocks, size = self.allocator.num_blocks, self.allocator.block_size
        counted = self.statistics()
        known = {
            "blocks": f"{blocks:,} of {size} tokens, in each of {len(self._layers)} layers",
            "keys and values": f"{self._heads} heads in {self._kept}",
            "size": size_text(self.nbytes) + (" on the GPU" if self._xp is not np else ""),
            "empty slots in used blocks": f"{counted.fragmentation:.1%}",
            "tokens found cached": f"{counted.prefix_hit_rate:.1%}",
        }
        pool = self.allocator._pool_html()
        return html.section("PagedKVCache", html.facts(known), pool)

    @property
    def dtype(self) -> str:
        """How keys and values are kept: the name that was given."""
        return self._dtype

    @property
    def _kept(self) -> str:
        return self._dtype + ("" if self.k_centre is None else " with int8 keys")

    @property
    def nbytes(self) -> int:
        """The size of the pools with their scales, in bytes."""
        return sum(storage.nbytes for storage in self._storages)

    def scales(self, layer: int) -> dict[str, Array]:
        """Return k_scales and v_scales of a layer as keyword arguments; none of a float cache."""
        arrays = self._layer(layer)
        return {name: array for name, array in arrays.items() if name.endswith("scales")}

    def keys(self, layer: int) -> QuantizedKeys:
        """Return the pool of a layer's keys: codes, scales and centre, no copies.

        Raises
        ------
        ValueError
            If the cache keeps keys in its dtype.
        """
        arrays = self._layer(layer)
        if "k_centre" not in arrays:
            raise error(
                ValueError,
                f"got keys({layer}) of a cache that keeps keys in {self._dtype}",
                "only caches with int8_keys=True have QuantizedKeys",
                "take k[layer], or make the cache with int8_keys=True",
            )
        return QuantizedKeys(arrays["k"], arrays["k_scales"], arrays["k_centre"])

    def copy(self, copies: Iterable[Copy], /) -> None:
        """Copy blocks in all layers, as `Sequence.append` returned them, in the order of the calls.

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
            for storage in self._storages:
                arrays = storage.device
                scales = {name: arrays.get(name) for name in ("k_scales", "v_scales")}
                copy_blocks(arrays["k"], arrays["v"], pairs, **scales)

    def copy_to_host(self, copies: Iterable[Copy], /) -> None:
        """Copy blocks to host memory, as `Sequence.swap_out` returned them.

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
        pairs = as_copies(copies, self.allocator.num_blocks, self.allocator.num_host_blocks)
        for storage in self._storages:
            storage.to_host(pairs)

    def copy_from_host(self, copies: Iterable[Copy], /) -> None:
        """Copy blocks back from host memory, bit for bit, as `Sequence.swap_in` returned them.

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
        pairs = as_copies(copies, self.allocator.num_host_blocks, self.allocator.num_blocks)
        for storage in self._storages:
            storage.from_host(pairs)

    def statistics(self) -> CacheStatistics:
        """Count blocks and slots: see `CacheStatistics`."""
        return statistics_of(self.allocator)

    def picture(
        self,
        sequences: Mapping[str, Sequence] | Iterable[Sequence] | None = None,
        /,
        *,
        axes: object = None,
        columns: int = 16,
    ) -> Any:
        """Draw the pool by matplotlib: a cell for each block, in the order of their ids.

        A block that sequences use has their colours, opaque as far as it has tokens; one that is
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
