"""Launch configurations of dK and dV on tensor cores, and of dQ in the same pass, for sm_75."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from cupyattn.ops.attention.kernels.modifiers import modified
from cupyattn.ops.attention.kernels.options import (
    BACKWARD_QUADS,
    EACH_BACKWARD_OPTION,
    PLAIN_BACKWARD,
    BackwardOptions,
)
from cupyattn.ops.attention.kernels.parameters import POSITIONS, SCORE_INPUTS, of_packed
from cupyattn.ops.attention.structs import BACKWARD_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.spec import Gates, KernelSpec, Parameter, Pointer, Specialisation, inputs
from cupyattn.runtime.tables import (
    FLOAT_BYTES,
    cpp_bool,
    option_macros,
    round_up,
    row_of,
    rows_for,
    with_gates,
    with_l2_ahead,
)

_DKDV_PARAMETERS: tuple[Parameter, ...] = (
    *(*inputs("q", "k", "v", "dout", "stats"), *inputs("scales", optional=True)),
    Pointer("cta_scales", optional=True),
    *(Pointer("dq_acc", optional=True), Pointer("dk"), Pointer("dv")),
    Pointer("dbias", optional=True),
    *(*POSITIONS, *SCORE_INPUTS),
    BACKWARD_STRUCT,
)
DKDV_KERNEL = KernelSpec(
    "attention_backward_dkdv", "attention/tensor_core/backward_dkdv.cu", _DKDV_PARAMETERS
)
DKDV_PAIRED_KERNEL = KernelSpec(
    "attention_backward_dkdv_paired",
    "attention/tensor_core/backward_dkdv_paired.cu",
    _DKDV_PARAMETERS,
)
DKDV_WIDE_KERNEL = KernelSpec(
    "attention_backward_dkdv_wide",
    "attention/tensor_core/backward_dkdv_wide.cu",
    _DKDV_PARAMETERS,
)
_DENSE = (DKDV_KERNEL, DKDV_PAIRED_KERNEL, DKDV_WIDE_KERNEL)
VARLEN = {
    kernel: KernelSpec(f"{kernel.entry}_varlen", kernel.source, of_packed(kernel.parameters))
    for kernel in _DENSE
}
"""The kernels of packed sequences, likewise."""
KERNELS = (*_DENSE, *VARLEN.values())

SMEM_UNIT = 128  # bytes: alignment of each buffer in Smem


@dataclass(frozen=True)
class DkdvConfig:
    """One CTA per warps * m_tiles * 16 keys; tile_q queries a tile, 8 * sub_q of them at once."""

    m_tiles: int
    warps: int
    tile_q: int
    sub_q: int
    dq_row_warps: int
    ctas_per_sm: int
    reason: str
    mma_k: int = 8
    l2_ahead: int = 0
    """How many tiles ahead of its use a tile is prefetched into L2; 0 for no prefetch."""
    gates: Gates = Gates()
    native: bool = False
    """Whether cp.async fills two buffers, with one barrier a tile (sm_80 or later)."""
    dq_parts: int = 1
    """In how many parts a native warp adds its columns of dQ: more of them take fewer registers."""
    unroll: int = 1
    """How many times a native kernel unrolls its loop over the queries of a tile."""

    @property
    def tile_keys(self) -> int:
        """Keys per CTA."""
        return self.warps * self.warp_keys

    @property
    def warp_keys(self) -> int:
        """Keys per warp."""
        return self.m_tiles * 16


@dataclass(frozen=True)
class PairedConfig:
    """One CTA per warps / 2 * 16 keys, each 16 of them of two warps; tile_q queries a tile."""

    warps: int
    tile_q: int
    ctas_per_sm: int
    reason: str
    mma_k: int = 8
    l2_ahead: int = 0
    """How many tiles ahead of its use a tile is prefetched into L2; 0 for no prefetch."""
    gates: Gates = Gates()
    native: bool = False
    """Whether cp.async fills two buffers, with one barrier a tile (sm_80 or later)."""
    dq_parts: int = 1
    """In how many parts a native warp adds its columns of dQ: more of them take fewer registers."""
    unroll: int = 1
    """How many times a native kernel unrolls its loop over the queries of a tile."""
    dq_row_warps: int = 1
    """Warps among which the rows of a dQ tile are distributed; the others share out columns."""

    @property
    def tile_keys(self) -> int:
        """Keys per CTA."""
        return self.warps // 2 * self.warp_keys

    @property
    def warp_keys(self) -> int:
        """Keys per pair of warps."""
        return 16


@dataclass(frozen=True)
class WideConfig:
    """One CTA per 32 keys, whose columns all its warps share; tile_q queries a tile."""

    tile_q: int
    reason: str
    mma_k: int = 8
    gates: Gates = Gates()
    native: bool = False
    """Whether cp.async fills two buffers (sm_80 or later)."""
    warps: int = 8
    ctas_per_sm: int = 1
    tile_keys: int = 32
    """Keys per CTA."""
    warp_keys: int = 16
    """Keys whose scores one warp turns into gradients."""
    l2_ahead: int = 0
    """Tiles are not prefetched into L2."""
    dq_parts: int = 1
    unroll: int = 1
    dq_row_warps: int = 1

    @property
    def slices(self) -> int:
        """Warps that share the columns of the keys, and as many those of the values."""
        return self.warps // 2


AnyConfig = DkdvConfig | PairedConfig | WideConfig


# In each table: the first row whose head dim is not below max(D, Dv). "Models" is the tensor
# utilisation of the main loop on a T4 by a static model of the machine code (NVRTC 12.9.86,
# 2026-11-28, +-0.05): no Turing device has been measured. Keys and values stay in registers
# with their gradients, 3 registers for every two columns of 16 keys: 32 keys a warp to 64 columns,
# 16 to 128, and beyond that 16 keys of two warps. From 257 columns on all 8 warps share 32 keys by
# columns, so that a fragment of Q or dout serves 32 keys; 16 keys of four warps would read shared
# memory twice as much, which binds. The model of two kinds of warps together is a script that is
# not kept. With global loads of 330 cycles it had 0.44 where all warps wait at each barrier and
# bring Q and dout together, 0.52 where each kind brings its own array, and 0.55 where a half of dQ
# is added while scores become gradients (one pass, head dim 512, 2026-11-28); with 500 cycles it
# has 0.53. The whole backward of 4 x 4,096 tokens, 8 heads of 512, took an H200 20.0 ms as
# compute_75 code and 24.4 ms deterministic, 138 and 113 TFLOP/s, where heads of 256 had 163 and 108
# (a script that is not kept, 2026-11-28). With options, tiles of 16 queries spill less at
# head dims 64 and 128, and model up to 0.10 less. (8 queries at once of head dim 80, with dQ by
# rows, were slower on an H200 when the table was made; by columns no GPU has timed them.)
_TURING_ONE_PASS: dict[int, AnyConfig] = {
    40: DkdvConfig(2, 4, 32, 1, 1, 2, "models 0.62, and 0.60 with 16 queries at once"),
    64: DkdvConfig(2, 4, 32, 1, 1, 2, "models 0.73; 0.66 with 16 queries at once, which spill"),
    80: DkdvConfig(
        1, 8, 64, 1, 1, 1, "models 0.58, and 0.56 with dQ shared out by rows; 0.61 with 16 queries"
    ),
    96: DkdvConfig(1, 8, 64, 1, 2, 1, "models 0.64 and fills the 64 KB; 0.57 with 32 queries"),
    128: DkdvConfig(1, 8, 32, 1, 2, 1, "models 0.64, as with dQ shared out by columns alone"),
    160: PairedConfig(
        8, 32, 1, "models 0.56 of its bound of 0.67, for the warps of values; 0.45 with 16 queries"
    ),
    192: PairedConfig(8, 32, 1, "models 0.65, and 0.57 with tiles of 16 queries"),
    256: PairedConfig(8, 16, 1, "models 0.59 for the warps of values; K takes half of the 64 KB"),
    512: WideConfig(16, "models 0.60 for the warps of keys, 0.53 for both kinds together"),
}
_TURING_DETERMINISTIC: dict[int, AnyConfig] = {
    40: DkdvConfig(2, 4, 32, 1, 1, 2, "models 0.64, and 0.60 with 16 queries at once"),
    64: DkdvConfig(
        2, 4, 32, 1, 1, 2, "models 0.77 as two CTAs, whose barriers do not bind each other"
    ),
    80: DkdvConfig(
        1, 8, 64, 1, 4, 1, "models 0.58; 0.53 with tiles of 32 queries, 0.63 with 16 at once"
    ),
    96: DkdvConfig(1, 8, 64, 1, 2, 1, "models 0.68, and 0.60 with tiles of 32 queries"),
    128: DkdvConfig(
        1, 8, 32, 1, 1, 1, "models 0.69, and 0.64 as two CTAs of 4 warps, 0.54 with 16 at once"
    ),
    160: PairedConfig(8, 32, 1, "models 0.59, and 0.53 with tiles of 16 queries"),
    192: PairedConfig(8, 32, 1, "models 0.64, and 0.56 with tiles of 16 queries"),
    256: PairedConfig(8, 16, 1, "models 0.63; two tiles of 32 queries do not fit"),
    512: WideConfig(16, "models 0.51 for the warps of keys, 0.46 for both kinds together"),
}


# From sm_80 on the products of scores take two steps of columns in one instruction, and tiles of
# head dim 128 come to L2 ahead of their loads, as the forward's do. The backward of 65,536 tokens,
# 16 heads of 128, took an H200 357.2 ms so, and 373.3 without; under causal order 174.1 for 175.3,
# and deterministic 426.6 for 455.3 and 205.7 for 210.9. With tiles alone, and the statistics of
# queries left to the loads, one pass gained nothing: 373.3 and 178.2 (sm_90 code, 2026-11-24,
# medians of 3 by replaced rows in one process).
_L2_AHEAD = {128: 2}
_ONE_PASS_GATES = {
    40: Gates(0.63, scalar=0.55, items=0.36, kernels=0.65),
    64: Gates(0.72, items=0.29, options=0.6, most_spills=64),
    80: Gates(0.58, scalar=0.51, items=0.52, kernels=0.57),
    96: Gates(0.64, kernels=0.67),
    128: Gates(0.62, scalar=0.54, items=0.48, most_spills=64),
    160: Gates(0.56),
    192: Gates(0.65, scalar=0.5, kernels=0.62),
    256: Gates(0.59, 48, kernels=0.55, most_spills=160),
    512: Gates(0.59, 16, scalar=0.45, most_spills=48),
}
_DETERMINISTIC_GATES = {
    40: Gates(0.64, kernels=0.63),
    64: Gates(0.77, scalar=0.67, options=0.72, kernels=0.75),
    80: Gates(0.58, kernels=0.67),
    96: Gates(0.69, scalar=0.59, kernels=0.66),
    128: Gates(0.67, 16, options=0.62, most_spills=64),
    160: Gates(0.6, scalar=0.46),
    192: Gates(0.65, kernels=0.64),
    256: Gates(0.63, 16, scalar=0.43, most_spills=32),
    512: Gates(0.50, 32),
}
ONE_PASS = with_l2_ahead(with_gates(_TURING_ONE_PASS, _ONE_PASS_GATES), _L2_AHEAD)
DETERMINISTIC = with_l2_ahead(with_gates(_TURING_DETERMINISTIC, _DETERMINISTIC_GATES), _L2_AHEAD)


# For rows of whole vectors from sm_80 on, whose CTAs have 163 KB of shared memory, on sm_86 and
# sm_89 99 KB and on sm_90 227 KB: Q, dout and the statistics come by cp.async, a whole tile ahead
# of their use, and all five products are m16n8k16. Long tiles have fewer barriers. TFLOP/s are of
# whole calls of 4 x 4,096 tokens, plain and causal, 2,048 columns of heads, float16, on an H200,
# where Turing's configurations had 246 and 215 at head dim 64, 231 and 218 at 128, 191 and 171 at
# 256 (a script that is not kept, by replaced rows in one process, 2026-11-28). Shared memory binds:
# it was busy for 70 % of the cycles at head dim 128 when that had 255 TFLOP/s (ncu).
_AMPERE_ONE_PASS: dict[int, AnyConfig] = {
    40: DkdvConfig(2, 4, 64, 2, 2, 2, "two CTAs fit with tiles of 64 queries", dq_parts=2),
    64: DkdvConfig(
        *(2, 4, 64, 2, 2, 2, "319 and 290 TFLOP/s on an H200, unrolled twice 311 and 284"),
        dq_parts=2,
    ),
    80: DkdvConfig(1, 8, 64, 2, 1, 1, "tiles of 64 queries take 93 KB"),
    96: DkdvConfig(1, 8, 64, 2, 1, 1, "tiles of 64 queries take 105 KB"),
    128: DkdvConfig(1, 8, 64, 2, 1, 1, "299 and 273 TFLOP/s on an H200, 279 with dQ by rows"),
    160: PairedConfig(
        *(8, 64, 1, "tiles of 64 queries, as at head dim 256 on an H200"),
        dq_row_warps=2, dq_parts=2, unroll=2,
    ),
    192: PairedConfig(
        *(8, 64, 1, "tiles of 64 queries, as at head dim 256 on an H200"),
        dq_row_warps=2, dq_parts=2, unroll=2,
    ),
    256: PairedConfig(
        *(8, 32, 1, "tiles of 64 queries do not fit; 222 and 211 TFLOP/s on an H200"),
        dq_parts=2, unroll=2,
    ),
    512: WideConfig(16, "two tiles of 16 queries take 83 KB"),
}  # fmt: skip
_ADA_ONE_PASS: dict[int, AnyConfig] = {
    40: DkdvConfig(2, 4, 32, 2, 1, 2, "two CTAs fit with tiles of 32 queries"),
    64: DkdvConfig(2, 4, 32, 2, 2, 2, "two CTAs fill the 99 KB", dq_parts=2),
    80: DkdvConfig(1, 8, 64, 2, 1, 1, "tiles of 64 queries take 93 KB"),
    96: DkdvConfig(1, 8, 32, 2, 1, 1, "two tiles of 64 queries do not fit"),
    128: DkdvConfig(1, 8, 32, 2, 1, 1, "tiles of 32 queries take 81 KB"),
    160: PairedConfig(8, 32, 1, "tiles of 32 queries take 73 KB", dq_parts=2, unroll=2),
    192: PairedConfig(8, 32, 1, "tiles of 32 queries take 85 KB", dq_parts=2, unroll=2),
    256: PairedConfig(8, 16, 1, "two tiles of 32 queries do not fit", dq_parts=2),
    512: WideConfig(16, "two tiles of 16 queries take 83 KB"),
}
_HOPPER_ONE_PASS = _AMPERE_ONE_PASS | {
    256: PairedConfig(
        *(8, 64, 1, "245 and 231 TFLOP/s on an H200, 238 and 227 with dQ by columns alone"),
        dq_row_warps=2, dq_parts=4, unroll=2,
    ),
    512: WideConfig(
        32, "191 and 188 TFLOP/s on an H200, 175 and 172 with tiles of 16 queries; takes 167 KB"
    ),
}  # fmt: skip
_AMPERE_DETERMINISTIC: dict[int, AnyConfig] = {
    40: DkdvConfig(2, 4, 64, 2, 1, 2, "tiles of 64 queries, without spills"),
    64: DkdvConfig(2, 4, 64, 2, 1, 2, "tiles of 64 queries, as two CTAs"),
    80: DkdvConfig(1, 8, 64, 2, 1, 1, "tiles of 64 queries, without spills"),
    96: DkdvConfig(1, 8, 64, 2, 1, 1, "tiles of 64 queries, without spills"),
    128: DkdvConfig(1, 8, 64, 2, 1, 1, "tiles of 64 queries, without spills"),
    160: PairedConfig(8, 32, 1, "tiles of 32 queries take 52 KB"),
    192: PairedConfig(8, 32, 1, "tiles of 32 queries take 56 KB"),
    256: PairedConfig(8, 32, 1, "tiles of 32 queries take 72 KB"),
    512: WideConfig(16, "two tiles of 16 queries take 83 KB"),
}


def _native(rows: dict[int, AnyConfig]) -> dict[int, AnyConfig]:
    return {limit: replace(row, mma_k=16, native=True) for limit, row in rows.items()}


NATIVE_ONE_PASS = {
    80: _native(_AMPERE_ONE_PASS),
    86: _native(_ADA_ONE_PASS),
    90: _native(_HOPPER_ONE_PASS),
}
NATIVE_DETERMINISTIC = {
    80: _native(_AMPERE_DETERMINISTIC),
    90: _native(_AMPERE_DETERMINISTIC | {512: _HOPPER_ONE_PASS[512]}),
}


def dkdv_row(arch: int, head_dim: int, head_dim_v: int, one_pass: bool, vec: int = 8) -> AnyConfig:
    """Return the table row of dk and dv for these head dims, and rows of whole vectors or not."""
    tables = ONE_PASS, DETERMINISTIC
    if vec > 1 and arch >= NATIVE_ARCH:
        tables = NATIVE_ONE_PASS, NATIVE_DETERMINISTIC
    return row_of(tables[0 if one_pass else 1], arch, head_dim, head_dim_v)


@cache
def dkdv(
    arch: int,
    head_dim: int,
    head_dim_v: int,
    vec: int,
    one_pass: bool,
    options: BackwardOptions = PLAIN_BACKWARD,
    packed: bool = False,
    dtype: str = "float16",
) -> Specialisation:
    """Specialise the dK/dV kernel, which gathers dQ as well with `one_pass`."""
    row = dkdv_row(arch, head_dim, head_dim_v, one_pass, vec)
    dense, of_warps = DKDV_PAIRED_KERNEL, {}
    if isinstance(row, WideConfig):
        dense = DKDV_WIDE_KERNEL
    elif isinstance(row, DkdvConfig):
        dense = DKDV_KERNEL
        of_warps = {"M_TILES": row.m_tiles, "SUB_Q": row.sub_q}
    return modified(VARLEN[dense] if packed else dense, options.modified).specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=_dkdv_shared_bytes(row, head_dim, head_dim_v, one_pass),
        gates=row.gates,
        reason=row.reason,
        DTYPE=dtype,
        NATIVE=int(row.native),
        DQ_ROW_WARPS=row.dq_row_warps,
        DQ_PARTS=row.dq_parts,
        UNROLL=row.unroll,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        WARPS=row.warps,
        TILE_Q=row.tile_q,
        ONE_PASS=cpp_bool(one_pass),
        VEC=vec,
        MIN_CTAS=row.ctas_per_sm,
        MMA_K=row.mma_k,
        L2_AHEAD=row.l2_ahead,
        **option_macros(options),
        **of_warps,
    )


def _dkdv_shared_bytes(config: AnyConfig, head_dim: int, head_dim_v: int, one_pass: bool) -> int:
    """Sum the tile loop's buffers, or K, or V (Smem in the sources, which assert it)."""
    wide = isinstance(config, WideConfig)
    unit = 32 * config.slices if isinstance(config, WideConfig) else 8  # columns
    row, row_v = round_up(head_dim, unit) * 2, round_up(head_dim_v, unit) * 2  # bytes
    keys = config.tile_keys
    buffers = 1 if (one_pass or wide) and not config.native else 2
    parts = [buffers * config.tile_q * row, buffers * config.tile_q * row_v]
    if config.native:
        parts += [buffers * config.tile_q * 2 * FLOAT_BYTES]  # statistics
    if isinstance(config, WideConfig):
        partial_scores = config.slices * keys * config.tile_q * FLOAT_BYTES
        parts += [partial_scores] * 2 + [keys * config.tile_q * 2] * 3  # P, and dS twice
    elif one_pass:
        parts += [keys * row]
    if (one_pass and not wide) or isinstance(config, PairedConfig):
        parts += [(2 if one_pass and config.native else 1) * keys * config.tile_q * 2]  # dS
    if isinstance(config, PairedConfig):
        parts += [keys * 16 * FLOAT_BYTES]  # S, 16 queries of it
    buffered = sum(round_up(part, SMEM_UNIT) for part in parts)
    return round_up(max(buffered, keys * row, keys * row_v), SMEM_UNIT)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rows at their largest head dim in every way, scalar loads in one; options by one."""
    for number, head_dim in enumerate(rows_for(ONE_PASS, arch)):
        yield dkdv(arch, head_dim, head_dim, 8, True)
        yield dkdv(arch, head_dim, head_dim, 8, False)
        yield dkdv(arch, head_dim, head_dim, 1, number % 2 == 0)
        yield dkdv(arch, head_dim, head_dim, 8, True, packed=True)
        yield dkdv(arch, head_dim, head_dim, 8, False, packed=True)
        if arch >= NATIVE_ARCH:
            yield dkdv(arch, head_dim, head_dim, 8, True, dtype="bfloat16")
            yield dkdv(arch, head_dim, head_dim, 8, False, dtype="bfloat16")
    for options in EACH_BACKWARD_OPTION:
        yield dkdv(arch, 64, 64, 8, True, options)
    for head_dim, options in itertools.product((40, 64, 80, 128), BACKWARD_QUADS):
        yield dkdv(arch, head_dim, head_dim, 8, True, options)
