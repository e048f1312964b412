"""Reordered instructions: many in one operation give what one by one would, bit for bit."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest
from support.ptx import kernel_text
from support.search import Search

from cupyattn import emulator
from cupyattn.emulator.codegen import reordering

FLOATS, WORDS, HALVES = 8, 4, 3
BINARY = ("add.f32", "add.ftz.f32", "sub.ftz.f32", "mul.f32", "mul.ftz.f32", "min.f32",
          "max.ftz.f32")  # fmt: skip
PACKED = ("cvt.rn.f16x2.f32", "cvt.rn.satfinite.f16x2.f32", "cvt.rn.bf16x2.f32",
          "cvt.rn.satfinite.bf16x2.f32")  # fmt: skip
UNARY = ("neg.f32", "neg.ftz.f32", "abs.ftz.f32", "ex2.approx.ftz.f32", "ex2.approx.f32")


class Program:
    """Random PTX on 8 floats, 4 words, 3 halves and 2 predicates of each thread."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.labels = 0
        self.uses: dict[str, int] = {}

    def register(self, kind: str) -> str:
        count = {"f": FLOATS, "r": WORDS, "h": HALVES, "p": 2}[kind]
        return f"%{kind}{self.random.randrange(count)}"

    def instruction(self) -> str:
        """Return one instruction; sometimes guarded, which cannot be stacked."""
        reg, choose = self.register, self.random.choice
        number = self.random.choice(("0f00000000", "0f80000000", "0f3F800000", "0f00000001"))
        a = number if self.random.random() < 0.2 else reg("f")
        text = choose(
            (
                f"{choose(BINARY)} {reg('f')}, {a}, {reg('f')};",
                f"{choose(BINARY)} {reg('f')}, {reg('f')}, {reg('f')};",
                f"{choose(UNARY)} {reg('f')}, {reg('f')};",
                f"fma.rn{choose(('', '.ftz'))}.f32 {reg('f')}, {reg('f')}, {a}, {reg('f')};",
                f"selp.f32 {reg('f')}, {reg('f')}, {a}, {reg('p')};",
                f"cvt.rn{choose(('', '.ftz'))}.f16.f32 {reg('h')}, {reg('f')};",
                f"{choose(PACKED)} {reg('r')}, {reg('f')}, {a};",
                f"{choose(('min', 'max'))}.bf16x2 {reg('r')}, {reg('r')}, {reg('r')};",
                f"mov.b32 {reg('r')}, {{{reg('h')}, {reg('h')}}};",
                f"mov.b32 {reg('r')}, {reg('f')};",
                f"mov.b32 {reg('f')}, {reg('r')};",
                f"mov.f32 {reg('f')}, {reg('f')};",
                f"{choose(('add.s32', 'xor.b32', 'sub.u32'))} {reg('r')}, {reg('r')}, {reg('r')};",
                f"{choose(('shl.b32', 'shr.u32'))} {reg('r')}, {reg('r')}, 7;",
                f"prmt.b32 {reg('r')}, {reg('r')}, {reg('r')}, 0x7632;",
                f"setp.lt.f32 {reg('p')}, {reg('f')}, {reg('f')};",
                f"setp.gt.u32 {reg('p')}, {reg('r')}, {reg('r')};",
                f"st.global.f32 [%rd3+{4 * (FLOATS + WORDS)}], {reg('f')};",
                f"ld.global.f32 {reg('f')}, [%rd3];",
            )
        )
        return f"@{reg('p')} {text}" if self.random.random() < 0.1 else text

    def run(self) -> list[str]:
        """Return a tile's worth of one operation on registers in a row, perhaps of its results."""
        names = "mul.ftz.f32", "add.ftz.f32", "fma.rn.ftz.f32", "ex2", self.random.choice(PACKED)
        name = self.random.choice(names)
        count, first = self.random.randrange(4, FLOATS + 1), self.random.randrange(FLOATS)
        other = self.register("f")
        lines = []
        for i in range(count):
            target, source = f"%f{(first + i) % FLOATS}", f"%f{(first + 2 * i) % FLOATS}"
            if name == "ex2":
                lines.append(f"ex2.approx.ftz.f32 {target}, {source};")
            elif name in PACKED:
                lines.append(f"{name} %r{i % WORDS}, {source}, {target};")
            elif name.startswith("fma"):
                lines.append(f"{name} {target}, {source}, {other}, {target};")
            else:
                lines.append(f"{name} {target}, {source}, {other};")
        return lines

    def product(self) -> list[str]:
        """Return a matrix product: its results are rows of a stack, too."""
        d = ", ".join(f"%f{i}" for i in range(4 * self.random.randrange(2), FLOATS)[:4])
        a, b = ", ".join(self.register("r") for _ in range(2)), self.register("r")
        return [f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{{d}}}, {{{a}}}, {{{b}}}, "
                f"{{{d}}};"]  # fmt: skip

    def straight(self, length: int) -> list[str]:
        lines = []
        for _ in range(length):
            lines += self.run() if self.random.random() < 0.15 else [self.instruction()]
        return lines

    def text(self) -> str:
        """Return a loop of two rounds, with a detour that some threads take in each."""
        lines = ["mov.u32 %r9, 0;", "ROUND:", *self.straight(12), *self.product()]
        lines += [*self.straight(8), f"@{self.register('p')} bra PAST;", *self.straight(10)]
        lines += ["PAST:", *self.straight(6), "bar.sync 0;", *self.product(), *self.straight(6)]
        lines += ["add.u32 %r9, %r9, 1;", "setp.lt.u32 %p3, %r9, 2;", "@%p3 bra ROUND;"]
        return "\n".join(lines)


