"""The PTX parser, the control-flow graph, and what a loaded module keeps."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from support.ptx import kernel_text

from cupyattn import emulator
from cupyattn.emulator import PTXSyntaxError
from cupyattn.emulator.codegen.control_flow import ControlFlow
from cupyattn.emulator.ptx.body import parse_variable, split_operands
from cupyattn.emulator.ptx.calls import expand_calls
from cupyattn.emulator.ptx.model import Function, readable
from cupyattn.emulator.ptx.parser import parse_module
from cupyattn.runtime.device import emulated


def body(text: str) -> Function:
    module = parse_module(kernel_text(text, ""))
    return expand_calls(module, module.function("k"))


def test_operands() -> None:
    assert split_operands("%r1|%p2, {%f1, %f2}, [%rd1+-4], -1") == [
        "%r1|%p2", "{%f1, %f2}", "[%rd1+-4]", "-1",
    ]  # fmt: skip
    assert split_operands("") == []


def test_instructions_labels_and_guards() -> None:
    function = body("LOOP: @!%p1 add.s32 %r1, %r2, -3; // comment; with a semicolon\n"
                    "{ mov.b32 %r1, 5; } /* another\n one; */ bra.uni LOOP;")  # fmt: skip
    first = function.instructions[0]
    assert (first.opcode, first.guard, first.operands) == (
        "add.s32", ("%p1", True), ["%r1", "%r2", "-3"],
    )  # fmt: skip
    assert str(first) == "@!%p1 add.s32 %r1, %r2, -3;"
    assert function.labels["LOOP"] == 0 and len(function.instructions) == 4


def test_scoped_registers_are_kept_apart() -> None:
    function = body("{ .reg .b32 t; mov.u32 t, 1; } { .reg .b32 t; mov.u32 t, 2; mov.u32 %r1, t; }")
    targets = [x.operands[0] for x in function.instructions[:2]]
    assert targets[0] != targets[1]
    assert function.instructions[2].operands[1] == targets[1]
    assert all(name in function.registers for name in targets)


def test_a_scope_goes_on_behind_one_within() -> None:
    function = body("{ { .reg .b32 t; mov.u32 t, 1; } .reg .b32 t; mov.u32 t, 2; }")
    first, second = (x.operands[0] for x in function.instructions[:2])
    assert first != second


COUNT = """{{ .reg .pred p; .reg .b32 n; mov.u32 n, %r60;
  bra TEST; LOOP: add.u32 {sum}, {sum}, {step}; sub.u32 n, n, 1;
  TEST: setp.ne.u32 p, n, 0; @p bra LOOP; }}"""


def test_labels_of_scopes_are_kept_apart() -> None:
    """Inline assembly with a loop, expanded twice; forward and backward branches."""
    x = np.zeros(4, np.uint32)
    loops = COUNT.format(sum="%r1", step=1) + COUNT.format(sum="%r2", step=100)
    text = f"""mov.u32 %r60, %tid.x; mov.u32 %r1, 0; mov.u32 %r2, 0; {loops}
      add.u32 %r1, %r1, %r2; ld.param.u64 %rd1, [p0]; mul.wide.u32 %rd2, %r60, 4;
      add.s64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r1;"""
    emulator.run(kernel_text(text), "k", 1, 4, [x])
    np.testing.assert_array_equal(x, 101 * np.arange(4))


def test_branch_tables_of_scopes_are_kept_apart() -> None:
    choice = """{{ TABLE: .branchtargets A, B; brx.idx %r60, TABLE;
      A: add.u32 %r1, %r1, {a}; bra END; B: add.u32 %r1, %r1, {b}; END: mov.u32 %r2, 0; }}"""
    x = np.zeros(2, np.uint32)
    text = f"""mov.u32 %r60, %tid.x; mov.u32 %r1, 0; {choice.format(a=1, b=2)}
      {choice.format(a=10, b=20)} ld.param.u64 %rd1, [p0]; mul.wide.u32 %rd2, %r60, 4;
      add.s64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r1;"""
    emulator.run(kernel_text(text), "k", 1, 2, [x])
    np.testing.assert_array_equal(x, [11, 22])


REGISTER_FUNCTION = """.func (.reg .b32 result, .reg .pred odd) f(.reg .b32 a, .reg .f32 b) {
  .reg .b32 t; mov.u32 result, 100; add.u32 result, result, a; add.u32 a, a, 1;
  cvt.rzi.u32.f32 t, b; add.u32 result, result, t;
  and.b32 t, a, 1; setp.ne.u32 odd, t, 0; ret; }"""


@pytest.mark.parametrize(("guard", "expected"), [("", [7, 109]), ("@%p2 ", [7, 7])])
def test_registers_are_passed_by_value(guard: str, expected: list[int]) -> None:
    """The callee changes its parameter; a result takes the place of an argument."""
    x = np.zeros(3, np.uint32)
    text = f"""mov.u32 %r1, 7; mov.u32 %r2, %r1; setp.ne.u32 %p1, %r1, 7; setp.ne.u32 %p2, %r1, 7;
      {guard}call (%r2, %p1), f, (%r2, 0f40000000); ld.param.u64 %rd1, [p0];
      st.global.u32 [%rd1], %r1; st.global.u32 [%rd1+4], %r2; selp.u32 %r3, 1, 0, %p1;
      st.global.u32 [%rd1+8], %r3;"""
    module = kernel_text(text).replace(".visible", REGISTER_FUNCTION + ".visible", 1)
    emulator.run(module, "k", 1, 1, [x])
    np.testing.assert_array_equal(x, [*expected, 0])


@pytest.mark.parametrize("call", ["call (%r2, %p1), f, (%r1)", "call f, (%r1, 0f00000000)"])
def test_a_call_with_another_number_of_arguments(call: str) -> None:
    module = kernel_text(f"{call};").replace(".visible", REGISTER_FUNCTION + ".visible", 1)
    with pytest.raises(PTXSyntaxError, match="f takes 2 arguments and returns 2 values"):
        emulator.run(module, "k", 1, 1, [None])


@pytest.mark.parametrize("text", ["", "END:"])
def test_an_empty_kernel_does_nothing(text: str) -> None:
    emulator.run(f".version 8.0\n.target sm_75\n.entry k() {{ {text} }}", "k", 1, 1, [])


@pytest.mark.parametrize(
    "last",
    ["bar.sync 0;", "bar.warp.sync -1;", "bar.arrive 1, 32;", "@%p1 bar.sync 0;", "@%p1 ret;"],
)
def test_a_kernel_may_end_without_ret(last: str) -> None:
    """It runs once, also where its lanes may wait at the end."""
    out = np.zeros(1, "u4")
    text = kernel_text(
        f"""ld.param.u64 %rd1, [p0]; ld.global.u32 %r1, [%rd1]; add.u32 %r1, %r1, 1;
        st.global.u32 [%rd1], %r1; {last}"""
    )
    text = text.replace("  ret;\n}", "}")
    emulator.run(text, "k", 1, 32, [out], checks=emulator.Checks(max_steps=10))
    assert out[0] == 1


def test_lines() -> None:
    text = (
        kernel_text(
            """
        .loc 1 10 3
        mov.u32 %r1, 1;
        .loc 2 700 5, function_name $L__info_string0, inlined_at 1 12 7
        mov.u32 %r2, 1;
        .loc 3 33 5, function_name $L__info_string1, inlined_at 1 13 7
        mov.u32 %r3, 1;
        .loc 1 0 3
        mov.u32 %r4, 1;
        .loc 1 14 9
        .loc 3 50 2, function_name $L__info_string1, inlined_at 1 14 9
        .loc 2 60 2, function_name $L__info_string2, inlined_at 3 50 2
        .loc 3 70 4, function_name $L__info_string3, inlined_at 2 60 2
        mov.u32 %r5, 1;
        .loc 3 50 2, function_name $L__info_string1, inlined_at 1 15 9
        .loc 3 70 4, function_name $L__info_string3, inlined_at 3 50 2
        mov.u32 %r6, 1;
        """,
            "",
        )
        + '.file 1 "/a/k.cu"\n.file 2 "/usr/include/cuda_fp16.hpp"\n.file 3 "/a//mma.cuh"\n'
    )
    function = parse_module(text).function("k")
    assert [x.location for x in function.instructions[:4]] == [
        ("/a/k.cu", 10),
        ("/a/k.cu", 12),  # not the toolkit's header, but what called it
        ("/a//mma.cuh", 33),
        ("/a//mma.cuh", 33),  # line 0 says nothing
    ]
    lines = [(x.location[1], [line for _, line in x.callers]) for x in function.instructions[:6]]
    assert lines == [
        (10, []), (12, []), (33, [13]), (33, [13]),
        (70, [50, 14]),  # without the toolkit's
        (70, [50, 15]),  # the caller that came last
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size", "alignment", "initial"),
    [
        (".global .align 4 .f32 x = 0f3F800000", 4, 4, np.float32(1).tobytes()),
        (".const .align 8 .b8 t[4] = {1, 2, 255}", 4, 8, bytes([1, 2, 255, 0])),
        (".global .s16 y[2] = {-1, 0x10}", 4, 2, np.array([-1, 16], "i2").tobytes()),
        (".global .f64 d = 0d3FF0000000000000", 8, 8, np.float64(1).tobytes()),
        (".global .f32 d = 2.5", 4, 4, np.float32(2.5).tobytes()),
        (".shared .align 16 .b8 s[]", 0, 16, None),
        (".local .align 8 .b8 __local_depot0[40]", 40, 8, None),
        (".global .v4 .u32 q", 16, 4, None),
        (".shared .u32 m[3][5]", 60, 4, None),
    ],
)
def test_variables(text: str, size: int, alignment: int, initial: bytes | None) -> None:
    variable = parse_variable(text)
    assert variable is not None
    assert (variable.size, variable.alignment, variable.initial) == (size, alignment, initial)


def test_unreadable_initial_values_matter_only_if_used() -> None:
    declaration = ".global .u64 table[2] = {generic(other), 0};\n"
    text = kernel_text("mov.u32 %r1, 1;", "")
    used = kernel_text("mov.u64 %rd1, table; ld.global.u64 %rd2, [%rd1];", "")
    emulator.run(text.replace(".visible", declaration + ".visible"), "k", 1, 1, [])
    with pytest.raises(emulator.UnsupportedPTXError, match="only numbers are understood"):
        emulator.run(used.replace(".visible", declaration + ".visible"), "k", 1, 1, [])


def test_registers_that_are_never_written_are_not_zero() -> None:
    out = np.zeros(1, "u4")
    emulator.run(
        kernel_text("ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], %r9;"), "k", 1, 1, [out]
    )
    assert out[0] == 0x7FFF7FFF


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZZ17race_between_warpsE1s", "s"),
        ("_ZZN5outer6kernelIfLi12EEEvPT_iE9row_stats_0", "row_stats"),
        ("_ZZ1kvE10s10_of_ten", "s10_of_ten"),
        ("_ZN4math5tableE", "math::table"),
        ("_ZL5table", "table"),
        ("_ZN4math4fillILi3EEEvPf", "math::fill"),
        ("_Z6kernelPf", "kernel"),
        ("kernel", "kernel"),
        ("_ZZ", "_ZZ"),
        ("_Z99short", "_Z99short"),
        ("__local_depot0", "__local_depot0"),
    ],
)
def test_readable_names(mangled: str, name: str) -> None:
    assert readable(mangled) == name


def order(text: str) -> list[int]:
    """Return the first instruction of every block, in the order in which blocks run."""
    return [block.first for block in ControlFlow(body(text)).blocks]


def test_both_sides_of_a_branch_come_before_their_join() -> None:
    # the cold side comes after the end, where compilers like to put it
    text = """
      setp.eq.u32 %p1, %r1, 0; @%p1 bra COLD;
      mov.u32 %r2, 1;
    JOIN:
      mov.u32 %r3, 1; ret;
    COLD:
      mov.u32 %r2, 2; bra JOIN;
    """
    function = body(text)
    flow = ControlFlow(function)
    assert flow.target["COLD"] < flow.target["JOIN"]
    assert [flow.blocks[flow.target[n]].first for n in ("JOIN", "COLD")] == [3, 5]


def test_loops_are_contiguous() -> None:
    # the exit of the loop is in the middle of its text
    text = """
    LOOP:
      setp.eq.u32 %p1, %r1, 0; @%p1 bra BODY;
    OUT:
      mov.u32 %r3, 1; ret;
    BODY:
      mov.u32 %r2, 2; bra LOOP;
    """
    flow = ControlFlow(body(text))
    assert flow.target["LOOP"] < flow.target["BODY"] < flow.target["OUT"]


def test_unreachable_code_is_dropped() -> None:
    assert order("ret; mov.u32 %r1, 1; add.u32 %r1, %r1, 1;") == [0]


TWO_KERNELS = """
.version 8.0
.target sm_75
.address_size 64
.func (.reg .u32 %result) twice(.reg .u32 %value)
{
  add.u32 %result, %value, %value;
  ret;
}
.visible .entry first(.param .u64 x)
{
  .reg .u64 %at; .reg .u32 %v;
  .global .align 4 .u32 start = 21;
  ld.param.u64 %at, [x];
  ld.global.u32 %v, [start];
  call (%v), twice, (%v);
  st.global.u32 [%at], %v;
  ret;
}
.visible .entry second(.param .u64 x)
{
  .reg .u64 %at; .reg .u32 %v;
  ld.param.u64 %at, [x];
  ld.global.u32 %v, [%at];
  call (%v), twice, (%v);
  st.global.u32 [%at], %v;
  ret;
}
"""


def test_kernels_outlive_their_ptx():
    module = emulator.load(TWO_KERNELS)
    x = np.zeros(1, np.uint32)
    for entry, value in (("first", 42), ("second", 84), ("first", 42), ("second", 84)):
        emulator.launch(module, entry, 1, 1, [x])
        assert x[0] == value
    assert module.symbol("start").view(np.uint32)[0] == 21
    module.symbol("start").view(np.uint32)[0] = 5
    emulator.launch(module, "first", 1, 1, [x])
    assert x[0] == 10


def test_a_program_is_small():
    """For 1,000 instructions it keeps code and a line of each, a fifth of the parse tree."""
    lines = [f"add.f32 %f{i % 30}, %f{i % 30}, %f{(i + 7) % 30};" for i in range(1000)]
    lines += ["ld.param.u64 %rd1, [x];"]
    lines += [f"st.global.f32 [%rd1+{4 * i}], %f{i};" for i in range(30)]
    text = kernel_text("\n".join(lines), ".param .u64 x")
    emulator.load(text).program("k")  # what is cached for all kernels
    gc.collect()
    tracemalloc.start()
    try:
        module = emulator.load(text)
        module.program("k")
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 300 * len(lines)


def test_the_device_keeps_a_bounded_number_of_modules():
    assert emulated._module.cache_info().maxsize == 64
