"""What a call of attention asks for: shapes and options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.ops.attention.kernels.modifiers import BLOCK_LISTS, Modifiers
from cupyattn.ops.attention.modifiers import UserFunction, modifiers_of, strides_of
from cupyattn.ops.attention.options import ALL_OPTIONS, TEACHING_OPTIONS
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.by_name import Overlaps
from cupyattn.runtime.checks import fixes_of_results

LSE_DTYPE = np.dtype(np.float32)
MAX_LENGTH = 2**30 - 2**10  # a row of the last tile stays below kFar (masks.cuh)


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """A valid call of attention; letters as in the public API.

    Two calls of one description share one object, so it stands for the description in caches.
    """

    batch: int
    sq: int
    sk: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: np.dtype
    layouts: dict[str, Layout]
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    softmax_scale: float
    q_offset: int | None
    """Where `layouts` has no q_offset array; None for the last query at the last key in use."""
    window: tuple[int | None, int | None]
    """Keys to the left and right that a query sees, causality included; None is unbounded."""
    softcap: float | None
    dropout_p: float
    interleaved: bool
    """Whether rotary pairs neighbouring features."""
    functions: dict[str, UserFunction | None]
    """score_mod and mask_mod."""
    implementation: str
    overlaps: Overlaps

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(B, Sq, H, Dv)."""
        return (self.batch, self.sq, self.heads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, H, Sq)."""
        return (self.batch, self.heads, self.sq)

    def query_tiles(self, rows: int) -> int:
        """Return how many tiles of query rows the sequences have together, of one head."""
        return self.batch * -(-self.sq // rows)

    def key_tiles(self, keys: int) -> int:
        """Return the same of keys."""
        return self.batch * -(-self.sk // keys)

    def given(self, name: str) -> Layout | None:
        """Return how an array of the call lies, as the caller gave it."""
        return self.layouts.get(name)

    def placed(self, name: str, layout: Layout) -> Layout:
        """Return the layout of an array of that name as kernels take it."""
        return layout

    def moved(
        self, arrays: Mapping[str, Layout], without: Collection[str] = ()
    ) -> AttentionProblem:
        """Return the call with `arrays` elsewhere, which begin where vectors do.

        It is `without` some of its other arrays.
        """
        places = {name: self.placed(name, layout) for name, layout in arrays.items()}
        others = {name: x for name, x in self.layouts.items() if name not in without}
        return replace(
            self,
            layouts={**others, **places},
            starts={**self.starts, **dict.fromkeys(arrays, 0)},
        )

    @property
    def ends_with_keys_in_use(self) -> bool:
        """Whether seqused_k decides where queries stand."""
        given = self.q_offset is not None or "q_offset" in self.layouts
        return "seqused_k" in self.layouts and not given

    @property
    def first_position(self) -> int | None:
        """Where query 0 stands; None where an array says it."""
        if "q_offset" in self.layouts or self.ends_with_keys_in_use:
            return None
        return self.sk - self.sq if self.q_offset is None else self.q_offset

    @property
    def lse_dtype(self) -> np.dtype:
        """Of lse and its gradient: float32, for float64 arrays float64."""
        return self.dtype if self.dtype == np.float64 else LSE_DTYPE

    @property
    def refusable_options(self) -> frozenset[str]:
        """The options of the call that some kernels do not have."""
        used = {"rotary" if name == "cos" else name for name in self.layouts}
        used |= {"softcap"} if self.softcap is not None else set()
        used |= {"dropout_p"} if self.dropout_p else set()
        used |= {name for name, function in self.functions.items() if function is not None}
        used |= {"window_size"} if self.window not in ((None, None), (None, 0)) else set()
        used |= {"q_offset"} if self.q_offset is not None else set()
        return frozenset(used & (ALL_OPTIONS - TEACHING_OPTIONS))

    @property
    def modifiers(self) -> Modifiers | None:
        """The user's expressions, as kernels compile them."""
        return modifiers_of(self.functions, self.layouts)

    @property
    def modifier_strides(self) -> tuple[Any, ...]:
        """What kernels take by value for them."""
        return strides_of(self.modifiers, self.layouts)

    @property
    def block_modifiers(self) -> Modifiers | None:
        """The same of kernels that walk the tiles that a block mask leaves."""
        return modifiers_of(self.functions, self.layouts, blocks=BLOCK_LISTS)

    @property
    def block_modifier_strides(self) -> tuple[Any, ...]:
        """What those take by value."""
        return strides_of(self.block_modifiers, self.layouts)

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(B, H, Sq, Sk), to which mask and bias broadcast."""
        return (self.batch, self.heads, self.sq, self.sk)


FORWARD_RESULTS = ("out", "lse")
BACKWARD_RESULTS = ("dq", "dk", "dv", "dbias", "dsinks")
ARRAY_FIXES = {
    "seqused_k": "pass an int32 array of shape (B,), for example numpy.full(B, length, 'int32')",
    "alibi_slopes": "pass a float array of shape (H,) or (B, H)",
    "sinks": "pass a float array of shape (H,)",
    "cos": "pass a float array of shape (positions, R/2), as rope_tables makes",
    "sin": "pass a float array of shape (positions, R/2), as rope_tables makes",
    "cu_seqlens_q": "pass an int32 array of shape (B + 1,)",
    "cu_seqlens_k": "pass an int32 array of shape (B + 1,)",
}
"""What to pass instead of a number or a list, where an array of that alone would not do."""
FORWARD_FIXES = {**ARRAY_FIXES, **fixes_of_results(*FORWARD_RESULTS)}
SHOWN_AS = {name: f"grads.{name}" for name in BACKWARD_RESULTS}
"""The names of backward's results in errors: as the caller gives them."""
