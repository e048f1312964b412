"""What every row of the configuration tables costs, on Turing and on a newer GPU, with no GPU.

ptxas says it when a kernel is compiled. Whether a row runs at all, spills nothing and is resident
as often as its table promises is checked with any compiler; the figures of sm_75 are pinned for
NVRTC 12.9, whose choices they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from cupyattn.kernels import configs
from cupyattn.kernels.arch import Arch, arch_of
from cupyattn.kernels.compile import compile_cubin, nvrtc_version
from cupyattn.kernels.configs import (
    attention,
    attention_backward,
    attention_backward_f32,
)
from cupyattn.kernels.configs import attention_teaching as teaching
from cupyattn.kernels.configs.dtypes import STORAGE, vector_items
from cupyattn.kernels.spec import Specialisation

pytestmark = pytest.mark.nvrtc

TURING, HOPPER = arch_of(75), arch_of(90)
PINNED_COMPILER = (12, 9)
REGISTER_TOLERANCE = 8  # one step of allocation


class Cost(NamedTuple):
    """Of one specialisation; a row's are the worst of its dtypes and loads."""

    registers: int
    shared_bytes: int
    ctas_per_sm: int
    spill_bytes: int = 0


# The flash kernels fill the register file: some rows of the tensor-core kernels spill, the
# forward's mostly in the loop over masked tiles, and the float32 kernel spills around the options
# of the scores. What they spill is pinned below and must not grow.
MAY_SPILL = (
    "attention_forward",
    "attention_forward_f32",
    "attention_backward_dkdv",
    "attention_backward_dkdv_paired",
    "attention_backward_dq",
    "attention_backward_f32_dkdv",
    "attention_backward_f32_dq",
)


def cost(specialisation: Specialisation, arch: Arch) -> Cost:
    """Compile, and let nothing else pass that spills or uses the stack."""
    resources = compile_cubin(specialisation, arch).resources
    assert resources is not None
    if specialisation.spec.entry not in MAY_SPILL:
        assert resources.spill_store_bytes == 0, specialisation.label
        assert resources.spill_load_bytes == 0, specialisation.label
        assert resources.stack_bytes == 0, specialisation.label
    shared = specialisation.shared_bytes + resources.static_shared_bytes
    ctas = arch.resident_ctas(specialisation.threads, resources.registers, shared)
    return Cost(resources.registers, shared, ctas, resources.spill_store_bytes)


def row_of(specialisation: Specialisation) -> str:
    """The kernel and its table row."""
    macros = dict(specialisation.macros)
    sizes = [str(macros[name]) for name in ("HEAD_DIM", "HEAD_DIM_V") if name in macros][:1]
    if "LANES" in macros:
        sizes.append(f"{macros['LANES']} lanes")
    if "ONE_PASS" in macros:
        sizes += ["one pass" if macros["ONE_PASS"] == "true" else "deterministic"]
    options = [name for name, absent in NO_OPTIONS.items() if macros.get(name, absent) != absent]
    return " ".join([specialisation.spec.entry, *sizes, *options])


NO_OPTIONS = {
    **dict.fromkeys(("BIAS", "SLOPES", "SINKS"), "void"),
    **dict.fromkeys(("MASK", "SOFTCAP", "DROPOUT", "DBIAS_ADD"), "false"),
    "SCORE_VEC": 1,
}

EVERY_OPTION = "BIAS SLOPES MASK SOFTCAP DROPOUT"


def rows() -> dict[str, list[Specialisation]]:
    """The catalogue by row: each in every dtype, with vector and with scalar loads."""
    found: dict[str, list[Specialisation]] = {}
    for specialisation in configs.catalogue():
        found.setdefault(row_of(specialisation), []).append(specialisation)
    return found


