"""Which kernels a call of attention runs, in which order their tiles start, and why.

`choose_forward` decides for the forward. Calls with up to 16 queries run the decode kernels, where
these are faster: "flash" gives each head of each sequence a CTA for all of its keys, with a tile of
64 to 128 query rows of which few have a query; decoding cuts the keys into equal parts for all
multiprocessors, and the query rows of a key-value head share what is read. A grid of fewer tiles
than the device takes at once leaves multiprocessors idle (few heads, some hundreds of queries, long
keys): each tile's keys are then split, a part for a CTA, and a second kernel adds the parts up
(cuda_src/attention/key_parts.cuh). Every option of the forward works so.

`interleaving` orders the grid. Under causal order the last rows of a head see all keys, the first
ones few. Multiprocessors take CTAs in the order of the grid: with one head after the other, the
long tiles of the last head start late, and most of the device waits for them. With the long tiles
of all heads first, the short ones fill the end (the longest first, Graham, 1969; FlashAttention-3's
scheduler does so too). With a block mask tiles differ too, as its lists say. And where a bias or
mask broadcasts over the batch, elements that are interleaved read its tiles once. Too many heads at
once would find nothing of each other's keys in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from cupyattn.ops.attention.checks import require_int8_call
from cupyattn.ops.attention.decode import (
    DECODE_ARITHMETIC,
    MOST_UNITS,
    launch_of,
    row_tiles_of,
    units_of,
)
from cupyattn.ops.attention.kernels import float32, int8, native
from cupyattn.ops.attention.kernels.decode import TILE_KEYS
from cupyattn.ops.attention.kernels.float32.forward import FloatFlashConfig
from cupyattn.ops.attention.kernels.int8 import Int8Config
from cupyattn.ops.attention.kernels.native import NativeConfig
from cupyattn.ops.attention.kernels.options import FlashOptions
from cupyattn.ops.attention.kernels.teaching.forward import MOST_TILED_DIM
from cupyattn.ops.attention.kernels.tensor_core import forward as tensor_core
from cupyattn.ops.attention.kernels.tensor_core.forward import (
    TALL,
    FlashConfig,
    admissible_rows,
    flash_longest_tile,
    flash_row,
    half_sums_row,
)
from cupyattn.ops.attention.options import (
    ALL_OPTIONS,
    DECODE_OPTIONS,
    INT8_OPTIONS,
    TEACHING_OPTIONS,
)
from cupyattn.ops.attention.params import (
    flash_options,
    require_near_rows,
    score_strides,
    whole_vectors,
)
from cupyattn.ops.attention.problem import AttentionArrays, AttentionProblem, Outputs, with_results
from cupyattn.ops.attention.rotary import in_scratch
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.checks import require_kernel_dtype
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import error
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES, vector_items

_CPU = "pass NumPy arrays, for example cupy.asnumpy(q), or leave backend('emulator')"
MAX_QUERIES = 16
"""Query tokens of a sequence that are decoded although a forward has the keys, paged or dense.

