"""What kernels are given: views, unaligned arrays, structures; from several threads."""

import threading
from typing import Any

import numpy as np
import pytest
from support.ptx import kernel_text

from cupyattn import emulator

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
