"""Bad input: the emulator refuses before anything has run, and says what is wrong."""

from typing import Any

import numpy as np
import pytest
from ptx import kernel_text

from cupyattn import emulator
from cupyattn.emulator import LaunchError, PTXSyntaxError, UnsupportedPTXError

BODY = "ld.param.u64 %rd1, [x]; mov.u32 %r1, 7; st.global.u32 [%rd1], %r1;"
PTX = kernel_text(BODY, ".param .u64 x, .param .u32 n, .param .f32 f")


def arguments(**changes: Any) -> list[Any]:
    args: dict[str, Any] = {"x": np.zeros(4, "u4"), "n": np.uint32(3), "f": np.float32(1)}
    args.update(changes)
    return list(args.values())


def test_right() -> None:
    args = arguments()
    emulator.run(PTX, "k", 1, 1, args)
    assert args[0][0] == 7


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (arguments()[:2], "takes 3 arguments, got 2"),
        ([*arguments(), np.int32(0)], "takes 3 arguments, got 4"),
        (arguments(n=3), "got a int; allowed are NumPy arrays"),
        (arguments(n=np.int64(3)), r"got 8 bytes \(int64\), the kernel expects 4"),
        (arguments(n=np.float32(3)), "got float32; convert"),
        (arguments(f=np.int32(3)), "got int32; convert"),
        (arguments(n=np.zeros(4)), "got an array, but the parameter is 4 bytes by value"),
        (arguments(n=None), "got None, but the parameter is 4 bytes by value"),
        (arguments(x=np.array([object()])), "an array of Python objects"),
        (arguments(x=[1, 2]), "got a list"),
    ],
)
def test_arguments(args: list[Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        emulator.run(PTX, "k", 1, 1, args)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        (0, 32, "grid is"),
        ((1, 70000), 32, "grid is"),
        (1, (32, 33), "1056 threads; at most 1024"),
        (1, 2048, "block is"),
        (1, (1, 1, 65), "block is"),
        ((1, 1, 1, 1), 32, "1 to 3 integers"),
        ("x", 32, "1 to 3 integers"),
    ],
)
def test_sizes(grid: Any, block: Any, message: str) -> None:
    args = arguments()
    with pytest.raises(LaunchError, match=message):
        emulator.run(PTX, "k", grid, block, args)
    assert not args[0].any()


def test_entries() -> None:
    module = emulator.load(PTX)
    assert list(module.entries) == ["k"] and module.target == 75
    sizes = [(p.name, p.offset, p.size, p.alignment) for p in module.entries["k"].parameters]
    assert sizes == [("x", 0, 8, 8), ("n", 8, 4, 4), ("f", 12, 4, 4)]
    with pytest.raises(LaunchError, match=r"no kernel 'other'.*\['k'\]"):
        emulator.launch(module, "other", 1, 1, [])


def test_launch_bounds() -> None:
    text = PTX.replace(")\n{", ")\n.maxntid 64, 1, 1\n{")
    emulator.run(text, "k", 1, 64, arguments())
    with pytest.raises(LaunchError, match="at most 64 threads"):
        emulator.run(text, "k", 1, 96, arguments())
    text = PTX.replace(")\n{", ")\n.reqntid 64, 1, 1\n{")
    with pytest.raises(LaunchError, match="requires blocks of"):
        emulator.run(text, "k", 1, 32, arguments())


@pytest.mark.parametrize("shared_bytes", range(18))
def test_any_size_of_shared_memory(shared_bytes: int) -> None:
    emulator.run(PTX, "k", 1, 1, arguments(), shared_bytes=shared_bytes)


def test_ptx_is_text() -> None:
    with pytest.raises(PTXSyntaxError, match=r"got a bytes; .*decode"):
        emulator.load(PTX.encode())  # type: ignore[arg-type]


