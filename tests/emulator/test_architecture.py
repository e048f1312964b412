"""Instructions are refused on targets that do not have them, as the assembler refuses them.

Shared memory begins at the address where it begins on the target.
"""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.ptx import kernel_text, run_on_the_gpu

from cupyattn import emulator
from cupyattn.emulator import LaunchError, OutOfBoundsError, UnsupportedPTXError
from cupyattn.emulator.ptx.architecture import SHARED_BYTES, needed_target
from cupyattn.runtime import nvrtc

# What the emulator runs, by the first architecture that has it.
FORMS = {
    70: [
        "fma.rn.sat.f16x2 r0, r1, r2, r3", "abs.f16 h0, h1", "setp.gt.f16x2 p|q, r0, r1",
        "set.gt.f16x2.f16x2 r0, r1, r2", "max.ftz.f32 f0, f1, f2", "max.s32 r0, r1, r2",
        "cvt.rz.satfinite.f16.f32 h0, f0", "cvt.rn.f16.f64 h0, e1", "cvt.rni.f16.f16 h0, h1",
        "dp4a.u32.u32 r0, r1, r2, r3",
        "atom.global.add.noftz.f16 h0, [d0], h1", "match.any.sync.b32 r0, r1, -1",
        "ld.global.L1::no_allocate.u32 r0, [d0]", "fence.acq_rel.gpu", "fence.proxy.alias",
        "prefetch.global.L1 [d0]", "barrier.sync 1, 64", "ex2.approx.ftz.f32 f0, f1",
    ],
    75: [
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {f0,f1,f2,f3}, {r0,r1}, {r2}, "
        "{f0,f1,f2,f3}",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.u8.s32 {r0,r1}, {r2}, {r3}, {r0,r1}",
        "mma.sync.aligned.m8n8k32.row.col.satfinite.s32.u4.s4.s32 {r0,r1}, {r2}, {r3}, {r0,r1}",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {r0}, [s]", "tanh.approx.f32 f0, f1",
        "movmatrix.sync.aligned.m8n8.trans.b16 r0, r1", "ex2.approx.f16x2 r0, r1",
        "ld.global.L2::128B.u32 r0, [d0]",
    ],
    80: [
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {r0,r1}, {r0,r1,r2,r3}, {r2,r3}, "
        "{r0,r1}",
        "max.f16 h0, h1, h2", "min.f16x2 r0, r1, r2", "max.NaN.f32 f0, f1, f2",
        "cvt.rn.bf16.f32 h0, f0", "cvt.f32.bf16 f0, h0", "cvt.rn.f16x2.f32 r0, f0, f1",
        "cvt.rn.bf16x2.f32 r0, f0, f1", "cvt.rn.relu.f16.f32 h0, f0",
        "fma.rn.relu.f16 h0, h1, h2, h3", "discard.global.L2 [d0], 128",
        "prefetch.global.L2::evict_last [d0]", "ld.global.L2::256B.u32 r0, [d0]",
        "ld.global.L2::cache_hint.u32 r0, [d0], d1",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {f0,f1,f2,f3}, {r0,r1}, {r2}, "
        "{f0,f1,f2,f3}",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {f0,f1,f2,f3}, {r0,r1,r2,r3}, "
        "{r4,r5}, {f0,f1,f2,f3}",
        "mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {r0,r1,r2,r3}, {r4,r5}, {r6}, "
        "{r0,r1,r2,r3}",
        "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 {r0,r1,r2,r3}, "
        "{r4,r5,r6,r7}, {r8,r0}, {r0,r1,r2,r3}",
        "cvt.rn.satfinite.f16x2.f32 r0, f0, f1", "cvt.rn.satfinite.bf16x2.f32 r0, f0, f1",
        "cvt.rn.relu.satfinite.bf16.f32 h0, f0", "cvt.rz.satfinite.bf16.f32 h0, f0",
        "fma.rn.bf16x2 r0, r1, r2, r3", "fma.rn.relu.bf16 h0, h1, h2, h3",
        "min.bf16x2 r0, r1, r2", "max.NaN.bf16 h0, h1, h2", "neg.bf16x2 r0, r1", "abs.bf16 h0, h1",
        "cp.async.cg.shared.global [s], [d0], 16, r1", "cp.async.commit_group",
        "cp.async.ca.shared.global.L2::128B [s], [d0], 4", "cp.async.wait_group 3",
        "cp.async.cg.shared.global.L2::cache_hint.L2::256B [s], [d0], 16, d1",
        "cp.async.ca.shared.global [s], [d0], 8, 3", "cp.async.ca.shared.global [s], [d0], 8, p",
        "cp.async.wait_all",
    ],
    90: [
        "add.bf16x2 r0, r1, r2", "sub.rn.bf16 h0, h1, h2", "mul.bf16x2 r0, r1, r2",
        "ex2.approx.ftz.bf16x2 r0, r1", "tanh.approx.bf16 h0, h1", "setp.gt.bf16x2 p|q, r0, r1",
        "cvt.rn.f16.bf16 h0, h1", "cvt.rn.bf16.f16 h0, h1", "cvt.f64.bf16 e0, h1",
        "cvt.rni.s32.bf16 r0, h1", "fence.acq_rel.cluster", "fence.proxy.async",
        "fence.mbarrier_init.release.cluster", "ld.acquire.cluster.global.u32 r0, [d0]",
        "atom.global.cluster.add.u32 r0, [d0], r1",
    ],
}  # fmt: skip
REGISTERS = (
    ".reg .pred p, q; .reg .b16 h<9>; .reg .b32 r<9>; .reg .b64 d<9>; .reg .f32 f<9>; "
    ".reg .f64 e<9>; .shared .align 16 .b8 s[64];"
)


