"""Launch configurations of products with few rows in float16: w streams once.

What is wanted of a row is bytes in flight: bursts of 8 to 10 loads of 16 bytes a thread, 16 to 24
warps on a multiprocessor, and enough CTAs for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from cupyattn.ops.linear.kernels_float32 import STRUCTS
from cupyattn.ops.linear.structs import THIN_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Parameter, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, rows_for
from cupyattn.runtime.tuning import USUAL, Choices

EPILOGUE: tuple[Parameter, ...] = (
    *inputs("b", "residual", optional=True),
    Pointer("preactivation", optional=True),
    Pointer("out"),
    THIN_STRUCT,
)
_PRODUCT = (*inputs("x", "w"), *EPILOGUE)
THIN = KernelSpec("linear_thin", "linear/thin/product.cu", _PRODUCT)
THIN_ROW = KernelSpec("linear_thin_row", "linear/thin/row.cu", _PRODUCT)
THIN_MERGE = KernelSpec(
    "linear_thin_merge", "linear/thin/merge.cu", (*inputs("partials"), *EPILOGUE)
)
KERNELS = (THIN, THIN_ROW, THIN_MERGE)

MAX_ROWS = 64
"""Of x. The kernel of one row apart, a CTA sums all of them."""


@dataclass(frozen=True)
class ThinConfig:
    """How a CTA shares the columns of w and k among its warps.

    Attributes
    ----------
    tile : int
        Of a warp: 16 columns each, for the tensor cores. For one row of x along N: lanes that
        share the columns, 8 each; along K 1, two columns a warp.
    steps : tuple of int
        Lengths of a burst to choose from, in steps.
    groups, k_warps : int
        Warps side by side along the columns, and warps that share columns and split K.
    ctas_per_sm : int
        Of Turing: what the compiler keeps registers for.
    """

    tile: int
    steps: tuple[int, ...]
    groups: int
    k_warps: int
    ctas_per_sm: int
    reason: str

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.groups * self.k_warps * WARP_SIZE

    def steps_for(self, inner: int, step_items: int) -> int:
        """Return the burst whose turns round the warps cover K with the fewest zeros.

        Of two the longer: more bytes in flight. A warp's whole K at once is one latency.
        """

        def covered(steps: int) -> int:
            turn = steps * step_items * self.k_warps
            return -(-inner // turn) * turn

        return min(sorted(self.steps, reverse=True), key=covered)


Table = Mapping[bool, Mapping[int, Mapping[int | None, ThinConfig]]]
"""By whether w lies along K, by the most rows of x, by the most columns of the result."""

# Chosen among a dozen for each, timed on an H200 as compute_75 code, 2026-11-22, in a sweep
# that is not kept; `benchmark linear --kind thin` times the rows as they are. Numbers are shares of
# the speed of a kernel that only reads w, over the benchmark's sizes. What binds is how many bytes
# are in flight, as on a T4, which has a quarter of that speed a multiprocessor.
_TURING: Table = {
    True: {
        1: {
            2048: ThinConfig(1, (4, 1), 1, 8, 3, "2048 x 8192: eight warps a column pair, 0.93"),
            None: ThinConfig(1, (5, 4, 2), 1, 4, 5, "CTAs are done at once: 0.92 to 0.99"),
        },
        8: {None: ThinConfig(1, (5, 4), 1, 8, 2, "16 columns: eight warps share a long K")},
        16: {
            4096: ThinConfig(1, (5, 4), 1, 8, 2, "2560 x 2560 fill the GPU: 0.73 instead of 0.65"),
            None: ThinConfig(2, (1,), 1, 8, 3, "a third CTA and short bursts: 0.83 to 0.91"),
        },
        32: {
            4096: ThinConfig(2, (2,), 1, 8, 2, "32 columns a CTA, and K in parts where it is long"),
            None: ThinConfig(2, (2,), 2, 4, 2, "two warps share what x costs: 0.64 to 0.79"),
        },
        64: {
            4096: ThinConfig(2, (2,), 1, 8, 1, "32 columns a CTA, and K in parts where it is long"),
            None: ThinConfig(2, (1,), 4, 3, 1, "twelve warps: 0.40 to 0.58, x from L1 binds"),
        },
    },
    False: {
        1: {
            4096: ThinConfig(4, (1,), 1, 20, 1, "32 columns a CTA: 2560 are 80 CTAs, 0.93"),
            32768: ThinConfig(4, (1,), 1, 8, 3, "64 bytes of a row; L2 has the rest for others"),
            None: ThinConfig(4, (1,), 2, 4, 3, "128 bytes of a row: 128256 x 2048 0.95, not 0.81"),
        },
        8: {
            4096: ThinConfig(2, (2,), 1, 16, 1, "32 columns a CTA instead of a split K"),
            None: ThinConfig(4, (1,), 1, 8, 2, "128 bytes of a row at once: 0.81 to 0.94"),
        },
        16: {
            4096: ThinConfig(2, (2,), 1, 16, 1, "as 8 rows"),
            None: ThinConfig(4, (1,), 1, 8, 2, "as 8 rows: 0.78 to 0.89"),
        },
        32: {
            4096: ThinConfig(2, (1,), 1, 8, 2, "32 columns a CTA, and K in parts where it is long"),
            None: ThinConfig(4, (1,), 1, 6, 2, "128 bytes of a row at once: 0.62 to 0.81"),
        },
        64: {
            4096: ThinConfig(2, (1,), 1, 12, 1, "32 columns a CTA: 0.37 to 0.40"),
            None: ThinConfig(2, (1,), 4, 3, 1, "as along K: 0.39 to 0.56"),
        },
    },
}  # fmt: skip
TABLE: Mapping[int, Table] = {75: _TURING}

SHARED_BYTES = 32_768
"""At most, so that two CTAs fit an SM."""
_STEP_ITEMS = 32  # k of a step on the tensor cores
_LANE_ITEMS = 8  # k of one load
_TILES_IN_FLIGHT = 8  # tiles of x that wait with a burst of w
_SPLIT_TURNS = 8
"""Turns of a CTA round its warps, below which a split of K costs more than it saves."""


@dataclass(frozen=True)
class ThinLaunch:
    """A product's kernel: the row of its table, what was chosen within it, and the grid."""

    config: ThinConfig
    along_k: bool
    vec: int
    x_tiles: int
    """Of eight rows; 0 for the kernel of one row."""
    steps: int
    tiles: int
    """CTAs along the columns."""
    splits: int
    """Parts of K."""


