"""Golden vectors of instructions in which the lanes of a warp work together."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16
from support.golden.case import Case, make_case
from support.golden.values import random_bits

from cupyattn.runtime.arch import TURING, arch_of

_LANES = np.arange(32, dtype=np.uint32)


def _shuffle() -> Case:
    """Widths 32 to 2 with every clamp that CUDA's intrinsics make, and clamps that they do not."""
    clamps, lanes = [], []
    for width in (32, 16, 8, 4, 2):
        for last in (0, 31):
            for lane in (0, 1, 2, 3, 8, 17, 31):
                clamps.append(np.full(32, (32 - width) << 8 | last, np.uint32))
                lanes.append(np.full(32, lane, np.uint32))
    for seed in range(8):  # each lane has a lane operand of its own, some beyond 31
        odd = (0x001F, 0x0000, 0x0807, 0x1005, 0x0C1F, 0x1F00, 0x0011, 0x1818)[seed]
        clamps.append(np.full(32, odd, np.uint32))
        lanes.append(random_bits(200 + seed, 32, np.uint32) >> np.uint32(26))
    values = random_bits(210, 32 * len(lanes), np.uint32).reshape(-1, 32)
    results = np.zeros((5, len(lanes), 32), np.uint32)
    return make_case(
        "shuffle",
        "shuffle",
        len(lanes),
        {"values": values, "lanes": np.array(lanes), "clamps": np.array(clamps)},
        {"results": results, "insides": results.copy()},
    )


def _vote() -> Case:
    masks = [2**32 - 1, 2**32 - 1, 2**32 - 1, 0x0000FFFF, 0xAAAAAAAA, 0x80000001, 0x00F0, 0x1,
             0xDEADBEEF, 2**32 - 1, 0x00FFFF00, 0x7FFFFFFF]  # fmt: skip
    count = len(masks)
    votes = random_bits(220, count * 32, np.uint32).reshape(count, 32) >> np.uint32(31)
    votes[1], votes[2], votes[5], votes[10] = 0, 1, 1, 0
    # few different values, so that lanes agree; the halves differ apart from each other
    values = random_bits(221, count * 32, np.uint64).reshape(count, 32) >> np.uint64(62)
    values |= (random_bits(222, count * 32, np.uint64).reshape(count, 32) >> np.uint64(63)) << (
        np.uint64(40)
    )
    values[2], values[5], values[6] = 7, 1 << 35, np.uint64(2**64 - 1)
    values[9] = 5
    values[9, 1] |= np.uint64(1 << 63)  # the low words agree, the whole words do not
    return make_case(
        "vote",
        "vote",
        count,
        {"votes": votes, "members": np.array(masks, np.uint32), "values": values},
        {"results": np.zeros((11, count, 32), np.uint32)},
    )


def _ldmatrix() -> Case:
    count = 4
    words = random_bits(230, count * 128, np.uint32).reshape(count, 128)
    words[0] = np.arange(256, dtype=np.uint16).view(np.uint32)  # all halves different
    order = random_bits(231, count * 32, np.uint32).reshape(count, 32)
    rows = np.argsort(order, axis=1, kind="stable").astype(np.uint32)
    rows[0] = _LANES
    rows[3] = order[3] >> np.uint32(27)  # some rows more than once
    return make_case(
        "ldmatrix",
        "ldmatrix",
        count,
        {"words": words, "rows": rows},
        {
            "results": np.zeros((6, count, 32, 4), np.uint32),
            "transposed": np.zeros((count, 32), np.uint32),
        },
    )


def _copies() -> Case:
    count = 3  # 0 to 16 bytes and others, of each lane
    sizes = random_bits(241, count * 32, np.uint32).reshape(count, 32) % 17
    sizes[0] = _LANES % 17
    return make_case(
        "copies",
        "ldmatrix",
        count,
        {
            "words": random_bits(240, count * 128, np.uint32).reshape(count, 128),
            "bytes": sizes.astype(np.int32),
        },
        {"results": np.zeros((5, count, 32, 4), np.uint32)},
        entry="golden_copies",
        arch=arch_of(80),
    )


