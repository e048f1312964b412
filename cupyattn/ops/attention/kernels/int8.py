"""Launch configurations of the forward over int8 keys, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from cupyattn.ops.attention.kernels import parameters
from cupyattn.ops.attention.kernels.modifiers import modified
from cupyattn.ops.attention.kernels.options import EACH_OPTION, PLAIN, FlashOptions
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.spec import Gates, KernelSpec, Specialisation
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import limit_of, option_macros, round_up, with_gates

REASONS = (
    "gained: scores are products of int8 on tensor cores, on Turing at twice the rate of float16, "
    "on GeForce at four times that of float16 with float32 sums; P V stays float16",
    "lost: q and k - centre keep 127 steps to each side of 0 in a row, so a score errs by about "
    "softmax_scale sqrt((a^2 |k - centre|^2 + b^2 |q|^2) / 12), with the rows' steps a and b",
)
"""Reasons of a call, for `cupyattn.explain`."""
NOT_NATIVE = (
    "not faster here: this is the kernel for 7.5. At head dims 64 and 128 an H200 has 294 and 293 "
    "TFLOP/s with it, for 392 and 406 with the exact kernels for 8.0 and later (causal 256 and "
    "274, for 369 and 384; 2026-11-29)"
)
"""A reason too, where the exact kernels have code of their own for the GPU."""

DECODE_REASONS = (
    "gained: keys are read in int8, half of the bytes of float16",
    "lost: k - centre keeps 127 steps to each side of 0 in a row, so a score errs by about "
    "softmax_scale b |q| / sqrt(12), with the row's step b; q stays as it is",
)
"""Reasons of a decoding call over int8 keys."""
_OPTION_MACROS = tuple(name for name in FlashOptions._fields if name != "dropout")


def reasons(traits: DeviceTraits) -> tuple[str, ...]:
    """Return the reasons of a call on a device."""
    return (*REASONS, NOT_NATIVE) if traits.native else REASONS


@dataclass(frozen=True)
class Int8Config:
    """One CTA per warps * m_tiles * 16 query rows; tile_k keys at a time."""

    m_tiles: int
    warps: int
    tile_k: int
    ctas_per_sm: int
    reason: str
    l2_ahead: int = 0
    """How many tiles ahead of its use a tile is prefetched into L2; 0 for no prefetch."""
    gates: Gates = Gates()
    steps: int = 1
    """Softmaxes of a tile of keys."""
    accumulator: str = "float32"
    """Type of the sums of P V within a tile of keys."""

    @property
    def tile_q(self) -> int:
        """Query rows per CTA."""
        return self.warps * self.warp_rows

    @property
    def warp_rows(self) -> int:
        """Query rows per warp."""
        return self.m_tiles * 16

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Return the bytes of Smem in forward.cuh, which asserts them."""
        k_row, v_row = round_up(head_dim, 16), round_up(head_dim_v, 8) * 2
        tiles = round_up(2 * self.tile_k * k_row, _UNIT) + round_up(2 * self.tile_k * v_row, _UNIT)
        loop = tiles + 2 * self.tile_k * 4 + self.tile_q * 4
        return round_up(max(loop, self.tile_q * 2 * k_row, self.tile_q * v_row), _UNIT)


_GROUP_KEYS = 16  # kGroupKeys in paged_keys.cuh
_UNIT = 128  # bytes: alignment of each buffer in Smem


def _models(utilisation: float, on_t4: float, on_rtx: float, others: str) -> str:
    """Return the reason of a row: tensor utilisation on a T4, rates to the exact kernel's."""
    return (
        f"models {utilisation:.2f} of a T4's tensor cores ({others}), {on_t4:.2f} of the exact "
        f"kernel's rate on a T4 and {on_rtx:.2f} on an RTX 2080 Ti (2026-11-29)"
    )


