"""The model of Turing on frozen machine code and on hand-made loops: no compiler, no disassembler.

loops.sass is what nvdisasm 13.5.37 lists (--print-code --print-instruction-encoding, runs of blanks
shortened) of loops.cu as NVRTC 12.9.86 compiles it for sm_75 (-std=c++17).
"""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cupyattn.emulator import Report
from cupyattn.turing import MACHINES, T4, Machine, analyse, memory_figures, power, row, sass
from cupyattn.turing.analysis import code_figures
from cupyattn.turing.counts import loop_figures
from cupyattn.turing.machine import access_bytes, barrier_warps, pipe_of, service
from cupyattn.turing.sass import (
    NO_SCOREBOARD,
    Control,
    DisassemblerError,
    SassInstruction,
    disassemble,
    parse_listing,
)
from cupyattn.turing.simulation import (
    FFMA,
    MATRIX,
    busy_fraction,
    steady_path,
    utilisation,
    working_loops,
)

LISTING = parse_listing((Path(__file__).parent / "loops.sass").read_text())

HMMA = SassInstruction(0, "HMMA.1688.F32", control=Control(stall=8))
IMMA = SassInstruction(0, "IMMA.8816.S8.S8", control=Control(stall=4))
IMMA_OF_4_BITS = replace(IMMA, opcode="IMMA.8832.U4.S4.SAT")
LDS = SassInstruction(0, "LDS.128", control=Control(stall=1, write_scoreboard=0))


# --- the listing


def test_instructions_of_a_listing():
    code = LISTING["matrix_loop"]
    assert [each.address for each in code] == list(range(0, 16 * len(code), 16))
    by_address = {each.address: each for each in code}
    jump = by_address[0x130]
    assert (jump.opcode, jump.predicate) == ("BRA", "!P0")
    assert jump.target == 0x6A0 and by_address[jump.target - 16].target == 0x1D0
    load = by_address[0x270]
    assert (load.opcode, load.operands) == ("LDSM.16.M88.4", "R40, [R41]")
    assert Counter(each.name for each in code)["HMMA"] == 8


def test_control_words_make_a_product_wait_for_its_operands():
    """These hold for every compiler, unless fields are read at the wrong bits."""
    code = LISTING["matrix_loop"]
    (load,) = (each for each in code if each.name == "LDSM")
    products = [each for each in code if each.name == "HMMA"]
    assert load.control.write_scoreboard != NO_SCOREBOARD
    assert load.control.write_scoreboard in products[0].control.waits_for
    (results,) = {each.control.write_scoreboard for each in products}
    reader = next(each for each in code if each.name == "FMNMX")
    assert results in reader.control.waits_for
    assert max(each.control.stall for each in products) == T4.hmma_f32
    assert all(
        each.control.write_scoreboard == NO_SCOREBOARD for each in code if each.name == "BRA"
    )


def test_a_listing_without_its_encoding_is_an_error():
    lines = ["k:", ".text.k:", "  /*0000*/  NOP ;  /* 0x0000000000007918 */", "  nothing"]
    with pytest.raises(ValueError, match="no second half"):
        parse_listing("\n".join(lines))


# --- pipes


@pytest.mark.parametrize(
    ("opcode", "pipe", "width", "cycles"),
    [
        ("HMMA.1688.F32", "tensor", 4, 0),
        ("FFMA.FTZ", "fma", 4, 0),
        ("IADD3.X", "alu", 4, 0),
        ("UIADD3", "uniform", 4, 0),
        ("MUFU.EX2", "xu", 4, 0),
        ("LDSM.16.MT88.4", "LDSM", 16, 8),
        ("LDSM.16.M88", "LDSM", 4, 2),
        ("LDS.U.64", "LDS", 8, 4),
        ("LDG.E.U8.SYS", "LDG", 1, 2),  # a narrow access costs as much as a word
        ("LDG.E.128.CONSTANT.SYS", "LDG", 16, 8),
        ("STL", "STL", 4, 2),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "STG", 4, 2),
        ("SHFL.BFLY", "SHFL", 4, 1),
        ("BAR.SYNC", "barrier", 4, 0),
    ],
)
def test_pipes(opcode, pipe, width, cycles):
    instruction = SassInstruction(0, opcode)
    assert pipe_of(instruction) == pipe
    assert access_bytes(instruction) == width
    assert service(instruction, T4) == cycles


