"""Every configuration of the tables stays within its gates (`cupyattn.runtime.spec.Gates`).

Gates are registers, spilled bytes and CTAs per SM, as ptxas reports them, and the utilisation that
the model of a T4 gives. They hold for one release of NVRTC.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support import gates
from support.gates import exceeded, limits_of, require_gates_tools
from support.ptx import KERNELS as KERNEL_FOLDER
from support.readme import ROOT
from support.search import deep, mostly_deep

from cupyattn.benchmark.ceiling_kernels import fma_rate
from cupyattn.cli.turing import IN_FLOAT32, TUNED
from cupyattn.ops.attention.kernels import decode, float32, int8, native
from cupyattn.ops.attention.kernels.modifiers import BLOCK_LISTS, Modifier, Modifiers
from cupyattn.ops.attention.kernels.options import BackwardOptions, FlashOptions
from cupyattn.ops.attention.kernels.teaching import forward as teaching
from cupyattn.ops.attention.kernels.tensor_core import backward_dkdv, backward_dq, forward
from cupyattn.registry import KERNELS, catalogue
from cupyattn.runtime.arch import TURING, arch_of
from cupyattn.runtime.compile import compile_cubin
from cupyattn.runtime.spec import GATES_NVRTC, Gates, KernelSpec, Specialisation
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.turing import MACHINES, T4, analyse, power, row

CONSTRAINTS = ROOT / ".ci" / "constraints.txt"


@cache
def by_kernel(arch: int = TURING.number) -> dict[str, list[Specialisation]]:
    found = defaultdict(list)
    for each in catalogue(arch):
        found[each.spec.entry].append(each)
    return found


@pytest.mark.parametrize("kernel", deep(*KERNELS))
def test_every_configuration_keeps_its_gates(kernel):
    require_gates_tools()
    assert [line for each in by_kernel()[kernel] for line in exceeded(each)] == []


@pytest.mark.parametrize(
    ("kernel", "macros"),
    [
        ("attention_forward", {"HEAD_DIM": 64}),
        ("attention_backward_dkdv", {"HEAD_DIM": 64}),
        ("linear_forward_f32", {}),
        ("softmax_backward", {"LANES": 32}),
    ],
)
def test_some_configurations_keep_their_gates(kernel, macros):
    require_gates_tools()
    assert exceeded(row(kernel, **macros)) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gates": Gates(models=0.99, spills=512)}, "models 0.8"),
        ({"gates": Gates(models=0.5)}, "bytes spill, at most 0 may"),
        ({"gates": Gates(spills=512), "threads": 512}, "0 CTAs an SM, at least 2 promised"),
    ],
)
def test_what_exceeds_a_gate_is_told(change, complaint, monkeypatch):
    require_gates_tools()
    usual = row("attention_forward", HEAD_DIM=64)
    artifact = compile_cubin(usual, TURING)
    monkeypatch.setattr(gates, "compile_cubin", lambda *_: artifact)
    monkeypatch.setattr(gates, "analyse", lambda _: analyse(usual))
    (line,) = exceeded(replace(usual, **change))
    assert complaint in line


def test_registers_beyond_a_gate_are_told():
    require_gates_tools()
    usual = row("softmax_backward", LANES=32)
    registers, ctas = exceeded(replace(usual, gates=Gates(registers=16)))
    assert "registers, at most 16 allowed" in registers
    assert "CTAs an SM, at least 8 promised" in ctas


def test_a_specialisation_has_the_loosest_limits_of_its_groups():
    usual, packed = (row(f"attention_forward{name}", HEAD_DIM=64) for name in ("", "_varlen"))
    some = Gates(0.9, 16, scalar=0.7, items=0.8, kernels=0.85, most_spills=64)
    assert limits_of(replace(usual, gates=some))[:2] == (0.9, 16)
    assert limits_of(replace(packed, gates=some))[:2] == (0.85, 64)
    for change, models in (({"MASK": "true"}, 0.8), ({"MASK": "true", "VEC": 1}, 0.7),
                           ({"SOFTCAP": "true"}, 0.9)):  # fmt: skip
        macros = {**dict(usual.macros), **change}
        other = replace(usual, gates=some, macros=tuple(macros.items()))
        assert limits_of(other)[:2] == (models, 64)


SAME_LOOP = (
    *("forward_rotary", "forward_rotary_varlen", "forward_split", "forward_split_f32"),
    *("forward_varlen_f32", "backward_dkdv_varlen", "backward_dkdv_paired_varlen"),
    *("backward_dkdv_wide_varlen", "backward_dq_varlen", "backward_dq_wide_varlen"),
    *("backward_summed_dbias_varlen", "backward_f32_dkdv_varlen", "backward_f32_dq_varlen"),
    "forward_int8_varlen",
)
"""Kernels of attention whose main loop is that of a tuned kernel."""


def test_every_kernel_with_products_has_a_modelled_gate():
    kernels = {*TUNED, *IN_FLOAT32, *(f"attention_{name}" for name in SAME_LOOP)}
    assert kernels <= set(KERNELS)
    without = [each for each in catalogue()
               if each.spec.entry in kernels and not limits_of(each).models]  # fmt: skip
    # Of int8 without tensor cores shuffles are the limit.
    assert [each.label for each in without if each.defines.get("DOT_PRODUCTS") != "true"] == []


def test_gates_hold_for_the_compiler_that_ci_installs():
    if not CONSTRAINTS.exists():
        pytest.skip("this is not a checkout: .ci/constraints.txt is not here")
    pinned = re.search(r"^nvidia-cuda-nvrtc-cu12==(\d+)\.(\d+)\.", CONSTRAINTS.read_text(), re.M)
    assert pinned is not None
    assert tuple(map(int, pinned.groups())) == GATES_NVRTC


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), (None, pytest.skip.Exception)]
)
def test_another_compiler_skips_gates_and_fails_in_ci(ci, outcome, monkeypatch):
    monkeypatch.setattr(gates, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(gates, "disassembler_version", lambda: "any")
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=r"gates hold for NVRTC 12\.9, this is 13\.0"):
        require_gates_tools()


# --- ratios that reasons state


@cache
def keys_per_cycle(kernel: Specialisation, machine: str) -> float:
    """Query rows times keys that an SM has done with in a cycle of the main loop."""
    figures = analyse(kernel, machine=MACHINES[machine])
    assert figures.main is not None and figures.main.utilisation is not None
    at = kernel.defines
    rows, keys = 16 * int(at["M_TILES"]) * int(at["WARPS"]), int(at["TILE_K"])
    cycles = figures.main.work_cycles / figures.main.utilisation.mean
    return figures.ctas_per_sm * rows * keys / cycles


def stated(text: str) -> dict[str, float]:
    """The rates that a reason states, to that of exact attention with float32 sums."""
    found = re.search(r"(\d\.\d\d) of the exact kernel's rate on a T4 and (\d\.\d\d) on", text)
    if found:
        return dict(zip(("T4", "RTX 2080 Ti"), map(float, found.groups()), strict=True))
    found = re.search(r"models (\d\.\d\d) of the .*rate with float32 sums on an RTX", text)
    assert found is not None, text
    return {"RTX 2080 Ti": float(found[1])}


def with_stated_rates() -> Iterator[Any]:
    """Rows of int8 keys, and of float16 sums."""
    for sums in (int8.INT8_HALF_SUMS, int8.INT8):
        for head_dim, config in sums.items():
            yield head_dim, int8.flash(head_dim, head_dim, 8, row=config)
    for head_dim, config in forward.FLASH_HALF_SUMS[75].items():
        yield head_dim, forward.flash(75, head_dim, head_dim, 8, row=config)


@pytest.mark.parametrize(
    ("head_dim", "kernel"), deep(*with_stated_rates()), ids=lambda x: getattr(x, "label", str(x))
)
def test_reasons_state_the_rates_of_the_model(head_dim, kernel):
    require_gates_tools()
    exact = forward.flash(75, head_dim, head_dim, 8)
    for machine, rate in stated(kernel.reason).items():
        modelled = keys_per_cycle(kernel, machine) / keys_per_cycle(exact, machine)
        assert modelled == pytest.approx(rate, abs=0.05), machine


# --- what no catalogue lists


def with_expressions() -> Iterator[Specialisation]:
    """A score_mod, a mask_mod, and documents of 512 tokens as a block mask, both directions."""
    slopes = Modifier("score - 0.0625f * (q_idx - k_idx)", "grad", ())
    documents = Modifier("q_idx / 512 == k_idx / 512", None, ())
    for modifiers in (Modifiers(slopes, None), Modifiers(None, documents)):
        yield forward.flash(75, 64, 64, 8, FlashOptions(modified=modifiers))
    blocks = Modifiers(None, documents, BLOCK_LISTS)
    options = BackwardOptions(modified=blocks)
    for head_dim in (64, 80, 128):
        yield forward.flash(75, head_dim, head_dim, 8, FlashOptions(modified=blocks))
    for head_dim in (64, 128):
        yield backward_dkdv.dkdv(75, head_dim, head_dim, 8, True, options)
        yield backward_dkdv.dkdv(75, head_dim, head_dim, 8, False, options)
    for head_dim in (40, 64, 128):
        yield backward_dq.dq(75, head_dim, head_dim, 8, options)


def some(specialisations: Iterator[Specialisation]) -> list[Any]:
    """The first for a plain run, all of them with ``--deep``."""
    first, *others = specialisations
    return [first, *deep(*others)]


@pytest.mark.parametrize("specialisation", deep(*with_expressions()), ids=lambda each: each.label)
def test_expressions_keep_the_gates(specialisation):
    require_gates_tools()
    assert exceeded(specialisation) == []


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rows"),
    [("float16", 128, 8), *deep(("float16", 128, 16), ("float32", 128, 8))],
)
def test_dense_keys_with_alibi_spill_nothing(dtype, head_dim, rows):
    """Slopes and tokens of a lane's rows stay in registers for all tiles."""
    require_gates_tools()
    launch = decode.decode_launch(75, dtype, head_dim, rows, vector_items(dtype))
    kernel = decode.forward(launch, FlashOptions(slopes="float32"), "DenseFeed")
    assert exceeded(replace(kernel, gates=Gates())) == []