Its tiles have at least four times as many rows.
"""

Implementations = Mapping[tuple[str, str], frozenset[str]]
"""The options that kernels have, by the name of the implementation and that of the dtype."""


def _implementations(**options: frozenset[str]) -> Implementations:
    return {(name, dtype): having for name, having in options.items() for dtype in STORAGE}


_DENSE = _implementations(flash=ALL_OPTIONS, tiled=TEACHING_OPTIONS, naive=TEACHING_OPTIONS)
_INT8: Implementations = {("int8", "float16"): INT8_OPTIONS}
_FLASH = _implementations(flash=ALL_OPTIONS)
IMPLEMENTATIONS: Mapping[str, Implementations] = {
    "attention": {**_DENSE, **_INT8},
    "attention_backward": _implementations(flash=ALL_OPTIONS, naive=TEACHING_OPTIONS),
    "attention_varlen": {**_FLASH, **_INT8},
    "attention_varlen_backward": _FLASH,
}


class Interleaving(NamedTuple):
    """The heads and batch elements whose tiles are interleaved: first tiles before second ones."""

    kv_heads: int
    """Key-value heads, each with the query heads of its group; 0: query heads are not either."""
    batches: int
    """Batch elements among them, whose like heads are neighbours."""


Configuration: TypeAlias = FlashConfig | FloatFlashConfig | Int8Config | NativeConfig


class ForwardChoice(NamedTuple):
    """The kernels of one forward call, and why they run it."""

    kernels: str
    """Either "naive", "tiled", "decode", "float32", "int8", "tensor_core" or "native"."""
    reasons: tuple[str, ...]
    problem: AttentionProblem
    """The call as these kernels get it: with q or k in scratch memory where they are rotated."""
    laid: AttentionArrays[Layout]
    """Its layouts with those of the results."""
    rotated: tuple[str, ...] = ()
    """Arrays that a launch before rotates: k alone where the kernel rotates queries itself."""
    interleaving: Interleaving = Interleaving(0, 1)
    configuration: Configuration | None = None
    options: FlashOptions = FlashOptions()
    vec: int = 1
    splits: int = 1


def choose_forward(
    problem: AttentionProblem, outputs: Outputs, traits: DeviceTraits
) -> ForwardChoice:
    """Choose the kernels of a forward call, of a batch or of packed sequences."""
    chosen = problem.options.implementation
    if chosen == "int8":
        return _choose_int8(problem, outputs, traits)
    if chosen != "flash":
        laid = with_results(problem, outputs)
        return ForwardChoice(chosen, (f"implementation={chosen!r} was passed",), problem, laid)
    rotary = problem.layouts.cos is not None
    dtype, dims = problem.dtype.name, (problem.head_dim, problem.head_dim_v)
    kernels = kernels_of(dtype, traits)
    half_sums = problem.options.accumulator == "float16"
    if half_sums:
        require_half_sum_kernels(kernels, dims, traits)
    if reason := _reason_to_decode(problem, traits):
        rotated: tuple[str, ...] = ("q", "k") if rotary else ()
        inner = in_scratch(problem, rotated) if rotated else problem
        laid = with_results(inner, outputs)
        how_decoded = DECODE_ARITHMETIC[launch_of(inner, traits).tensor_cores]
        why = (reason, how_decoded.format(dtype=dtype), *([DECODED_SUMS] if half_sums else []))
        return ForwardChoice("decode", why, inner, laid, rotated)
    reasons = [arithmetic(kernels, dtype), *([HALF_SUMS] if half_sums else [])]
    inner, rotated = problem, ()
    if rotary and kernels == "tensor_core" and _rotates_queries(problem, traits):
        inner, rotated = in_scratch(problem, ("k",), ()), ("k",)
        reasons.append("the kernel rotates queries as it loads them, a launch before it the keys")
    elif rotary:
        inner, rotated = in_scratch(problem, ("q", "k")), ("q", "k")
        reasons.append("a launch before rotates queries and keys")
    laid = with_results(inner, outputs)
    together = interleaving(problem, traits)
    if together.kv_heads > 1:
        reasons.append(f"tiles of {together.kv_heads} key-value heads are interleaved in the grid")
    configuration, options, vec = _CONFIGURE[kernels](inner, laid, traits)
    splits = 1 if inner.layouts.cos is not None else num_splits(inner, configuration, traits)
    if splits > 1:
        reasons.append(f"query tiles are too few to fill the GPU: keys are split {splits} ways")
    how = rotated, together, configuration, options, vec, splits
    return ForwardChoice(kernels, tuple(reasons), inner, laid, *how)


def _choose_int8(
    problem: AttentionProblem, outputs: Outputs, traits: DeviceTraits
) -> ForwardChoice:
    """Choose the kernel over int8 keys, or raise NotImplementedError for what it does not have."""
    require_int8_call(problem, traits)
    laid = with_results(problem, outputs)
    options = flash_options(problem, 2)
    row = int8.int8_row(problem.head_dim, problem.head_dim_v, options, problem.options.accumulator)
    require_near_rows(problem, ("k", "v"), row.tile_k)
    vec = whole_vectors(vector_items("float16"), problem, laid, ("q", "v", "out"))
    together = interleaving(problem, traits)
    how: tuple[Any, ...] = ((), together, row, options, vec)
    reasons = int8.reasons(traits)
    reasons += (HALF_SUMS,) if problem.options.accumulator == "float16" else ()
    return ForwardChoice("int8", reasons, problem, laid, *how)


HALF_SUMS = "sums of a tile of keys are float16: accumulator='float16' was passed"
"""The reason for kernels with float16 accumulators."""
DECODED_SUMS = "accumulator='float16' changes nothing: decode kernels have float32 sums"
_MOST_HALF_SUMS = 256
"""The largest D and Dv of kernels with float16 accumulators."""
_ARITHMETIC = {
    "native": "{dtype} runs on tensor cores, with cp.async and mma.m16n8k16",
    "tensor_core": "{dtype} runs on tensor cores",
    "float32": "{dtype} runs in float32 arithmetic on this GPU",
}


def arithmetic(kernels: str, dtype: str) -> str:
    """Return the reason for the kernels of a dtype: "native", "tensor_core" or "float32"."""
    return _ARITHMETIC[kernels].format(dtype=dtype)


def kernels_of(dtype: str, traits: DeviceTraits) -> str:
    """Name the kernels that run the forward of a dtype."""
    if traits.native and dtype in native.DTYPES:
        return "native"
    return "tensor_core" if traits.has_mma(dtype) else "float32"


def require_half_sum_kernels(kernels: str, dims: tuple[int, int], traits: DeviceTraits) -> None:
    """Raise NotImplementedError unless the forward's kernels have float16 accumulators."""
    if kernels == "tensor_core" and max(dims) > _MOST_HALF_SUMS:
        raise error(
            NotImplementedError,
            f"accumulator='float16' with a head dim of {max(dims)}",
            f"its kernels take head dims up to {_MOST_HALF_SUMS}",
            "leave it out",
        )
    if kernels != "tensor_core":
        has = {
            "native": "kernels for 8.0 and later accumulate in float32, in which data centre GPUs "
            "multiply as fast",
            "float32": "without tensor cores kernels compute in float32",
        }
        raise error(
            NotImplementedError,
            f"accumulator='float16' on a GPU of compute capability {traits.arch / 10}",
            f"it is for GPUs of 7.5 with tensor cores: {has[kernels]}",
            "leave it out",
        )


