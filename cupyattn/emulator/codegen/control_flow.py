"""Basic blocks, the order in which they run, and liveness.

Order matters for divergence. Lanes that disagree run block by block, always the block with the
lowest number (see `machine.batch`); numbering the blocks by a weak topological order makes
that reconverge at the post-dominators, as hardware does: both sides of a branch come before their
join, and every loop is contiguous, so that all lanes leave it before what follows runs.

The weak topological order is that of F. Bourdoncle, "Efficient chaotic iteration strategies with
widenings", 1993: strongly connected components in topological order, then each without its head.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from cupyattn.emulator.errors import PTXSyntaxError
from cupyattn.emulator.ptx.model import Function, Instruction

_NO_RESULT = frozenset(
    [
        "st",
        "cp",
        "red",
        "bra",
        "brx",
        "bar",
        "barrier",
        "ret",
        "exit",
        "membar",
        "fence",
        "trap",
        "brkpt",
        "nanosleep",
        "prefetch",
        "prefetchu",
        "discard",
        "applypriority",
        "pmevent",
    ]
)
_NAME = re.compile(r"%?[\w$]+")


@dataclass
class Block:
    """Instructions `first` to `last` - 1, then the blocks that may follow.

    `next` is the block that a fall-through enters (None at the end of the function).
    """

    first: int
    last: int
    successors: list[int] = field(default_factory=list)
    next: int | None = None


@lru_cache(maxsize=1 << 15)
def _names_in(operand: str) -> tuple[str, ...]:
    return tuple(_NAME.findall(operand))


def _registers_in(operands: list[str], registers: dict[str, str]) -> list[str]:
    found: list[str] = []
    for operand in operands:
        if operand in registers:  # as most are
            found.append(operand)
        else:
            found += [name for name in _names_in(operand) if name in registers]
    return found


def registers_of(
    instruction: Instruction, registers: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Return the registers that `instruction` writes and those that it reads.

    A guarded instruction also reads what it writes: the lanes switched off keep the old value.
    """
    operands = instruction.operands
    written: list[str] = []
    if instruction.result_comes_after:
        operands = operands[1:]
    elif operands and instruction.root not in _NO_RESULT:
        written = _registers_in(operands[:1], registers)
        operands = operands[1:]
    read = _registers_in(operands, registers)
    if instruction.guard:
        guard = [name for name in instruction.guard[:1] if name in registers]
        read = [*read, *guard, *written]
    return written, read


def _ends_block(instruction: Instruction) -> bool:
    return instruction.root in ("bra", "brx", "ret", "exit") or instruction.waits


