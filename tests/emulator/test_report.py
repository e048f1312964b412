"""The report: counts that are known by hand for small kernels."""

import numpy as np
import pytest
from support.ptx import kernel_text

from cupyattn import emulator
from cupyattn.emulator import Report
from cupyattn.emulator.ptx.model import Instruction
from cupyattn.emulator.report import pipe

PROLOGUE = "mov.u32 %r60, %tid.x; ld.param.u64 %rd1, [x]; "


def report_of(body: str, array: np.ndarray, block: int = 32, grid: int = 1) -> Report:
    report = Report()
    text = kernel_text(PROLOGUE + body, ".param .u64 x") + '.file 1 "k.cu"'
    returned = emulator.run(text, "k", grid, block, [array], report=report)
    assert returned is report
    return report


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (8, 8), (32, 32), (128, 32), (0, 1)])
def test_global_sectors(stride: int, sectors: int) -> None:
    body = (
        f"mul.wide.u32 %rd2, %r60, {stride}; add.s64 %rd3, %rd1, %rd2; ld.global.u32 %r1, [%rd3];"
    )
    report = report_of(body, np.zeros(32 * 32, "u4"))
    (access,) = report.accesses
    assert (access.requests, access.sectors, access.bytes) == (1, sectors, 128)
    ideal = 1 if stride == 0 else 4
    assert access.efficiency == report.sector_efficiency == ideal / sectors
    assert report.bytes_moved == {"global load": 128}


@pytest.mark.parametrize(
    ("width", "stride", "ways"),
    [  # bytes per lane, bytes between lanes
        (4, 4, 1), (4, 8, 2), (4, 128, 32), (4, 0, 1), (4, 132, 1), (8, 8, 1), (8, 128, 16),
        (16, 16, 1), (16, 128, 8), (16, 144, 1), (16, 32, 2), (2, 2, 1), (2, 4, 1), (2, 64, 16),
    ],
)  # fmt: skip
def test_bank_conflicts(width: int, stride: int, ways: int) -> None:
    vector = {16: ".v4.u32 [%r3], {%r60, %r60, %r60, %r60}", 8: ".v2.u32 [%r3], {%r60, %r60}",
              4: ".u32 [%r3], %r60", 2: ".u16 [%r3], %h1"}[width]  # fmt: skip
    body = f".shared .align 16 .b8 s[8192]; mov.u32 %r1, s; mul.lo.u32 %r2, %r60, {stride}; "
    body += f"add.s32 %r3, %r1, %r2; cvt.u16.u32 %h1, 5; mov.u32 %r60, 1; st.shared{vector};"
    report = report_of(body, np.zeros(1, "u4"), block=64 if stride < 128 else 32)
    (access,) = report.accesses
    assert access.ways == report.bank_conflict_ways == access.worst == ways
    assert access.write and access.space == "shared"


@pytest.mark.parametrize(("row_bytes", "ways"), [(16, 1), (128, 8), (144, 1), (64, 4), (32, 2)])
def test_ldmatrix_conflicts(row_bytes: int, ways: int) -> None:
    body = f"""
      .shared .align 16 .b8 s[8192]; mov.u32 %r1, s; mul.lo.u32 %r2, %r60, {row_bytes};
      add.s32 %r3, %r1, %r2; st.shared.v4.u32 [%r3], {{%r60, %r60, %r60, %r60}}; bar.sync 0;
      ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r3];
    """
    report = report_of(body, np.zeros(1, "u4"))
    loads = [a for a in report.accesses if a.instruction.root == "ldmatrix"]
    assert [a.ways for a in loads] == [ways] and loads[0].phases == 4


def test_instruction_mix_and_divergence() -> None:
    body = """
      .loc 1 3 0
      setp.lt.u32 %p1, %r60, 8;
      @%p1 bra L1;
      .loc 1 4 0
      add.f32 %f1, %f1, %f1; fma.rn.f32 %f1, %f1, %f1, %f1;
      bra L2;
    L1:
      .loc 1 5 0
      ex2.approx.f32 %f1, %f1;
    L2:
      .loc 1 6 0
      mul.wide.u32 %rd2, %r60, 4; add.s64 %rd3, %rd1, %rd2; st.global.f32 [%rd3], %f1;
      red.global.add.f32 [%rd3], %f1;
    """
    report = report_of(body, np.zeros(64, "f4"), block=64)
    mix = report.instruction_mix
    assert mix["xu"] == 1  # warp 0 alone
    assert mix["fma"] == 2 * 2 + 2  # two warps, and mul.wide
    assert mix["ldg"] == 2 and mix["atomic"] == 2
    assert report.diverged_steps == 2 and report.atomic_updates == 64
    lines = {line.line: line for line in report.lines}
    assert lines[5].instructions == {"xu": 1}
    assert lines[4].instructions == {"fma": 4, "control": 2}
    assert [lines[n].diverged_steps for n in (3, 4, 5, 6)] == [0, 1, 1, 0]  # warp 1 goes one way
    assert [a.space for a in lines[6].accesses] == ["global", "global"]
    text = str(report)
    assert "k.cu:6" in text and "sectors/request" in text and "xu 1" in text


@pytest.mark.parametrize(
    ("opcode", "busy"),
    [
        ("cvt.f32.f16", "half"),  # HADD2.F32 in the machine code for sm_75
        ("cvt.rn.f16.f32", "xu"),  # F2F.F16.F32
        ("cvt.rn.f32.s32", "xu"),
        ("cvt.u32.u16", "alu"),
    ],
)
def test_conversions_keep_the_pipe_busy_that_the_assembler_takes(opcode: str, busy: str) -> None:
    assert pipe(Instruction(opcode, ["a", "b"])) == busy


def test_warps_that_part_do_not_diverge() -> None:
    body = """
      .loc 1 3 0
      setp.lt.u32 %p1, %r60, 32;
      @%p1 bra L1;
      .loc 1 4 0
      add.f32 %f1, %f1, %f1;
    L1:
    """
    report = report_of(body, np.zeros(1, "f4"), block=96, grid=5)
    assert report.diverged_steps == 0
    assert {line.line: line for line in report.lines}[4].instructions["fma"] == 2 * 5


def test_the_last_warp_of_an_odd_block_does_not_diverge() -> None:
    report = report_of("bra L1; L1: add.f32 %f1, %f1, %f1;", np.zeros(1, "f4"), block=40)
    assert report.diverged_steps == 0


def test_totals_over_launches() -> None:
    report = Report()
    text = kernel_text(PROLOGUE + "ld.global.u32 %r1, [%rd1];", ".param .u64 x")
    module = emulator.load(text)
    for _ in range(3):
        emulator.launch(module, "k", 5, 32, [np.zeros(1, "u4")], report=report)
    assert report.accesses[0].requests == 15


def test_kernels_of_one_name_are_added_up() -> None:
    """As specialisations of one source are, a report over several calls has them all."""
    report = Report()
    for width in (4, 8, 4):
        text = kernel_text(
            f"ld.param.u64 %rd1, [p0]; mov.u64 %rd2, 0; mov.u32 %r1, 0; "
            f"st.global.b{8 * width} [%rd1], {'%r1' if width == 4 else '%rd2'};"
        )
        emulator.run(text, "k", 1, 1, [np.zeros(1, np.uint64)], report=report)
    assert report.bytes_moved == {"global store": 16}
    assert [access.requests for access in report.accesses] == [2, 1]
