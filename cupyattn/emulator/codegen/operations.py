"""Instructions that are computed together on stacks of registers: which, and by which function.

A stack has registers as rows of one array. Equal operations on several rows are one NumPy call.

A tile product in a kernel is many small ``mma``; one NumPy matmul for all of them is much faster
than one each. Those that accumulate one after the other are one product over a longer k, and those
with the same A are one product with a wider B.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cupyattn.emulator.codegen.arithmetic import fixed_permutation, fixed_selector
from cupyattn.emulator.codegen.float_arithmetic import may_be_subnormal
from cupyattn.emulator.codegen.generator import CodeGenerator
from cupyattn.emulator.ptx.model import Instruction, register_dtype


@dataclass(eq=False, slots=True)
class Row:
    """A value of the lanes: the expression that gives it, perhaps a row of a stack.

    The expression is empty as long as nothing has been written that computes the value.
    """

    expression: str = ""
    stack: str = ""
    index: int = 0


def gather(rows: Sequence[Row], dtype: str) -> str:
    """Return an expression for the stack of `rows`, or for the one row that they all are."""
    distinct = {row.expression: row for row in rows}
    if len(distinct) == 1:
        return rows[0].expression
    if len({row.stack for row in rows}) == 1 and rows[0].stack:
        found = _runs(rows)
        if len(found) == 1:
            return found[0]
        return f"pick({rows[0].stack}, {[row.index for row in rows]})"
    if 2 * len(distinct) <= len(rows):
        order = {expression: i for i, expression in enumerate(distinct)}
        every = gather(list(distinct.values()), dtype)
        return f"pick({every}, {[order[row.expression] for row in rows]})"
    return f"pile(({', '.join(_runs(rows))},), {len(rows)}, shape, {dtype})"


def _runs(rows: Sequence[Row]) -> list[str]:
    """Return expressions for `rows`: slices of stacks where several follow each other."""
    found = []
    start = 0
    while start < len(rows):
        first = rows[start]
        end, step = start + 1, 0
        while end < len(rows) and first.stack and rows[end].stack == first.stack:
            ahead = rows[end].index - rows[end - 1].index
            if ahead < 1 or step not in (0, ahead):
                break
            step = ahead
            end += 1
        if end - start > 1:
            stop = rows[end - 1].index + 1
            found.append(f"{first.stack}[{first.index}:{stop}{f':{step}' if step > 1 else ''}]")
        else:
            found.append(first.expression)
        start = end
    return found


_FEWEST_STACKED = 4


@dataclass(frozen=True)
class LaneOperation:
    """A function of the lanes: no memory, no exchange between lanes, no fault.

    Attributes
    ----------
    function : str
        Name of the function in generated code.
    operands : tuple of str
        dtypes of its operands.
    widened : tuple of bool
        Which of them the function wants in float64, exactly; their dtype says float32.
    flushed : tuple of bool
        Which may hold subnormal numbers that count as zeros.
    result : str
        dtype of the result.
    flushes : bool
        Whether subnormal results become zeros.
    """

    function: str
    operands: tuple[str, ...]
    widened: tuple[bool, ...]
    flushed: tuple[bool, ...]
    result: str
    flushes: bool = False

    @property
    def of_floats(self) -> bool:
        """Whether an operand is a float."""
        return "f4" in self.operands or self.result == "f4"

    def key(self, operands: Sequence[Row]) -> Hashable:
        """Return what operations that can be one on stacks have in common."""
        return self

    def write(
        self,
        gen: CodeGenerator,
        operands: Sequence[Sequence[Row]],
        results: Sequence[Sequence[Row]],
    ) -> None:
        """Write several of this operation: on stacks, or one by one where that is no gain."""
        columns = list(zip(*operands, strict=True))
        common = [len({row.expression for row in column}) == 1 for column in columns]
        if len(operands) < _FEWEST_STACKED or all(common):
            for rows, (result,) in zip(operands, results, strict=True):
                self._write_one(gen, rows, result)
            return
        arguments, flushed = [], []
        for i, column in enumerate(columns):
            argument = gather(column, "f8" if self.widened[i] else self.operands[i])
            once = common[i] and self.flushed[i]
            arguments.append(f"flush({argument})" if once else argument)
            flushed.append(self.flushed[i] and not once)
        name = gen.temporary()
        ending = f", {tuple(flushed)}, {self.flushes}" if any(flushed) or self.flushes else ""
        gen.line(
            f"{name} = stacked({self.function}, {len(operands)}, shape, {self.result}, "
            f"({', '.join(arguments)},){ending})"
        )
        for index, (result,) in enumerate(results):
            result.expression, result.stack, result.index = f"{name}[{index}]", name, index

    def _write_one(self, gen: CodeGenerator, rows: Sequence[Row], result: Row) -> None:
        arguments = ", ".join(
            f"flush({row.expression})" if flushed else row.expression
            for row, flushed in zip(rows, self.flushed, strict=True)
        )
        called = f"({self.function})" if self.function.startswith("lambda") else self.function
        text = f"{called}({arguments})"
        result.expression = gen.temporary()
        gen.line(f"{result.expression} = {f'flush({text})' if self.flushes else text}")


# Functions of float32, without and with .ftz, and whether the latter flushes by itself.
_FLOAT = {
    "add": ("np.add", "np.add", False),
    "sub": ("np.subtract", "np.subtract", False),
    "mul": ("np.multiply", "multiply_flushed", True),
    "fma": ("fma_single", "fma_single_ftz", True),
    "max": ("maximum", "maximum", False),
    "min": ("minimum", "minimum", False),
    "neg": ("np.negative", "np.negative", True),
    "abs": ("np.abs", "np.abs", True),
    "ex2": ("exp2_single", "exp2_single", False),
}
_FLOAT_OPCODE = re.compile(
    r"((add|sub|mul)(\.rn)?|fma\.rn|max|min|neg|abs|ex2\.approx)(\.ftz)?\.f32"
)
_FLOAT_OPERANDS = {"fma": 3, "neg": 1, "abs": 1, "ex2": 1}  # others: two
_SELECT = {"selp.f32": "f4", "selp.b32": "u4", "selp.u32": "u4", "selp.s32": "u4"}
_BITS = {
    "add.s32": "np.add", "add.u32": "np.add", "sub.s32": "np.subtract", "sub.u32": "np.subtract",
    "and.b32": "np.bitwise_and", "or.b32": "np.bitwise_or", "xor.b32": "np.bitwise_xor",
    "shl.b32": "np.left_shift", "shr.u32": "np.right_shift", "shr.b32": "np.right_shift",
}  # fmt: skip
_HALVES = ("cvt.rn.f16.f32", "cvt.rn.ftz.f16.f32")
_PAIRS = {  # the function, and the types of its two operands
    "cvt.rn.f16x2.f32": ("nearest_halves", "f4"),
    "cvt.rn.satfinite.f16x2.f32": ("finite_halves", "f4"),
    "cvt.rn.bf16x2.f32": ("nearest_bfloats", "f4"),
    "cvt.rn.satfinite.bf16x2.f32": ("finite_bfloats", "f4"),
    "min.bf16x2": ("minimum_bfloats", "u4"), "max.bf16x2": ("maximum_bfloats", "u4"),
}  # fmt: skip
_OTHERS = (*_HALVES, *_PAIRS, "mov.b32", "prmt.b32")
_SHIFTS = {str(amount) for amount in range(32)}


def operation_of(gen: CodeGenerator, x: Instruction) -> tuple[LaneOperation, list[str]] | None:
    """Return how to compute an instruction on stacks, and of which operands; None if it cannot be.

    Guarded instructions cannot be. Neither can invalid PTX, which the lowering reports.
    """
    if x.guard or len(x.operands) < 2 or not _may_be(x.opcode):
        return None
    try:
        operation, operands = _described(gen, x)
        if operation is None or not _fits(gen, x.operands[0], operands, operation):
            return None
    except (IndexError, ValueError):  # too few operands, or too many
        return None
    return operation, operands


def _described(gen: CodeGenerator, x: Instruction) -> tuple[LaneOperation | None, list[str]]:
    operands = list(x.operands[1:])
    operation = None
    if _is_of_floats(x.opcode):
        operation = _float(gen, x)
    elif x.opcode in _SELECT:
        kind = _SELECT[x.opcode]
        operation = _plain("where", ("b1", kind, kind), kind)
        operands = [operands[2], *operands[:2]]
    elif x.opcode in _HALVES:
        flushed = "ftz" in x.parts and may_be_subnormal(gen, operands[0])
        operation = LaneOperation("nearest_half", ("f4",), (False,), (flushed,), "u2")
    elif x.opcode in _PAIRS:
        function, kind = _PAIRS[x.opcode]
        operation = _plain(function, (kind, kind), "u4")
    elif x.opcode == "mov.b32":
        operation, operands = _move(gen, x)
    elif x.opcode == "prmt.b32":
        selector = fixed_selector(x)
        if selector is not None:
            text = fixed_permutation(gen, ("a", "b"), selector)
            operation = _plain(f"lambda a, b: {text}", ("u4", "u4"), "u4")
            operands.pop()
    elif x.opcode in _BITS and (x.root not in ("shl", "shr") or operands[1] in _SHIFTS):
        operation = _plain(_BITS[x.opcode], ("u4", "u4"), "u4")
    return operation, operands


@lru_cache(maxsize=4096)
def _is_of_floats(opcode: str) -> bool:
    return _FLOAT_OPCODE.fullmatch(opcode) is not None


@lru_cache(maxsize=4096)
def _may_be(opcode: str) -> bool:
    return _is_of_floats(opcode) or opcode in _SELECT or opcode in _BITS or opcode in _OTHERS


@lru_cache(maxsize=4096)
def _plain(function: str, operands: tuple[str, ...], result: str) -> LaneOperation:
    no = (False,) * len(operands)
    return LaneOperation(function, operands, no, no, result)


def _float(gen: CodeGenerator, x: Instruction) -> LaneOperation:
    operands = x.operands[1:]
    if len(operands) != _FLOAT_OPERANDS.get(x.root, 2):
        raise ValueError("not as many operands as it takes")
    ftz = "ftz" in x.parts
    return _of_floats(x.root, ftz, tuple([ftz and may_be_subnormal(gen, o) for o in operands]))


@lru_cache(maxsize=4096)
def _of_floats(root: str, ftz: bool, subnormal: tuple[bool, ...]) -> LaneOperation:
    without, with_flush, by_itself = _FLOAT[root]
    flushes = ftz and not by_itself
    if root in ("max", "min"):  # monotonic: the result instead of the operands, if at all
        flushes, subnormal = any(subnormal), (False,) * len(subnormal)
    return LaneOperation(
        with_flush if ftz else without,
        ("f4",) * len(subnormal),
        tuple(root == "fma" and i < 2 for i in range(len(subnormal))),
        subnormal,
        "f4",
        flushes,
    )


def _move(gen: CodeGenerator, x: Instruction) -> tuple[LaneOperation | None, list[str]]:
    """Return two halves packed, or bits seen as another type."""
    target, source = x.operands
    parts = [name.strip() for name in source.strip("{} ").split(",")]
    if len(parts) == 2:
        return _plain("pack_pair", ("u2", "u2"), "u4"), parts
    to, of = gen.stored.get(target), gen.stored.get(source)
    if to is None or of is None:
        return None, parts
    return _plain(f"lambda a: a.view({to})", (of,), to), parts


def _fits(gen: CodeGenerator, target: str, operands: list[str], operation: LaneOperation) -> bool:
    """Tell whether all registers are stored as what the operation works on."""
    stored = gen.stored
    if stored.get(target) != operation.result:
        return False
    for name, dtype in zip(operands, operation.operands, strict=True):
        if stored.get(name, dtype) != dtype:
            return False
    return True


@dataclass(frozen=True)
class MmaForm:
    """A form of ``mma`` that the emulator runs.

    Attributes
    ----------
    shape : str
        Such as "m16n8k8".
    a, b : str
        The PTX types of A and B.
    accumulator : str
        The PTX type of C and D.
    saturates : bool
        Whether int32 sums are limited instead of wrapped (``.satfinite``).
    """

    shape: str
    a: str
    b: str
    accumulator: str
    saturates: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether sums are int32, and exact."""
        return self.accumulator == "s32"

    @property
    def steps(self) -> int:
        """The number of steps, one register of B each: 16 bytes of a row of A."""
        return 2 if self.shape == ("m16n8k32" if self.is_integer else "m16n8k16") else 1

    @property
    def a_registers(self) -> int:
        """The registers of A in a step, each 8 rows; B has one."""
        return 2 if self.shape.startswith("m16") else 1

    @property
    def sums(self) -> int:
        """The registers of C, and of D."""
        return 2 if self.accumulator == "f16" else 2 * self.a_registers

    @property
    def dtype(self) -> str:
        """The dtype in which registers of C and D are stored."""
        return "f4" if self.accumulator == "f32" else "u4"

    @property
    def registers(self) -> tuple[int, int, int, int]:
        """The numbers of registers of D, A, B and C."""
        return self.sums, self.a_registers * self.steps, self.steps, self.sums