def odd_head_dims() -> Iterator[Specialisation]:
    """Head dims between the configurations': ragged, D != Dv, the first and last of each."""
    dims = ((1, 1), (3, 64), (64, 1), (40, 24), (65, 65), (128, 8), (8, 128), (129, 3), (72, 256))
    for number, (head_dim, head_dim_v) in enumerate(dims):
        dtype = tuple(STORAGE)[number % len(STORAGE)]
        yield teaching.tiled(75, dtype, head_dim, head_dim_v)


def odd_float32_head_dims() -> Iterator[Specialisation]:
    """Output columns of a thread in all ways besides the tables': quads, and 1, 2, 3 more.

    But 14 of them (head dims 209 to 224): about 100 bytes spill between the products.
    """
    dims = ((1, 1), (33, 24), (96, 64), (64, 72), (80, 80), (96, 96), (104, 112), (24, 144))
    for head_dim, head_dim_v in (*dims, (192, 168), (8, 192), (208, 208)):
        vec = float32.forward.VECTOR_ITEMS if head_dim % 4 == head_dim_v % 4 == 0 else 1
        yield float32.forward.flash(75, "float32", head_dim, head_dim_v, vec)


@pytest.mark.parametrize(
    "specialisation",
    [*some(odd_head_dims()), *some(odd_float32_head_dims())],
    ids=lambda each: each.label,
)
def test_head_dims_between_the_configurations_spill_nothing(specialisation):
    require_gates_tools()
    assert exceeded(replace(specialisation, gates=Gates())) == []