# The first row whose head dim is not below max(D, Dv). Figures are those of the main loop by the
# static model of `python -m cupyattn turing` (NVRTC 12.9.86, +-0.05). Over nine start offsets of an
# SM's two CTAs, at equal distances within an iteration, head dims 64, 96 and 128 model 0.66 to
# 0.78, 0.67 to 0.69 and 0.70 to 0.79 on a T4, and on an RTX 2080 Ti 0.89 to 0.91, 0.79 to 0.85 and
# 0.82 to 0.85 (2026-11-29). V is loaded after the softmax: loaded before it, as the float16 kernel
# does, head dims 64 and 128 model 0.71 and 0.77. An H200 that runs the same code (CUPYATTN_ARCH=75,
# 4 x 4,096 tokens of 2,048 features, 2026-11-28) has 291 TFLOP/s at head dim 64, and 281 with tiles
# brought to L2 two ahead; 295 at 128, and 261 without; the float16 kernel has 289 and 242. (Without
# them 128 models 1.25 and 1.46 of the exact kernel's rate.) With quantize_keys, 44 us there, it is
# 287 at 64 and 290 at 128, causal 242 and 263, where the float16 kernel has 287 and 249, causal 261
# and 245 (2026-11-29): a causal call has half of the tiles, all of the edges and of that pass.
_TURING = {
    64: Int8Config(2, 4, 64, 2, _models(0.72, 1.10, 1.52, "0.71 with 48 keys, 0.66 with 32")),
    96: Int8Config(2, 4, 32, 2, _models(0.68, 1.07, 1.30, "0.66 with 24 keys, 0.50 with 16")),
    128: Int8Config(
        2, 4, 16, 2, _models(0.77, 1.22, 1.39, "0.81 with 24 keys, where 12 bytes spill"), 2
    ),
    192: Int8Config(
        1, 8, 48, 1, _models(0.61, 1.11, 1.29, "0.58 with 32 keys; shared memory binds")
    ),
    256: Int8Config(
        1, 8, 32, 1, _models(0.68, 1.36, 1.54, "0.63 with 16 keys; shared memory binds")
    ),
}
# Items of a bias or mask and a capped score's steps take registers: with 64 keys 108 to 200 bytes
# spill, some of them in the main loop.
_TURING_WITH_ITEMS = {
    64: Int8Config(
        *(2, 4, 48, 2),
        "models 0.42 to 0.57 of a T4's tensor cores with items, 0.41 to 0.53 with 64 keys "
        "(2026-11-28)",
    )
}
_GATES = {
    64: Gates(0.74, 128, scalar=0.60, options=0.51, kernels=0.70, most_spills=160),
    96: Gates(0.68),
    128: Gates(0.78, kernels=0.70, most_spills=64),
    192: Gates(0.60),
    256: Gates(0.67, 32),
}


def _gains(on_rtx: float, others: str = "") -> str:
    """Return the reason of a row with float16 sums: its rate to the exact kernel's."""
    return (
        f"models {on_rtx:.2f} of the exact kernel's rate with float32 sums on an RTX 2080 Ti"
        f"{others and ', and '}{others} (2026-11-29)"
    )


# With float16 accumulators, by the same model. Over nine start offsets head dims 64, 96 and 128
# have 2.00, 1.77 and 1.89 of the exact kernel's rate in the mean. At 128 two softmaxes a tile halve
# the registers of scores, so that longer tiles do not spill, and their sums are added to float32
# ones less often. At 96 they model 0.67 to 0.78 of the tensor cores, by start offset, for 0.80 to
# 0.81 (RTX 2080 Ti); an H200 has 271 TFLOP/s with them and 273 without (2026-11-29).
_TURING_HALF_SUMS = {
    64: Int8Config(2, 4, 64, 2, _gains(1.96)),
    96: Int8Config(2, 4, 48, 2, _gains(1.77, "1.62 in two softmaxes; 16 bytes spill in the loop")),
    128: Int8Config(
        2, 4, 32, 2, _gains(1.91, "1.50 with 16 keys in one softmax, 1.56 with 32"), steps=2
    ),
    192: Int8Config(1, 8, 48, 1, _gains(1.58, "1.54 with 32 keys")),
    256: Int8Config(1, 8, 32, 1, _gains(1.57, "1.47 in two softmaxes")),
}
_HALF_SUMS_GATES = {
    64: Gates(0.82, 128, kernels=0.77),
    96: Gates(0.78, 208),
    128: Gates(0.69, 64),
    192: Gates(0.65, 32),
    256: Gates(0.66, 64),
}
_ITEMS_GATES = {64: Gates(0.42, 64)}
INT8 = with_gates(_TURING, _GATES)
INT8_HALF_SUMS = {
    limit: replace(row, accumulator="float16")
    for limit, row in with_gates(_TURING_HALF_SUMS, _HALF_SUMS_GATES).items()
}
_WITH_ITEMS = with_gates(_TURING_WITH_ITEMS, _ITEMS_GATES)

