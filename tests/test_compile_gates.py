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
from cupyattn.kernels.configs import attention
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


# The flash kernels fill the register file: some rows of the tensor-core kernel spill, most of it in
# the loop over masked tiles, and the float32 kernel spills around the options of the scores. What
# they spill is pinned below and must not grow.
MAY_SPILL = ("attention_forward", "attention_forward_f32")


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
    size = f"{macros['HEAD_DIM']}" if "HEAD_DIM" in macros else f"{macros['LANES']} lanes"
    options = [name for name, absent in NO_OPTIONS.items() if macros.get(name, absent) != absent]
    return " ".join([specialisation.spec.entry, size, *options])


NO_OPTIONS = {
    **dict.fromkeys(("BIAS", "SLOPES", "SINKS"), "void"),
    **dict.fromkeys(("MASK", "SOFTCAP", "DROPOUT"), "false"),
}


def rows() -> dict[str, list[Specialisation]]:
    """The catalogue by row: each in every dtype, with vector and with scalar loads."""
    found: dict[str, list[Specialisation]] = {}
    for specialisation in configs.catalogue():
        found.setdefault(row_of(specialisation), []).append(specialisation)
    return found


ROWS = rows()
PROMISED_CTAS = {
    **{f"attention_tiled {dim}": row.ctas_per_sm for dim, row in attention.TILED.items()},
    **{f"attention_forward {dim}": row.ctas_per_sm for dim, row in attention.FLASH.items()},
    **{f"attention_forward_f32 {dim}": row.ctas_per_sm for dim, row in attention.FLASH_F32.items()},
}

# On sm_75 with NVRTC 12.9: the most registers and shared bytes and the fewest CTAs per SM of any
# dtype and load. Lower them when a kernel gets cheaper; think twice before raising them.
PINNED = {
    "attention_naive 256": Cost(63, 1_552, 8),
    "attention_tiled 64": Cost(128, 20_992, 2),
    "attention_tiled 128": Cost(178, 57_856, 1),
    "attention_tiled 256": Cost(153, 60_928, 1),
    "attention_forward 40": Cost(238, 15_360, 2),
    "attention_forward 64": Cost(255, 32_768, 2, 136),
    "attention_forward 80": Cost(255, 30_720, 2, 136),
    "attention_forward 96": Cost(255, 24_576, 2, 28),
    "attention_forward 128": Cost(255, 32_768, 2, 100),
    "attention_forward 160": Cost(168, 61_440, 1, 40),
    "attention_forward 192": Cost(249, 49_152, 1),
    "attention_forward 256": Cost(255, 65_536, 1, 28),
    "attention_forward 64 BIAS": Cost(255, 32_768, 2, 340),
    "attention_forward 64 MASK": Cost(255, 32_768, 2, 436),
    "attention_forward 64 SLOPES": Cost(255, 32_768, 2, 180),
    "attention_forward 64 SOFTCAP": Cost(255, 32_768, 2, 136),
    "attention_forward 64 SINKS": Cost(255, 32_768, 2, 136),
    "attention_forward 64 DROPOUT": Cost(255, 32_768, 2, 124),
    "attention_forward 80 BIAS": Cost(255, 30_720, 2, 364),
    "attention_forward 80 MASK": Cost(255, 30_720, 2, 236),
    "attention_forward 128 BIAS": Cost(255, 32_768, 2, 180),
    "attention_forward 128 MASK": Cost(255, 32_768, 2, 180),
    "attention_forward 40 DROPOUT": Cost(255, 20_480, 2),
    "attention_forward 80 DROPOUT": Cost(253, 20_480, 2),
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
        yield attention.tiled(dtype, head_dim, head_dim_v, vec)


@pytest.mark.parametrize("specialisation", list(odd_head_dims()), ids=lambda s: s.label)
def test_head_dims_between_the_rows_cost_no_more(specialisation):
    macros = dict(specialisation.macros)
    promised = attention.tiled_config(macros["HEAD_DIM"], macros["HEAD_DIM_V"]).ctas_per_sm
    assert cost(specialisation, TURING).ctas_per_sm >= promised