@pytest.mark.parametrize(
    ("opcode", "operands", "warps"),
    [
        ("BAR.SYNC", "0x0", 8),
        ("BAR.SYNC", "0x1, 0x40", 2),
        ("BAR.ARV", "0x1, 0x40", 0),
        ("BAR.SYNC", "R3, R4", 8),
        ("LDS", "R3, [R4]", 0),
    ],
)
def test_barriers(opcode, operands, warps):
    assert barrier_warps(SassInstruction(0, opcode, operands), 8) == warps


# --- loops


def assemble(*lines: tuple[str, int | None]) -> list[SassInstruction]:
    """Opcodes and targets, 16 bytes apart; every branch has a predicate."""
    return [
        SassInstruction(16 * k, opcode, predicate="P0", target=target)
        for k, (opcode, target) in enumerate(lines)
    ]


def test_loops_that_do_the_work():
    """A loop, one around it, and a rare block after both that jumps into it."""
    nest = assemble(
        ("BRA", 0x20), ("MOV", None), ("HMMA", None), ("BRA", 0x50), ("LDG", None),
        ("BRA", 0x0), ("BRA", 0x0), ("MOV", None), ("BRA", 0x20),
    )  # fmt: skip
    work, bodies = working_loops(nest)
    assert (work, bodies) == (MATRIX, [nest[:6]])
    # The branch over MOV jumps, that over the load falls through.
    assert [each.address for each in steady_path(bodies[0], work)] == [0, 0x20, 0x30, 0x40, 0x50]


def test_float32_products_are_work_where_there_are_no_others():
    loop = assemble(("FFMA", None), ("FADD", None), ("BRA", 0))
    assert working_loops(loop) == (FFMA, [loop])
    work, bodies = working_loops([*loop, SassInstruction(0x30, "HMMA")])
    assert work is FFMA, "a product outside of every loop is not the work"
    assert bodies == [loop]
    assert working_loops(assemble(("FADD", None), ("BRA", 0)))[1] == []


def test_a_branch_over_products_falls_through():
    loop = assemble(("BRA", 0x30), ("FFMA", None), ("FMUL", None), ("BRA", 0))
    assert steady_path(loop, FFMA) == loop
    assert steady_path(loop, MATRIX) == [loop[0], loop[3]]


# --- figures of the frozen loops. For the same cubin another program of the same model (one file,
# cuobjdump instead of nvdisasm), calibrated on published T4 figures, gave these; so did it for
# every row of attention_forward on 2026-11-20. It had neither the rate of L2 nor loaded memory.
UNLOADED = Machine(global_latency=330, global_spread=0, l2_rate=math.inf, bank_conflict=0)


def test_figures_of_the_matrix_loop():
    (loop,) = code_figures(LISTING["matrix_loop"], threads=128, ctas=8, machine=UNLOADED)
    assert (loop.start, loop.end) == (464, 1680)
    assert (loop.instructions, loop.skipped, loop.work) == (38, 39, 8)
    assert loop.counts == {
        "alu": 21, "STS": 1, "barrier": 2, "LDSM": 1, "fma": 1, "LDG": 1, "tensor": 8, "SHFL": 1,
        "control": 2,
    }  # fmt: skip
    assert loop.cycles == {"tensor": 512, "fma": 16, "alu": 336, "lsu": 800, "issue": 304}
    assert (loop.work_pipe, loop.binding_pipe) == ("tensor", "lsu")
    assert (loop.lsu_ratio, loop.bound) == (1.5625, 0.64)
    assert (loop.spill_bytes, loop.narrow_global) == (0, 0)
    played = loop.utilisation
    assert played.mean == pytest.approx(0.48909104, abs=1e-7)
    assert played.low == pytest.approx(0.47732859, abs=1e-7)
    assert played.high == pytest.approx(0.49760596, abs=1e-7)


