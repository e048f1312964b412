"""Whole kernels on the emulator: calls, branches, state spaces, atomics, warp instructions."""

from typing import Any

import numpy as np
import pytest
from support.ptx import compile_module, kernel_text

from cupyattn import emulator
from cupyattn.emulator import Checks
from cupyattn.runtime.arch import TURING, Arch, arch_of

pytestmark = pytest.mark.nvrtc

RNG = np.random.default_rng(3)


def run(
    kernel: str, grid: Any, block: Any, *args: Any, arch: Arch = TURING, **options: Any
) -> None:
    emulator.launch(compile_module("features.cu", arch), kernel, grid, block, args, **options)


def test_calls() -> None:
    weights, offsets = [1, 2, 3, 4], np.array([0.5, -1, 3e10], "f4")

    def move(p: tuple[Any, ...], by: float, k: int) -> tuple[Any, ...]:
        if k == 7:
            return p
        return p[0] * by, p[1] + weights[k & 3], p[2] if k > 3 else offsets[k % 3]

    k = RNG.integers(0, 9, 80).astype("i4")
    out = np.zeros((80, 2), "f4")
    run("calls", 2, 40, out, k)
    for i, n in enumerate(k.tolist()):
        p = move((float(i), 2.0, 3.0), 2.0, n)
        if n & 1:
            p = move(p, 3.0, n + 1)
        assert out[i, 0] == np.float32(p[0] + p[1] + p[2])
        assert out[i, 1] == move(move((i, i, i), 2.0, n), 0.5, n + 1)[1]


def test_block_wide_reductions() -> None:
    x = RNG.standard_normal(96).astype("f4")
    out = np.zeros(96, "i4")
    module = compile_module("features.cu", TURING)
    before = int(module.symbol("counter").view("i4")[0])
    run("count_votes", 1, 96, out, x)
    n = int((x > 0).sum())
    base = n + 100000 * int((x > 2).any()) + 1000000 * int((x > -9).all())
    ballots = [int((x[:32] > 0).sum()), int((x[32:40] > 0).sum())]
    want = np.full(96, base)
    want[:32] += 1000 * ballots[0]
    want[32:40] += 1000 * ballots[1]
    np.testing.assert_array_equal(out, want)
    # a __device__ variable lives as long as the module
    assert int(module.symbol("counter").view("i4")[0]) == before + n + 1000 * ballots[0]


PER_THREAD = """
  mov.u32 %r60, %tid.x; mul.wide.u32 %rd1, %r60, 4; ld.param.u64 %rd2, [x];
  add.s64 %rd3, %rd2, %rd1; ld.global.u32 %r1, [%rd3];
"""


@pytest.mark.parametrize("uniform", [False, True])
def test_branch_tables(uniform: bool) -> None:
    body = (
        PER_THREAD
        + """
      TABLE: .branchtargets ZERO, ONE, TWO;
      brx.idx %r1, TABLE;
    ONE: add.u32 %r1, %r1, 10;
    ZERO: add.u32 %r1, %r1, 100; bra JOIN;
    TWO: mov.u32 %r1, 7;
    JOIN: st.global.u32 [%rd3], %r1;
    """
    )
    if uniform:
        body = body.replace("brx.idx %r1", "mov.u32 %r2, 2; brx.idx %r2")
    x = np.arange(32, dtype="u4") % 3
    want = np.full(32, 7) if uniform else np.choose(x, [100, 111, 7])
    emulator.run(kernel_text(body, ".param .u64 x"), "k", 1, 32, [x])
    np.testing.assert_array_equal(x, want)


def test_reductions_at_barriers_of_their_own() -> None:
    # each pair of warps has a barrier; in the second form its warps come from different places
    straight = (
        PER_THREAD
        + """
      shr.u32 %r2, %r60, 6; add.u32 %r3, %r2, 1; setp.ne.u32 %p1, %r1, 0;
      bar.red.popc.u32 %r4, %r3, 64, %p1; st.global.u32 [%rd3], %r4;
    """
    )
    split = (
        PER_THREAD
        + """
      shr.u32 %r2, %r60, 6; add.u32 %r3, %r2, 1; setp.ne.u32 %p1, %r1, 0;
      and.b32 %r5, %r60, 32; setp.eq.u32 %p2, %r5, 0; @%p2 bra EVEN;
      bar.red.popc.u32 %r4, %r3, 64, %p1; bra JOIN;
    EVEN: bar.red.popc.u32 %r4, %r3, 64, %p1;
    JOIN: st.global.u32 [%rd3], %r4;
    """
    )
    votes = RNG.integers(0, 2, 128).astype("u4")
    want = np.repeat(votes.reshape(2, 64).sum(1), 64)
    for body in (straight, split):
        x = votes.copy()
        emulator.run(kernel_text(body, ".param .u64 x"), "k", 1, 128, [x])
        np.testing.assert_array_equal(x, want)


