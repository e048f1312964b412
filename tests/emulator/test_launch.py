"""Arguments of kernels (views, structures, threads), and bad input, which is refused."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
from support.ptx import kernel_text

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
        (arguments(n=3), "got int; allowed are NumPy arrays"),
        (arguments(n=np.int64(3)), r"got 8 bytes \(int64\), the kernel expects 4"),
        (arguments(n=np.float32(3)), "got float32; convert"),
        (arguments(f=np.int32(3)), "got int32; convert"),
        (arguments(n=np.zeros(4)), "got an array, but the parameter is 4 bytes by value"),
        (arguments(n=None), "got None, but the parameter is 4 bytes by value"),
        (arguments(x=np.array([object()])), "an array of Python objects"),
        (arguments(x=[1, 2]), "got list"),
        (arguments(x=np.zeros(4, ">f4")), "got >f4, numbers in the other byte order"),
        (arguments(f=np.array(1, ">f4")), "got >f4, numbers in the other byte order"),
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
        (None, 32, "grid is None; allowed: 1 to 3 integers"),
        (1.0, 32, r"grid is 1\.0; allowed"),
        (True, 32, "grid is True; allowed"),
        (1, (32.0, 1), r"block is \(32\.0, 1\); allowed"),
        (1, {32}, r"block is \{32\}; allowed"),
        (1, (), "block is"),
    ],
)
def test_sizes(grid: Any, block: Any, message: str) -> None:
    args = arguments()
    with pytest.raises(LaunchError, match=message):
        emulator.run(PTX, "k", grid, block, args)
    assert not args[0].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"entry": b"k"},
            r"entry is b'k' \(bytes\); allowed: the name of a kernel as str.*\['k'\]",
        ),
        ({"entry": None}, "entry is None"),
        ({"args": np.zeros(3)}, r"args is array.* \(ndarray\); allowed: a list or tuple"),
        ({"args": None}, r"args is None \(NoneType\); allowed: a list or tuple"),
        ({"args": {"x": 1}}, r"args is .*\(dict\)"),
        ({"shared_bytes": 64.0}, r"shared_bytes is 64\.0 \(float\); allowed: a number of bytes"),
        ({"shared_bytes": None}, "shared_bytes is None"),
        ({"shared_bytes": True}, "shared_bytes is True"),
        ({"checks": True}, r"checks is True \(bool\); allowed: Checks\(\)"),
        ({"report": {}}, r"report is \{\} \(dict\); allowed: a Report\(\)"),
        ({"module": PTX}, r"module is .* \(str\); allowed: what emulator.load"),
    ],
)
def test_wrong_types(changes: dict[str, Any], message: str) -> None:
    call = {"module": emulator.load(PTX), "entry": "k", "grid": 1, "block": 1, "args": arguments()}
    call.update(changes)
    with pytest.raises(LaunchError, match=message):
        emulator.launch(**call)
    if "args" not in changes:
        assert not call["args"][0].any()


@pytest.mark.parametrize("ptx", [PTX.encode(), bytearray(PTX.encode()), None, 7, ["a"]])
def test_ptx_of_another_type(ptx: Any) -> None:
    with pytest.raises(PTXSyntaxError, match=rf"ptx has type {type(ptx).__name__}; allowed: PTX"):
        emulator.run(ptx, "k", 1, 1, arguments())


def test_wrong_types_of_what_is_passed_along() -> None:
    with pytest.raises(LaunchError, match="sources has type list; allowed: a mapping"):
        emulator.load(PTX, ["a.cu"])  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"Argument.array has type list; allowed: a NumPy array"):
        emulator.Argument([1.0])  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"Checks.races is 'no'; allowed: True or False"):
        emulator.Checks(races="no")  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="max_steps is 0; allowed: a positive int"):
        emulator.Checks(max_steps=0)
    for dtype, values in (("u9", {}), ("u8", {}), ([("x", "u8")], [1])):
        with pytest.raises(LaunchError, match="Struct"):
            emulator.Struct(dtype, values)  # type: ignore[arg-type]
    text = kernel_text("", ".param .align 8 .b8 s[8]")
    for value in ("many", [1, 2], {}):
        with pytest.raises(LaunchError, match="field 'n' of a Struct is int64, got"):
            emulator.run(text, "k", 1, 1, [emulator.Struct([("n", "i8")], {"n": value})])


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
    with pytest.raises(PTXSyntaxError, match=r"ptx has type bytes; .*decode"):
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
    for end in range(PTX.index(".visible") + 1, len(PTX.rstrip())):
        with pytest.raises(PTXSyntaxError, match="cut short"):
            emulator.load(PTX[:end])
    assert emulator.load(PTX[: PTX.index(".visible")]).entries == {}


@pytest.mark.parametrize("bits", [32, 16])
def test_addresses_have_64_bits(bits: int) -> None:
    with pytest.raises(UnsupportedPTXError, match=rf"addresses of {bits} bits .*compile without"):
        emulator.load(PTX.replace(".address_size 64", f".address_size {bits}"))


def test_a_name_is_defined_once() -> None:
    entry = PTX[PTX.index(".visible") :]
    device = ".func d() { ret; }\n"
    with pytest.raises(PTXSyntaxError, match=r"k has two bodies; .*another name"):
        emulator.load(PTX + entry)
    with pytest.raises(PTXSyntaxError, match="d has two bodies"):
        emulator.load(PTX + device + device)
    declared_first = PTX + ".func d();\n" + device + entry.replace(" k(", " l(")
    assert list(emulator.load(declared_first).entries) == ["k", "l"]


@pytest.mark.parametrize("seed", range(5))
def test_damaged_ptx_is_refused_or_runs(seed: int) -> None:
    # nothing but the emulator's own errors, whatever token is lost, replaced or strange
    rng = random.Random(seed)
    shared = ".global .align 4 .b8 t[4] = {1, 0f3F800000, 2};\n.visible .entry k("
    text = kernel_text(
        ".shared .b32 s[4]; { .reg .f32 a; mov.f32 a, 0f3F800000; @!%p1 add.ftz.f32 %f1, a, %f2; }"
        "vote.sync.ballot.b32 %r3, %p1, -1; LOOP: @!%p2 bra LOOP; bar.sync 1, 64;" + BODY,
        ".param .u64 x, .param .align 8 .b8 q[16]",
    ).replace(".visible .entry k(", shared)
    args, checks = [np.zeros(4, "u4"), np.zeros((), "V16")[()]], emulator.Checks(max_steps=1000)
    emulator.run(text, "k", 1, 64, args, checks=checks)
    assert args[0][0] == 7
    tokens = [m.span() for m in re.finditer(r"[\w.%$]+|\S", text)]
    for _ in range(200):
        (start, end), (a, b) = rng.sample(tokens, 2)
        new = rng.choice(["", text[a:b], "foo9", "-1"])
        with contextlib.suppress(emulator.EmulatorError):
            module = emulator.load(text[:start] + new + text[end:])
            for entry in module.entries:
                emulator.launch(module, entry, 1, 64, args, checks=checks)


MMA, F4 = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "{%f1, %f2, %f3, %f4}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("wmma.load.a.sync %r1;", r"not supported \[wmma.load.a.sync %r1;\]"),
        ("cp.async.ca.shared.global [%r1], [%rd1], 16;", "not supported"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f0}, {%r0}, {%r1}, {%f0};", "m16n8k8"),
        ("mbarrier.init.shared.b64 [%r1], 32;", "not supported"),
        ("redux.sync.add.s32 %r1, %r2, -1;", "not supported"),
        ("elect.sync %r1|%p1, -1;", "not supported"),
        ("wgmma.fence.sync.aligned;", "not supported"),
        ("tcgen05.fence::before_thread_sync;", "not supported"),
        ("tex.1d.v4.f32.s32 {%f0, %f1, %f2, %f3}, [t, {%r1}];", "not supported"),
        ("vadd.s32.s32.s32 %r1, %r2, %r3;", "not supported"),
        ("add.ftz.f16 %h1, %h2, %h3;", ".ftz of f16"),
        ("add.rm.f64 %fd1, %fd2, %fd3;", "rounding .rm of f64"),
        ("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r1}, {%r2}, {%r3}, {%r1};", "of 2, 1"),
        ("add.cc.u32 %r1, %r2, %r3;", "carry flag"),
        ("fma.rn.bf16 %h1, %h2, %h3, %h4;", "needs sm_80"),
        ("mov.u32 %r1, %clock;", "'%clock' is no register"),
        ("cvt.rna.tf32.f32 %r1, %f1;", "not supported"),
        ("barrier.cluster.arrive;", "not supported"),
        ("shfl.idx.b32 %r1, %r2, 0, 31;", "without .sync"),
        ("lop3.b32 %r1, %r2;", "cannot read it"),
        ("bra nowhere;", "unknown label nowhere"),
        ("bar.sync 16;", "barrier 16; a block has the barriers 0 to 15"),
        ("barrier.cta.sync -1;", "barrier -1; a block has the barriers 0 to 15"),
        ("bar.sync 1, 33;", "a barrier of 33 threads; allowed: a positive multiple of 32"),
        ("bar.arrive 1, 0;", "a barrier of 0 threads"),
        ("bar.arrive 1;", "bar.arrive needs a number of threads"),
        ("add.u32 %r1, %p1, %r2;", "%p1 is a predicate"),
        ("setp.eq.u32 %r1, %r2, %r3;", "%r1 is no predicate"),
        ("ld.global.u32 %r1, [%f1];", "%f1 is no register of 32 or 64 bits"),
        ("cvt.u32.f32 %r1, %f1;", "a float to an integer without .rni"),
        ("add.f32 %f1, , %f2;", "an operand is missing"),
        ("st.global.u8 [%rd1], %f1;", "%f1 is a float of 32 bits"),
        ("mul.wide.u64 %rd1, %rd2, %rd3;", ".wide of 64 bits"),
        ("@foo bra LOST; LOST: mov.u32 %r1, 1;", "'foo' is no register"),
        ("@foo mov.u32 %r1, 1;", "'foo' is no register"),
        ("@%r2 mov.u32 %r1, 1;", "%r2 is no predicate"),
        ("@%r2 bra LOST; LOST: mov.u32 %r1, 1;", "%r2 is no predicate"),
        (".reg .b8 %b; mov.f32 %b, %f1;", "%b has 8 bits, which a float of 32 bits does not fit"),
        ("mov.f32 %rd1, %f1;", "%rd1 has 64 bits, which a float of 32 bits does not fit"),
        ("mma.sync.aligned {%f1}, {%r1}, {%r2}, {%f1};", "m16n8k8"),
        ("selp.f32 %f1, %f2;", "cannot read it"),
        ("cvt %f1, %f2;", "cannot read it"),
        (".reg .b32 %many<1065353216>;", "declares 1065353216 registers; at most 1048576"),
        (f"{MMA} {{%f1, %f2, %f3}}, {{%r1, %r2}}, {{%r3}}, {{%f1, %f2, %f3}};", "of 4, 2, 1 and 4"),
        (f"{MMA} {{%f1, %f2, %f3, %f4}}, {{%r1, %r2}}, {{%r3}};", "of 4, 2, 1 and 4 registers"),
        (f"{MMA} {F4}, {{%r1, foo}}, {{%r3}}, {F4};", "'foo' is no register"),
        (
            f"{MMA} {{-1, %f2, %f3, %f4}}, {{%r1, %r2}}, {{%r3}}, {F4};",
            "target '-1' is no register",
        ),
        (f"{MMA} {F4}, {{%r1, %r2}}, {{%fd1}}, {F4};", "%fd1 is a float of 64 bits"),
        ("mov.f32 %f1, 0f3F8000001;", "'0f3F8000001' is no register, number"),
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
        assert str(caught.value).count("k: ") == 1  # the kernel is named once


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


RNG = np.random.default_rng(3)


class TestArguments:
    BODY = """
      ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u32 %r1, [stride];
      mov.u32 %r2, %tid.x; mul.lo.s32 %r3, %r2, %r1; mul.wide.s32 %rd3, %r3, 4;
      add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
      ld.global.f32 %f1, [%rd4]; add.f32 %f1, %f1, %f1; st.global.f32 [%rd5], %f1;
    """
    PTX = kernel_text(BODY, ".param .u64 p0, .param .u64 p1, .param .u32 stride")

    @pytest.mark.parametrize("view", [np.s_[:, 0], np.s_[:, 2], np.s_[::-1, 1], np.s_[5, :]])
    def test_views_are_written_in_place(self, view: Any) -> None:
        pool = RNG.standard_normal((16, 16)).astype("f4")
        x = pool[view]
        want = pool.copy()
        want[view] *= 2
        emulator.run(self.PTX, "k", 1, 16, [x, x, np.int32(x.strides[0] // 4)])
        np.testing.assert_array_equal(pool, want)

    def test_packed_views_share_their_memory(self) -> None:
        packed = RNG.standard_normal((16, 3)).astype("f4")
        q, k = packed[:, 0], packed[:, 1]
        want = packed.copy()
        want[:, 1] = 2 * want[:, 0]
        emulator.run(self.PTX, "k", 1, 16, [emulator.Argument(q, const=True), k, np.int32(3)])
        np.testing.assert_array_equal(packed, want)
        with pytest.raises(emulator.ConstWriteError):
            emulator.run(
                self.PTX, "k", 1, 16, [k, emulator.Argument(q, "q", const=True), np.int32(3)]
            )

    def test_unaligned_base(self) -> None:
        raw = np.zeros(4 * 16 + 1, "u1")
        x = np.ndarray((16,), "f4", raw, 1)
        with pytest.raises(emulator.MisalignedAccessError):
            emulator.run(self.PTX, "k", 1, 16, [x, x, np.int32(1)])

    def test_threads_may_launch_one_module_at_once(self) -> None:
        module = emulator.load(self.PTX)
        arrays = [np.full(16, i, "f4") for i in range(8)]
        workers = [
            threading.Thread(target=emulator.launch, args=(module, "k", 1, 16, [a, a, np.int32(1)]))
            for a in arrays
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [a[0] for a in arrays] == [2.0 * i for i in range(8)]

    def test_structures_by_value(self) -> None:
        text = kernel_text(
            """
            ld.param.u64 %rd1, [s+8]; ld.param.v2.u32 {%r1, %r2}, [s+16]; mov.b64 %rd2, s;
            ld.param.u16 %r3, [%rd2+24]; add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3;
            st.global.u32 [%rd1], %r1;
            """,
            ".param .align 8 .b8 s[32]",
        )
        dtype = np.dtype([("a", "i4"), ("x", "u8"), ("n", "u4", 2), ("h", "u2")], align=True)
        out = np.zeros(1, "u4")
        emulator.run(text, "k", 1, 1, [emulator.Struct(dtype, {"x": out, "n": (30, 4), "h": 8})])
        assert out[0] == 42