def test_figures_of_the_ffma_loop():
    (loop,) = code_figures(LISTING["ffma_loop"], threads=64, ctas=16)
    assert (loop.start, loop.end, loop.instructions, loop.work) == (272, 624, 23, 8)
    assert loop.counts == {"alu": 4, "LDG": 2, "fma": 14, "uniform": 2, "control": 1}
    assert loop.cycles == {"fma": 224, "alu": 64, "uniform": 32, "lsu": 320, "issue": 184}
    assert loop.work_cycles == 128, "FADD and FMUL share the pipe, but are not products"
    assert (loop.lsu_ratio, loop.bound, loop.narrow_global) == (2.5, 0.4, 1)
    assert 0 < loop.utilisation.low <= loop.utilisation.high <= loop.bound


@pytest.mark.parametrize(
    ("shared_rate", "lsu_ratio", "bound"), [(16, 6.0625, 1 / 6.0625), (128, 0.8125, 1.0)]
)
def test_the_rate_of_shared_memory_binds(shared_rate, lsu_ratio, bound):
    """Half the rate of newer GPUs is what makes Turing rank tiles differently."""
    machine = Machine(shared_rate=shared_rate)
    (loop,) = code_figures(LISTING["matrix_loop"], threads=128, ctas=8, machine=machine)
    assert loop.lsu_ratio == lsu_ratio
    assert loop.bound == pytest.approx(bound)
    assert loop.utilisation.mean <= bound + 0.001
    (turing,) = code_figures(LISTING["matrix_loop"], threads=128, ctas=8)
    assert (loop.utilisation.mean > turing.utilisation.mean) == (shared_rate > T4.shared_rate)


def test_spills_are_what_the_loop_moves():
    path = assemble(("LDL.64", None), ("HMMA", None), ("STL", None), ("STL.128", None), ("BRA", 0))
    figures = loop_figures(path, MATRIX, warps=4, ctas=2)
    assert figures.spill_bytes == 8 + 4 + 16
    assert figures.utilisation is None


def test_where_no_cta_fits_nothing_is_done():
    path = assemble(("LDL.64", None), ("HMMA", None), ("BRA", 0))
    figures = loop_figures(path, MATRIX, warps=4, ctas=0)
    assert (figures.bound, figures.lsu_ratio) == (None, None)


def test_the_main_loop_is_the_one_without_masks():
    """The shorter of two loops with equal products is the main loop, in any order."""
    masked = assemble(*[("FMNMX", None)] * 4, ("HMMA", None), ("BRA", 0))
    full = [
        SassInstruction(0x100, "HMMA"),
        SassInstruction(0x110, "BRA", predicate="P0", target=0x100),
    ]
    for code in (masked + full, full + masked):
        simulated = [loop for loop in code_figures(code, 128, 2) if loop.utilisation]
        assert [loop.start for loop in simulated] == [0x100]


# --- the simulation


def test_products_alone_saturate():
    assert busy_fraction([HMMA] * 32, MATRIX, warps=4, ctas=1) > 0.99


def test_a_geforce_needs_twice_the_cycles():
    """A warp that waits for each product keeps the slower tensor cores busier."""
    waiting = [HMMA, SassInstruction(0, "MOV", control=Control(stall=8))]
    shares = [
        busy_fraction(waiting, MATRIX, 4, 1, machine=machine)
        for machine in (T4, Machine(hmma_f32=16))
    ]
    assert shares == pytest.approx([0.5, 1.0], abs=0.02)


@pytest.mark.parametrize(
    "machine",
    [machine for machine in MACHINES.values() if machine.tensor_cores],
    ids=lambda machine: machine.name,
)
@pytest.mark.parametrize(("product", "multiply_adds"), [(IMMA, 1024), (IMMA_OF_4_BITS, 2048)])
def test_integer_products_reach_the_rate_of_integers(product, multiply_adds, machine):
    """Twice and four times the multiply-adds of float16 on a T4, on every device with the cores."""
    jump = SassInstruction(16 * 64, "BRA", "0x0", target=0, control=Control(stall=5))
    code = [replace(product, address=16 * k) for k in range(64)] + [jump]
    (loop,) = code_figures(code, threads=128, ctas=2, machine=machine)
    assert loop.of_integers and loop.work_pipe == "tensor"
    assert loop.work_cycles == 64 * 4 * 2 and loop.work_flop == 64 * 8 * 2 * multiply_adds
    assert loop.utilisation.mean > 0.97
    assert loop.flop_per_cycle == pytest.approx(2 * multiply_adds, rel=0.03)


