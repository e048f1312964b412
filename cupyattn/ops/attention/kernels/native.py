"""Launch configurations of the forward on the tensor cores of sm_80 and later.

Over caches of integers the kernel of tensor_core/forward.py runs there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cupyattn.ops.attention.kernels import parameters
from cupyattn.ops.attention.kernels.modifiers import modified
from cupyattn.ops.attention.kernels.options import (
    EACH_OPTION,
    EACH_PAGED_OPTION,
    PLAIN,
    FlashOptions,
)
from cupyattn.ops.attention.kernels.tensor_core.forward import wide_shared_bytes
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.spec import KernelSpec, Specialisation
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import cpp_bool, limit_of, option_macros, round_up, rows_for

DTYPES = ("float16", "bfloat16")
"""The dtypes that the kernels have."""


@dataclass(frozen=True)
class NativeConfig:
    """One CTA per warps * m_tiles * 16 query rows; tile_k keys at a time, in equal steps."""

    m_tiles: int
    warps: int
    tile_k: int
    ctas_per_sm: int
    reason: str
    steps: int = 1
    """Softmaxes of a tile of keys."""
    q_shared: bool = False
    """Whether Q stays in shared memory."""
    deferred: bool = False
    """Whether P is clamped and checked after P V, instead of scores before the exponentials."""
    sharing: int = 1
    """Warps that share rows, each with its own columns: 4 in forward_wide.cuh, elsewhere 1."""

    @property
    def tile_q(self) -> int:
        """Query rows per CTA."""
        return self.warps // self.sharing * self.warp_rows

    @property
    def warp_rows(self) -> int:
        """Query rows per warp."""
        return self.m_tiles * 16

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Return the bytes of both stages and of Q or the output (Smem in forward.cuh)."""
        if self.sharing > 1:
            return wide_shared_bytes(self, head_dim, head_dim_v, key_places=2)
        k_row, v_row = round_up(head_dim, 8) * 2, round_up(head_dim_v, 8) * 2
        stage = self.tile_k * (k_row + v_row)
        rows = self.tile_q * max(k_row, v_row)
        return stage + (stage + rows if self.q_shared else max(stage, rows))


