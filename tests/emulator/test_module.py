"""What a loaded module keeps: programs and variables, not the PTX that they were made of."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
from support.ptx import kernel_text

from cupyattn import emulator
from cupyattn.kernels.device import emulated

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
    """Of 4,000 instructions it keeps the code and a line for each, a fifth of the parse tree."""
    lines = [f"add.f32 %f{i % 30}, %f{i % 30}, %f{(i + 7) % 30};" for i in range(4000)]
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
