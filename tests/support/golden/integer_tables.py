"""Integer and logic instructions.

Not there because their result is unspecified: division by zero, bit fields beyond position or
length 255. Not there because the emulator has
not: the carry flag, sad.
"""

from __future__ import annotations

import numpy as np
from support.golden.elementwise import Instruction, Table, comparison
from support.golden.values import integers, joined, pairs, random_bits

_MODES = ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")
_TABLES = (0x96, 0xE8, 0xCA, 0x80, 0xFE, 0x1B, 0x00, 0xFF, 0x2D)
_BYTES = ("u32.u32", "u32.s32", "s32.u32", "s32.s32")


def _instructions(result: str, *opcodes: str) -> tuple[Instruction, ...]:
    return tuple(Instruction(opcode, result) for opcode in opcodes)


def _edges(dtype: type) -> np.ndarray:
    top = 2 ** (8 * np.dtype(dtype).itemsize)
    values = [0, 1, 2, 3, 10, top // 2 - 1, top // 2, top // 2 + 1, top - 1, top - 2, top - 7,
              2**16 - 1, 2**24 + 1]  # fmt: skip
    return np.array(values, dtype)


def _unary(size: int) -> Table:
    dtype = {4: np.uint32, 8: np.uint64}[size]
    bits = 8 * size
    counts = [f"{root}.b{bits}" for root in ("popc", "clz")]
    counts += [f"bfind{s}.{t}{bits}" for s in ("", ".shiftamt") for t in "us"]
    values = [f"{root}.b{bits}" for root in ("brev", "not", "cnot")]
    values += [f"{root}.s{bits}" for root in ("abs", "neg")]
    return Table(
        f"b{bits}_unary",
        (f"b{bits}",),
        (integers(100 + size, dtype, 40),),
        _instructions("b32", *counts) + _instructions(f"b{bits}", *values),
    )


def _binary(size: int) -> Table:
    dtype = {4: np.uint32, 8: np.uint64}[size]
    bits = 8 * size
    typed = [f"{root}.{t}{bits}" for root in ("mul.lo", "mul.hi", "min", "max") for t in "us"]
    typed += [f"{root}.{t}{bits}" for root in ("add", "sub") for t in "us"]
    typed += [f"{root}.b{bits}" for root in ("and", "or", "xor")]
    comparisons = tuple(
        comparison(f"setp.{name}.{t}{bits}")
        for t in "us"
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    )
    instructions = _instructions(f"b{bits}", *typed) + comparisons
    if size == 4:
        instructions += _instructions("b64", "mul.wide.u32", "mul.wide.s32")
        instructions += _instructions("b32", "add.sat.s32", "sub.sat.s32")
        instructions += _instructions(
            "b32", *(f"mul24.{part}.{t}32" for part in ("lo", "hi") for t in "us")
        )
    edges = _edges(dtype)
    random = tuple(random_bits(110 + size + i, 60, dtype) for i in range(2))
    operands = joined(pairs(edges, edges), random)
    return Table(f"b{bits}_binary", (f"b{bits}",) * 2, operands, instructions)


def _division(size: int) -> Table:
    dtype = {4: np.uint32, 8: np.uint64}[size]
    bits = 8 * size
    edges = _edges(dtype)
    divisors = edges[edges != 0]
    a, b = joined(
        pairs(edges, divisors),
        tuple(random_bits(120 + size + i, 60, dtype) for i in range(2)),
        (random_bits(130, 60, dtype), random_bits(131, 60, dtype) >> dtype(bits - 12) | dtype(1)),
    )
    opcodes = [f"{root}.{t}{bits}" for root in ("div", "rem") for t in "us"]
    return Table(
        f"b{bits}_division", (f"b{bits}",) * 2, (a, b), _instructions(f"b{bits}", *opcodes)
    )


def _shifts() -> tuple[Table, Table]:
    amounts = np.array([0, 1, 5, 15, 16, 31, 32, 33, 63, 64, 65, 255, 256, 2**32 - 1], np.uint32)
    tables = []
    for dtype, bits in ((np.uint32, 32), (np.uint64, 64)):
        values = np.concatenate([_edges(dtype), random_bits(140 + bits, 6, dtype)])
        opcodes = (f"shl.b{bits}", f"shr.u{bits}", f"shr.s{bits}")
        tables.append(
            Table(
                f"b{bits}_shift",
                (f"b{bits}", "b32"),
                pairs(values, amounts),
                _instructions(f"b{bits}", *opcodes),
            )
        )
    return tables[0], tables[1]