def test_switch() -> None:
    x = RNG.integers(-1, 8, 40).astype("i4")
    out = np.zeros(34, "i4")
    run("choose", 1, 32, out, x)
    adds = 0
    for i in range(32):
        v, base = int(x[i]), int(x[0])
        if v == 0:
            r = int(x[i + 1]) * 7
        elif v == 1:
            r, adds = 3 * adds, adds + 1
        elif v == 2:
            r, base = bin(i).count("1"), int(x[3])
        elif v == 3:
            r = 32 - i.bit_length()
        elif v == 4:
            r = int(np.array([int(f"{i:032b}"[::-1], 2)], "u4").view("i4")[0])
        elif v == 5:
            r, base = (i & -i).bit_length(), int(x[1])
        elif v == 6:
            r = i // 3
        else:
            r = -1
        assert out[i] == np.int64(r + base).astype("i4"), (i, v)
    assert out[32] == 3 * adds
    assert out[33] == max([i for i in range(32) if x[i] == 3], default=0)


@pytest.mark.parametrize("number", [75, 80])  # shared memory begins at 0, and at 1,024
def test_generic_pointers_reach_every_space(number: int) -> None:
    arch = arch_of(number)
    a = RNG.standard_normal(96).astype("f4")
    a[8:] = 0
    where = np.arange(32, dtype="i4") % 3
    where[8:] = where[8:] % 2 + 1  # no two lanes on one global or shared element
    where[16:] = 2
    first = a.copy()
    with pytest.raises(emulator.SharedMemoryRaceError):  # the atomic hits what lane 31 stored
        run("generic_pointers", 1, 32, a.copy(), where, arch=arch)
    run("generic_pointers", 1, 32, a, where, arch=arch, checks=Checks.fast())
    shared = -np.arange(32, dtype="f4")
    for i in range(32):
        j = i & 7
        local = 100 * i + j
        loaded = {0: first[j], 1: shared[j], 2: local}[int(where[i])]
        stored = local + 0.5 if where[i] == 2 else local
        assert a[32 + i] == np.float32(loaded + stored), i
    assert (a[64:] == -31 + (where == 1).sum()).all()


def test_divergent_loops_reconverge() -> None:
    start = RNG.integers(1, 400, 200).astype("i4")
    steps = np.zeros(224, "i4")
    run("collatz", 7, 32, steps, np.concatenate([start, np.ones(24, "i4")]))

    def count(n: int) -> int:
        steps = 0
        while n != 1:
            n = 3 * n + 1 if n & 1 else n // 2
            steps += 1
        return steps

    counts = np.array([count(int(n)) for n in start] + [0] * 24)
    np.testing.assert_array_equal(steps, counts + 1000 * np.repeat(counts[::32], 32))


@pytest.mark.parametrize("block", [1, 7, 33, (5, 3), (4, 3, 5), (32, 4), 1024])
def test_blocks_of_any_shape(block: Any) -> None:
    shape = (block,) if isinstance(block, int) else block
    x, y, z = (*shape, 1, 1)[:3]
    threads = x * y * z
    out = np.zeros((2 * 3 * 2, threads), "i4")
    run("indices", (2, 3, 2), block, out)
    tz, ty, tx = np.indices((z, y, x))
    total = int((tx + 10 * ty + 100 * tz).sum())
    np.testing.assert_array_equal(
        out, np.broadcast_to(total * 1000 + np.arange(threads), out.shape)
    )


def test_atomics() -> None:
    i, u, wide = np.zeros(6, "i4"), np.zeros(7, "u4"), np.zeros(2, "u8")
    u[0], u[2] = 1000, 0xFFFFFFFF
    f, h, d, old = np.zeros(1, "f4"), np.zeros(2, "f2"), np.zeros(1, "f8"), np.zeros(96, "i4")
    run("atomics", 2, 48, i, u, wide, f, h, d, old)
    t = np.arange(96)
    assert i[:3].tolist() == [t.sum(), -50, 45] and i[3] in t and i[4] == 96
    assert i[5] == (t * 37 % 101).max()
    assert u[:5].tolist() == [7, 95, 0, 0xFFFF, np.bitwise_xor.reduce(t)]
    assert u[5] == 96 % 10 and u[6] == (0 - 96) % 10
    assert wide.tolist() == [int(t.sum()) << 30, 95 << 40]
    assert f[0] == t.sum() / 2 and d[0] == t.sum() / 4 and h.tolist() == [96, -96]
    assert sorted(old) == t.tolist()


def test_blocks_may_wait_for_each_other() -> None:
    turn, order, ticket = np.zeros(1, "i4"), np.full(5, -1, "i4"), np.zeros(1, "i4")
    run("take_turns", 5, 64, turn, order, ticket)  # the first to come goes last
    np.testing.assert_array_equal(order, np.arange(5)[::-1])
    assert turn[0] == ticket[0] == 5


