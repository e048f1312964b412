"""One SM, cycle by cycle: how busy the warps of its CTAs keep the pipe that does the work.

Scoreboards, stalls and waits are those of the control words. Each sub-partition issues one
instruction a cycle, of the warp that issued last if it can, else of the one that is least advanced.
Memory instructions wait in a queue of each sub-partition for the SM's one load/store unit, which
serves the queues in turn. Global accesses then take the SM's share of L2, and some loads arrive
earlier than others. Values are not computed: every warp repeats the steady path of the loop.

The loops that do the work are found first, and in each the steady path of an iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from random import Random
from typing import NamedTuple

from cupyattn.runtime.arch import SUB_PARTITIONS, WARP_SIZE
from cupyattn.turing.machine import (
    ARITHMETIC,
    MEMORY,
    T4,
    Machine,
    bank_conflicts,
    barrier_warps,
    interval,
    latency,
    matrix_operations,
    pipe_of,
    service,
    transfer,
)
from cupyattn.turing.sass import SCOREBOARDS, SassInstruction


class LoopWork(NamedTuple):
    """The main work of a kernel: instructions of one pipe, which its other work must not delay."""

    pipe: str
    does: Callable[[SassInstruction], bool]
    flop: Callable[[SassInstruction], int]
    """Operations of one of them, of a warp."""


MATRIX = LoopWork("tensor", lambda instruction: pipe_of(instruction) == "tensor", matrix_operations)
"""Products on tensor cores."""

FFMA = LoopWork(
    "fma", lambda instruction: instruction.name in ("FFMA", "FFMA32I"), lambda _: 2 * WARP_SIZE
)
"""Products in float32; the pipe's other instructions are not the work."""

# A forward branch over any of these is taken to fall through: `if (more) load the next tile`.
# Over others, such as rescaling and masking, it is taken to jump: they are rare.
_STEADY = ("LDG", "STG", "LDS", "STS", "LDSM", "barrier")


def working_loops(
    code: Sequence[SassInstruction],
) -> tuple[LoopWork, list[Sequence[SassInstruction]]]:
    """Return the kind of a kernel's work, and its innermost loops that do any of it.

    Tensor-core products, or in a kernel without them float32 products.
    """
    for work in (MATRIX, FFMA):
        found = [code[start : end + 1] for start, end in _innermost(code, work)]
        if found:
            break
    return work, found


def _innermost(code: Sequence[SassInstruction], work: LoopWork) -> list[tuple[int, int]]:
    """First and last index of each loop, from its backward branch and that branch's target."""
    index = {instruction.address: k for k, instruction in enumerate(code)}
    loops = {
        (index[instruction.target], k)
        for k, instruction in enumerate(code)
        if instruction.target in index and index[instruction.target] < k
    }
    # A block that begins inside a loop and ends after it is rare code that jumps back, not a loop.
    loops = {
        (start, end)
        for start, end in loops
        if not any(first < start <= last < end for first, last in loops)
    }
    loops = {(start, end) for start, end in loops if any(map(work.does, code[start : end + 1]))}
    return sorted(
        (start, end)
        for start, end in loops
        if not any(
            start <= first and last <= end and (start, end) != (first, last)
            for first, last in loops
        )
    )


def steady_path(body: Sequence[SassInstruction], work: LoopWork) -> list[SassInstruction]:
    """Return the instructions of a loop that an iteration in steady state executes.

    Predicated instructions count as executed. A forward branch within the loop is taken if it is
    unconditional, or if it skips no product, no barrier and no access to shared or global memory.
    """
    return list(_walk(body, work))


def _walk(body: Sequence[SassInstruction], work: LoopWork) -> Iterator[SassInstruction]:
    index = {instruction.address: k for k, instruction in enumerate(body)}
    k = 0
    while k < len(body):
        instruction = body[k]
        yield instruction
        target = -1 if instruction.target is None else index.get(instruction.target, -1)
        skipped = body[k + 1 : max(target, k + 1)]
        is_steady = any(work.does(each) or pipe_of(each) in _STEADY for each in skipped)
        diverges = "DIV" in instruction.modifiers  # taken only by a warp that has diverged
        if target > k and not diverges and (instruction.is_unconditional or not is_steady):
            k = target
        else:
            k += 1


