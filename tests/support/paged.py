"""Paged caches for tests: runs of attention over them, and calls of append_kv.

Queries are one row for each sequence, or packed sequences with different numbers of them. A call of
append_kv has its arguments, and the contents that it must leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.devices import EMULATED, KERNELS, SENTINEL, dtype_of

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention import paged as decode
from cupyattn.ops.attention.choice import MAX_QUERIES
from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.device.emulated import EmulatedDevice
from cupyattn.testing import PagedCase, expected


@dataclass(frozen=True)
class PagedProblem(PagedCase):
    """A call of paged attention, run by the kernels; scales follow the first five arrays."""

    @property
    def decoded(self) -> bool:
        """Tell whether the kernel for few queries is used."""
        return self.Sq <= MAX_QUERIES

    def keywords(self) -> dict[str, Any]:
        """The options without scales."""
        given = super().keywords()
        return {name: value for name, value in given.items() if not name.endswith("_scales")}

    def arrays(self, order: int = 0) -> tuple[np.ndarray, ...]:
        """q, k_cache, v_cache, block_table, seqlens_k; with `bits` k_scales and v_scales follow.

        `order` draws another place in the pool.
        """
        return self.stored(order)

    def packed(self) -> dict[str, Any]:
        """The options that say where packed queries are."""
        return {}

    def ratio(self, out: np.ndarray, lse: np.ndarray, arrays: tuple[np.ndarray, ...]) -> float:
        """The largest error over its bound."""
        options = {**scales_of(arrays), **self.keywords(), **self.packed()}
        with EMULATED.running():  # bounds of kernels, also where results are of a GPU
            want = expected(cupyattn.paged_attention, *arrays[:5], **options, return_lse=True)
        return max(reference.error_ratio(*each) for each in zip((out, lse), *want, strict=True))


def scales_of(arrays: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """Name what follows the first five arrays."""
    return dict(zip(("k_scales", "v_scales"), arrays[5:], strict=False))


def on_emulator(problem: PagedProblem, arrays: tuple[np.ndarray, ...], **more: Any) -> Any:
    """Run the kernels with all checks; returns out and lse."""
    with cupyattn.backend("emulator"):
        return cupyattn.paged_attention(
            *arrays[:5], **scales_of(arrays), **problem.keywords(), return_lse=True, **more
        )


def on_kernels(problem: PagedProblem, arrays: tuple[np.ndarray, ...], **more: Any) -> Any:
    """Run the kernels on the GPU, if there is one, otherwise on the emulator."""
    keywords = {
        name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
        for name, value in (problem.keywords() | scales_of(arrays) | more).items()
    }
    with KERNELS.running():
        results = cupyattn.paged_attention(
            *map(KERNELS.put, arrays[:5]), **keywords, return_lse=True
        )
    return tuple(map(KERNELS.get, results))


@contextmanager
def keys_shared() -> Iterator[None]:
    """Let the CTAs of decoding share keys of short sequences too, as they do those of long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "WHOLE_KEYS", 0)
        decode._plan.cache_clear()  # a plan is remembered for its problem
        yield
    decode._plan.cache_clear()


@contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Let the device of the kernels have so many: the shares of CTAs end elsewhere."""
    device = KERNELS.device if device_count() else EmulatedDevice
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "multiprocessors", count)
        yield


@dataclass(frozen=True)
class PackedProblem(PagedProblem):
    """A call with cu_seqlens_q; Sq is max_seqlen_q, and `spare` more rows follow the last."""

    queries: tuple[int, ...] = ()
    spare: int = 0

    @property
    def decoded(self) -> bool:
        return False

    def queries_of(self, b: int) -> int:
        return self.queries[b]

    @property
    def bounds(self) -> np.ndarray:
        """cu_seqlens_q."""
        return np.cumsum((0, *self.queries), dtype=np.int32)

    def packed(self) -> dict[str, Any]:
        return {"cu_seqlens_q": self.bounds, "max_seqlen_q": self.Sq}

    def stored(self, order: int = 0) -> tuple[np.ndarray, ...]:
        q, *others = super().stored(order)
        rows = [q[b, : self.queries[b]] for b in range(len(self.queries))]
        after = np.full((self.spare, *q.shape[2:]), np.nan, q.dtype)
        return np.concatenate([*rows, after]), *others

    def sequences(self, arrays: tuple[np.ndarray, ...]) -> Any:
        """Each sequence's own rows, and its arrays as a call of one sequence."""
        q, k, v, table, lengths, *scales = arrays
        for b, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if begin < end:
                own = slice(b, b + 1)
                rows = slice(begin, end)
                yield rows, (q[None, rows], k, v, table[own], lengths[own], *scales)

    def call(self, arrays: tuple[np.ndarray, ...], **more: Any) -> Any:
        """Run the kernels on the GPU, if there is one, otherwise on the emulator."""
        there = {
            name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
            for name, value in {"cu_seqlens_q": self.bounds, **self.keywords(), **more}.items()
        }
        with KERNELS.running():
            results = self.on_arrays(tuple(map(KERNELS.put, arrays)), **there)
        return tuple(map(KERNELS.get, results))

    def on_arrays(self, arrays: tuple[Any, ...], **more: Any) -> Any:
        """Call paged_attention where the arrays are; out and lse."""
        given = {"cu_seqlens_q": self.bounds, **self.keywords(), **scales_of(arrays), **more}
        return cupyattn.paged_attention(*arrays[:5], max_seqlen_q=self.Sq, return_lse=True, **given)