ROWS = rows()
PROMISED_CTAS = {
    **{
        f"attention_backward_f32_{row}".format(dim): config.ctas_per_sm
        for row, table in (
            ("dkdv {} one pass", attention_backward_f32.DKDV),
            ("dkdv {} deterministic", attention_backward_f32.DKDV),
            ("dq {}", attention_backward_f32.DQ),
        )
        for dim, config in table.items()
    },
    **{f"attention_tiled {dim}": row.ctas_per_sm for dim, row in teaching.TILED.items()},
    **{f"attention_forward {dim}": row.ctas_per_sm for dim, row in attention.FLASH.items()},
    **{f"attention_forward_f32 {dim}": row.ctas_per_sm for dim, row in attention.FLASH_F32.items()},
    **{
        f"attention_backward_dkdv{'' if dim <= 128 else '_paired'} {dim} {way}": row.ctas_per_sm
        for way, table in (
            ("one pass", attention_backward.ONE_PASS),
            ("deterministic", attention_backward.DETERMINISTIC),
        )
        for dim, row in table.items()
    },
    **{
        f"attention_backward_dq {dim}": row.ctas_per_sm
        for dim, row in attention_backward.DQ.items()
    },
}

# On sm_75 with NVRTC 12.9: the most registers and shared bytes and the fewest CTAs per SM of any
# dtype and load. Lower them when a kernel gets cheaper; think twice before raising them.
PINNED = {
    "attention_naive 256": Cost(63, 1_552, 8),
    "attention_tiled 64": Cost(128, 20_992, 2),
    "attention_tiled 128": Cost(178, 57_856, 1),
    "attention_tiled 256": Cost(153, 60_928, 1),
    "attention_forward 40": Cost(229, 15_360, 2),
    "attention_forward 64": Cost(255, 32_768, 2, 108),
    "attention_forward 80": Cost(255, 30_720, 2, 96),
    "attention_forward 96": Cost(255, 24_576, 2, 4),
    "attention_forward 128": Cost(255, 32_768, 2, 40),
    "attention_forward 160": Cost(247, 61_440, 1),
    "attention_forward 192": Cost(245, 49_152, 1),
    "attention_forward 256": Cost(255, 65_536, 1, 16),
    "attention_forward 64 BIAS": Cost(255, 32_768, 2, 204),
    "attention_forward 64 MASK": Cost(255, 32_768, 2, 268),
    "attention_forward 64 SLOPES": Cost(255, 32_768, 2, 152),
    "attention_forward 64 SOFTCAP": Cost(255, 32_768, 2, 108),
    "attention_forward 64 SINKS": Cost(255, 32_768, 2, 108),
    "attention_forward 64 DROPOUT": Cost(255, 32_768, 2, 116),
    "attention_forward 80 BIAS": Cost(255, 30_720, 2, 136),
    "attention_forward 80 MASK": Cost(255, 30_720, 2, 84),
    "attention_forward 128 BIAS": Cost(255, 32_768, 2, 48),
    "attention_forward 128 MASK": Cost(255, 32_768, 2, 40),
    "attention_forward 40 DROPOUT": Cost(255, 20_480, 2),
    "attention_forward 80 DROPOUT": Cost(254, 20_480, 2),
    "attention_forward_f32 64": Cost(253, 32_768, 2),
    "attention_forward_f32 128": Cost(254, 32_768, 2),
    "attention_forward_f32 160": Cost(255, 49_152, 1, 12),
    "attention_forward_f32 256": Cost(253, 49_152, 1),
    "attention_forward_f32 64 BIAS": Cost(255, 32_768, 2, 48),
    "attention_forward_f32 64 MASK": Cost(255, 32_768, 2, 8),
    "attention_forward_f32 64 SLOPES": Cost(255, 32_768, 2, 8),
    "attention_forward_f32 64 SOFTCAP": Cost(252, 32_768, 2),
    "attention_forward_f32 64 SINKS": Cost(251, 32_768, 2),
    "attention_forward_f32 64 DROPOUT": Cost(251, 32_768, 2),
    "attention_backward_f32_delta 64": Cost(30, 0, 4),
    "attention_backward_f32_dkdv 64 one pass": Cost(255, 32_768, 2),
    "attention_backward_f32_dkdv 64 deterministic": Cost(255, 32_768, 2),
    "attention_backward_f32_dq 64": Cost(254, 32_768, 2),
    "attention_backward_f32_delta 128": Cost(30, 0, 4),
    "attention_backward_f32_dkdv 128 one pass": Cost(255, 32_768, 2, 108),
    "attention_backward_f32_dkdv 128 deterministic": Cost(255, 32_768, 2, 8),
    "attention_backward_f32_dq 128": Cost(230, 32_768, 2),
    "attention_backward_f32_delta 256": Cost(30, 0, 4),
    "attention_backward_f32_dkdv 256 one pass": Cost(255, 24_576, 2, 48),
    "attention_backward_f32_dkdv 256 deterministic": Cost(255, 24_576, 2),
    "attention_backward_f32_dq 256": Cost(199, 24_576, 2),
    f"attention_backward_f32_dkdv 64 one pass {EVERY_OPTION}": Cost(255, 32_768, 2, 228),
    f"attention_backward_f32_dkdv 64 deterministic {EVERY_OPTION}": Cost(255, 32_768, 2, 208),
    f"attention_backward_f32_dq 64 {EVERY_OPTION}": Cost(255, 32_768, 2, 40),
    "attention_backward_f32_dkdv 64 one pass BIAS": Cost(255, 32_768, 2, 128),
    "attention_backward_f32_dkdv 64 deterministic BIAS": Cost(255, 32_768, 2, 56),
    "attention_backward_f32_dq 64 BIAS": Cost(255, 32_768, 2, 16),
    "attention_backward_naive_dq 256": Cost(64, 2_576, 8),
    "attention_backward_naive_dkdv 256": Cost(64, 3_072, 8),
    f"attention_backward_naive_dq 256 {EVERY_OPTION}": Cost(64, 2_576, 8),
    f"attention_backward_naive_dkdv 256 {EVERY_OPTION}": Cost(96, 3_072, 5),
    f"attention_backward_naive_dbias 256 1 lanes {EVERY_OPTION}": Cost(79, 0, 6),
    f"attention_backward_naive_dbias 256 32 lanes {EVERY_OPTION}": Cost(79, 0, 6),
    "attention_backward_naive_dsinks SINKS": Cost(40, 32, 4),
    "attention_backward_delta 40": Cost(32, 0, 4),
    "attention_backward_convert 40": Cost(48, 0, 4),
    "attention_backward_dkdv 40 one pass": Cost(216, 23_552, 2),
    "attention_backward_dkdv 40 deterministic": Cost(216, 10_240, 2),
    "attention_backward_delta 64": Cost(29, 0, 4),
    "attention_backward_convert 64": Cost(48, 0, 4),
    "attention_backward_dkdv 64 one pass": Cost(255, 32_768, 2, 8),
    "attention_backward_dkdv 64 deterministic": Cost(255, 16_384, 2, 4),
    "attention_backward_delta 80": Cost(32, 0, 4),
    "attention_backward_convert 80": Cost(48, 0, 4),
    "attention_backward_dkdv 80 one pass": Cost(248, 57_344, 1),
    "attention_backward_dkdv 80 deterministic": Cost(238, 40_960, 1),
    "attention_backward_delta 96": Cost(32, 0, 4),
    "attention_backward_convert 96": Cost(48, 0, 4),
    "attention_backward_dkdv 96 one pass": Cost(250, 65_536, 1),
    "attention_backward_dkdv 96 deterministic": Cost(254, 49_152, 1),
    "attention_backward_delta 128": Cost(29, 0, 4),
    "attention_backward_convert 128": Cost(48, 0, 4),
    "attention_backward_dkdv 128 one pass": Cost(254, 57_344, 1),
    "attention_backward_dkdv 128 deterministic": Cost(255, 32_768, 1, 8),
    "attention_backward_delta 160": Cost(32, 0, 4),
    "attention_backward_convert 160": Cost(48, 0, 4),
    "attention_backward_dkdv_paired 160 one pass": Cost(230, 49_152, 1),
    "attention_backward_dkdv_paired 160 deterministic": Cost(228, 49_152, 1),
    "attention_backward_delta 192": Cost(32, 0, 4),
    "attention_backward_convert 192": Cost(48, 0, 4),
    "attention_backward_dkdv_paired 192 one pass": Cost(252, 57_344, 1),
    "attention_backward_dkdv_paired 192 deterministic": Cost(253, 57_344, 1),
    "attention_backward_delta 256": Cost(29, 0, 4),
    "attention_backward_convert 256": Cost(48, 0, 4),
    "attention_backward_dkdv_paired 256 one pass": Cost(255, 55_296, 1, 84),
    "attention_backward_dkdv_paired 256 deterministic": Cost(255, 38_912, 1, 52),
    "attention_backward_dq 40": Cost(255, 15_360, 2, 120),
    "attention_backward_dq 64": Cost(255, 16_384, 2, 72),
    "attention_backward_dq 80": Cost(255, 20_480, 2, 56),
    "attention_backward_dq 96": Cost(255, 24_576, 2, 108),
    "attention_backward_dq 128": Cost(255, 32_768, 1, 56),
    "attention_backward_dq 160": Cost(252, 40_960, 1),
    "attention_backward_dq 192": Cost(255, 49_152, 1, 36),
    "attention_backward_dq 256": Cost(255, 65_536, 1, 284),
    "attention_backward_dkdv 64 one pass BIAS": Cost(255, 32_768, 2, 216),
    "attention_backward_dq 64 BIAS": Cost(255, 16_384, 2, 168),
    "attention_backward_dkdv 64 one pass BIAS DBIAS_ADD": Cost(255, 32_768, 2, 216),
    "attention_backward_dkdv 64 one pass MASK": Cost(255, 32_768, 2, 20),
    "attention_backward_dq 64 MASK": Cost(255, 16_384, 2, 96),
    "attention_backward_dkdv 64 one pass SLOPES": Cost(255, 32_768, 2, 80),
    "attention_backward_dq 64 SLOPES": Cost(255, 16_384, 2, 72),
    "attention_backward_dkdv 64 one pass SOFTCAP": Cost(255, 32_768, 2, 12),
    "attention_backward_dq 64 SOFTCAP": Cost(255, 16_384, 2, 36),
    "attention_backward_dkdv 64 one pass DROPOUT": Cost(255, 32_768, 2, 64),
    "attention_backward_dq 64 DROPOUT": Cost(255, 16_384, 2, 80),
    "attention_backward_dkdv 40 one pass BIAS SCORE_VEC": Cost(221, 23_552, 2),
    "attention_backward_dq 40 BIAS SCORE_VEC": Cost(255, 10_240, 2, 64),
    "attention_backward_dkdv 40 one pass BIAS DBIAS_ADD SCORE_VEC": Cost(226, 23_552, 2),
    "attention_backward_dkdv 40 one pass MASK SCORE_VEC": Cost(218, 23_552, 2),
    "attention_backward_dq 40 MASK SCORE_VEC": Cost(246, 10_240, 2),
    "attention_backward_dkdv 64 one pass BIAS SCORE_VEC": Cost(255, 32_768, 2, 48),
    "attention_backward_dq 64 BIAS SCORE_VEC": Cost(255, 16_384, 2, 152),
    "attention_backward_dkdv 64 one pass BIAS DBIAS_ADD SCORE_VEC": Cost(255, 32_768, 2, 52),
    "attention_backward_dkdv 64 one pass MASK SCORE_VEC": Cost(255, 32_768, 2, 40),
    "attention_backward_dq 64 MASK SCORE_VEC": Cost(255, 16_384, 2, 112),
    "attention_backward_dkdv 80 one pass BIAS SCORE_VEC": Cost(255, 57_344, 1),
    "attention_backward_dq 80 BIAS SCORE_VEC": Cost(255, 20_480, 2, 108),
    "attention_backward_dkdv 80 one pass BIAS DBIAS_ADD SCORE_VEC": Cost(254, 57_344, 1),
    "attention_backward_dkdv 80 one pass MASK SCORE_VEC": Cost(248, 57_344, 1),
    "attention_backward_dq 80 MASK SCORE_VEC": Cost(255, 20_480, 2, 56),
    "attention_backward_dkdv 128 one pass BIAS SCORE_VEC": Cost(255, 57_344, 1, 16),
    "attention_backward_dq 128 BIAS SCORE_VEC": Cost(255, 32_768, 1, 104),
    "attention_backward_dkdv 128 one pass BIAS DBIAS_ADD SCORE_VEC": Cost(255, 57_344, 1, 12),
    "attention_backward_dkdv 128 one pass MASK SCORE_VEC": Cost(255, 57_344, 1, 8),
    "attention_backward_dq 128 MASK SCORE_VEC": Cost(255, 32_768, 1, 80),
    "attention_backward_dbias": Cost(38, 0, 4),
    "attention_backward_dsinks": Cost(36, 32, 4),
    "softmax_forward 8 lanes": Cost(72, 0, 7),
    "softmax_forward 32 lanes": Cost(72, 0, 7),
    "softmax_forward 256 lanes": Cost(71, 32, 3),
    "softmax_forward 512 lanes": Cost(40, 64, 2),
    "softmax_backward 8 lanes": Cost(60, 0, 8),
    "softmax_backward 32 lanes": Cost(96, 0, 5),
    "softmax_backward 256 lanes": Cost(90, 32, 2),
    "softmax_backward 512 lanes": Cost(42, 64, 2),
}