MARGIN = 0.05
"""How far a simulated utilisation is to be trusted, either way."""

OFFSETS = (97, 311, 743, 1301)
"""Cycles between the starts of CTAs that share an SM: an arbitrary sample, of which there are many
in a real launch."""

_WARP_OFFSET = 13  # cycles between the starts of a CTA's warps
_WARM_UP = 3  # iterations of the slowest warp before counting begins
_ITERATIONS = 14
_LAST_CYCLE = 4_000_000
_ENQUEUE = 4  # cycles from the issue of a memory instruction until it can be served
_READ_SERVED, _READ_ISSUED = 6, 8  # cycles until operands of memory, of other instructions are read
_NEVER = 1 << 60


@dataclass(frozen=True)
class Utilisation:
    """The busy fraction of the pipe that does the work, over several start offsets."""

    mean: float
    low: float
    high: float


def utilisation(
    path: Sequence[SassInstruction], work: LoopWork, warps: int, ctas: int, machine: Machine = T4
) -> Utilisation:
    """Simulate `ctas` CTAs of `warps` warps that repeat a loop's steady path, for each offset."""
    offsets = OFFSETS if ctas > 1 else OFFSETS[:1]  # one CTA starts when it starts
    fractions = [busy_fraction(path, work, warps, ctas, offset, machine) for offset in offsets]
    return Utilisation(sum(fractions) / len(fractions), min(fractions), max(fractions))


def busy_fraction(
    path: Sequence[SassInstruction],
    work: LoopWork,
    warps: int,
    ctas: int,
    offset: int = OFFSETS[0],
    machine: Machine = T4,
) -> float:
    """Simulate one start offset.

    It is counted from the slowest warp's third iteration to its fourteenth.

    Raises RuntimeError if the warps wait for each other for ever: synchronisation that this model
    does not know.
    """
    sm = _Sm(_steps(path, work, warps, machine), warps, ctas, offset, machine)
    while sm.slowest < _ITERATIONS:
        sm.now = sm.next_event()
        if sm.now > _LAST_CYCLE:
            raise RuntimeError(
                f"the simulated loop at {path[0].address:#x} does not advance; the model knows "
                "scoreboards and barriers only; report it with the kernel's name"
            )
        sm.cycle()
    return sm.busy / (SUB_PARTITIONS * (sm.now + 1 - sm.counting_from))


@dataclass(frozen=True, slots=True)
class _Step:
    """The properties of an instruction that the simulation uses."""

    pipe: int  # index into ARITHMETIC; -1 for none, which is the last of `pipe_free`
    interval: int
    work: int  # cycles that count as busy
    is_memory: bool
    service: int
    transfer: float  # cycles of the SM's share of L2
    is_store: bool
    result: int  # the scoreboard of its result
    gap: int  # cycles to the warp's next instruction
    releases: tuple[tuple[int, int], ...]  # scoreboards, with cycles from service, or from issue
    waits_for: tuple[int, ...]
    barrier_warps: int

    @classmethod
    def of(
        cls, instruction: SassInstruction, work: LoopWork, warps: int, machine: Machine
    ) -> _Step:
        pipe, control = pipe_of(instruction), instruction.control
        occupied = "tensor" if pipe == "fp16" else pipe
        cycles = interval(instruction, machine)
        is_memory = pipe in MEMORY
        releases = (
            (control.write_scoreboard, latency(instruction, machine)),
            (control.read_scoreboard, _READ_SERVED if is_memory else _READ_ISSUED),
        )
        return cls(
            pipe=ARITHMETIC.index(occupied) if occupied in ARITHMETIC else -1,
            interval=cycles,
            work=cycles if work.does(instruction) else 0,
            is_memory=is_memory,
            service=service(instruction, machine),
            transfer=transfer(instruction, machine),
            is_store=pipe == "STG",
            result=control.write_scoreboard,
            gap=max(control.stall, 1 if instruction.target is None else machine.branch),
            releases=tuple((board, after) for board, after in releases if board < SCOREBOARDS),
            waits_for=control.waits_for,
            barrier_warps=barrier_warps(instruction, warps),
        )