def require_kernels(problem: AttentionProblem, table: Implementations, function: str) -> None:
    """Raise unless an implementation has kernels for a problem.

    Raises
    ------
    NotImplementedError
        If there are none, or they lack an option or the head dims of the problem.
    """
    require_kernel_dtype("q", problem.dtype)
    name = problem.options.implementation
    chosen = table.get((name, problem.dtype.name))
    if chosen is None:
        others = [other for other, dtype in table if dtype == problem.dtype.name]
        raise error(
            NotImplementedError,
            f"{function} with implementation={name!r} on a GPU or the emulator",
            f"kernels are {' and '.join(map(repr, others))}; the CPU path has every implementation",
            f"pass implementation={others[0]!r}, or {_CPU}",
        )
    missing = sorted(problem.refusable_options - chosen)
    if missing:
        having = [
            other
            for (other, dtype), each in table.items()
            if dtype == problem.dtype.name and problem.refusable_options <= each
        ]
        instead = f"pass implementation={having[0]!r}, or " if having else ""
        raise error(
            NotImplementedError,
            f"{', '.join(missing)} in {function} on a GPU or the emulator with "
            f"implementation={name!r}",
            "its kernels do not have it; the CPU path has every option",
            instead + _CPU,
        )
    largest = max(problem.head_dim, problem.head_dim_v)
    if name == "tiled" and largest > MOST_TILED_DIM:
        raise error(
            NotImplementedError,
            f"a head dim of {largest} in {function} on a GPU or the emulator with "
            f"implementation={name!r}",
            f"its kernel takes head dims up to {MOST_TILED_DIM}; the CPU path takes all",
            f"pass implementation='flash', or {_CPU}",
        )
    for option, given in problem.functions.given.items():
        if given.expression:
            continue
        kind = "ScoreMod" if option == "score_mod" else "MaskMod"
        raise error(
            NotImplementedError,
            f"{option} in {function} on a GPU or the emulator, a Python function",
            f"kernels are compiled from a {kind}; the CPU path has every option",
            f"pass {option}=cupyattn.{kind}(...), an expression in CUDA C++, or {_CPU}",
        )


LEAST_DECODED_KEYS = 256
"""Keys that a query may see. Timed on an H200 as compute_75 code (2026-11-22), decoding was faster
than flash from there on, of one sequence and of many. For half as many keys of one sequence they
took about as long, and the second launch weighs on the host."""


# With rotary a launch before rotates q, and all of k: by the emulator's count of bytes (one query,
# 32 heads on 8 of 128, 1,024 keys of float16) k and v are then 5.1 times k instead of 2.0: k is
# read and written once more, and the tables are as large. Rotated in the tile loop, each key-value
# head would read the tables again, for a pair of features twice its own bytes, and hold them in
# registers together with the tiles of keys on their way. Decoding loops keep rotated keys
# (append_kv), and read none of this.