def worst(row: str, arch: Arch) -> Cost:
    costs = [cost(specialisation, arch) for specialisation in ROWS[row]]
    registers, shared, ctas, spills = zip(*costs, strict=True)
    return Cost(max(registers), max(shared), min(ctas), max(spills))


@pytest.mark.parametrize("arch", [TURING, HOPPER], ids=lambda arch: arch.real)
@pytest.mark.parametrize("row", ROWS)
def test_every_row_fits(row, arch):
    """And is resident as often as its table row says."""
    found = worst(row, arch)
    assert found.ctas_per_sm >= PROMISED_CTAS.get(row, 1), found


@pytest.mark.parametrize("row", ROWS)
def test_turing_figures_are_the_pinned_ones(row):
    if nvrtc_version() != PINNED_COMPILER:
        pytest.skip(f"figures are pinned for NVRTC 12.9, this is {nvrtc_version()}")
    found, pinned = worst(row, TURING), PINNED[row]
    assert found.registers <= pinned.registers + REGISTER_TOLERANCE, found
    assert found.shared_bytes == pinned.shared_bytes, found
    assert found.ctas_per_sm == pinned.ctas_per_sm, found
    assert found.spill_bytes <= pinned.spill_bytes, found


def test_every_row_is_pinned():
    assert set(PINNED) == set(ROWS)