def thin_rows(arch: int, *, along_k: bool, rows: int) -> tuple[int, dict[str, ThinConfig]]:
    """Return what a table has for so many rows of x: its limit, and configurations by columns."""
    by_rows = rows_for(TABLE, arch)[along_k]
    limit = next(limit for limit in by_rows if rows <= limit)
    return limit, {str(columns): config for columns, config in by_rows[limit].items()}


def usual_columns(configs: Iterable[str], outer: int) -> str:
    """Return the first of the configurations' columns that are not below a result's.

    Examples
    --------
    >>> usual_columns(["2048", "None"], 3000)
    'None'
    """
    return next(name for name in configs if name == "None" or outer <= int(name))


def thin_launch(
    arch: int,
    multiprocessors: int,
    vec: int,
    *,
    along_k: bool,
    rows: int,
    inner: int,
    outer: int,
    gated: bool,
    choices: Choices = USUAL,
) -> ThinLaunch:
    """Choose for x (rows, inner) and a result of `outer` columns; w has twice as many if gated.

    `vec` is 8 where all rows of x and w are aligned to 16 bytes, or 1. K is split where columns
    alone would leave multiprocessors without their CTAs. `choices` are among the configurations
    for as many rows.
    """
    limit, among = thin_rows(arch, along_k=along_k, rows=rows)
    problem = limit, outer, inner, "gated" if gated else "plain", "nk" if along_k else "kn", vec
    config = choices.pick(THIN.entry, problem, among, usual=usual_columns(among, outer))
    x_tiles = limit // _LANE_ITEMS
    step = step_items(config, x_tiles)
    # Single items wait in registers of their own: of a longer burst some would spill.
    steps = config.steps_for(inner, step) if vec > 1 else 1
    tiles = -(-outer // (cta_columns(config, along_k, x_tiles) // (1 + gated)))
    turns = -(-inner // (step * steps * config.k_warps))
    splits = (
        min(multiprocessors * config.ctas_per_sm // tiles, turns // 2)
        if turns >= _SPLIT_TURNS
        else 1
    )
    return ThinLaunch(config, along_k, vec, x_tiles, steps, tiles, max(splits, 1))


def step_items(config: ThinConfig, x_tiles: int) -> int:
    """Return the k of a warp's step."""
    return _STEP_ITEMS if x_tiles else WARP_SIZE // config.tile * _LANE_ITEMS


def cta_columns(config: ThinConfig, along_k: bool, x_tiles: int) -> int:
    """Return the columns of w that a CTA sums."""
    return config.groups * _warp_columns(config, along_k, x_tiles)


def _warp_columns(config: ThinConfig, along_k: bool, x_tiles: int) -> int:
    if x_tiles:
        return 16 * config.tile
    return 2 if along_k else 8 * config.tile


def thin(launch: ThinLaunch, activation: str | None, gated: bool) -> Specialisation:
    """Specialise the kernel of a product.

    Where K is split it leaves float32 sums, and `merge` has the activation.
    """
    split = launch.splits > 1
    return _thin(
        launch.config,
        launch.along_k,
        launch.x_tiles,
        launch.steps,
        launch.vec,
        None if split else activation,
        not split and gated,
        "float32" if split else "float16",
    )


@cache
def _thin(
    config: ThinConfig,
    along_k: bool,
    x_tiles: int,
    steps: int,
    vec: int,
    activation: str | None,
    gated: bool,
    out: str,
) -> Specialisation:
    columns = _warp_columns(config, along_k, x_tiles)
    sizes: dict[str, Any] = {
        "VEC": vec,
        "STEPS": steps,
        "GROUPS": config.groups,
        "K_WARPS": config.k_warps,
        "MIN_CTAS": config.ctas_per_sm if vec > 1 else 1,
    }
    if x_tiles:
        pass_tiles = x_tiles
        while _thin_shared_bytes(config, columns, pass_tiles) > SHARED_BYTES:
            pass_tiles //= 2
        kernel, shared = THIN, _thin_shared_bytes(config, columns, pass_tiles)
        sizes["W_TILES"], sizes["X_TILES"] = config.tile, x_tiles
        sizes["X_SLOTS"] = min(steps, max(_TILES_IN_FLIGHT // x_tiles, 1))
        sizes["PASS_TILES"] = pass_tiles
    else:
        kernel, shared = THIN_ROW, config.groups * config.k_warps * columns * FLOAT_BYTES
        sizes["LANES"] = config.tile
    return kernel.specialise(
        threads=config.threads,
        static_shared_bytes=shared,
        W_ALONG_K=cpp_bool(along_k),
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        OUT=out,
        **sizes,
    )


def _thin_shared_bytes(config: ThinConfig, columns: int, pass_tiles: int) -> int:
    """All warps' sums for some rows, and a bias for each column (Smem in product.cu asserts it)."""
    sums = config.k_warps * pass_tiles * _LANE_ITEMS * (columns + 4)
    return config.groups * (sums + columns) * FLOAT_BYTES


_MERGE_THREADS = 128


def merge_ctas(items: int) -> int:
    """Return the grid of `merge` for so many items of the result."""
    return -(-items // _MERGE_THREADS)


@cache
def merge(activation: str | None, gated: bool) -> Specialisation:
    """Specialise the kernel that adds the parts of a split K."""
    return THIN_MERGE.specialise(
        threads=_MERGE_THREADS, ACTIVATION=STRUCTS[activation], GATED=cpp_bool(gated)
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row with vector and scalar loads, its longest burst; activations by one."""
    vec = vector_items("float16")
    for along_k, by_rows in rows_for(TABLE, arch).items():
        for limit, by_columns in by_rows.items():
            for config in by_columns.values():
                row = (config, along_k, limit // _LANE_ITEMS)
                yield _thin(*row, max(config.steps), vec, None, False, "float16")
                yield _thin(*row, 1, 1, "silu", True, "float16")
    yield _thin(config, False, 8, 1, vec, None, False, "float32")
    for activation in STRUCTS:
        yield merge(activation, activation is not None)