_BYTES, _NIBBLES = ("s8", "u8"), ("s4", "u4")
_MMA_FORMS = {
    f"mma.sync.aligned.{form.shape}.row.col{'.satfinite' * form.saturates}."
    f"{form.accumulator}.{form.a}.{form.b}.{form.accumulator}": form
    for form in (
        *(MmaForm(shape, kind, kind, accumulator)
          for shape in ("m16n8k8", "m16n8k16")
          for kind, accumulator in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"))),
        *(MmaForm(shape, a, b, "s32", saturates)
          for shape, types in (("m8n8k16", _BYTES), ("m8n8k32", _NIBBLES),
                               ("m16n8k16", _BYTES), ("m16n8k32", _BYTES))
          for a in types for b in types for saturates in (False, True)),
    )
}  # fmt: skip
MMA_FORMS = (
    "mma.m16n8k8 and m16n8k16 .row.col of f16 with f16 or f32 accumulators, and of bf16 with f32, "
    "m16n8k16, m16n8k32 and m8n8k16 of s8 and u8, and m8n8k32 of s4 and u4"
)
"""The forms that run, for an error message."""


def mma_form(x: Instruction) -> MmaForm | None:
    """Return the form of an ``mma``; None if the emulator does not run it."""
    return _MMA_FORMS.get(x.opcode)


class MmaChain:
    """A chain of ``mma``. Its operands: the accumulators to start from, then A and B of each step.

    Chains with the same A are one product with a wider B. Integer sums are exact in any order of
    summation, so integer chains are also one product with a taller A, where every A meets every B.
    """

    def __init__(self, form: MmaForm, site: int, steps: int) -> None:
        self.form = form
        self.site = site
        self.steps = steps
        self.step = form.a_registers + 1  # operands of a step
        self.operands = (form.dtype,) * form.sums + ("u4",) * (self.step * steps)
        self.result = form.dtype

    def followed_by(self, other: MmaChain) -> MmaChain | None:
        """Return this product and one that goes on from its sums as one; None if they cannot be."""
        if other.form != self.form or self.form.saturates:  # each step limits its sums
            return None
        return MmaChain(self.form, self.site, self.steps + other.steps)

    def key(self, operands: Sequence[Row]) -> Hashable:
        """Return what chains that can be one product have in common."""
        common = (self.form, self.steps)
        return common if self.form.is_integer else (*common, *self._left(operands))

    def write(
        self,
        gen: CodeGenerator,
        operands: Sequence[Sequence[Row]],
        results: Sequence[Sequence[Row]],
    ) -> None:
        """Write the products of chains with the same key."""
        for tall in _grids([(self._left(rows), self._right(rows)) for rows in operands]):
            self._write_grid(gen, operands, results, tall)

    def _left(self, operands: Sequence[Row]) -> tuple[Row, ...]:
        steps = operands[self.form.sums :]
        return tuple(row for i, row in enumerate(steps) if i % self.step < self.form.a_registers)

    def _right(self, operands: Sequence[Row]) -> tuple[Row, ...]:
        return tuple(operands[self.form.sums :][self.form.a_registers :: self.step])

    def _write_grid(
        self,
        gen: CodeGenerator,
        operands: Sequence[Sequence[Row]],
        results: Sequence[Sequence[Row]],
        grid: list[list[int]],
    ) -> None:
        """Write one product of chains by number: those of a row have A in common, of a column B."""
        form = self.form
        left = [a for chains in grid for a in self._left(operands[chains[0]])]
        right = [b for chain in grid[0] for b in self._right(operands[chain])]
        if form.is_integer:
            method = "multiply_integers"
            # 8 rows of A are multiplied alone: of each the registers of all steps, and two sums
            tall = form.a_registers
            left = [
                a
                for first in range(0, len(left), tall * self.steps)
                for half in range(tall)
                for a in left[first + half :: tall][: self.steps]
            ]
            sums = [(chain, 2 * half + i) for chains in grid for half in range(tall)
                    for chain in chains for i in range(2)]  # fmt: skip
            numbers = f"{tall * len(grid)}, {len(grid[0])}, {self.steps}, {form.a!r}, {form.b!r}, "
            numbers += f"{form.saturates}"
        else:
            sums = [(chain, i) for chains in grid for chain in chains for i in range(form.sums)]
            method = "multiply"
            numbers = f"{len(sums) // form.sums}, {self.steps}, {form.a!r}"
        start = [operands[chain][i] for chain, i in sums]
        name = gen.temporary()
        gen.line(
            f"{name} = matrix.{method}({gather(left, 'u4')}, {gather(right, 'u4')}, "
            f"{gather(start, form.dtype)}, {numbers}, mask, {self.site})"
        )
        for index, (chain, i) in enumerate(sums):
            row = results[chain][i]
            row.expression, row.stack, row.index = f"{name}[{index}]", name, index


def _grids(sides: Sequence[tuple[Hashable, Hashable]]) -> list[list[list[int]]]:
    """Arrange the pairs (left, right) by number: grids of which each row meets every column.

    Examples
    --------
    >>> _grids([("a", 0), ("a", 1), ("b", 1), ("b", 0), ("c", 1)])
    [[[0, 1], [3, 2]], [[4]]]
    """
    order = {right: i for i, right in enumerate(dict.fromkeys(right for _, right in sides))}
    rows: dict[Hashable, list[int]] = {}
    for number, (left, _) in enumerate(sides):
        rows.setdefault(left, []).append(number)
    grids: dict[tuple[int, ...], list[list[int]]] = {}
    for numbers in rows.values():
        numbers.sort(key=lambda number: order[sides[number][1]])
        columns = tuple(order[sides[number][1]] for number in numbers)
        grids.setdefault(columns, []).append(numbers)
    return list(grids.values())


def fragments(x: Instruction) -> list[list[str]]:
    """Return the registers of D, A, B and C."""
    return [[name.strip() for name in o.strip("{} ").split(",")] for o in x.operands]


def product_of(gen: CodeGenerator, x: Instruction) -> tuple[MmaChain, list[str], list[str]] | None:
    """Return an ``mma`` as a chain of one, its operands and its targets; None if it is no such."""
    form = mma_form(x) if x.root == "mma" and not x.guard else None
    if form is None or form.accumulator == "f16":
        return None
    found = fragments(x)
    if tuple(map(len, found)) != form.registers:
        return None
    d, a, b, c = found
    operands = [*c]
    for step in range(form.steps):
        operands += [*a[form.a_registers * step :][: form.a_registers], b[step]]
    product = MmaChain(form, x.site, form.steps)
    registers = gen.function.registers
    wanted = zip([*d, *operands], (form.dtype,) * len(d) + product.operands, strict=True)
    if (
        len({*d}) < len(d)
        or any(name not in registers for name in d)
        or any(
            register_dtype(registers[name]) != dtype for name, dtype in wanted if name in registers
        )
    ):
        return None
    return product, operands, d