def _components(nodes: list[int], successors: dict[int, list[int]]) -> list[list[int]]:
    """Return the strongly connected components in topological order (Tarjan, iterative).

    Among components that the edges do not order, program order is kept.
    """
    inside = set(nodes)
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    result: list[list[int]] = []
    for root in sorted(nodes, reverse=True):
        if root in index:
            continue
        work = [(root, iter(sorted(successors[root], reverse=True)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for following in rest:
                if following not in inside:
                    continue
                if following not in index:
                    index[following] = low[following] = len(index)
                    stack.append(following)
                    on_stack.add(following)
                    work.append((following, iter(sorted(successors[following], reverse=True))))
                    break
                if following in on_stack:
                    low[node] = min(low[node], index[following])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    result.append(component)
    return result[::-1]


def _weak_topological_order(
    nodes: list[int], successors: dict[int, list[int]], entered_from: dict[int, list[int]]
) -> list[int]:
    order: list[int] = []
    for component in _components(nodes, successors):
        if len(component) == 1:
            order += component
            continue
        members = set(component)
        heads = [n for n in component if any(p not in members for p in entered_from[n])]
        head = min(heads or component)
        rest = [n for n in component if n != head]
        order += [head, *_weak_topological_order(rest, successors, entered_from)]
    return order


class ControlFlow:
    """Control-flow graph of a function, its blocks numbered in the order in which they run.

    Attributes
    ----------
    blocks : list of Block
        Reachable blocks, in weak topological order.
    target : dict
        Number of the block that a label names.
    accesses : dict
        The registers that each reachable instruction writes and reads, by its site.
    use_count : Counter
        How often each register is read, in the text of the whole function.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        starts = self._split()
        reachable, successors = self._reachable(starts)
        before: dict[int, list[int]] = {n: [] for n in reachable}
        for node in reachable:
            for following in successors[node]:
                before[following].append(node)
        before[0].append(-1)  # entered from outside
        order = _weak_topological_order(reachable, successors, before)
        number = {old: new for new, old in enumerate(order)}
        self.blocks = []
        for old in order:
            block = starts[old]
            block.successors = [number[s] for s in successors[old]]
            block.next = number.get(block.next) if block.next is not None else None
            self.blocks.append(block)
        first = {block.first: i for i, block in enumerate(self.blocks)}
        self.target = {
            label: first[i] for label, i in function.labels.items() if first.get(i) is not None
        }
        self._liveness()

    def _split(self) -> list[Block]:
        """Cut the instruction list at labels and after branches and barriers."""
        instructions = self.function.instructions
        leaders = {0, *self.function.labels.values()}
        leaders.update(i + 1 for i, x in enumerate(instructions) if _ends_block(x))
        starts = sorted(i for i in leaders if i < len(instructions))
        ends = [*starts[1:], len(instructions)]
        blocks = [Block(a, b) for a, b in zip(starts, ends, strict=True)]
        for i, block in enumerate(blocks):
            block.next = i + 1 if i + 1 < len(blocks) else None
        return blocks

    def _reachable(self, blocks: list[Block]) -> tuple[list[int], dict[int, list[int]]]:
        at = {block.first: i for i, block in enumerate(blocks)}
        labels = self.function.labels
        successors: dict[int, list[int]] = {}
        todo = [0]
        while todo:
            node = todo.pop()
            if node in successors:
                continue
            last = self.function.instructions[blocks[node].last - 1]
            following: list[int] = []
            if last.root in ("bra", "brx"):
                names = last.operands[:1]
                if last.root == "brx":
                    names = self.function.branch_tables[last.operands[1]]
                for name in names:
                    if name not in labels:
                        raise PTXSyntaxError(f"branch to the unknown label {name}: {last}")
                    if labels[name] < len(self.function.instructions):
                        following.append(at[labels[name]])
            falls_through = last.root not in ("bra", "brx", "ret", "exit") or last.guard
            if falls_through and blocks[node].next is not None:
                following.append(blocks[node].next or 0)
            successors[node] = list(dict.fromkeys(following))
            todo += successors[node]
        return sorted(successors), successors

    def _liveness(self) -> None:
        """Backward data flow over bit sets: which registers a block's successors may read.

        Those that some block reads before it writes them have a bit; most live in one block.
        """
        registers = self.function.registers
        self.accesses: dict[int, tuple[list[str], list[str]]] = {}
        self.written_in: dict[str, set[int]] = {}
        uses: list[str] = []
        reads_first: list[set[str]] = []
        writes: list[dict[str, None]] = []  # in the order of the program
        for number, block in enumerate(self.blocks):
            block_used: set[str] = set()
            block_defined: dict[str, None] = {}
            for instruction in self.function.instructions[block.first : block.last]:
                written, read = self.accesses[instruction.site] = registers_of(
                    instruction, registers
                )
                uses += read
                for name in read:
                    if name not in block_defined:
                        block_used.add(name)
                for name in written:
                    block_defined[name] = None
            for name in block_defined:
                self.written_in.setdefault(name, set()).add(number)
            reads_first.append(block_used)
            writes.append(block_defined)
        self.use_count = Counter(uses)
        self._bit = {name: 1 << i for i, name in enumerate(set().union(*reads_first))}
        used = [sum(map(self._bit.__getitem__, names)) for names in reads_first]
        defined = [sum(self._bit[name] for name in names if name in self._bit) for names in writes]
        self.live_in = [0] * len(self.blocks)
        self.live_out = [0] * len(self.blocks)
        changed = True
        while changed:
            changed = False
            for number in range(len(self.blocks) - 1, -1, -1):
                out = 0
                for following in self.blocks[number].successors:
                    out |= self.live_in[following]
                live = used[number] | (out & ~defined[number])
                if live != self.live_in[number] or out != self.live_out[number]:
                    self.live_in[number], self.live_out[number] = live, out
                    changed = True
        entering = self.live_in[0]
        sides = zip(self.live_in, self.live_out, strict=True)
        crossing = [before | after | entering for before, after in sides]
        self._local_to = {
            name: number
            for name, (number, *others) in self.written_in.items()
            if not others and not crossing[number] & self._bit.get(name, 0)
        }

    def read_after(self, registers: Iterable[str], number: int) -> list[str]:
        """Return those of `registers` that other blocks may read once block `number` has ended."""
        live, bit = self.live_out[number], self._bit
        return [name for name in registers if name in bit and live & bit[name]]

    def continues(self, number: int) -> bool:
        """Tell whether lanes wait at the end of the block before, and then go on here."""
        before = self.blocks[number - 1] if number else None
        return (
            before is not None
            and before.next == number
            and self.function.instructions[before.last - 1].waits
        )

    def is_local(self, register: str, number: int) -> bool:
        """Tell whether `register` lives inside block `number` alone.

        Diverged lanes may then write it without a mask: no other lane looks at it. A register
        that other blocks write as well does not count, a lane waiting there may need its value;
        nor does one that some path reads without having written it.
        """
        return self._local_to.get(register) == number