def _steps(
    path: Sequence[SassInstruction], work: LoopWork, warps: int, machine: Machine
) -> list[_Step]:
    fetch = machine.fetch if len(path) > machine.instruction_cache else 0
    steps = []
    for instruction, conflicts in zip(path, bank_conflicts(path), strict=True):
        step = _Step.of(instruction, work, warps, machine)
        interval = step.interval + (machine.bank_conflict if conflicts else 0)
        steps.append(replace(step, interval=interval, gap=max(step.gap, fetch)))
    return steps


@dataclass(slots=True, eq=False)
class _Warp:
    """A warp of a CTA, and its state."""

    cta: int
    index: int
    part: int  # the sub-partition that it lives in: they are filled in turn
    ready: int  # the cycle from which stalls and barriers let its next instruction issue
    step: _Step  # that instruction
    clear: int  # the cycle from which scoreboards do too, as far as is known; _NEVER if it is not
    issued: int = 0  # instructions, of all iterations
    at_barrier: bool = False
    # Of each scoreboard: memory instructions that wait for service, and when it is free after that.
    unserved: list[int] = field(default_factory=lambda: [0] * SCOREBOARDS)
    free_from: list[int] = field(default_factory=lambda: [0] * SCOREBOARDS)

    def look(self) -> None:
        """Update the cycle from which it can issue."""
        cycle = _NEVER if self.at_barrier else self.ready
        for board in self.step.waits_for:
            if self.unserved[board]:
                cycle = _NEVER
            elif self.free_from[board] > cycle:
                cycle = self.free_from[board]
        self.clear = cycle

    def release(self, step: _Step, cycle: int, delay: int = 0) -> None:
        """Record when scoreboards are free: some cycles after this one, for a result later."""
        for board, after in step.releases:
            free = cycle + after + (delay if board == step.result else 0)
            if free > self.free_from[board]:
                self.free_from[board] = free