MMA_DEPTH = {"mma": 8, "mma_k16": 16, "mma_bf16": 8, "mma_bf16_k16": 16}
"""By case, k of its m16n8k8 or m16n8k16."""

MMA_PROBLEMS = (
    "a distinct", "b distinct", "a and b distinct", "random", "random", "random", "cancelling",
    "subnormals", "infinities and NaN", "float32 subnormals",
)  # fmt: skip


def _normal(seed: int, count: int) -> np.ndarray:
    """Return numbers near a normal distribution: a sum of four uniform ones."""
    uniform = random_bits(seed, 4 * count, np.uint32).reshape(4, count) * 2.0**-32
    return (uniform.sum(0) - 2) * np.sqrt(3)


def _permuted(seed: int, values: np.ndarray) -> np.ndarray:
    order = random_bits(seed, values.size, np.uint32)
    return values[np.argsort(order, kind="stable")]


def _signs(seed: int, count: int) -> np.ndarray:
    return (random_bits(seed, count, np.uint32) % 3).astype(np.float64) - 1


def mma_problem(
    kind: str, seed: int, k: int, smallest: float = 2.0**-14
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return A (two products), B (two products) and C of one warp, by lane and element.

    `smallest` is the smallest normal number of A and B.
    """
    a, b, c = _normal(seed, 32 * k), _normal(seed + 1, 16 * k), _normal(seed + 2, 128)
    numbers_a, numbers_b = np.arange(-64.0, 64.0, 8 / k), np.arange(-32.0, 32.0, 8 / k)
    distinct_a = np.concatenate([_permuted(seed + i, numbers_a) for i in (3, 4)])
    distinct_b = np.concatenate([_permuted(seed + i, numbers_b) for i in (5, 6)])
    if kind.endswith("distinct"):
        # with -1, 0 and 1 on the other side all sums are multiples of 1 or 1/2 that float16 holds
        a, b = distinct_a, distinct_b
        if kind == "a distinct":
            b = _signs(seed + 7, 16 * k)
        elif kind == "b distinct":
            a = _signs(seed + 8, 32 * k)
        c = _permuted(seed + 9, np.arange(-64.0, 64.0))
    elif kind == "cancelling":
        a, c = a * 64, c * 2.0**-6
    elif kind == "subnormals":
        a, b, c = a * smallest / 4, b * 4, c * smallest * 2.0**-6
    elif kind == "infinities and NaN":
        a[[3, 70]], a[[11]], a[[40]] = np.inf, np.nan, -np.inf
        b[[5]], b[[9]] = 0.0, np.inf
        c[[17]], c[[90]] = -np.inf, np.nan
    elif kind == "float32 subnormals":
        a, c = a * 0, c * 2.0**-130
    return a.reshape(32, k), b.reshape(32, k // 2), c.reshape(32, 4)


def mma_case(name: str, magnitudes: bool = False) -> Case:
    """Return a case of `MMA_DEPTH`; with `magnitudes` the same on the absolute values."""
    k, of_bfloats = MMA_DEPTH[name], "bf16" in name
    dtype, smallest = (bfloat16, 2.0**-126) if of_bfloats else (np.float16, 2.0**-14)
    problems = [mma_problem(kind, 300 + 20 * i, k, smallest) for i, kind in enumerate(MMA_PROBLEMS)]
    a, b, c = (np.array(arrays) for arrays in zip(*problems, strict=True))
    if magnitudes:
        a, b, c = abs(a), abs(b), abs(c)
    count = len(problems)
    return make_case(
        name,
        "mma_k16" if of_bfloats else name,
        count,
        {
            "a": a.astype(dtype).view(np.uint32),
            "b": b.astype(dtype).view(np.uint32),
            "c_single": c.astype(np.float32),
            "c_half": None if of_bfloats else c.astype(np.float16).view(np.uint32),
        },
        {
            "single": np.zeros((2, count, 32, 4), np.float32),
            "half": np.zeros((2, count, 32, 2), np.uint32),
            "chained": np.zeros((count, 32, 4), np.float32),
        },
        macros={"KIND": '"bf16"', "DEPTH": k} if of_bfloats else None,
        scratch=frozenset({"half"} if of_bfloats else ()),
        arch=TURING if name == "mma" else arch_of(80),
    )


def _mma_integer() -> Case:
    """All bit patterns; the ends of the ranges, where sums overflow int32; a single item."""
    count = 8
    a, b = (random_bits(seed, count * 64, np.uint32).reshape(count, 32, 2) for seed in (500, 501))
    c = random_bits(502, count * 64, np.uint32).reshape(count, 32, 2)
    ends = np.array([0x80808080, 0x7F7F7F7F, 0xFFFFFFFF, 0x88888888, 0x77777777], np.uint32)
    for problem, end in enumerate(ends, 1):
        a[problem], b[problem] = end, end
        b[problem, :, 1] = ends[1] if problem % 2 else end  # of the other sign, if it has one
        near = c[problem] >> np.uint32(12)
        c[problem] = np.where(near & 1, 0x80000000 + near, 0x7FFFFFFF - near)
    a[6] = 0
    a[6, 13, 0], a[6, 22, 1] = 0x00000300, 0x0A000000  # which rows of B these meet pins the layout
    c[7] = 0
    return make_case(
        "mma_integer",
        "mma_integer",
        count,
        {"a": a, "b": b, "c": c.view(np.int32)},
        {"results": np.zeros((16, 3, count, 32, 2), np.int32)},
    )


def _mma_integer_tall() -> Case:
    """As `_mma_integer`, of 16 rows: sums of 16 and of 32 products."""
    count = 8
    a = random_bits(510, count * 256, np.uint32).reshape(count, 32, 8)
    b = random_bits(511, count * 128, np.uint32).reshape(count, 32, 4)
    c = random_bits(512, count * 128, np.uint32).reshape(count, 32, 4)
    ends = np.array([0x80808080, 0x7F7F7F7F, 0xFFFFFFFF, 0x00008080], np.uint32)
    for problem, end in enumerate(ends, 1):
        a[problem], b[problem] = end, end
        b[problem, :, 2:] = ends[1] if problem % 2 else end
        if problem == 4:  # products of one sign, then of the other: where are sums limited?
            b[problem, :, 1::2] = ends[1]
        near = c[problem] >> np.uint32(12)
        c[problem] = np.where(near & 1, 0x80000000 + near, 0x7FFFFFFF - near)
    for problem in (5, 6):
        a[problem] = 0
        a[problem, 13, problem - 5 :: 2] = 0x00000300
        a[problem, 22, problem - 4] = 0x0A000000
    c[7] = 0
    return make_case(
        "mma_integer_tall",
        "mma_integer",
        count,
        {"a": a, "b": b, "c": c.view(np.int32)},
        {"results": np.zeros((16, 3, count, 32, 4), np.int32)},
        entry="golden_mma_integer_tall",
        arch=arch_of(80),
    )


def _philox() -> Case:
    count = 128
    counters = random_bits(400, 4 * count, np.uint32).reshape(count, 4)
    counters[0], counters[1] = 0, 2**32 - 1  # the known answers of Random123's test vectors
    return make_case(
        "philox",
        "philox",
        1,
        {"counters": counters},
        {"words": np.zeros_like(counters), "fields": np.zeros(count, np.uint32)},
        threads=128,
        entry="probe_philox",
        scalars={
            "count": np.int32(count),
            "key_lo": np.uint32(0xA4093822),
            "key_hi": np.uint32(0x299F31D0),
            "seed": np.uint64(0xDEADBEEF_12345678),
        },
    )


MMA = tuple(map(mma_case, MMA_DEPTH))
WARP_LEVEL = (
    _shuffle(), _vote(), _ldmatrix(), _copies(), *MMA, _mma_integer(), _mma_integer_tall(),
    _philox(),
)  # fmt: skip