# --- other GPUs


@pytest.mark.parametrize(
    ("machine", "kernel", "macros", "models"),
    [
        ("RTX 2080 Ti", "attention_forward", {"HEAD_DIM": 64}, 0.96),
        ("GTX 1650 Ti", "attention_forward_f32", {"DTYPE": "float32", "HEAD_DIM": 128}, 0.8),
    ],
)
def test_other_turing_gpus_have_their_utilisation(machine, kernel, macros, models):
    require_gates_tools()
    loop = analyse(row(kernel, **macros), machine=MACHINES[machine]).main
    assert loop is not None and loop.utilisation is not None
    assert loop.utilisation.mean >= models - gates.MODEL_TOLERANCE


def test_the_ceiling_of_float32_is_that_of_the_units():
    require_gates_tools()
    loop = analyse(fma_rate()).main
    assert loop is not None
    assert loop.flop_per_cycle == 128, "64 units, two operations each"


def test_machine_code_of_integer_products_has_their_rate():
    """The assembler's opcodes, in a loop: 1,024 multiply-adds in a cycle of an SM."""
    require_gates_tools()
    kernel = KernelSpec("product_s8", str(KERNEL_FOLDER / "integer_mma.cu"), parameters=())
    loop = analyse(kernel.specialise(threads=32)).main
    assert loop is not None and loop.of_integers
    assert loop.work_flop / loop.work_cycles == 2 * 1024
    assert loop.utilisation is not None and 0 < loop.utilisation.mean <= loop.bound + 0.01