def _ternary() -> Table:
    edges = _edges(np.uint32)[[0, 1, 4, 5, 6, 8, 12]]
    operands = joined(
        pairs(edges, edges, edges[::2]),
        tuple(random_bits(150 + i, 100, np.uint32) for i in range(3)),
    )
    opcodes = [f"mad.{part}.{t}32" for part in ("lo", "hi") for t in "us"]
    opcodes += [f"dp4a.{types}" for types in _BYTES]
    opcodes += [f"dp2a.{half}.{types}" for half in ("lo", "hi") for types in _BYTES]
    lookups = tuple(Instruction("lop3.b32", "b32", f", {table:#04x}") for table in _TABLES)
    select = Instruction("slct.b32.s32", "b32")
    return Table(
        "b32_ternary",
        ("b32",) * 3,
        operands,
        (*_instructions("b32", *opcodes), *lookups, select),
    )


def _permutations() -> Table:
    values = np.array([0x83_72_61_50, 0xF7_E6_95_44], np.uint32)
    selectors = np.concatenate(
        [
            np.arange(16, dtype=np.uint32) * np.uint32(0x1111),
            np.array([0x3210, 0x7654, 0x5410, 0x7632, 0x0123, 0xBA98, 0xFEDC], np.uint32),
            random_bits(160, 40, np.uint32),
        ]
    )
    a, b, c = pairs(values[:1], values[1:], selectors)
    constant = tuple(
        Instruction(
            f"prmt.b32 {selector:#06x}", "b32", text=f"prmt.b32 %0, %1, %2, {selector:#06x};"
        )
        for selector in (0x3210, 0x5410, 0x7632, 0x0123, 0xBA98, 0x4440)
    )
    opcodes = [f"prmt.b32{mode}" for mode in _MODES]
    instructions = (*_instructions("b32", *opcodes), *constant)
    return Table("b32_permute", ("b32",) * 3, (a, b, c), instructions)


def _funnel_shifts() -> Table:
    amounts = np.array([0, 1, 7, 16, 31, 32, 33, 63, 64, 2**32 - 1], np.uint32)
    operands = pairs(
        random_bits(170, 3, np.uint32), np.array([0x80000001, 0x7FFFFFFE], np.uint32), amounts
    )
    opcodes = [f"shf.{side}.{mode}.b32" for side in "lr" for mode in ("clamp", "wrap")]
    return Table("b32_funnel_shift", ("b32",) * 3, operands, _instructions("b32", *opcodes))


def _bit_fields() -> tuple[Table, ...]:
    places = np.array([0, 1, 7, 16, 31, 32, 40, 63, 64, 200, 255], np.uint32)
    tables = []
    for dtype, bits in ((np.uint32, 32), (np.uint64, 64)):
        values = np.concatenate([random_bits(180 + bits, 3, dtype), _edges(dtype)[[6, 8]]])
        tables.append(
            Table(
                f"b{bits}_extract",
                (f"b{bits}", "b32", "b32"),
                pairs(values, places, places),
                _instructions(f"b{bits}", f"bfe.u{bits}", f"bfe.s{bits}"),
            )
        )
        bases = np.array([0, 2**bits - 1], dtype)
        tables.append(
            Table(
                f"b{bits}_insert",
                (f"b{bits}", f"b{bits}", "b32", "b32"),
                pairs(values[:2], bases, places, places),
                _instructions(f"b{bits}", f"bfi.b{bits}"),
            )
        )
    return tuple(tables)


def _wide() -> tuple[Table, Table]:
    edges = _edges(np.uint32)[[0, 1, 5, 6, 8]]
    sums = _edges(np.uint64)[[0, 5, 8]]
    operands = joined(
        pairs(edges, edges, sums),
        (*(random_bits(190 + i, 40, np.uint32) for i in range(2)), random_bits(192, 40, np.uint64)),
    )
    edges64 = _edges(np.uint64)[[1, 4, 5, 6, 8]]
    operands64 = joined(
        pairs(edges64, edges64, sums), tuple(random_bits(193 + i, 40, np.uint64) for i in range(3))
    )
    return (
        Table(
            "b64_mad_wide",
            ("b32", "b32", "b64"),
            operands,
            _instructions("b64", "mad.wide.u32", "mad.wide.s32"),
        ),
        Table(
            "b64_mad",
            ("b64",) * 3,
            operands64,
            _instructions("b64", *(f"mad.{part}.{t}64" for part in ("lo", "hi") for t in "us")),
        ),
    )


INTEGERS = (
    _unary(4),
    _unary(8),
    _binary(4),
    _binary(8),
    _division(4),
    _division(8),
    *_shifts(),
    _ternary(),
    _permutations(),
    _funnel_shifts(),
    *_bit_fields(),
    *_wide(),
)