# Passes over K and V that take as long as flash's tile loop for one head where its grid fills the
# device.
# Of a T4 (320 GB/s; 65 and 8.1 TFLOP/s, of which flash reaches about 0.8) at head dim 128: 1.6 ns
# a key and pass of float16, 1.26 a key and head; 3.2 and 8 of float32.
_PASSES_OF_A_LOOP = 0.75  # on tensor cores
_PASSES_OF_A_FLOAT_LOOP = 2.0
_FLASH_CTAS_PER_SM = 2


def _reason_to_decode(problem: AttentionProblem, traits: DeviceTraits) -> str:
    """Return why the decode kernels run a call; nothing where they have not all of it, or lose."""
    has_kernels = (
        problem.head_dim == problem.head_dim_v
        and not problem.refusable_options - DECODE_OPTIONS
        and problem.batch * problem.heads * problem.sq > 0
        and problem.sk >= TILE_KEYS
    )
    if problem.packed or not has_kernels or not _decodes_faster(problem, traits):
        return ""
    keys = _keys_seen(problem)
    return f"Sq = {problem.sq} is at most {MAX_QUERIES}, with up to {keys} keys: decode kernels"


def _decodes_faster(problem: AttentionProblem, traits: DeviceTraits) -> bool:
    """Compare passes over K and V with flash's tile loops, one for each head.

    Those use no more of the device than their grid fills.
    """
    if problem.sq > MAX_QUERIES or _keys_seen(problem) < LEAST_DECODED_KEYS:
        return False
    launch = launch_of(problem, traits)
    if units_of(problem, launch) > MOST_UNITS:
        return False
    filled = min(1.0, problem.batch * problem.heads / (traits.multiprocessors * _FLASH_CTAS_PER_SM))
    on_tensor_cores = kernels_of(problem.dtype.name, traits) != "float32"
    passes = _PASSES_OF_A_LOOP if on_tensor_cores else _PASSES_OF_A_FLOAT_LOOP
    group = problem.heads // problem.kv_heads
    return row_tiles_of(problem, launch) * filled <= max(1.0, passes * group)


def _keys_seen(problem: AttentionProblem) -> int:
    """Return how many keys the window leaves for all queries together, at the most."""
    left, right = problem.window
    if left is None or right is None:
        return problem.sk
    return min(problem.sk, left + problem.sq + right)


_TALL_GAIN = 1.05
"""How many more rows tall tiles may compute: they model 1.12 of the others' speed."""
_SCORES_TOGETHER = 2  # neighbouring keys of a row that a thread holds, in float32 arithmetic
LEAST_KEYS = 256
"""The fewest keys of a split."""
_CTA_KEYS = 128
"""The fixed cost of a split, in keys: it begins and ends."""
_ROW_KEYS = 4
"""The cost of each row of a split, in keys: float32 sums are written and read again. By the
bytes of 128 rows and the products of 64 keys it is about 3 on a T4, an estimate. A causal call
of 1 x 2,048 tokens, 16 heads of 128, took 0.134 ms in 3 parts on an H200, where one of the code
before took 0.120 ms whole (compute_75 code, 2026-11-22, `benchmark attention --tokens 2048
--seqlen 2048 --options causal`)."""
_COMBINE_KEYS = 128
"""The cost of the second launch, in keys."""
_MOST_WAVES = 4
"""The most waves of CTAs: scratch memory holds the sums of all of them."""