def test_integer_products_wait_for_the_sums_that_they_go_on_from():
    waits = replace(IMMA, control=Control(stall=4, write_scoreboard=0, waits_for=(0,)))
    share = busy_fraction([waits], MATRIX, warps=4, ctas=1)
    assert share == pytest.approx(4 / T4.imma_latency, rel=0.02)
    slow = replace(T4, imma_latency=28)
    assert busy_fraction([waits], MATRIX, 4, 1, machine=slow) == pytest.approx(4 / 28, rel=0.02)
    hmma = replace(waits, opcode="HMMA.1688.F32")
    assert busy_fraction([hmma], MATRIX, 4, 1, machine=slow) == pytest.approx(8 / 20, rel=0.02)


def test_a_loop_with_both_kinds_of_products():
    (loop,) = code_figures(assemble(("HMMA.1688.F32", None), ("IMMA.8816.S8.S8", None),
                                    ("IMMA.8832.S4.S4", None), ("BRA", 0)), 128, 1)  # fmt: skip
    assert not loop.of_integers
    assert (loop.work_flop, loop.work_cycles) == (4 * (2048 + 2048 + 4096), 8 + 4 + 4)


def test_float32_products_share_their_pipe():
    path = [SassInstruction(0, name, control=Control(stall=2)) for name in ("FFMA", "FADD")] * 8
    assert busy_fraction(path, FFMA, 4, 1) == pytest.approx(0.5, abs=0.01)


def test_the_load_store_unit_serves_one_at_a_time():
    """16 bytes a thread are 512 a warp, 8 cycles, in which only one of four gets what it needs."""
    path = [LDS, replace(HMMA, control=Control(stall=8, waits_for=(0,)))]
    assert busy_fraction(path, MATRIX, 16, 1) == pytest.approx(8 / 32, rel=0.02)


def test_a_scoreboard_is_waited_for():
    """One warp: the load's way into the unit, its service and its latency, then the product."""
    waits = replace(HMMA, control=Control(stall=8, waits_for=(0,)))
    cycles = 4 + 2 + T4.shared_latency + 8
    lds = SassInstruction(0, "LDS", control=Control(stall=1, write_scoreboard=0))
    assert 4 * busy_fraction([lds, waits], MATRIX, 1, 1) == pytest.approx(8 / cycles, rel=0.02)


LDG = SassInstruction(0, "LDG.E.128", "R0, [R4]", control=Control(stall=1, write_scoreboard=0))


def test_all_sms_share_the_rate_of_l2():
    """A warp's load of 512 bytes takes 512 / 20 cycles of an SM's share."""
    path = [*[LDG] * 8, replace(HMMA, control=Control(stall=8, waits_for=(0,)))]
    share = busy_fraction(path, MATRIX, 16, 1)
    assert share == pytest.approx(8 / 4 / (8 * 512 * 40 / 800), rel=0.05)
    more = busy_fraction(path, MATRIX, 16, 1, machine=Machine(multiprocessors=80))
    assert more == pytest.approx(share / 2, rel=0.05)


def test_stores_do_not_delay_loads():
    wait = replace(HMMA, control=Control(stall=8, waits_for=(0,)))
    store = replace(LDG, opcode="STG.E.128", control=Control(stall=1))
    loads, both = (busy_fraction(path, MATRIX, 8, 1) for path in ([LDG, wait], [LDG, store, wait]))
    assert both == pytest.approx(loads, rel=0.03)


def test_loads_arrive_at_times_that_differ():
    """Loads of 16 warps before a barrier are as late as the last of them."""
    barrier = SassInstruction(0, "BAR.SYNC", "0x0", control=Control(stall=1))
    path = [LDG, replace(HMMA, control=Control(stall=8, waits_for=(0,))), barrier]
    even, uneven = (
        busy_fraction(path, MATRIX, 16, 1, machine=Machine(l2_rate=1e6, global_spread=spread))
        for spread in (0, 150)
    )
    assert uneven < 0.9 * even


