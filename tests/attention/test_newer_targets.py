"""Instructions of the kernels for GPUs newer than Turing, from their PTX on the emulator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.search import deep

import cupyattn
from cupyattn import emulator, reference
from cupyattn.emulator.machine.global_memory import GlobalMemory
from cupyattn.runtime.arch import ARCH_VARIABLE, TURING, Arch, arch_of
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.device import emulated as emulated_device
from cupyattn.runtime.spec import Specialisation
from cupyattn.testing import AttentionCase

pytestmark = pytest.mark.nvrtc


def run_code_of(
    arch: Arch, monkeypatch: pytest.MonkeyPatch, changed: Callable[[Specialisation, str], str]
) -> None:
    """Have the emulator run kernels for an architecture, of what `changed` makes of their PTX."""

    def module(specialisation: Specialisation, target: Arch) -> emulator.Module:
        assert target is arch
        ptx = compile_ptx(specialisation, arch).code.decode()
        assert f".target {arch.real}" in ptx
        return emulator.load(changed(specialisation, ptx))

    monkeypatch.setattr(emulated_device, "_module", module)
    monkeypatch.setenv(ARCH_VARIABLE, str(arch.number))


@pytest.mark.parametrize("arch", [arch_of(80), *deep(TURING)], ids=lambda arch: arch.real)
def test_scores_take_two_steps_at_once_from_sm_80_on(arch: Arch, monkeypatch):
    """m16n8k16 is two m16n8k8: 11 steps of columns are 5 of the former and one of the latter."""

    shapes: dict[str, set[str]] = {}

    def noted(specialisation: Specialisation, ptx: str) -> str:
        shapes[specialisation.spec.entry] = set(re.findall(r"mma\.sync\.aligned\.(m\w+)", ptx))
        return ptx

    run_code_of(arch, monkeypatch, noted)
    problem = AttentionCase(B=1, Sq=40, Sk=70, H=2, G=1, D=88, Dv=64, dtype="float16")
    q, k, v = problem.arrays()
    dout, _ = problem.gradients()
    with cupyattn.backend("emulator"):
        out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
        grads = cupyattn.attention_backward(dout, q, k, v, out, lse, causal=True)
    expected = {"m16n8k8", "m16n8k16"} if arch.number >= 80 else {"m16n8k8"}
    for kernel in ("attention_forward", "attention_backward_dkdv"):
        assert shapes[kernel] == expected
    exact, exact_lse = reference.attention(q, k, v, causal=True)
    bounds = reference.attention_bound(q, k, v, dtype="float16", tile_k=16, causal=True)
    assert reference.error_ratio(out, exact, bounds[0]) <= 1
    assert reference.error_ratio(lse, exact_lse, bounds[1]) <= 1
    results = dout, q, k, v, out, lse
    wanted = reference.attention_backward(*results, causal=True)
    bound = reference.attention_backward_bound(*results, dtype="float16", causal=True)
    for name in ("dq", "dk", "dv"):
        gradient, exact, largest = (getattr(x, name) for x in (grads, wanted, bound))
        assert reference.error_ratio(np.asarray(gradient), exact, largest) <= 1, name


LENGTH, HEAD_DIM, LINE = 200, 128, 128  # the line in bytes, two of them a row


def rows_of_views(view: str) -> list[np.ndarray]:
    """Return q, k, v and dout whose rows lie in that way in memory."""
    rng = np.random.default_rng(0)
    wide = [rng.standard_normal((1, 2 * LENGTH, 1, HEAD_DIM)).astype(np.float16) for _ in range(4)]
    ways = {"in order": slice(LENGTH), "backwards": slice(LENGTH - 1, None, -1)}
    return [array[:, ways.get(view, slice(None, None, 2))] for array in wide]


@pytest.mark.deep
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("view", ["in order", "backwards", "every second"])
def test_tiles_come_to_l2_before_their_turn_from_sm_80_on(view, deterministic, monkeypatch):
    """Just the lines of their rows, whichever way these run: loads in their place say which."""
    brought: dict[int, int] = {}  # and where its array begins
    prefetch = re.compile(r"prefetch\.global\.L2 (\[[^]]*\]);")

    def loads(_: Specialisation, ptx: str) -> str:
        return prefetch.sub(r"{ .reg .b16 byte; ld.global.u8 byte, \1; }", ptx)

    locate = GlobalMemory.locate

    def noted(memory: Any, address: Any, size: int, mask: Any, *where: Any) -> Any:
        if size == 1:  # nothing else here loads a byte
            for at in np.broadcast_to(address, memory.shape)[mask].tolist():
                base, low = max((r.base, r.low) for r in memory.device.regions if r.base <= at)
                brought[at - base + low] = low
        return locate(memory, address, size, mask, *where)

    run_code_of(arch_of(80), monkeypatch, loads)
    monkeypatch.setattr(GlobalMemory, "locate", noted)
    q, k, v, dout = rows_of_views(view)

    def lines(rows: range, *arrays: np.ndarray) -> set[int]:
        starts = {array[0, row].ctypes.data for array in arrays for row in rows}
        return {start + line for start in starts for line in (0, LINE)}

    with cupyattn.backend("emulator"):
        out, lse = cupyattn.attention(q, k, v, return_lse=True)
        # The last 8 keys are masked, and come first; then two tiles of 16 with loads of their own,
        # before whose turn there is nothing.
        assert set(brought) == lines(range(48, 192), k, v)
        brought.clear()
        cupyattn.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic)
    # Tiles of 32: all of the queries after the fourth but the last one.
    expected = lines(range(128, 192), q, dout)
    if deterministic:
        expected |= lines(range(96, 192), k, v)
    assert set(brought) > expected
    # Two float32 a row, side by side.
    statistics = sorted(line - begin for line, begin in brought.items() if line not in expected)
    assert statistics == list(range(128 * 8, 192 * 8, LINE))
