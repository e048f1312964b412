"""What the kernels do on newer GPUs than Turing only, from their PTX on the emulator."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.search import deep
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import emulator, reference
from cupyattn.kernels.arch import TURING, Arch, arch_of
from cupyattn.kernels.compile import compile_ptx
from cupyattn.kernels.device import emulated as emulated_device
from cupyattn.kernels.spec import Specialisation

pytestmark = pytest.mark.nvrtc


@pytest.mark.parametrize("arch", [arch_of(80), *deep(TURING)], ids=lambda arch: arch.real)
def test_scores_take_two_steps_at_once_from_sm_80_on(arch: Arch, monkeypatch):
    """m16n8k16 is two m16n8k8: 11 steps of columns are 5 of the former and one of the latter."""

    shapes: dict[str, set[str]] = {}

    def module(specialisation: Specialisation) -> emulator.Module:
        ptx = compile_ptx(specialisation, arch).path.read_text(encoding="utf-8")
        assert f".target {arch.real}" in ptx
        shapes[specialisation.spec.entry] = set(re.findall(r"mma\.sync\.aligned\.(m\w+)", ptx))
        return emulator.load(ptx)

    monkeypatch.setattr(emulated_device, "_module", module)
    monkeypatch.setattr(emulated_device.EmulatedDevice, "arch", arch)
    problem = AttentionProblem(B=1, Sq=40, Sk=70, H=2, G=1, D=88, Dv=64, dtype="float16")
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
