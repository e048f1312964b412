"""Operations of a model's step on a paged cache: tables of its sequences, append and attend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn.functions import QuantizedKeys, RMSNorm, append_kv, paged_attention
from cupyattn.kv_cache.allocator import BlockAllocator
from cupyattn.kv_cache.arguments import as_count
from cupyattn.kv_cache.sequence import Sequence
from cupyattn.kv_cache.tables import StepTables, as_counts, lengths_of, require_tables
from cupyattn.runtime.annotations import Keywords
from cupyattn.runtime.arrays import Array, adopt_one
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.outputs import named_out

_GIVEN = ("k_scales", "v_scales", "cu_seqlens_q", "max_seqlen_q")
"""Options of `paged_attention` that a cache and its tables have."""


class CacheSteps:
    """The part of `PagedKVCache` that a step calls."""

    allocator: BlockAllocator
    _xp: ModuleType
    _layers: list[dict[str, Array]]

    def _layer(self, layer: int) -> dict[str, Array]:
        return self._layers[as_count("layer", layer, 0, len(self._layers) - 1)]

    def step_tables(
        self,
        sequences: Items[Sequence] = (),
        new_tokens: int | Iterable[int] = 1,
        *,
        max_batch: int | None = None,
        max_blocks: int | None = None,
        max_tokens: int | None = None,
    ) -> StepTables:
        """Make the tables of a step, which `StepTables.update` refills in the same place.

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
        """Return the blocks of sequences, int32 (B, most blocks), -1 after each one's last.

        It alone; `step_tables` uploads all that a step needs at once.
        """
        return self.step_tables(sequences, 0).block_table

    def seqlens_k(self, sequences: Items[Sequence], /) -> Array:
        """Return the tokens of sequences, int32 (B,)."""
        return self.step_tables(sequences, 0).seqlens_k

    def slot_mapping(
        self, sequences: Items[Sequence], new_tokens: int | Iterable[int] = 1, /
    ) -> Array:
        """Return the slots of the last tokens of sequences, int32 (total,), one after the other.

        Slot ``block * block_size + offset`` is that of a token in the block's place ``offset``.
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
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        """Write the keys and values of a step's new tokens in a layer: `append_kv`.

        Parameters
        ----------
        layer : int
            Which layer's.
        k, v : array (total, G, D), or (B, S, G, D)
            The new tokens in the order of the tables: as many as these have, or have room for. With
            four axes S is the number of each sequence's new tokens.
        tables : StepTables
            Those of the step.
        q : array (total, H, D), or (B, S, H, D), optional
            Queries to be normalised and rotated in place; only with rotary or q_norm.
        rotary : Rotary or (cos, sin), optional
            Tables by which k and q are rotated to their positions.
        q_norm, k_norm : RMSNorm, optional
            Norms of the heads of q and of k, before the rotation.

        Raises
        ------
        ValueError
            If the tables have another number of tokens, in all or of a sequence. Nothing is written
            then.
        TypeError, ValueError
            As `append_kv`, for dtypes, heads and whatever else does not fit.
        """
        require_tables(tables, self.allocator)
        k = adopt_one("k", k)
        _require_axes("k", k, tables, "total, G, D", "B, S, G, D")
        tokens = k.shape[:-2]
        count = math.prod(tokens)
        if not tables.num_tokens <= count <= len(tables.slot_mapping):
            raise error(
                ValueError,
                f"k {tuple(k.shape)} has {count} tokens",
                f"the step's tables have {tables.num_tokens}, and room for "
                f"{len(tables.slot_mapping)}",
                "pass the new tokens of all sequences, sequence after sequence",
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
            q_norm=q_norm,
            k_norm=k_norm,
            k_scales=arrays.get("k_scales"),
            v_scales=arrays.get("v_scales"),
            k_centre=arrays.get("k_centre"),
        )

    def attend(self, layer: int, q: Array, tables: StepTables, /, **options: object) -> Any:
        """Let the new tokens of a step see all tokens of their sequences in a layer.

        Parameters
        ----------
        layer : int
            Which layer's keys and values.
        q : array (B, Sq, H, D), or (total, H, D)
            The queries of the new tokens, as `paged_attention` takes them: packed for sequences
            with different numbers of them, otherwise Sq of each. A step that a CUDA graph captures
            has (B, 1, H, D).
        tables : StepTables
            Those of the step.
        **options
            As of `paged_attention`: causal, softmax_scale, window_size, out and so on, but for
            scales, cu_seqlens_q and max_seqlen_q, which the cache and the tables have.

        Returns
        -------
        out or (out, lse)
            As of `paged_attention`. Rows of out after the step's tokens are zeros,
            unless it was given.

        Raises
        ------
        ValueError
            If the tables are another cache's, have more new tokens than there are packed queries,
            or not Sq of each sequence.
        TypeError, ValueError
            As `paged_attention`.

        Notes
        -----
        Of packed queries the sequences with one new token that come before all others are decoded,
        and the rest is a second call: the kernels of prompts compute many query rows at once. So a
        step is fastest with the sequences that generate in front, as `Scheduler` has them in all
        but few steps.
        """
        require_tables(tables, self.allocator)
        for name in _GIVEN:
            if name in options:
                raise error(
                    TypeError,
                    f"attend got {name} = {shown(options[name])}",
                    "the cache has its own scales, and the tables have the bounds of queries",
                    f"leave {name} out, or call paged_attention",
                )
        q = adopt_one("q", q)
        _require_axes("q", q, tables, "total, H, D", "B, Sq, H, D")
        arrays, batch = self._layer(layer), len(tables.seqlens_k)
        if len(q.shape) != 3:
            rows = len(q) if tables.num_sequences <= len(q) <= batch else batch
            return _attend(arrays, tables, slice(0, rows), q, options)
        if tables.num_tokens > len(q):
            raise error(
                ValueError,
                f"q {tuple(q.shape)} has {len(q)} tokens",
                f"the step's tables have {tables.num_tokens}",
                "pass the queries of all new tokens, sequence after sequence",
            )
        if tables.decodes(len(q)):
            return _decode(arrays, tables, slice(0, len(q)), q, options)
        first = tables.num_decoding
        if first or tables.num_tokens < len(q):
            options = {**options, "out": self._results(q, options)}
        if first:
            _decode(arrays, tables, slice(0, first), q, options)
        queries = {"cu_seqlens_q": tables.cu_seqlens_q[first:], "max_seqlen_q": tables.max_seqlen_q}
        return _attend(arrays, tables, slice(first, batch), q, queries | options)

    def _results(self, q: Array, options: dict[str, object]) -> object:
        """Return the given out, if it fits, or zeros; each call writes a part of it."""
        shapes = {"out": q.shape}
        if with_lse := bool(options.get("return_lse")):
            shapes["lse"] = (q.shape[1], q.shape[0])
        arrays = named_out(options.get("out"), tuple(shapes))
        for name, array in arrays.items():
            found = getattr(array, "shape", None)
            if found != shapes[name]:
                kind = type(array).__name__
                raise error(
                    TypeError if found is None else ValueError,
                    f"{name} has type {kind}" if found is None else f"{name} has shape {found}",
                    f"the result has shape {shapes[name]}",
                    "pass an array of that shape, or none",
                )
        dtypes = {"out": q.dtype, "lse": np.float64 if q.dtype == np.float64 else np.float32}
        for name, shape in shapes.items():
            if name not in arrays:
                arrays[name] = self._xp.zeros(shape, dtypes[name])
        return (arrays["out"], arrays["lse"]) if with_lse else arrays["out"]


def _require_axes(name: str, array: Array, tables: StepTables, packed: str, alike: str) -> None:
    """Raise unless rows are packed, or the tokens of the step for each sequence."""
    shape = tuple(array.shape)
    if len(shape) not in (3, 4):
        raise error(
            ValueError,
            f"{name} has shape {shape}",
            f"{name} is ({packed}) or ({alike}), 3 or 4 axes",
            "reshape it",
        )
    each = tables.max_seqlen_q  # and if each sequence has so many, they all have
    if len(shape) == 4 and tables.num_sequences:
        if shape[1] == each and tables.num_tokens == each * tables.num_sequences:
            return
        counts = [end - begin for begin, end, _ in tables.spans()]
        raise error(
            ValueError,
            f"{name} {shape} has {shape[1]} tokens of each sequence",
            f"the step's sequences have {shown(counts)} new ones",
            f"pass as many of each, or those of all packed, ({packed})",
        )


def _attend(
    arrays: dict[str, Array], tables: StepTables, rows: slice, q: Array, options: Keywords
) -> Any:
    """Call paged_attention for the sequences in these rows of the tables."""
    slopes: Any = options.get("alibi_slopes")
    if len(getattr(slopes, "shape", ())) == 2:
        options = {**options, "alibi_slopes": slopes[rows]}
    keys: Any = arrays["k"]
    if "k_centre" in arrays:
        keys = QuantizedKeys(arrays["k"], arrays["k_scales"], arrays["k_centre"])
    else:
        options = {**options, "k_scales": arrays.get("k_scales")}
    return paged_attention(
        q,
        keys,
        arrays["v"],
        tables.block_table[rows],
        tables.seqlens_k[rows],
        v_scales=arrays.get("v_scales"),
        **options,
    )


def _decode(
    arrays: dict[str, Array], tables: StepTables, rows: slice, q: Array, options: dict[str, object]
) -> Any:
    """Do the same of packed queries, one a sequence: the kernels that decode are made for these."""
    given: Any = options.get("out")
    if isinstance(given, tuple) and len(given) == 2:
        out, lse = given
        options = {**options, "out": (out[rows, None], lse[:, rows].T[:, :, None])}
    elif given is not None:
        options = {**options, "out": given[rows, None]}
    results = _attend(arrays, tables, rows, q[rows, None], options)
    if given is not None:
        return given
    if options.get("return_lse"):
        return results[0][:, 0], results[1][:, :, 0].T
    return results[:, 0]


def _room(name: str, given: int | None, needed: int) -> int:
    return needed if given is None else as_count(name, given, needed)