def test_shared_memory_limits() -> None:
    emulator.run(PTX, "k", 1, 1, arguments(), shared_bytes=65536)
    with pytest.raises(LaunchError, match=r"needs 65540 bytes .* sm_75 has 65536"):
        emulator.run(PTX, "k", 1, 1, arguments(), shared_bytes=65540)
    with pytest.raises(LaunchError, match="must not be negative"):
        emulator.run(PTX, "k", 1, 1, arguments(), shared_bytes=-4)
    static = kernel_text(".shared .align 4 .b8 s[40000];" + BODY, ".param .u64 x")
    with pytest.raises(LaunchError, match="static 40000, dynamic 30000"):
        emulator.run(static, "k", 1, 1, [np.zeros(1, "u4")], shared_bytes=30000)
    static = static.replace("40000", "50000")
    with pytest.raises(LaunchError, match="make it dynamic"):
        emulator.run(static, "k", 1, 1, [np.zeros(1, "u4")])


def test_no_ptx() -> None:
    with pytest.raises(PTXSyntaxError, match="this is not PTX"):
        emulator.load("\x7fELF")
    with pytest.raises(PTXSyntaxError, match="cut short"):
        emulator.load(PTX.rstrip()[:-1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("wmma.load.a.sync %r1;", r"not supported \[wmma.load.a.sync %r1;\]"),
        ("cp.async.ca.shared.global [%r1], [%rd1], 16;", "not supported"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f0}, {%r0}, {%r1}, {%f0};", "m16n8k8"),
        ("add.cc.u32 %r1, %r2, %r3;", "carry flag"),
        ("fma.rn.bf16 %h1, %h2, %h3, %h4;", "needs sm_80"),
        ("mov.u32 %r1, %clock;", "'%clock' is no register"),
        ("cvt.rna.tf32.f32 %r1, %f1;", "not supported"),
        ("barrier.cluster.arrive;", "not supported"),
        ("shfl.idx.b32 %r1, %r2, 0, 31;", "without .sync"),
        ("lop3.b32 %r1, %r2;", "cannot read it"),
        ("bra nowhere;", "unknown label nowhere"),
    ],
)
def test_unsupported_instructions(body: str, message: str) -> None:
    args = arguments()
    text = kernel_text(
        BODY + "\n.loc 1 17 3\n" + body, ".param .u64 x, .param .u32 n, .param .f32 f"
    )
    text += '\n.file 1 "/src/some.cu"\n'
    with pytest.raises(emulator.EmulatorError, match=message) as caught:
        emulator.run(text, "k", 1, 1, args)
    assert not args[0].any()
    if isinstance(caught.value, UnsupportedPTXError):
        assert "/src/some.cu:17" in str(caught.value)


CALLS = """
.version 8.0
.target sm_75
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);
.func loop() { call.uni loop, (); ret; }
.visible .entry prints() {
  .reg .b64 %rd<3>; .reg .b32 %r<3>;
  { .param .b64 param0; .param .b64 param1; .param .b32 retval0;
    call.uni (retval0), vprintf, (param0, param1); }
  ret;
}
.visible .entry recurses() { call.uni loop, (); ret; }
.visible .entry indirect() { .reg .b64 %rd<3>; call.uni %rd1, (), proto; ret; }
"""


@pytest.mark.parametrize(
    ("entry", "message"),
    [("prints", "printf: take it out"), ("recurses", "recursion"), ("indirect", "indirect call")],
)
def test_unsupported_calls(entry: str, message: str) -> None:
    with pytest.raises(UnsupportedPTXError, match=message):
        emulator.run(CALLS, entry, 1, 1, [])


def test_structure_fields() -> None:
    with pytest.raises(LaunchError, match=r"no fields \['z'\]"):
        emulator.Struct(np.dtype([("x", "u8")]), {"z": 1})
    with pytest.raises(LaunchError, match="only uint64 fields hold pointers"):
        emulator.Struct(np.dtype([("x", "u4")]), {"x": emulator.Argument(np.zeros(1))})
