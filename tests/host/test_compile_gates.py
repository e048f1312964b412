"""What every row of the configuration tables costs, on Turing and on a newer GPU, with no GPU.

ptxas says it when a kernel is compiled. Whether a row runs at all, spills nothing and is resident
as often as its table promises is checked with any compiler; the figures of sm_75 are pinned for
NVRTC 12.9, whose choices they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support import costs, figures
from support.costs import Cost, code_of, cost, first_of_each_kernel, made_of, row_of, rows, worst
from support.figures import GATES, NVRTC, RECORD, compiler_version, worth_trying
from support.search import Search, deep

from cupyattn.kernels import compile
from cupyattn.kernels.arch import TURING, Arch, arch_of
from cupyattn.kernels.configs.attention import decode, float32, tensor_core
from cupyattn.kernels.configs.attention.options import FlashOptions
from cupyattn.kernels.configs.attention.teaching import forward as teaching
from cupyattn.kernels.configs.dtypes import STORAGE, vector_items
from cupyattn.kernels.source import source_root
from cupyattn.kernels.spec import Specialisation

pytestmark = pytest.mark.nvrtc

HOPPER = arch_of(90)
REGISTER_TOLERANCE = 8  # one step of allocation


ROWS = rows()
PROMISED_CTAS = {
    **{
        f"attention_backward_f32_{row}".format(dim): config.ctas_per_sm
        for row, table in (
            ("dkdv {} one pass", float32.backward.DKDV[75]),
            ("dkdv {} deterministic", float32.backward.DKDV[75]),
            ("dq {}", float32.backward.DQ[75]),
        )
        for dim, config in table.items()
    },
    **{f"attention_tiled {dim}": row.ctas_per_sm for dim, row in teaching.TILED[75].items()},
    **{
        f"attention_forward{keys} {dim}": row.ctas_per_sm
        for keys in ("", "_paged", "_rotary", "_varlen", "_rotary_varlen", "_split")
        for dim, row in tensor_core.forward_rows.FLASH[75].items()
    },
    **{
        f"attention_forward_paged {dim} of {cache}": row.ctas_per_sm
        for cache in decode.INTEGER_BITS
        for dim, row in tensor_core.forward_rows.FLASH_INTEGERS[75].items()
    },
    **{
        f"attention_forward_paged_f32 {dim} of {cache}": row.ctas_per_sm
        for cache in decode.INTEGER_BITS
        for dim, row in float32.forward.FLASH[75].items()
    },
    **{
        f"attention_forward{keys}_f32 {dim}": row.ctas_per_sm
        for keys in ("", "_paged", "_varlen", "_split")
        for dim, row in float32.forward.FLASH[75].items()
    },
    **{
        f"attention_backward_dkdv{'' if dim <= 128 else '_paired'} {dim} {way}": row.ctas_per_sm
        for way, table in (
            ("one pass", tensor_core.backward_dkdv.ONE_PASS[75]),
            ("deterministic", tensor_core.backward_dkdv.DETERMINISTIC[75]),
        )
        for dim, row in table.items()
    },
    **{
        f"attention_decode {dim} {row.rows} rows": row.ctas_per_sm
        for dim, rows_of_dim in decode.TENSOR_CORES[75].items()
        for row in rows_of_dim.values()
    },
    **{
        f"attention_decode {dim} {row.rows} rows of {cache}": row.ctas_per_sm
        for cache, by_head_dim in decode.INTEGER_TENSOR_CORES[75].items()
        for dim, rows_of_dim in by_head_dim.items()
        for row in rows_of_dim.values()
    },
    **{
        f"attention_backward_dq {dim}": row.ctas_per_sm
        for dim, row in tensor_core.backward_dq.DQ[75].items()
    },
}


def require_pinned_compiler() -> None:
    if compiler_version() != NVRTC:
        pytest.skip(f"figures are pinned for NVRTC {NVRTC}, this is {compiler_version()}")


def worst_of_row(row: str, arch: Arch) -> Cost:
    """Of its dtypes and loads; a plain run, and one for a newer GPU, compiles only the first.

    That one has vector loads. Of a newer GPU, for which no row was chosen, --deep compiles the
    first row and the last of each kernel; of Turing those that have changed, and some others.
    """
    members = ROWS[row]
    return worst(members if Search.deep and arch is TURING else members[:1], arch)


def first_rows(members: Iterable[Specialisation]) -> list[str]:
    return [row_of(each) for each in first_of_each_kernel(members)]


FIRST = first_rows(members[0] for members in ROWS.values())
TRIED = worth_trying(
    {row: partial(made_of, members) for row, members in ROWS.items()}, RECORD["gates"], FIRST
)
LAST = first_rows(members[0] for members in reversed(ROWS.values()))
AHEAD = "attention_forward 128"  # tiles are brought to L2 before their turn
ON_HOPPER = [row for row in ROWS if row in {*FIRST, *LAST, AHEAD}]
NEWER = "attention_forward 40"  # the products of newer GPUs' tensor cores


@pytest.mark.parametrize(
    ("row", "arch"),
    [
        *((row, TURING) for row in FIRST[::6]),
        (NEWER, HOPPER),
        *deep(*((row, TURING) for row in TRIED if row not in FIRST[::6])),
        *deep(*((row, HOPPER) for row in ON_HOPPER if row != NEWER)),
    ],
)
def test_every_row_fits(row, arch):
    """And is resident as often as its table row says; on Turing it costs what is pinned.

    One test: in two processes each would compile the row.
    """
    found = worst_of_row(row, arch)
    assert found.ctas_per_sm >= PROMISED_CTAS.get(row, 1), found
    if arch is TURING and compiler_version() == NVRTC:
        require_pinned_figures(found, GATES[row])


def require_pinned_figures(found: Cost, pinned: Cost) -> None:
    assert found.registers <= pinned.registers + REGISTER_TOLERANCE, found
    assert found.shared_bytes <= pinned.shared_bytes, found
    if Search.deep:
        assert found.shared_bytes == pinned.shared_bytes, found
        assert found.ctas_per_sm == pinned.ctas_per_sm, found
    assert found.ctas_per_sm >= pinned.ctas_per_sm, found
    assert found.spill_bytes <= pinned.spill_bytes, found


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rows"),
    [("float16", 128, 8), *deep(("float16", 128, 16), ("float32", 128, 8))],
)
def test_dense_keys_with_alibi_spill_nothing(dtype, head_dim, rows):
    """Slopes and tokens of a lane's rows stay in registers for the whole walk."""
    require_pinned_compiler()
    launch = decode.decode_launch(75, dtype, head_dim, rows, vector_items(dtype))
    found = cost(decode.forward(launch, FlashOptions(slopes="float32"), "DenseFeed"), TURING)
    assert found.spill_bytes == 0
    assert found.ctas_per_sm >= launch.config.ctas_per_sm