@pytest.mark.parametrize("target", FORMS)
def test_forms_run_from_their_target_on(target: int) -> None:
    older = max([t for t in FORMS if t < target], default=None)
    for form in FORMS[target]:
        body = f"{REGISTERS} @p bra END; bra END;\n.loc 1 9 1\n{form};\nEND:"
        emulator.run(kernel_text(body, "", target=target), "k", 1, 32, [])
        if older is not None:
            message = rf"needs sm_{target}, and the PTX is for sm_{older} .*{re.escape(form[:9])}"
            with pytest.raises(UnsupportedPTXError, match=message):
                emulator.run(kernel_text(body, "", target=older), "k", 1, 32, [])


@pytest.mark.nvrtc
@pytest.mark.parametrize(("older", "target"), [*pairwise(FORMS), (None, 70)])
def test_the_assembler_agrees(older: int | None, target: int) -> None:
    def refused(architecture: int) -> set[int]:
        """Return which of the forms the assembler inside NVRTC refuses."""
        lines = "\\n".join(f"{form};" for form in FORMS[target])
        text = f'extern "C" __global__ void k() {{ asm volatile("{{ {REGISTERS}\\n{lines} }}"); }}'
        try:
            nvrtc.load_nvrtc().compile(
                b"k.cu", text.encode(), [], [f"-arch=sm_{architecture}"], ptx=False
            )
        except (nvrtc.SourceRejectedError, RuntimeError) as rejected:
            log = str(rejected)
            if "gpu-architecture" in log:
                pytest.skip(f"this NVRTC does not compile for sm_{architecture} any more")
            found = {int(number) for number in re.findall(r"line (\d+); error", log)}
            assert found, log
            return found
        return set()

    assert not refused(target)
    if older is not None:
        assert len(refused(older)) == len(FORMS[target])


def test_needed_target_of_forms_that_are_not_run() -> None:
    for opcode, target in (("fma.rn.bf16", 80), ("add.bf16x2", 90), ("redux.sync.add.s32", 70)):
        assert needed_target(opcode) == target


@pytest.mark.parametrize("target", [10, 35, 61, 74, 99])
def test_unknown_targets(target: int) -> None:
    with pytest.raises(UnsupportedPTXError, match=rf"for sm_{target} .*sm_70, sm_72, sm_75"):
        emulator.load(kernel_text("", "", target=target))


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_known_targets(target: int) -> None:
    text = kernel_text("ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], 7;", target=target)
    out = np.zeros(1, "u4")
    emulator.run(text, "k", 1, 1, [out], shared_bytes=SHARED_BYTES[target])
    assert out[0] == 7


ADDRESSES = """
  .shared .align 4096 .b8 s[16];
  ld.param.u64 %rd1, [p0]; mov.u32 %r1, s; mov.u32 %r2, d; mov.u32 %r3, %total_smem_size;
  st.global.v2.u32 [%rd1], {%r1, %r2}; st.global.u32 [%rd1+8], %r3;
  mov.u32 %r4, %dynamic_smem_size; add.u32 %r5, %r2, %r4;
  st.shared.u8 [%r1], 1; st.shared.u8 [%r5+LAST], 1;
"""
"""The addresses of static and dynamic shared memory, and stores to the first and last byte.

Alignments count from the beginning of a block's variables, as on an H200 (2026-11-29).
"""