KERNEL = KernelSpec("attention_forward_int8", "attention/int8/forward.cu", parameters.INT8)
VARLEN = KernelSpec(
    "attention_forward_int8_varlen", "attention/int8/forward.cu", parameters.INT8_VARLEN
)
PAGED = KernelSpec(
    "attention_forward_int8_paged", "attention/int8/forward.cu", parameters.INT8_PAGED
)
KERNELS = (KERNEL, VARLEN, PAGED)


def int8_row(
    head_dim: int, head_dim_v: int, options: FlashOptions = PLAIN, accumulator: str = "float32"
) -> Int8Config:
    """Return the configuration for these head dims and options."""
    half_sums = accumulator == "float16"
    rows = INT8_HALF_SUMS if half_sums else INT8
    limit = limit_of(rows, head_dim, head_dim_v)
    if options.adds_items and limit in _WITH_ITEMS:
        row = _WITH_ITEMS[limit]
        return replace(row, accumulator="float16", gates=Gates()) if half_sums else row
    return rows[limit]


def paged_row(
    head_dim: int, options: FlashOptions = PLAIN, accumulator: str = "float32"
) -> Int8Config:
    """Return the configuration over a paged cache, whose tiles are whole groups of 16 keys."""
    row = int8_row(head_dim, head_dim, options, accumulator)
    return replace(row, tile_k=row.tile_k // _GROUP_KEYS * _GROUP_KEYS, l2_ahead=0)


@cache
def flash(
    head_dim: int,
    head_dim_v: int,
    vec: int,
    options: FlashOptions = PLAIN,
    spec: KernelSpec = KERNEL,
    row: Int8Config | None = None,
) -> Specialisation:
    """Specialise one of `KERNELS`.

    `vec` is 8 where rows of q, v and out are aligned to 16 bytes, or 1.
    """
    row = row or int8_row(head_dim, head_dim_v, options)
    return modified(spec, options.modified).specialise(
        threads=row.warps * WARP_SIZE,
        shared_bytes=row.shared_bytes(head_dim, head_dim_v),
        gates=row.gates,
        reason=row.reason,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        M_TILES=row.m_tiles,
        WARPS=row.warps,
        TILE_K=row.tile_k,
        STEPS=row.steps,
        VEC=vec,
        MIN_CTAS=row.ctas_per_sm,
        MMA_K=8,
        L2_AHEAD=row.l2_ahead,
        ACCUMULATOR=row.accumulator,
        **option_macros(options, _OPTION_MACROS),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row at its largest head dim, with vector and scalar loads; options by one."""
    vec = vector_items("float16")
    for head_dim in INT8:
        yield flash(head_dim, head_dim, vec)
    for head_dim in (64, 128):
        yield flash(head_dim, head_dim, vec, spec=VARLEN)
        yield flash(head_dim, head_dim, vec, spec=PAGED, row=paged_row(head_dim))
    for head_dim, row in INT8_HALF_SUMS.items():
        yield flash(head_dim, head_dim, vec, row=row)
    yield flash(128, 128, vec, spec=VARLEN, row=INT8_HALF_SUMS[128])
    yield flash(64, 64, 1)
    for options in EACH_OPTION:
        if not options.dropout:
            yield flash(64, 64, vec, options)