class _Sm:
    """The state of the SM. Cycles in which nothing can happen are passed over."""

    def __init__(
        self, steps: list[_Step], warps: int, ctas: int, offset: int, machine: Machine
    ) -> None:
        self.steps = steps
        self.machine = machine
        resident = warps * ctas
        period = max(
            resident * sum(step.service for step in steps),
            resident * sum(step.interval for step in steps) // SUB_PARTITIONS,
            1,
        )
        starts = [
            (cta, index, cta * offset % period + _WARP_OFFSET * index)
            for cta in range(ctas)
            for index in range(warps)
        ]
        self.warps = [
            _Warp(cta, index, number % SUB_PARTITIONS, start, steps[0], start)
            for number, (cta, index, start) in enumerate(starts)
        ]
        parts = range(SUB_PARTITIONS)
        # Of each sub-partition: its warps, the next to issue first; what waits for the load/store
        # unit, with the cycle of its arrival; when each pipe is free; when to look again.
        self.order = [[warp for warp in self.warps if warp.part == part] for part in parts]
        self.queues: list[deque[tuple[int, _Warp, _Step]]] = [deque() for _ in parts]
        self.pipe_free = [[0] * (len(ARITHMETIC) + 1) for _ in parts]
        self.wake = [0] * SUB_PARTITIONS
        self.lsu_free = self.turn = 0
        self.l2_free = [0.0, 0.0]  # of loads, of stores
        self.random = Random(offset)  # loads arrive in the same order in every run
        self.now = self.busy = self.counting_from = self.slowest = 0

    def next_event(self) -> int:
        """Return the next cycle in which an instruction may issue or be served."""
        cycle = min(self.wake)
        if cycle > self.now + 1:
            arrivals = [queue[0][0] for queue in self.queues if queue]
            if arrivals:
                return min(cycle, max(self.lsu_free, min(arrivals)))
        return cycle

    def cycle(self) -> None:
        """Let the load/store unit take an instruction, and each sub-partition issue one."""
        now = self.now
        if self.lsu_free <= now:
            self._serve()
        for part, wake in enumerate(self.wake):
            if wake > now:
                continue
            pipe_free = self.pipe_free[part]
            is_full = len(self.queues[part]) >= self.machine.queue
            earliest = _NEVER
            for warp in self.order[part]:
                cycle = warp.clear
                if cycle >= earliest:  # nor can its pipe make that sooner
                    continue
                step = warp.step
                if is_full and step.is_memory:
                    continue
                if pipe_free[step.pipe] > cycle:
                    cycle = pipe_free[step.pipe]
                if cycle <= now:
                    self._issue(warp)
                    earliest = now + 1
                    break
                if cycle < earliest:
                    earliest = cycle
            self.wake[part] = earliest

    def _serve(self) -> None:
        for part in range(self.turn, self.turn + SUB_PARTITIONS):
            queue = self.queues[part % SUB_PARTITIONS]
            if queue and queue[0][0] <= self.now:
                break
        else:
            return
        _, warp, step = queue.popleft()
        self.turn = (part + 1) % SUB_PARTITIONS
        self.lsu_free = self.now + step.service
        for board, _ in step.releases:
            warp.unserved[board] -= 1
        warp.release(step, self.lsu_free, self._move(step) if step.transfer else 0)
        warp.look()
        self.wake[part % SUB_PARTITIONS] = self.now  # the warp, or one that found the queue full

    def _move(self, step: _Step) -> int:
        """Let L2 move the bytes of a global access; return by how much its result is later."""
        moved = max(self.l2_free[step.is_store], self.lsu_free) + step.transfer
        self.l2_free[step.is_store] = moved
        spread = self.machine.global_spread
        return int(moved) - self.lsu_free + self.random.randint(-spread, spread)

    def _issue(self, warp: _Warp) -> None:
        step, now, part = warp.step, self.now, warp.part
        if step.is_memory:
            self.queues[part].append((now + _ENQUEUE, warp, step))
            for board, _ in step.releases:
                warp.unserved[board] += 1
        else:
            if step.pipe >= 0:
                self.pipe_free[part][step.pipe] = now + step.interval
            warp.release(step, now)
        warp.ready = now + step.gap
        if self.counting_from:
            self.busy += step.work
        self._advance(warp)
        if step.barrier_warps:
            self._arrive(warp, step.barrier_warps)
        warp.look()
        order = self.order[part]
        if order[0] is not warp:
            order.remove(warp)
            order.sort(key=attrgetter("issued"))
            order.insert(0, warp)

    def _advance(self, warp: _Warp) -> None:
        warp.issued += 1
        iterations, at = divmod(warp.issued, len(self.steps))
        warp.step = self.steps[at]
        if at == 0 and iterations == self.slowest + 1:
            self.slowest = min(each.issued for each in self.warps) // len(self.steps)
            if self.slowest == _WARM_UP and not self.counting_from:
                self.counting_from = self.now + 1

    def _arrive(self, warp: _Warp, together: int) -> None:
        warp.at_barrier = True
        group = (warp.cta, warp.index // together)
        mates = [each for each in self.warps if (each.cta, each.index // together) == group]
        if all(mate.at_barrier for mate in mates):
            for mate in mates:
                mate.at_barrier = False
                mate.ready = max(mate.ready, self.now + self.machine.barrier)
                mate.look()
                self.wake[mate.part] = min(self.wake[mate.part], mate.ready)