def odd_head_dims() -> Iterator[Specialisation]:
    """Head dims between the rows' own: ragged ones, D != Dv, the first and last of a row."""
    dims = ((1, 1), (3, 64), (64, 1), (40, 24), (65, 65), (128, 8), (8, 128), (129, 3), (72, 256))
    for number, (head_dim, head_dim_v) in enumerate(dims):
        dtype = tuple(STORAGE)[number % len(STORAGE)]
        items = vector_items(dtype)
        vec = items if head_dim % items == 0 and head_dim_v % items == 0 else 1
        yield teaching.tiled(dtype, head_dim, head_dim_v, vec)


def odd_float32_flash_dims() -> Iterator[Specialisation]:
    """Output columns of a thread in all ways beside those of the rows: quads, and 1, 2, 3 more.

    But 14 of them (head dims 209 to 224): about 100 bytes spill between the products.
    """
    dims = ((1, 1), (33, 24), (96, 64), (64, 72), (80, 80), (96, 96), (104, 112), (24, 144))
    for head_dim, head_dim_v in (*dims, (192, 168), (8, 192), (208, 208)):
        vec = attention.F32_VECTOR_ITEMS if head_dim % 4 == head_dim_v % 4 == 0 else 1
        yield attention.flash_f32("float32", head_dim, head_dim_v, vec)


@pytest.mark.parametrize("specialisation", list(odd_float32_flash_dims()), ids=lambda s: s.label)
def test_float32_flash_between_the_rows_spills_nothing(specialisation):
    if nvrtc_version() != PINNED_COMPILER:
        pytest.skip(f"figures are pinned for NVRTC 12.9, this is {nvrtc_version()}")
    macros = dict(specialisation.macros)
    found = cost(specialisation, TURING)
    row = attention.flash_f32_config(macros["HEAD_DIM"], macros["HEAD_DIM_V"])
    assert found.ctas_per_sm >= row.ctas_per_sm
    assert found.spill_bytes == 0


@pytest.mark.parametrize("specialisation", list(odd_head_dims()), ids=lambda s: s.label)
def test_head_dims_between_the_rows_cost_no_more(specialisation):
    macros = dict(specialisation.macros)
    promised = teaching.tiled_config(macros["HEAD_DIM"], macros["HEAD_DIM_V"]).ctas_per_sm
    assert cost(specialisation, TURING).ctas_per_sm >= promised