def test_every_row_is_pinned():
    assert set(GATES) == set(ROWS)


def test_every_row_is_resident_as_often_as_its_table_says():
    """Those too that are not compiled again."""
    assert {
        row for row, pinned in GATES.items() if pinned.ctas_per_sm < PROMISED_CTAS.get(row, 1)
    } == set()


def test_a_row_that_has_changed_is_compiled(monkeypatch):
    monkeypatch.setattr(Search, "deep", True)
    monkeypatch.setattr(figures, "compiler_version", lambda: NVRTC)
    row, members = next(iter(ROWS.items()))
    record = {row: {"made_of": made_of(members)}}

    def is_tried(members: list[Specialisation] = members, always: tuple[str, ...] = ()) -> bool:
        return worth_trying({row: partial(made_of, members)}, record, always) == [row]

    assert not is_tried()
    assert is_tried(always=(row,))
    *others, last = members
    assert is_tried([*others, replace(last, macros=(*last.macros, ("ANOTHER", 1)))])
    assert worth_trying({"a new row": str}, record, ()) == ["a new row"]
    with monkeypatch.context() as another:
        another.setattr(compile, "_OPTIONS", (*compile._OPTIONS, "-fmad=false"))
        assert is_tried()
    with monkeypatch.context() as another:
        another.setattr(figures, "compiler_version", lambda: "12.8")
        assert is_tried()
    monkeypatch.setattr(costs, "code_of", lambda path: f"of another {path}")
    assert is_tried()


def test_comments_are_not_what_a_row_is_made_of(tmp_path):
    (tmp_path / "a.cuh").write_text("// first\nint a;  /* it */\n")
    (tmp_path / "b.cu").write_text('#include "a.cuh"\nfloat b;\n')
    before = code_of(tmp_path / "b.cu")

    def after(text: str) -> str:
        (tmp_path / "a.cuh").write_text(text)
        code_of.cache_clear()
        return code_of(tmp_path / "b.cu")

    assert after("int a;  // another\n") == before
    assert after("int c;\n") != before
    for source in source_root().rglob("*.cu*"):
        text = source.read_text(encoding="utf-8")
        assert not re.search(r'"[^"\n]*(//|/\*)[^"\n]*"', text), f"no comment, in {source}"


def odd_head_dims() -> Iterator[Specialisation]:
    """Head dims between the rows' own: ragged ones, D != Dv, the first and last of a row."""
    dims = ((1, 1), (3, 64), (64, 1), (40, 24), (65, 65), (128, 8), (8, 128), (129, 3), (72, 256))
    for number, (head_dim, head_dim_v) in enumerate(dims):
        dtype = tuple(STORAGE)[number % len(STORAGE)]
        yield teaching.tiled(75, dtype, head_dim, head_dim_v)


def odd_float32_flash_dims() -> Iterator[Specialisation]:
    """Output columns of a thread in all ways beside those of the rows: quads, and 1, 2, 3 more.

    But 14 of them (head dims 209 to 224): about 100 bytes spill between the products.
    """
    dims = ((1, 1), (33, 24), (96, 64), (64, 72), (80, 80), (96, 96), (104, 112), (24, 144))
    for head_dim, head_dim_v in (*dims, (192, 168), (8, 192), (208, 208)):
        vec = float32.forward.VECTOR_ITEMS if head_dim % 4 == head_dim_v % 4 == 0 else 1
        yield float32.forward.flash(75, "float32", head_dim, head_dim_v, vec)


def some(specialisations: Iterator[Specialisation]) -> list[Any]:
    """The first for a plain run, all of them with ``--deep``."""
    first, *others = specialisations
    return [first, *deep(*others)]


@pytest.mark.parametrize("specialisation", some(odd_float32_flash_dims()), ids=lambda s: s.label)
def test_float32_flash_between_the_rows_spills_nothing(specialisation):
    require_pinned_compiler()
    macros = dict(specialisation.macros)
    found = cost(specialisation, TURING)
    row = float32.forward.flash_row(75, macros["HEAD_DIM"], macros["HEAD_DIM_V"])
    assert found.ctas_per_sm >= row.ctas_per_sm
    assert found.spill_bytes == 0


@pytest.mark.parametrize("specialisation", some(odd_head_dims()), ids=lambda s: s.label)
def test_head_dims_between_the_rows_cost_no_more(specialisation):
    macros = dict(specialisation.macros)
    promised = teaching.tiled_row(75, macros["HEAD_DIM"], macros["HEAD_DIM_V"]).ctas_per_sm
    assert cost(specialisation, TURING).ctas_per_sm >= promised