# The first row whose head dim is not below max(D, Dv). Two warps of each scheduler are what their
# registers allow. With 32 rows a warp each fragment of K and V feeds two products; from head dim
# 160 on the accumulator leaves room for 16. Where Q and the scores of 64 keys do not fit next to
# it, Q stays in shared memory, or a tile takes several softmaxes. Reasons compare in TFLOP/s of
# float16 (H200, N 4096, 4 sequences of 2,048 features, plain, 2026-11-28); sm_80 to sm_89 have
# not been measured: there the rows are those that fit.
_AMPERE = {
    64: NativeConfig(
        2,
        4,
        64,
        2,
        "394 TFLOP/s on an H200, and 350 checked before, 389 with 128 keys",
        deferred=True,
    ),
    80: NativeConfig(
        2,
        4,
        64,
        2,
        "387 TFLOP/s on an H200, and 379 with Q in registers and two softmaxes",
        1,
        True,
        deferred=True,
    ),
    96: NativeConfig(
        2, 4, 64, 2, "391 TFLOP/s on an H200, and 353 with two softmaxes", 1, True, deferred=True
    ),
    128: NativeConfig(
        2, 4, 32, 2, "64 KiB: two CTAs fit 164 KiB; 392 TFLOP/s on an H200", 1, True, deferred=True
    ),
    160: NativeConfig(1, 8, 64, 1, "as 192", 2, deferred=True),
    192: NativeConfig(
        1,
        8,
        64,
        1,
        "354 TFLOP/s on an H200, and 351 checked before, with one softmax",
        2,
        deferred=True,
    ),
    256: NativeConfig(
        1, 8, 64, 1, "343 TFLOP/s on an H200, and 325 with two softmaxes, 339 with 32 keys", 4
    ),
    512: NativeConfig(
        2,
        8,
        16,
        1,
        "four warps share 32 rows, 79 KiB fit all; 232 TFLOP/s on an H200",
        sharing=4,
    ),
}
# 99 KiB a CTA and 100 KiB an SM.
_GEFORCE = {
    **_AMPERE,
    80: NativeConfig(
        2, 4, 64, 2, "40 KiB with Q in registers: two CTAs fit 100 KiB", 2, deferred=True
    ),
    96: NativeConfig(
        2, 4, 64, 2, "48 KiB with Q in registers: two CTAs fit 100 KiB", 2, deferred=True
    ),
    128: NativeConfig(1, 4, 32, 2, "16 rows a warp: two CTAs fit 100 KiB", deferred=True),
    256: NativeConfig(1, 8, 32, 1, "96 KiB, with Q in the place of the second tile"),
}
_HOPPER = {
    **_AMPERE,
    128: NativeConfig(
        2,
        4,
        64,
        2,
        "410 TFLOP/s on an H200, and 387 checked before, 392 with 32 keys",
        2,
        True,
        deferred=True,
    ),
}
NATIVE = {80: _AMPERE, 86: _GEFORCE, 90: _HOPPER, 120: _GEFORCE}
# Calls with options check before the exponentials, which forms no scores again: with a bias at
# head dim 64 that has 261 TFLOP/s, and 211 checked after P V (H200, as above). Dropout, a block
# mask's lists and items that are read one by one take more registers: half of the scores at a
# time has 217 with dropout, and 203 all of them; with a bias read one by one all of them spill
# 280 bytes of a thread, half of them none (sm_90, NVRTC 12.9). From head dim 80 on every option
# takes half of the scores: at 128 all of them spill 476 and 760 bytes with a bias in float16 and
# float32, half of them 12 and 16.
_HALF = "half of the scores at a time leaves registers"
_AMPERE_HALVES = {
    64: NativeConfig(2, 4, 64, 2, "217 with dropout, and 203 with one softmax a tile", 2),
    80: NativeConfig(2, 4, 64, 2, _HALF, 2, q_shared=True),
    96: NativeConfig(2, 4, 64, 2, _HALF, 2, q_shared=True),
    128: NativeConfig(2, 4, 32, 2, "64 KiB: two CTAs fit 164 KiB", q_shared=True),
    160: NativeConfig(1, 8, 64, 1, _HALF, 2),
    192: NativeConfig(1, 8, 64, 1, _HALF, 2),
    256: NativeConfig(1, 8, 64, 1, "16 keys at a time leave registers", 4),
    512: _AMPERE[512],
}
_GEFORCE_HALVES = {
    **_AMPERE_HALVES,
    80: NativeConfig(2, 4, 64, 2, _HALF, 2),
    96: NativeConfig(2, 4, 64, 2, _HALF, 2),
    128: NativeConfig(1, 4, 32, 2, "16 rows a warp: two CTAs fit 100 KiB"),
    256: NativeConfig(1, 8, 32, 1, "16 keys at a time leave registers", 2),
}
_HOPPER_HALVES = {**_AMPERE_HALVES, 128: NativeConfig(2, 4, 64, 2, _HALF, 2, q_shared=True)}
NATIVE_HALVES = {80: _AMPERE_HALVES, 86: _GEFORCE_HALVES, 90: _HOPPER_HALVES, 120: _GEFORCE_HALVES}
_OPTIONS_64 = NativeConfig(2, 4, 64, 2, "bias 261 and ALiBi 317; bias 226 in two softmaxes")
NATIVE_WITH = {arch: {**rows, 64: _OPTIONS_64} for arch, rows in NATIVE_HALVES.items()}
# A softcap keeps the special function units busy: next to P V more of that is hidden. With other
# options as well it takes the rows above.
_AMPERE_SOFTCAP = {
    **NATIVE_WITH[80],
    64: NativeConfig(2, 4, 64, 2, "257, and 248 checked before", 1, True, deferred=True),
    80: NativeConfig(2, 4, 64, 2, "as 96", 2, True, deferred=True),
    96: NativeConfig(2, 4, 64, 2, "280, and 221 checked before", 2, True, deferred=True),
}
_HOPPER_SOFTCAP = {
    **_AMPERE_SOFTCAP,
    128: NativeConfig(2, 4, 64, 2, "330, and 312 checked before", 2, True, deferred=True),
}
NATIVE_SOFTCAP = {80: _AMPERE_SOFTCAP, 86: NATIVE_WITH[86], 90: _HOPPER_SOFTCAP}
NATIVE_SOFTCAP[120] = NATIVE_WITH[120]