@pytest.mark.nvrtc
@pytest.mark.parametrize("kernel", mostly_deep(KERNELS, ["attention_forward"]))
def test_newer_gpus_hold_the_promised_ctas(kernel):
    """No gate was written for them: each kernel's first specialisation, for sm_90."""
    hopper = arch_of(90)
    specialisation = by_kernel(hopper.number)[kernel][0]
    found = compile_cubin(specialisation, hopper).resources
    assert found is not None
    shared = specialisation.shared_bytes + found.static_shared_bytes
    ctas = hopper.resident_ctas(specialisation.threads, found.registers, shared)
    assert ctas >= dict(specialisation.macros).get("MIN_CTAS", 1)


def bfloat16_over_caches() -> Iterator[Specialisation]:
    """Kernels of sm_80 and later that multiply bfloat16 over a cache on tensor cores."""
    of_prompts = (each for each in native.catalogue(80) if each.spec is native.PAGED)
    for each in (*decode.catalogue(80), *forward.catalogue(80), *of_prompts):
        macros = dict(each.macros)
        on_tensor_cores = macros.get("LANES", 0) == 0
        over_a_cache = "CACHE" in macros or each.spec is native.PAGED
        if macros["DTYPE"] == "bfloat16" and over_a_cache and on_tensor_cores:
            yield each


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("specialisation", "arch"),
    some(zip(bfloat16_over_caches(), itertools.cycle((90, 86, 80, 89, 90)))),
    ids=lambda each: getattr(each, "label", each),
)
def test_bfloat16_over_caches_has_registers_on_newer_gpus(specialisation, arch):
    """Prompts spill as over float16 on sm_75 (176 bytes at most), steps what slopes take.

    Steps over heads of more than 256 keep sums of all columns, and spill up to 316 bytes: over
    bfloat16 they read 4,234 GB/s beside 4,318 at 256 (`benchmark decode`, H200, 2026-11-29).
    """
    require_gates_tools()
    if specialisation.spec is native.PAGED:  # whose configurations are an architecture's own
        macros = dict(specialisation.macros)
        options = FlashOptions(
            slopes=macros["SLOPES"], softcap=macros["SOFTCAP"] == "true", sinks=macros["SINKS"]
        )
        head_dim = macros["HEAD_DIM"]
        shape = "bfloat16", head_dim, head_dim, macros["VEC"], options
        specialisation = native.flash(arch, *shape, native.PAGED)
    found = compile_cubin(specialisation, arch_of(arch)).resources
    decodes = specialisation.spec is decode.FORWARD
    of_steps = 24 if dict(specialisation.macros)["HEAD_DIM"] <= 256 else 320
    assert found.spill_store_bytes <= (of_steps if decodes else 176)
    shared = specialisation.shared_bytes + found.static_shared_bytes
    ctas = arch_of(arch).resident_ctas(specialisation.threads, found.registers, shared)
    assert ctas >= dict(specialisation.macros)["MIN_CTAS"]


# --- rates under the power limit


@pytest.mark.parametrize(
    ("entry", "macros", "tflops"),
    [("matmul", {"A_LINES": "kAlong", "B_LINES": "kAcross"}, 24), *deep(("matmul_s8", {}, 42))],
)
def test_published_products_of_a_t4_are_within_the_uncertainty(entry, macros, tflops):
    """NVIDIA's products, which this library's of 256 x 192 replace; the integers were fitted."""
    require_gates_tools()
    product = row(entry, TILE_ROWS=256, TILE_COLUMNS=192, **macros)
    assert sustained_tflops(product, T4) == pytest.approx(tflops, rel=power.UNCERTAINTY)


def test_the_anchor_of_energies_is_met():
    require_gates_tools()
    product = row("matmul", TILE_ROWS=256, TILE_COLUMNS=192, A_LINES="kAlong", B_LINES="kAcross")
    found = sustained_tflops(product, MACHINES["TITAN RTX"])
    assert found == pytest.approx(power.ANCHOR_TFLOPS, rel=0.01)


def sustained_tflops(specialisation, machine):
    loop = analyse(specialisation, machine=machine).main
    held = loop.sustained(machine).ghz
    return machine.tflops(loop.flop_per_cycle) * held / (machine.clock_mhz / 1000)