STRIDE = FLOATS + WORDS + 2
LOAD = [f"ld.global.f32 %f{i}, [%rd3+{4 * i}];" for i in range(FLOATS)]
LOAD += [f"ld.global.u32 %r{i}, [%rd3+{4 * (FLOATS + i)}];" for i in range(WORDS)]
LOAD += [f"mov.b32 {{%h{i}, %h{(i + 1) % HALVES}}}, %r{i};" for i in range(HALVES)]
LOAD += ["setp.gt.f32 %p0, %f0, %f1;", "setp.gt.f32 %p1, %f2, %f3;"]
STORE = [f"st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(FLOATS)]
STORE += [f"st.global.u32 [%rd3+{4 * (FLOATS + i)}], %r{i};" for i in range(WORDS)]
PLACE = [
    "mov.u32 %r10, %tid.x; mov.u32 %r11, %ctaid.x; mov.u32 %r12, %ntid.x;",
    "mad.lo.s32 %r13, %r11, %r12, %r10; ld.param.u64 %rd1, [x];",
    f"mul.wide.u32 %rd2, %r13, {4 * STRIDE}; add.s64 %rd3, %rd1, %rd2;",
]


def execute(text: str, blocks: int, threads: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((blocks * threads, STRIDE)).astype(np.float32)
    odd = np.array([0.0, -0.0, 1e-39, -1e-39, 2.0**-126, 1e38, np.inf], np.float32)
    x = np.where(rng.random(x.shape) < 0.3, rng.choice(odd, x.shape), x)
    ptx = kernel_text("\n".join([*PLACE, *LOAD, text, *STORE]), ".param .u64 x", target=80)
    ptx = ptx.replace(".reg .pred", ".reg .b16 %h<4>;\n.reg .pred", 1)
    module = emulator.load(ptx)
    emulator.launch(module, "k", blocks, threads, [x])
    return x.view(np.uint32)


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be free: every instruction is then written in its place."""
    monkeypatch.setattr(reordering, "operation_of", lambda gen, instruction: None)
    monkeypatch.setattr(reordering, "product_of", lambda gen, instruction: None)


# The lanes of a launch decide on how stacks are kept: whole, cut, or not copied at all.
@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (3, 64), (12, 256), (32, 256)])
def test_stacked_is_as_one_by_one(blocks, threads, monkeypatch):
    count = 30 if blocks * threads < 1000 else 5
    for seed in range(count if Search.deep else count // 3):
        text = Program(seed).text()
        found = execute(text, blocks, threads, seed)
        with monkeypatch.context() as patch:
            one_by_one(patch)
            expected = execute(text, blocks, threads, seed)
        nan = np.isnan(found.view(np.float32)) & np.isnan(expected.view(np.float32))
        assert ((found == expected) | nan).all(), text


class Products:
    """Random PTX of whole numbers: chains of ``mma``, and what reads and overwrites their parts.

    8 pairs of float16 or bfloat16 of a lane are A and B, 16 floats four accumulators. All numbers
    are whole and small, so that sums are exact in any order.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kind = ("f16", "bf16")[seed % 2]

    def pair(self) -> str:
        return f"%r{self.random.randrange(8)}"

    def product(self) -> str:
        d = c = self.random.randrange(4)
        if self.random.random() < 0.2:
            d = self.random.randrange(4)
        fragments = [", ".join(f"%f{4 * n + i}" for i in range(4)) for n in (d, c)]
        a = "%r0, %r1" if self.random.random() < 0.5 else f"{self.pair()}, {self.pair()}"
        b, k = self.pair(), 8
        if self.random.random() < 0.2:
            a, b, k = f"{a}, {self.pair()}, {self.pair()}", f"{b}, {self.pair()}", 16
        return (
            f"mma.sync.aligned.m16n8k{k}.row.col.f32.{self.kind}.{self.kind}.f32 "
            f"{{{fragments[0]}}}, {{{a}}}, {{{b}}}, {{{fragments[1]}}};"
        )

    def other(self) -> str:
        f = [f"%f{self.random.randrange(16)}" for _ in range(3)]
        return self.random.choice(
            (
                f"add.f32 {f[0]}, {f[1]}, {f[2]};",
                f"@%p0 mov.f32 {f[0]}, {f[1]};",
                f"max.f32 {f[0]}, {f[1]}, {f[2]};",
                f"mov.b32 {self.pair()}, {self.pair()};",
                f"ld.global.u32 {self.pair()}, [%rd3+{4 * self.random.randrange(8)}];",
                f"st.global.f32 [%rd3+{4 * (8 + self.random.randrange(16))}], {f[0]};",
            )
        )

    def text(self) -> str:
        lines = [self.product() if self.random.random() < 0.6 else self.other() for _ in range(24)]
        return "\n".join([*lines[:18], "bar.sync 0;", *lines[18:]])


def execute_products(text: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.zeros((32, 24), np.uint32)
    kind = ml_dtypes.bfloat16 if ".bf16" in text else np.float16
    x[:, :8] = rng.integers(-2, 3, (32, 16)).astype(kind).view(np.uint32)
    x[:, 8:] = rng.integers(-9, 10, (32, 16)).astype(np.float32).view(np.uint32)
    body = ["mov.u32 %r10, %tid.x; ld.param.u64 %rd1, [x];"]
    body += ["mul.wide.u32 %rd2, %r10, 96; add.s64 %rd3, %rd1, %rd2;"]
    body += [f"ld.global.u32 %r{i}, [%rd3+{4 * i}];" for i in range(8)]
    body += [f"ld.global.f32 %f{i}, [%rd3+{32 + 4 * i}];" for i in range(16)]
    body += ["setp.gt.f32 %p0, %f0, %f1;", text]
    body += [f"st.global.u32 [%rd3+{4 * i}], %r{i};" for i in range(8)]
    body += [f"st.global.f32 [%rd3+{32 + 4 * i}], %f{i};" for i in range(16)]
    emulator.run(kernel_text("\n".join(body), ".param .u64 x", target=80), "k", 1, 32, [x])
    return x


def test_joined_products_are_as_one_by_one(monkeypatch):
    for seed in range(60 if Search.deep else 20):
        text = Products(seed).text()
        found = execute_products(text, seed)
        with monkeypatch.context() as patch:
            one_by_one(patch)
            # `run` would find the module of the first time
            expected = execute_products(text + "\n", seed)
        assert (found[:, :8] == expected[:, :8]).all(), text
        assert (found[:, 8:].view(np.float32) == expected[:, 8:].view(np.float32)).all(), text


class IntegerProducts(Products):
    """Random PTX of integer ``mma``: registers 0 to 7 are A and B, 20 to 27 four accumulators."""

    KINDS = (
        "m8n8k16.row.col.s32.s8.s8.s32",
        "m8n8k16.row.col.s32.u8.s8.s32",
        "m8n8k16.row.col.satfinite.s32.s8.s8.s32",
        "m8n8k32.row.col.s32.s4.s4.s32",
    )

    def product(self) -> str:
        d = c = self.random.randrange(4)
        if self.random.random() < 0.2:
            d = self.random.randrange(4)
        if self.random.random() < 0.3:
            return self.tall(d // 2, c // 2)
        kind = self.KINDS[0] if self.random.random() < 0.7 else self.random.choice(self.KINDS)
        d, c = (f"%r{20 + 2 * n}, %r{21 + 2 * n}" for n in (d, c))
        return f"mma.sync.aligned.{kind} {{{d}}}, {{{self.pair()}}}, {{{self.pair()}}}, {{{c}}};"

    def tall(self, d: int, c: int) -> str:
        """Return a product of 16 rows: its sums are two of the four accumulators."""
        k, limited = self.random.choice((16, 32, 32)), self.random.choice(("", "", ".satfinite"))
        a, b = (", ".join(self.pair() for _ in range(count * k // 16)) for count in (2, 1))
        sums = [", ".join(f"%r{20 + 4 * n + i}" for i in range(4)) for n in (d, c)]
        return (
            f"mma.sync.aligned.m16n8k{k}.row.col{limited}.s32.s8.u8.s32 {{{sums[0]}}}, {{{a}}}, "
            f"{{{b}}}, {{{sums[1]}}};"
        )

    def other(self) -> str:
        r = [f"%r{20 + self.random.randrange(8)}" for _ in range(3)]
        return self.random.choice(
            (
                f"add.u32 {r[0]}, {r[1]}, {r[2]};",
                f"@%p0 mov.u32 {r[0]}, {r[1]};",
                f"mov.b32 {self.pair()}, {r[0]};",
                f"ld.global.u32 {self.pair()}, [%rd3+{4 * self.random.randrange(8)}];",
                f"st.global.u32 [%rd3+{4 * self.random.randrange(16)}], {r[0]};",
            )
        )


def execute_integer_products(text: str, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).integers(0, 1 << 32, (32, 16)).astype(np.uint32)
    loaded = (*range(8), *range(20, 28))
    body = ["mov.u32 %r10, %tid.x; ld.param.u64 %rd1, [x];"]
    body += ["mul.wide.u32 %rd2, %r10, 64; add.s64 %rd3, %rd1, %rd2;"]
    body += [f"ld.global.u32 %r{r}, [%rd3+{4 * i}];" for i, r in enumerate(loaded)]
    body += ["setp.gt.u32 %p0, %r20, %r21;", text]
    body += [f"st.global.u32 [%rd3+{4 * i}], %r{r};" for i, r in enumerate(loaded)]
    emulator.run(kernel_text("\n".join(body), ".param .u64 x", target=80), "k", 1, 32, [x])
    return x


def test_joined_integer_products_are_as_one_by_one(monkeypatch):
    for seed in range(100 if Search.deep else 20):
        text = IntegerProducts(seed).text()
        found = execute_integer_products(text, seed)
        with monkeypatch.context() as patch:
            one_by_one(patch)
            expected = execute_integer_products(text + "\n", seed)
        assert (found == expected).all(), text


def test_a_tile_product_is_one_operation():
    """Two steps of k for four tiles that share A, spread between loads: one matmul, not eight."""
    lines = []
    for tile in range(4):
        for step in range(2):
            lines.append(f"ld.global.u32 %r{10 + tile}, [%rd3+{4 * tile}];")
            d = ", ".join(f"%f{4 * tile + i}" for i in range(4))
            lines.append(
                f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{{d}}}, "
                f"{{%r{2 * step}, %r{2 * step + 1}}}, {{%r{10 + tile}}}, {{{d}}};"
            )
    text = kernel_text("\n".join(["ld.param.u64 %rd3, [x];", *lines, "st.global.f32 [%rd3], %f0;"]),
                       ".param .u64 x")  # fmt: skip
    source = emulator.load(text).program("k").source
    assert source.count("matrix.multiply(") == 1


def test_arithmetic_between_stores_is_stacked():
    lines = [f"mul.f32 %f{i}, %f{i}, %f20; st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(8)]
    text = kernel_text("\n".join(["ld.param.u64 %rd3, [x];", *lines]), ".param .u64 x")
    source = emulator.load(text).program("k").source
    assert source.count("stacked(np.multiply, 8") == 1
    assert source.count("np.multiply") == 1