def num_splits(problem: AttentionProblem, row: Configuration, traits: DeviceTraits) -> int:
    """Return into how many parts the keys of each tile of query rows are cut; 1 for none.

    CTAs run in waves, and a wave is as long as a split: of the numbers of splits that leave
    LEAST_KEYS to each, the one with the least waves * (keys of a split + its fixed cost), if
    it saves more than _COMBINE_KEYS. Packed sequences are not split, nor are tiles that fill the
    device, nor what a block mask leaves.
    """
    if problem.packed or problem.layouts.block_mask is not None:
        return 1
    heads, slots = problem.batch * problem.heads, traits.multiprocessors * row.ctas_per_sm
    tiles = heads * -(-problem.sq // row.tile_q)
    keys = _keys_of_tiles(problem, row.tile_q) if 0 < tiles < slots else ()
    longest = max(keys, default=0)
    best, least = 1, longest + _CTA_KEYS
    fixed = _CTA_KEYS + _ROW_KEYS * min(row.tile_q, problem.sq)
    for splits in range(2, min(longest // LEAST_KEYS, _MOST_WAVES * slots // max(tiles, 1)) + 1):
        part = -(-longest // splits)
        waves = -(-heads * sum(-(-each // part) for each in keys) // slots)
        cost = waves * (part + fixed) + _COMBINE_KEYS
        if cost < least:
            best, least = splits, cost
    return best


def _keys_of_tiles(problem: AttentionProblem, tile_q: int) -> tuple[int, ...]:
    """Return how many keys each tile of query rows of a head sees.

    Where the device alone knows the positions of queries, it is what the window leaves at the most.
    All keys are taken to be in use.
    """
    sq, sk, (left, right) = problem.sq, problem.sk, problem.window
    offset = sk - sq if problem.q_offset is None else problem.q_offset
    seen = []
    for first in range(0, sq, tile_q):
        last = min(first + tile_q, sq) - 1
        if problem.layouts.q_offset is not None:
            reach = sk if left is None or right is None else left + right + last - first + 1
            seen.append(min(reach, sk))
            continue
        begin = 0 if left is None else max(first + offset - left, 0)
        end = sk if right is None else min(last + offset + right + 1, sk)
        seen.append(max(end - begin, 0))
    return tuple(seen)


def _float32_configuration(
    problem: AttentionProblem, laid: AttentionArrays[Layout], traits: DeviceTraits
) -> tuple[FloatFlashConfig, FlashOptions, int]:
    """Return the configuration of float32 arithmetic, its options, and the items of a load."""
    vec = whole_vectors(float32.forward.VECTOR_ITEMS, problem, laid, ("q", "k", "v", "out"))
    options = flash_options(problem, _SCORES_TOGETHER)
    return (
        float32.forward.flash_row(traits.arch, problem.head_dim, problem.head_dim_v),
        options,
        vec,
    )


def _tensor_core_configuration(
    problem: AttentionProblem, laid: AttentionArrays[Layout], traits: DeviceTraits
) -> tuple[FlashConfig, FlashOptions, int]:
    """Return the configuration on tensor cores, its options, and the items of a load.

    Dense calls that take the plain table's configuration get what was chosen for the device, but
    not under dropout, for whose random numbers tiles are whole or half of 32 keys.
    """
    dims = problem.head_dim, problem.head_dim_v
    require_near_rows(problem, ("k", "v"), flash_longest_tile(traits.arch, *dims))
    vec = whole_vectors(vector_items(problem.dtype.name), problem, laid, ("q", "k", "v", "out"))
    together = 2 if problem.options.dropout_p else 4  # a Philox call serves pairs of keys
    options = flash_options(problem, together)
    if problem.options.accumulator == "float16":
        return half_sums_row(traits.arch, *dims, options), options, vec
    among = admissible_rows(traits.arch, *dims)
    (name, plain), *_ = among.items()
    usual = flash_row(traits.arch, *dims, options)
    layouts = problem.layouts
    fixed = problem.packed or layouts.cos is not None or layouts.block_mask is not None
    if fixed or options.dropout or usual is not plain:
        return usual, options, vec
    tall = among.get(TALL)
    if tall and vec > 1 and not options.adds_items:  # which leaves registers
        computed, in_plain = (-(-problem.sq // row.tile_q) * row.tile_q for row in (tall, plain))
        name = TALL if computed <= _TALL_GAIN * in_plain else name
    chosen = traits.choices.pick(tensor_core.KERNEL.entry, dims, among, usual=name)
    return chosen, options, vec


def _native_configuration(
    problem: AttentionProblem, laid: AttentionArrays[Layout], traits: DeviceTraits
) -> tuple[NativeConfig, FlashOptions, int]:
    """Return the configuration from sm_80 on, its options, and the items of a load."""
    dims = problem.head_dim, problem.head_dim_v
    together = 2 if problem.options.dropout_p else 4  # a Philox call serves pairs of keys
    options = flash_options(problem, together)
    row = native.chosen_row(traits, *dims, options, packed=problem.packed)
    require_near_rows(problem, ("k", "v"), row.tile_k)
    vec = whole_vectors(vector_items(problem.dtype.name), problem, laid, ("q", "k", "v", "out"))
    return row, options, vec


_Configured: TypeAlias = tuple[Configuration, FlashOptions, int]
_CONFIGURE: Mapping[
    str, Callable[[AttentionProblem, AttentionArrays[Layout], DeviceTraits], _Configured]
] = {
    "native": _native_configuration,
    "tensor_core": _tensor_core_configuration,
    "float32": _float32_configuration,
}


def _rotates_queries(problem: AttentionProblem, traits: DeviceTraits) -> bool:
    """Tell whether the kernel rotates query rows as it loads them: whole chunks.

    Where keys are split several CTAs would rotate the same rows. With a block mask it does not.
    """
    starts, cos, sin = problem.starts, problem.layouts.cos, problem.layouts.sin
    if cos is None or sin is None or problem.layouts.block_mask is not None:
        return False
    row = flash_row(traits.arch, problem.head_dim, problem.head_dim_v)
    if num_splits(problem, row, traits) > 1:
        return False
    rotated = cos.shape[1] * (2 if problem.options.interleaved else 1)
    aligned = all(
        start == 0 and table.strides[0] % VECTOR_BYTES == 0
        for start, table in ((starts.cos, cos), (starts.sin, sin))
    )
    return aligned and rotated % vector_items(problem.dtype.name) == 0


_TIMES_L2 = 2
"""So many times the bytes of L2 may K and V of the heads have. A CTA of 128 rows alone does 128
operations for each byte of them, of which a T4 wants 170 at 0.85 of its tensor cores: one reading
in two may miss."""

# Causal over plain calls by `python -m support.grid_order` (a simulation, 2026-11-22), forward of
# 1 x 2,048 tokens of 32 heads, at head dims 64, 80, 128, 192, 256: with one head after the other
# 1.72, 1.71, 1.72, 1.74, 1.74 on a T4's 40 multiprocessors and 1.18, 1.16, 1.18, 1.47, 1.47 on an
# H200's 132; in this order 1.97, 1.96, 1.97, 1.85, 1.85 and 1.83, 1.82, 1.83, 1.83, 1.83. The
# backward of head dim 128 gains from 1.74 to 1.85, and from 1.47 to 1.83.


def interleaving(
    problem: AttentionProblem,
    traits: DeviceTraits,
    *,
    backward: bool = False,
    prompts: bool = False,
) -> Interleaving:
    """Return how many key-value heads are interleaved in the grid, of how many batch elements.

    Heads are interleaved where their tiles differ: under causal order, and with a block mask, whose
    lists say which come first. With each come all query heads of its group, which share its keys.
    It is as many as leave each query head some CTAs at a time, and as L2 has room for: for keys and
    values, in the backward for queries and their gradients too. It divides B * G; or G of packed
    prompts, whose order is that of their sequences. (Of packed sequences those with equally many
    tiles are interleaved, and the last heads of these may be fewer.)

    Batch elements are interleaved where a bias or mask broadcasts over them: its tiles are read
    from memory once then, and by the others from L2. (With all heads interleaved, a forward of 4 x
    2,048 tokens of 16 heads of 64 on an H200 read 306 MB for 576: ncu on a patched tree that is not
    kept, CUPYATTN_ARCH=75, 2026-11-24. This rule has not been measured.)
    """
    left, right = problem.window
    sequences = problem.kv_heads if prompts else problem.batch * problem.kv_heads
    uneven = (left is None and right is not None) or problem.layouts.block_mask is not None
    sharing = 1 if prompts else _batches_alike(problem)
    if not (uneven or sharing > 1) or not sequences * problem.heads:
        return Interleaving(0, 1)
    group = problem.heads // problem.kv_heads
    rows = max(problem.sk, group * problem.sq if backward else 0)
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    room = traits.multiprocessors // 2 // group
    most = max(1, min(room, _TIMES_L2 * traits.l2_bytes // max(rows * row_bytes, 1)))
    batches = _largest_divisor(sharing, most)
    if not uneven:
        return Interleaving(batches if batches > 1 else 0, batches)
    return Interleaving(batches * _largest_divisor(sequences // batches, most // batches), batches)


def _batches_alike(problem: AttentionProblem) -> int:
    """Return how many batch elements have one bias or mask; 1 of packed sequences."""
    both = problem.layouts.bias, problem.layouts.mask
    given = [layout for layout in both if layout is not None]
    if problem.packed or not given:
        return 1
    one = any(score_strides(layout, problem.scores_shape)[0] == 0 for layout in given)
    return max(problem.batch, 1) if one else 1


def _largest_divisor(number: int, most: int) -> int:
    return max(count for count in range(1, max(most, 1) + 1) if number % count == 0)