def test_vectors_and_small_types() -> None:
    a = RNG.integers(0, 2**32, (32, 4)).astype("u4")
    b, c = np.zeros((32, 2), "u4"), RNG.integers(0, 256, 32).astype("u1")
    s, w = RNG.integers(-9000, 9000, 32).astype("i2"), RNG.integers(0, 2**63, 32).astype("u8")
    c0, s0, w0 = c.copy(), s.copy(), w.copy()
    run("vectors", 1, 32, a, b, c, s, w)
    np.testing.assert_array_equal(b[:, 0], a[:, 0] + a[:, 3])
    np.testing.assert_array_equal(b[:, 1], a[:, 1] ^ a[:, 2])
    np.testing.assert_array_equal(c, (a[:, 0] >> 24).astype("u1") + c0)
    np.testing.assert_array_equal(s, -s0)
    want = [int(w0[k]) * int(w0[k ^ 1]) >> 64 for k in range(32)]
    np.testing.assert_array_equal(w, np.array(want, "u8"))


def test_match_and_bytes() -> None:
    x = RNG.integers(0, 4, 32).astype("u4")
    out = np.zeros((3, 32), "u4")
    run("matches", 1, 32, out, x)
    for k in range(32):
        assert out[0, k] == sum(1 << j for j in range(32) if x[j] == x[k])
        source = int(x[k]).to_bytes(4, "little") + k.to_bytes(4, "little")
        picked = int.from_bytes(bytes(source[n] for n in (5, 7, 1, 3)), "little")
        assert out[2, k] == ((k << 32 | int(x[k])) << 5 >> 32) + picked + int(x[k]) * k + 3
    assert not out[1].any()
    run("matches", 1, 32, out, np.full(32, 9, "u4"))
    assert (out[1] == 0).all()  # the mask of all 32 lanes plus 1
    assert (out[0] == 0xFFFFFFFF).all()


def test_shuffles() -> None:
    out = np.zeros((6, 32), "i4")
    run("shuffles", 1, 32, out)
    k = np.arange(32)
    np.testing.assert_array_equal(out[0], np.full(32, 5))
    np.testing.assert_array_equal(out[1], np.where(k < 3, k, k - 3))
    np.testing.assert_array_equal(out[2], np.where(k % 8 + 4 < 8, k + 4, k))
    np.testing.assert_array_equal(out[3], k ^ 9)
    np.testing.assert_array_equal(out[4], k // 16 * 16 + (k * 5 + 1) % 16)
    np.testing.assert_array_equal(out[5], np.ones(32))


def test_math_library() -> None:
    erf = np.vectorize(__import__("math").erf)
    x = np.concatenate([RNG.uniform(-6, 6, 180), [0.0, -0.0, 1e-30, 80.0, -100.0]]).astype("f4")
    n = x.size
    y = np.zeros((8, n), "f4")
    run("math", 3, 64, x, y, np.int32(n))
    x8 = x.astype("f8")
    functions: list[Any] = [
        np.exp, lambda v: np.log(np.abs(v) + np.float32(1e-3)), np.tanh, erf,
        lambda v: np.sin((v.astype("f4") * np.float32(1000)).astype("f8")),
        lambda v: np.abs(v) ** np.float64(np.float32(1.7)),
        lambda v: v / np.float64(np.float32(3.1)),
        lambda v: np.fmod(v, np.float64(np.float32(0.7))),
    ]  # fmt: skip
    for row, function in enumerate(functions):
        want = function(x8)
        with np.errstate(over="ignore"):
            want = want.astype("f4")
        want[np.abs(want) < np.finfo(np.float32).smallest_normal] = 0
        np.testing.assert_allclose(y[row], want, rtol=4e-6, atol=2e-7, err_msg=str(row))


def test_half_library() -> None:
    x = RNG.uniform(-3, 3, 32).astype("f2")
    y = np.zeros((5, 32), "f2")
    run("half_math", 1, 32, x, y, np.int32(32))
    np.testing.assert_allclose(y[0], np.exp2(x.astype("f8")), rtol=2e-3)
    np.testing.assert_array_equal(y[1], np.where(x > 0, np.sqrt(np.abs(x)), -x))
    np.testing.assert_array_equal(y[2], (x.astype("f8") ** 2 + 0.5).astype("f2"))
    np.testing.assert_array_equal(y[3], np.maximum(x, np.float16(0.25)))
    np.testing.assert_array_equal(y[4], x * np.float16(2) + x * np.float16(3))


def test_results_do_not_depend_on_the_batch() -> None:
    start = RNG.integers(1, 400, 32 * 600).astype("i4")
    whole, parts = np.zeros(32 * 600, "i4"), np.zeros(32 * 600, "i4")
    run("collatz", 600, 32, whole, start)  # more than one batch
    for first in range(0, 600, 150):
        at = slice(32 * first, 32 * (first + 150))
        run("collatz", 150, 32, parts[at], start[at])
    np.testing.assert_array_equal(whole, parts)