Memory = dict[str, Any]
"""Arrays by name; the caches and the packed q, k and v are views of what is here."""
POSITIONS = 40
"""Rows of the tables."""


@dataclass(frozen=True)
class AppendProblem:
    """A call, its data drawn by `seed`: slices of packed q, k and v, and of pools of K and V."""

    tokens: tuple[int, ...]
    H: int
    G: int
    D: int
    dtype: str
    bits: int | None = None
    """Bits of a stored item; None for a cache of the tokens' dtype."""
    half: int | None = None
    """Pairs that are rotated, q's too; None without a rotation."""
    interleaved: bool = False
    table: str = "float32"
    integers: str = "int32"
    norms: str = ""
    """Which heads are normalised: of "q" and "k"."""
    block_size: int = 4
    margin: int = 0
    """Items by which the tokens miss the alignment of vectors."""
    seed: int = 0

    @property
    def cache_dtype(self) -> np.dtype:
        """The dtype of the caches' arrays."""
        names = {8: "int8", 4: "uint8", None: self.dtype}
        return dtype_of(names[self.bits])

    def memory(self) -> Memory:
        """Draw the arrays; caches and scales hold a number that stays where nothing is written."""
        rng, dtype = np.random.default_rng(self.seed), dtype_of(self.dtype)
        total = int(np.prod(self.tokens))
        num_blocks = -(-total // self.block_size) + 2
        heads, stored = self.H + 2 * self.G, self.D // 2 if self.bits == 4 else self.D
        flat = np.zeros(self.margin + total * heads * self.D, dtype)
        flat[self.margin :] = rng.standard_normal(total * heads * self.D)
        slots = rng.permutation(num_blocks * self.block_size)[:total]
        slots[rng.random(total) < 0.2] = -1
        blocks = num_blocks, 2, self.block_size, self.G
        memory: Memory = {
            "flat": flat,
            "pool": np.full((*blocks, stored), SENTINEL, self.cache_dtype),
            "slot_mapping": slots.reshape(self.tokens).astype(self.integers),
        }
        if self.bits:
            memory["scales"] = np.full(blocks, SENTINEL, np.float32)
        if self.half is not None:
            cos, sin = cupyattn.rope_tables(POSITIONS, 2 * self.half, dtype=self.table)
            positions = rng.integers(0, POSITIONS, self.tokens).astype(self.integers)
            memory |= {"cos": cos, "sin": sin, "positions": positions}
        for name in self.norms:
            memory[f"{name}_weight"] = rng.standard_normal(self.D).astype(dtype)
        return memory

    def views(self, memory: Memory) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call, and its options."""
        packed = self._packed(memory)
        q, k, v = (
            packed[..., first : first + count, :]
            for first, count in ((0, self.H), (self.H, self.G), (self.H + self.G, self.G))
        )
        caches = [memory["pool"][:, i] for i in (0, 1)]
        options: dict[str, Any] = {}
        if self.bits:
            options |= {name: memory["scales"][:, i] for i, name in enumerate(SCALES)}
        if self.half is not None:
            rotary = cupyattn.Rotary(memory["cos"], memory["sin"], self.interleaved)
            options |= {"q": q, "rotary": rotary, "positions": memory["positions"]}
        for name in self.norms:
            options[f"{name}_norm"] = self.norm(name, memory)
        if "q" in self.norms:
            options["q"] = q
        return [*caches, k, v, memory["slot_mapping"]], options

    def norm(self, name: str, memory: Memory) -> cupyattn.RMSNorm | None:
        """The norm of the heads of q or k; each has numbers of its own."""
        if name not in self.norms:
            return None
        return cupyattn.RMSNorm(
            memory[f"{name}_weight"], *{"q": (0.3, 1.0), "k": (1e-6, 0.5)}[name]
        )

    def exact(self, name: str, tokens: np.ndarray, given: Memory) -> np.ndarray:
        """Tokens (total, heads, D) of q or k, normalised and rotated in float64."""
        norm, exact = self.norm(name, given), tokens.astype(float)
        if norm is not None:
            eps, offset = norm[1:]
            exact = reference.norm(
                tokens, None, norm.weight, centred=False, eps=eps, weight_offset=offset
            )[0]
        if self.half is not None:
            tables, where = (given["cos"], given["sin"]), given["positions"].ravel()
            exact = reference.rotated(exact, *tables, where, interleaved=self.interleaved)
        return exact

    def bound(self, name: str, tokens: np.ndarray, given: Memory, dtype: str) -> Any:
        """The bound of `exact`, stored as a dtype."""
        options: dict[str, Any] = {"norm": self.norm(name, given)}
        if self.half is not None:
            options |= {"rotary": (given["cos"], given["sin"]), "interleaved": self.interleaved,
                        "positions": given["positions"].ravel()}  # fmt: skip
        return reference.append_kv_bound(tokens, dtype, **options)

    def _packed(self, memory: Memory) -> Any:
        return memory["flat"][self.margin :].reshape(*self.tokens, self.H + 2 * self.G, self.D)

    def call(self, memory: Memory) -> None:
        """Make the call."""
        arguments, options = self.views(memory)
        cupyattn.append_kv(*arguments, **options)

    def appended(self, memory: Memory) -> Memory:
        """Return the contents after the call, on the GPU if there is one, or on the emulator."""
        placed = {name: KERNELS.put(a) for name, a in memory.items()}
        with KERNELS.running():
            self.call(placed)
        return {name: KERNELS.get(array) for name, array in placed.items()}

    def ratio(self, found: Memory, given: Memory) -> float:
        """The largest error over its bound; infinite where bits had to be the same, and are not."""
        (_, _, k, v, slots), _ = self.views(given)
        changed = self.half is not None or "k" in self.norms
        same = [self._tokens_are_same(found, given)]
        ratios = []
        for index, (tokens, computed) in enumerate(((k, changed), (v, False))):
            flat = tokens.reshape(-1, self.G, self.D)
            written = slots.ravel() >= 0
            at = np.divmod(slots.ravel()[written], self.block_size)
            cache = found["pool"][:, index]
            scales = found["scales"][:, index] if self.bits else None
            exact = self.exact("k", flat, given) if computed else flat.astype(float)
            if not computed and self.bits:
                stored, expected = reference.quantise(flat[written], self.bits)
                same += [np.array_equal(cache[at], stored),
                         np.array_equal(scales[at], expected, equal_nan=True)]  # fmt: skip
            if self.bits:  # a head that is not all finite is read back as NaN
                exact = np.where(np.isfinite(exact).all(axis=-1, keepdims=True), exact, np.nan)
            kept = self.cache_dtype.name
            bound = (self.bound("k", flat, given, kept) if computed
                     else reference.append_kv_bound(flat, kept))  # fmt: skip
            values = cache[at] if scales is None else reference.dequantise(cache[at], scales[at])
            ratios.append(reference.error_ratio(values, exact[written], bound[written]))
            same += [_untouched(cache, at), scales is None or _untouched(scales, at)]
        return max(ratios) if all(same) else np.inf

    def _tokens_are_same(self, found: Memory, given: Memory) -> bool:
        """k, v and all of q but its changed features stay; those are within their bound."""
        after, before = self._packed(found), self._packed(given)
        kept = _equal(after[..., self.H :, :], before[..., self.H :, :])
        q, before = (packed[..., : self.H, :] for packed in (after, before))
        if self.half is None and "q" not in self.norms:
            return kept and _equal(q, before)
        q, before = (x.reshape(-1, self.H, self.D) for x in (q, before))
        exact = self.exact("q", before, given)
        bound = self.bound("q", before, given, self.dtype)
        rest = slice(self.D if "q" in self.norms else 2 * (self.half or 0), None)
        return (
            kept
            and reference.error_ratio(q, exact, bound) <= 1
            and _equal(q[..., rest], before[..., rest])
        )


SCALES = ("k_scales", "v_scales")


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.astype(float), b.astype(float), equal_nan=True)


def _untouched(array: np.ndarray, at: tuple[np.ndarray, np.ndarray]) -> bool:
    """Tell whether all but some slots are unchanged."""
    rest = np.ones(array.shape[:2], bool)
    rest[at] = False
    return bool((array[rest] == np.array(SENTINEL, array.dtype)).all())
