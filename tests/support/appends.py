"""Calls of append_kv for tests: their arguments, and the contents that they must leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.devices import KERNELS, SENTINEL, dtype_of

import cupyattn
from cupyattn import reference

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
        return [*caches, k, v, memory["slot_mapping"]], options

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
        (_, _, k, v, slots), options = self.views(given)
        rotation: dict[str, Any] = {}
        if self.half is not None:
            rotation = {"rotary": options["rotary"][:2], "positions": options["positions"].ravel(),
                        "interleaved": self.interleaved}  # fmt: skip
        same = [self._tokens_are_same(found, given)]
        ratios = []
        for index, (tokens, rotated) in enumerate(((k, rotation), (v, {}))):
            flat = tokens.reshape(-1, self.G, self.D)
            written = slots.ravel() >= 0
            at = np.divmod(slots.ravel()[written], self.block_size)
            cache = found["pool"][:, index]
            scales = found["scales"][:, index] if self.bits else None
            exact, bound = flat.astype(float), 0.0
            if rotated:
                exact = reference.rotated(flat, *rotated["rotary"], rotated["positions"],
                                          interleaved=self.interleaved)  # fmt: skip
            elif self.bits:
                stored, expected = reference.quantise(flat[written], self.bits)
                same += [np.array_equal(cache[at], stored),
                         np.array_equal(scales[at], expected, equal_nan=True)]  # fmt: skip
            if self.bits:  # a head that is not all finite is read back as NaN
                exact = np.where(np.isfinite(exact).all(axis=-1, keepdims=True), exact, np.nan)
            bound = reference.append_kv_bound(flat, self.cache_dtype.name, **rotated)
            values = cache[at] if scales is None else reference.dequantise(cache[at], scales[at])
            ratios.append(reference.error_ratio(values, exact[written], bound[written]))
            same += [_untouched(cache, at), scales is None or _untouched(scales, at)]
        return max(ratios) if all(same) else np.inf

    def _tokens_are_same(self, found: Memory, given: Memory) -> bool:
        """k, v and all of q but the rotated features stay; those are within their bound."""
        after, before = self._packed(found), self._packed(given)
        kept = _equal(after[..., self.H :, :], before[..., self.H :, :])
        q, before = (packed[..., : self.H, :] for packed in (after, before))
        if self.half is None:
            return kept and _equal(q, before)
        q, before = (x.reshape(1, -1, self.H, self.D) for x in (q, before))
        where = given["positions"].ravel()
        tables, way = (given["cos"], given["sin"]), {"interleaved": self.interleaved}
        exact = reference.rope(before, *tables, where, **way)
        bound = reference.rope_bound(before, *tables, where, dtype=self.dtype, **way)
        rest = slice(2 * self.half, None)
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