def test_three_registers_of_one_bank_take_a_cycle_more():
    path = [
        SassInstruction(0, "FFMA", operands, control=Control(stall=2))
        for operands in ("R0, R1, R3, R5", "R0, R1, R3, R4")
    ]
    shares = [busy_fraction([each] * 16, FFMA, 4, 1) for each in path]
    assert shares == pytest.approx([2 / 3, 1], abs=0.02)
    kept = replace(path[0], operands="R0, R1.reuse, R3, R5")
    assert busy_fraction([kept] * 16, FFMA, 4, 1) == pytest.approx(1, abs=0.04)


def test_a_loop_beyond_the_instruction_cache_issues_every_other_cycle():
    alu = SassInstruction(0, "MOV", control=Control(stall=1))
    fast, slow = (
        busy_fraction([alu] * 8 + [HMMA], MATRIX, 4, 1, machine=Machine(instruction_cache=size))
        for size in (16, 8)
    )
    assert fast == pytest.approx(8 / 24, abs=0.02) and slow < fast


def test_a_barrier_holds_its_warps_together():
    barrier = SassInstruction(0, "BAR.SYNC", "0x0", control=Control(stall=1))
    free = busy_fraction([HMMA] * 4, MATRIX, 4, 1)
    held = busy_fraction([*[HMMA] * 4, barrier], MATRIX, 4, 1)
    assert held == pytest.approx(32 / (32 + T4.barrier), abs=0.02)
    assert held < free


def test_two_ctas_fill_each_others_gaps():
    barrier = SassInstruction(0, "BAR.SYNC", "0x0", control=Control(stall=1))
    path = [*[HMMA] * 4, barrier]
    one, two = (utilisation(path, MATRIX, 4, ctas) for ctas in (1, 2))
    assert one.low == one.high, "a CTA alone starts when it starts"
    assert two.low > one.mean + 0.2


def test_ctas_of_two_warps_use_every_sub_partition():
    assert busy_fraction([HMMA] * 8, MATRIX, warps=2, ctas=2) > 0.99


def test_a_loop_that_cannot_advance():
    """Two warps meet at a barrier for four, which the others never reach."""
    waits = [SassInstruction(0, "BAR.SYNC", "0x0"), HMMA]
    sick = SassInstruction(0, "LDS", control=Control(write_scoreboard=0, waits_for=(0,)))
    assert busy_fraction([*waits, sick], MATRIX, 2, 1) > 0
    with pytest.raises(RuntimeError, match="does not advance"):
        busy_fraction([*waits, sick], MATRIX, 2, 1, machine=Machine(shared_latency=10_000_000))


# --- power


def test_a_t4_sustains_what_its_limit_allows():
    """Its product of this library's, next to 24 TFLOP/s in cuBLAS, which set no parameter."""
    product = [*[HMMA] * 128, *[LDS] * 20, *[LDG] * 7]
    jump = SassInstruction(16 * 155, "BRA", "0x0", target=0, control=Control(stall=5))
    code = [replace(each, address=16 * k) for k, each in enumerate(product)] + [jump]
    (loop,) = code_figures(code, threads=256, ctas=1)
    held = loop.sustained(T4)
    assert held.watts == pytest.approx(70, abs=0.01)
    assert 0.4 < held.ghz < 0.8


def test_without_utilisation_there_is_no_clock():
    assert loop_figures(assemble(("HMMA", None)), MATRIX, 4, 2).sustained(T4) is None


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_more_energy_never_raises_the_clock(machine):
    clocks = [power.sustained(joules, machine).ghz for joules in (0, 500, 1000, 2000, 4000, 1e5)]
    assert clocks == sorted(clocks, reverse=True)
    assert clocks[0] == machine.clock_mhz / 1000 and clocks[-1] > 0
    assert power.sustained(4000, machine).watts <= machine.watts + 1e-6


def test_energy_grows_with_the_square_of_the_voltage():
    """From the lowest voltage to that of 1.92 GHz, which a T4 under load never has."""

    def dynamic(ghz):
        return power.watts(1000, ghz, T4) - power.watts(0, ghz, T4)

    assert (power.volts(1.0), power.volts(1.41)) == (0.718, 0.718)
    assert power.volts(1.92) == pytest.approx(1.068)
    assert dynamic(1.92) / dynamic(1.0) == pytest.approx(1.92 * (1.068 / 0.718) ** 2)