def addresses_text(target: int, last: int = -1) -> str:
    """Return a kernel of ADDRESSES; it stores to the byte `last` after the end, -1 the last one."""
    dynamic = ".extern .shared .align 2048 .b8 d[];\n"
    text = kernel_text(ADDRESSES.replace("LAST", str(last)), target=target)
    return text.replace(".visible", dynamic + ".visible")


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_shared_memory_begins_after_what_the_system_reserves(target: int) -> None:
    text = addresses_text(target)
    start, limit = 1024 * (target >= 80), SHARED_BYTES[target]
    out = np.zeros(3, "u4")
    for total in (2096, limit):  # the KiB of the system does not count
        emulator.run(text, "k", 1, 1, [out], shared_bytes=total - 2048)
        unit = 128 if target >= 80 else 256  # PTX ISA, %total_smem_size
        assert out.tolist() == [start, start + 2048, -(-total // unit) * unit]
    for last, where in ((0, r"offset 2096: 0 bytes past its end \(after `d`, 48 bytes at 2048"),
                        (-2097, "offset -1: 1 bytes before its start")):  # fmt: skip
        with pytest.raises(OutOfBoundsError, match=where):
            emulator.run(addresses_text(target, last), "k", 1, 1, [out], shared_bytes=48)
    with pytest.raises(LaunchError, match=f"needs {limit + 1} bytes .* sm_{target} has {limit}:"):
        emulator.run(text, "k", 1, 1, [out], shared_bytes=limit - 2047)


@pytest.mark.gpu
def test_shared_memory_of_a_gpu_begins_there(tmp_path: Path) -> None:
    import cupy

    target = 80 if int(cupy.cuda.Device().compute_capability) >= 80 else 75
    text = addresses_text(target)
    got = run_on_the_gpu(text, 1, 1, np.zeros(3, "u4"), tmp_path, shared_bytes=48)
    out = np.zeros(3, "u4")
    emulator.run(text, "k", 1, 1, [out], shared_bytes=48)
    np.testing.assert_array_equal(got, out)


@pytest.mark.parametrize("target", [75, 80])
@pytest.mark.parametrize("combine", ["add", "xor"])
def test_swizzle_of_an_address_instead_of_an_offset(combine: str, target: int) -> None:
    # threads of one half read what the other half stored; the halves are 1,024 bytes each
    body = f"""
      .shared .align 16 .b8 s[2048];
      mov.u32 %r1, %tid.x; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
      st.shared.u32 [%r4], %r1; bar.sync 0; xor.b32 %r5, %r3, 1024; {combine}.b32 %r6, %r2, %r5;
      .loc 1 5 1
      ld.shared.u32 %r7, [%r6];
      ld.param.u64 %rd1, [p0]; cvt.u64.u32 %rd2, %r3; add.s64 %rd3, %rd1, %rd2;
      st.global.u32 [%rd3], %r7;
    """.replace("add.b32", "add.u32")
    out = np.zeros(512, "u4")
    if combine == "xor" and target == 80:
        with pytest.raises(OutOfBoundsError, match="1024 bytes before its start") as caught:
            emulator.run(kernel_text(body, target=target), "k", 1, 512, [out])
        assert caught.value.line == 5
    else:
        emulator.run(kernel_text(body, target=target), "k", 1, 512, [out])
        np.testing.assert_array_equal(out, np.arange(512) ^ 256)


@pytest.mark.parametrize(
    "form",
    [
        "max.relu.s32 r0, r1, r2",
        "add.f32.f16 f0, h0, f1",
        "fma.rn.f32.f16 f0, h0, h1, f1",
        "fma.rn.oob.f16 h0, h1, h2, h3",
        "fma.rn.ftz.bf16x2 r0, r1, r2, r3",
        "fma.rn.sat.bf16 h0, h1, h2, h3",
        "rcp.approx.bf16 h0, h1",
        "cvt.rn.satfinite.f32.f64 f0, e0",
        "cvt.rn.satfinite.s32.f32 r0, f0",
        "cvt.rs.f16x2.f32 r0, f0, f1, r1",
        "ld.global.v8.b32 {r0,r1,r2,r3,r4,r5,r6,r7}, [d0]",
        "st.global.v4.f64 [d0], {e0,e1,e2,e3}",
        "red.async.relaxed.cluster.global.add.u32 [d0], r1, [d1]",
    ],
)
def test_modifiers_are_not_ignored(form: str) -> None:
    with pytest.raises(UnsupportedPTXError, match="not supported"):
        emulator.run(kernel_text(f"{REGISTERS} {form};", "", target=120), "k", 1, 32, [])