def flash_row(
    arch: int, head_dim: int, head_dim_v: int, options: FlashOptions = PLAIN
) -> NativeConfig:
    """Return the configuration for these head dims and options."""
    one_by_one = (options.bias != "void" and options.bias_vec == 1) or (
        options.mask and options.mask_vec == 1
    )
    listed = options.modified is not None and options.modified.blocks is not None
    table = NATIVE_WITH
    if options._replace(sinks="void") == PLAIN:
        table = NATIVE
    elif options._replace(sinks="void") == PLAIN._replace(softcap=True):
        table = NATIVE_SOFTCAP
    elif options.dropout or listed or one_by_one:
        table = NATIVE_HALVES
    rows = rows_for(table, arch)
    return rows[limit_of(rows, head_dim, head_dim_v)]


def admissible_rows(arch: int, head_dim: int, head_dim_v: int) -> dict[str, NativeConfig]:
    """Return the plain rows with room for these head dims, by the head dim that each is made for.

    The first is the usual one.
    """
    rows = rows_for(NATIVE, arch)
    least = limit_of(rows, head_dim, head_dim_v)
    sharing = rows[least].sharing
    return {str(d): row for d, row in rows.items() if d >= least and row.sharing == sharing}


def chosen_row(
    traits: DeviceTraits, head_dim: int, head_dim_v: int, options: FlashOptions, *, packed: bool
) -> NativeConfig:
    """Return the configuration, which for plain dense calls may be chosen for the device."""
    dims = head_dim, head_dim_v
    row, among = flash_row(traits.arch, *dims, options), admissible_rows(traits.arch, *dims)
    if packed or row not in among.values():
        return row
    return traits.choices.pick(KERNEL.entry, dims, among, usual=next(iter(among)))


_QUADS = (
    FlashOptions(bias="float16", bias_vec=4),
    FlashOptions(bias="float32", bias_vec=4),
    FlashOptions(mask=True, mask_vec=4),
)
"""Options whose arrays are read four keys at a time."""

KERNEL = KernelSpec("attention_forward_native", "attention/native/forward.cu", parameters.FLASH)
VARLEN = KernelSpec(
    "attention_forward_native_varlen", "attention/native/forward.cu", parameters.VARLEN
)
SPLIT = KernelSpec(
    "attention_forward_native_split", "attention/native/forward_split.cu", parameters.SPLIT
)
# A chunk of 2,048 queries for 8,192 tokens, causal, 4 sequences of 32 heads on 8, took 1.06, 1.03
# and 1.04 of the time over dense keys at head dims 64, 128 and 256 in float16, and 1.14, 1.02 and
# 1.03 in bfloat16 (an H200, sm_90 code, blocks of 16, 2026-11-28, `benchmark decode --prefill`).
PAGED = KernelSpec(
    "attention_forward_native_paged",
    "attention/native/forward_paged.cu",
    parameters.PAGED_FLOATS,
)
KERNELS = (KERNEL, VARLEN, SPLIT, PAGED)


@cache
def flash(
    arch: int,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions = PLAIN,
    spec: KernelSpec = KERNEL,
    row: NativeConfig | None = None,
) -> Specialisation:
    """Specialise one of `KERNELS`; `vec` is 8 where rows are aligned to 16 bytes, or 1."""
    row = row or flash_row(arch, head_dim, head_dim_v, options)
    return modified(spec, options.modified).specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=row.shared_bytes(head_dim, head_dim_v),
        reason=row.reason,
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        M_TILES=row.m_tiles,
        WARPS=row.warps,
        TILE_K=row.tile_k,
        STEPS=row.steps,
        Q_SHARED=int(row.q_shared),
        DEFERRED=cpp_bool(row.deferred),
        VEC=vec,
        MIN_CTAS=row.ctas_per_sm,
        MMA_K=16,
        **option_macros(options),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row at its largest head dim for both dtypes, and options by one; none for Turing.

    The ahead-of-time list is that of sm_75, which has none of these kernels.
    """
    if arch < min(NATIVE):
        return
    vec = vector_items("float16")
    for head_dim in rows_for(NATIVE, arch):
        for dtype in DTYPES:
            yield flash(arch, dtype, head_dim, head_dim, vec)
            yield flash(arch, dtype, head_dim, head_dim, 1)
        yield flash(arch, "float16", head_dim, head_dim, vec, spec=VARLEN)
        yield flash(arch, "bfloat16", head_dim, head_dim, vec, spec=SPLIT)
        for options in (*EACH_OPTION, *_QUADS):
            yield flash(arch, "bfloat16", head_dim, head_dim, vec, options)
        for options in (PLAIN, *EACH_PAGED_OPTION):
            yield flash(arch, "bfloat16", head_dim, head_dim, vec, options, PAGED)