def test_energy_of_bytes_grows_with_their_way():
    shared, there = (power.energy([SassInstruction(0, each)]) for each in ("LDS.128", "LDG.E.128"))
    register = power.energy([SassInstruction(0, "MOV")])
    assert register < shared < there


# --- what a caller may pass


@pytest.mark.parametrize(
    "given",
    [
        *({"clock_mhz": 0}, {"watts": -70}, {"watts": math.nan}, {"watts": math.inf}),
        *({"queue": 0}, {"hmma_f32": -8}, {"global_spread": -1}, {"shared_rate": "64"}),
    ],
)
def test_an_impossible_value_of_a_machine_is_refused(given):
    ((name, _),) = given.items()
    with pytest.raises(ValueError, match=rf"Machine\({name}=.*; it is a finite number"):
        Machine(**given)


def test_numpy_numbers_make_a_machine():
    assert Machine(watts=np.int64(80), clock_mhz=np.float32(1500)).watts == 80


def test_latencies_of_a_machine_may_be_0_and_rates_infinite():
    machine = Machine(global_latency=0, global_spread=0, fetch=0, l2_rate=math.inf)
    assert busy_fraction([LDG, HMMA], MATRIX, 4, 1, machine=machine) > 0


def test_a_name_instead_of_a_kernel_or_machine_is_refused():
    with pytest.raises(TypeError, match=r"row\(.*specialisation of a Kernel"):
        analyse("attention_forward")
    with pytest.raises(TypeError, match="MACHINES"):
        analyse(row("attention_forward", HEAD_DIM=64), machine="T4")


def test_a_missing_row_is_answered_with_its_values_or_macros():
    with pytest.raises(ValueError, match=r"\[40, 64, 80, 96, 128, .*\]}; pass values"):
        row("attention_forward", HEAD_DIM=65)
    with pytest.raises(ValueError, match=r"no macro DIM; its macros are .*HEAD_DIM"):
        row("attention_forward", DIM=64)
    with pytest.raises(ValueError, match="there is no kernel"):
        row(["attention_forward"])


def test_a_call_without_bytes_is_refused():
    with pytest.raises(ValueError, match=r"least_bytes=0; .* at least one byte"):
        memory_figures(Report(), 0)


# --- the disassembler


@pytest.fixture
def no_tool(monkeypatch, tmp_path):
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sass, "WHEEL", "a-wheel-that-is-not-there")
    sass._find.cache_clear()
    yield tmp_path
    sass._find.cache_clear()


def test_without_a_disassembler_the_error_says_what_to_install(no_tool):
    with pytest.raises(DisassemblerError, match=r"no nvdisasm here; .*; pip install"):
        disassemble(b"")


@pytest.mark.parametrize("variable", ["PATH", "CUDA_PATH"])
def test_a_disassembler_of_a_toolkit_is_found(no_tool, monkeypatch, variable):
    folder = no_tool / "bin"
    folder.mkdir()
    tool = folder / "nvdisasm"
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv(variable, str(folder if variable == "PATH" else no_tool))
    assert sass._find() == tool


def test_what_the_disassembler_says_is_the_error(monkeypatch):
    def failing(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "nvdisasm fatal: not an ELF file")

    monkeypatch.setattr(sass, "_find", lambda: Path("nvdisasm"))
    monkeypatch.setattr(sass.subprocess, "run", failing)
    with pytest.raises(DisassemblerError, match="not an ELF file"):
        disassemble(b"")


def test_products_of_tensor_cores_that_a_card_lacks_are_counted_and_not_played():
    jump = SassInstruction(16, "BRA", "0x0", target=0, control=Control(stall=5))
    code = [HMMA, jump]
    (there,) = code_figures(code, 128, 2)
    (lacking,) = code_figures(code, 128, 2, machine=MACHINES["GTX 1650 Ti"])
    assert there.utilisation is not None and there.flop_per_cycle > 0
    assert lacking.utilisation is None and lacking.flop_per_cycle is None
    assert lacking.work_flop == there.work_flop == 2 * 4 * 2 * 16 * 8 * 8
    assert lacking.work_cycles > there.work_cycles
