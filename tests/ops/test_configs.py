"""The launch-configuration tables: the right row at every limit, and rows that can run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.devices import dtype_of

from cupyattn.ops.attention.kernels import decode, float32, native, tensor_core
from cupyattn.ops.attention.kernels.modifiers import BLOCK_LISTS, Modifier, Modifiers
from cupyattn.ops.attention.kernels.options import PLAIN, FlashOptions
from cupyattn.ops.attention.kernels.teaching import forward as teaching
from cupyattn.ops.attention.kernels.tensor_core import forward as forward_rows
from cupyattn.ops.attention.structs import (
    ATTENTION_PARAMS,
    BACKWARD_PARAMS,
    DBIAS_PARAMS,
    DECODE_PARAMS,
    MERGE_PARAMS,
    PAGED_PARAMS,
    TEACHING_BACKWARD_PARAMS,
    TEACHING_PARAMS,
    VARLEN_BACKWARD_PARAMS,
    VARLEN_PARAMS,
)
from cupyattn.ops.cache.kernels import APPEND_PARAMS, COPY_BLOCKS_PARAMS, GATHER_PARAMS
from cupyattn.ops.linear.kernels_quantised import DEQUANTIZE_PARAMS, QUANTIZE_PARAMS
from cupyattn.ops.linear.kernels_skinny import SKINNY_PARAMS
from cupyattn.ops.softmax import kernels as softmax
from cupyattn.registry import KERNELS, catalogue
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.row_kernel import ROWS
from cupyattn.runtime.source import source_root
from cupyattn.runtime.spec import Specialisation, StructParameter
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import rows_params
from cupyattn.runtime.tables import MAX_HEAD_DIM, pairs, rows_for


@pytest.mark.parametrize(
    ("largest", "row"), [(1, 64), (63, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)]
)
def test_tiled_rows_start_and_end_where_the_table_says(largest, row):
    """The larger of D and Dv decides, whichever it is."""
    for dims in ((largest, largest), (largest, 1), (1, largest)):
        assert teaching.tiled_row(75, *dims) is teaching.TILED[75][row]


TABLES = {"rows": ROWS[75], "held": softmax.HELD[75], "streamed": softmax.STREAMED[75]}


@pytest.mark.parametrize("length", [0, 1, 128, 129, 2048, 2049, 16_384, 16_385, 2**31])
@pytest.mark.parametrize("kernel", [softmax.FORWARD, softmax.BACKWARD, softmax.LOGSUMEXP])
def test_rows_start_and_end_where_the_table_says(length, kernel):
    row = next(limit for limit in kernel.table[75] if limit is None or length <= limit)
    config = kernel.table[75][row]
    assert kernel.config(75, length) is config
    macros = kernel.specialise(75, "float32", length, 1).defines
    assert (macros["THREADS"], macros["LANES"]) == (config.threads, config.lanes)
    assert macros["RESIDENT"] == ("true" if config.items else "false")


def test_tables_are_in_order_and_reach_every_size():
    assert list(teaching.TILED[75]) == sorted(teaching.TILED[75])
    assert max(teaching.TILED[75]) == teaching.MOST_TILED_DIM
    for table in TABLES.values():
        *limits, last = table
        assert limits == sorted(limits)
        assert last is None
    rows = itertools.chain(teaching.TILED[75].values(), *map(dict.values, TABLES.values()))
    for config in (teaching.NAIVE, *rows):
        assert config.reason.strip()


def test_shared_memory_of_the_tiled_kernel_fits_for_all_head_dims():
    """As many CTAs as the row promises, on the SM with the least shared memory."""
    for head_dim in range(1, teaching.MOST_TILED_DIM + 1):
        for head_dim_v in range(1, teaching.MOST_TILED_DIM + 1):
            config = teaching.tiled_row(75, head_dim, head_dim_v)
            shared = teaching._tiled_shared_bytes(config, head_dim, head_dim_v)
            assert shared % 16 == 0
            assert shared * config.ctas_per_sm <= TURING.shared_bytes_per_cta


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("table", TABLES)
def test_a_resident_row_has_room_in_its_threads(table, dtype):
    kernel = replace(softmax.BACKWARD, table={75: TABLES[table]})
    for limit, config in TABLES[table].items():
        assert config.lanes in (1, 2, 4, 8, 16, 32, config.threads)
        assert config.threads % WARP_SIZE == 0
        assert config.rows_per_cta * config.lanes == config.threads
        for vec in (1, vector_items(dtype)):
            macros = dict(kernel.specialise(75, dtype, limit or 10**6, vec).macros)
            batch = macros["STRIPS"] * macros["LANES"] * macros["VEC"]
            assert macros["VEC"] == vec
            assert batch == config.lanes * (config.items or config.in_flight or vec)
            if config.items:
                assert batch >= limit, "the row's end would be dropped"


def test_vectors_are_16_bytes():
    assert VECTOR_BYTES == 16
    for dtype, itemsize in STORAGE.items():
        assert dtype_of(dtype).itemsize == itemsize
        assert dtype_of(dtype).name == dtype, "the CUDA sources use NumPy's names"
        assert vector_items(dtype) * itemsize == VECTOR_BYTES


def test_the_same_key_is_the_same_object():
    """Loaded modules, plans and caches use a specialisation's identity."""
    assert teaching.tiled(75, "float16", 64, 32) is teaching.tiled(75, "float16", 64, 32)
    assert teaching.naive("float16", 64, 32) is teaching.naive("float16", 64, 32)
    small = softmax.FORWARD.specialise
    assert small(75, "float32", 10, 4) is small(75, "float32", 10, 4)
    different = [
        teaching.tiled(75, dtype, dim, dim_v)
        for dtype in STORAGE
        for dim, dim_v in ((64, 64), (64, 32), (32, 64))
    ]
    assert len({specialisation.macros for specialisation in different}) == len(different)


def met(specialisations: Iterable[Specialisation], *names: str) -> set[tuple[Any, ...]]:
    """The combinations of these macros' values."""
    return {tuple(dict(each.macros)[name] for name in names) for each in specialisations}


def of_kernel(entry: str) -> list[Specialisation]:
    return [each for each in catalogue() if each.spec.entry == entry]


def test_the_ahead_of_time_list_has_every_kernel_and_nothing_twice():
    labels = Counter(specialisation.label for specialisation in catalogue())
    assert max(labels.values()) == 1, labels.most_common(1)
    newer = {kernel.entry for kernel in native.KERNELS}
    assert {specialisation.spec.entry for specialisation in catalogue()} == set(KERNELS) - newer
    assert {each.spec.entry for each in native.catalogue(80)} == newer


def test_the_ahead_of_time_list_has_pairs_alone():
    """Each entry takes `compile` and CI a third of a second: 1,272 of them seven minutes.

    An option or a dtype more is a few entries more if it meets the others in pairs, and doubles
    them if it meets all. Where pairs come to more than this, first look for rows that no plan has.
    """
    assert len([*catalogue()]) <= 1_640


def test_the_ahead_of_time_list_has_every_pair_of_row_dtype_and_load():
    tiled = of_kernel("attention_tiled")
    rows = {(limit, row.rows) for limit, row in teaching.TILED[75].items()}
    assert met(tiled, "HEAD_DIM", "ROWS") == rows
    assert met(tiled, "DTYPE", "HEAD_DIM") == set(itertools.product(STORAGE, teaching.TILED[75]))
    loads = {(dtype, vec) for dtype in STORAGE for vec in (vector_items(dtype), 1)}
    for kernel in (softmax.FORWARD, softmax.BACKWARD, softmax.LOGSUMEXP):
        lanes = {row.lanes for row in kernel.table[75].values()}
        found = of_kernel(kernel.entry)
        assert met(found, "DTYPE", "LANES") == set(itertools.product(STORAGE, lanes))
        assert met(found, "DTYPE", "VEC") == loads


def test_pairs_meet_and_are_few():
    axes = (range(4), range(3), "ab", "xyz")
    chosen = list(pairs(*axes))
    assert chosen[0] == tuple(axis[0] for axis in axes)
    for first, second in itertools.combinations(range(len(axes)), 2):
        expected = set(itertools.product(axes[first], axes[second]))
        assert {(each[first], each[second]) for each in chosen} == expected
    assert len(chosen) <= 14
    assert list(pairs()) == []


def test_newer_architectures_take_the_newest_rows_that_are_not_newer():
    table = {75: "Turing", 80: "Ampere"}
    assert [rows_for(table, arch) for arch in (75, 80, 86, 120)] == ["Turing", *["Ampere"] * 3]
    for arch, columns in ((75, 8), (80, 16), (90, 16)):
        kernel = tensor_core.forward.flash(arch, 64, 64, 8)
        assert dict(kernel.macros)["MMA_K"] == columns


@pytest.mark.parametrize(
    ("terms", "lanes"), [(0, 1), (1, 1), (16, 1), (17, WARP_SIZE), (2**40, WARP_SIZE)]
)
def test_rows_of_dbias_start_and_end_where_the_table_says(terms, lanes):
    assert float32.backward.dbias_row(75, terms).lanes == lanes


def test_the_ahead_of_time_list_has_every_kernel_of_dbias_and_dsinks():
    dbias = of_kernel("attention_backward_f32_dbias")
    assert met(dbias, "DTYPE", "LANES") == set(itertools.product(STORAGE, (1, WARP_SIZE)))
    assert met(dbias, "MASK", "SOFTCAP", "DROPOUT") == {("true", "true", "true")}
    for entry in ("attention_backward_f32_dsinks", "attention_backward_f32_dsinks_varlen"):
        assert met(of_kernel(entry), "SINKS") == {(dtype,) for dtype in STORAGE}
    naive = of_kernel("attention_backward_naive")
    assert met(naive, "DTYPE") == {(dtype,) for dtype in STORAGE}


def test_the_ahead_of_time_list_has_every_flash_row_and_option():
    macros = [dict(s.macros) for s in catalogue() if s.spec.entry == "attention_forward"]
    rows = {(m["HEAD_DIM"], m["M_TILES"], m["TILE_K"], m["VEC"]) for m in macros}
    tables = tensor_core.forward
    expected = {
        (d, row.m_tiles, row.tile_k, vec) for d, row in tables.FLASH[75].items() for vec in (8, 1)
    }
    of_expressions = ("block mask", "score_mod", "mask_mod")  # which users write
    of_options = [rows for kind, rows in tables.FLASH_WITH.items() if kind not in of_expressions]
    for table in (tables.FLASH_TALL, *of_options):
        expected |= {(d, row.m_tiles, row.tile_k, 8) for d, row in table[75].items()}
    assert rows == expected
    for name, absent in (("BIAS", "void"), ("SLOPES", "void"), ("SINKS", "void")):
        assert {m[name] for m in macros} > {absent}
    for name in ("MASK", "SOFTCAP", "DROPOUT"):
        assert {m[name] for m in macros} == {"true", "false"}


@pytest.mark.parametrize(
    ("largest", "row"),
    [(1, 64), (64, 64), (65, 128), (128, 128), (129, 160), (161, 256), (257, 512)],
)
def test_float32_flash_rows_start_and_end_where_the_table_says(largest, row):
    for dims in ((largest, largest), (largest, 1), (1, largest)):
        assert float32.forward.flash_row(75, *dims) is float32.forward.FLASH[75][row]


def test_float32_flash_fits_for_all_head_dims():
    """As many CTAs as the row promises, on the SM with the least shared memory."""
    assert list(float32.forward.FLASH[75]) == sorted(float32.forward.FLASH[75])
    assert max(float32.forward.FLASH[75]) == MAX_HEAD_DIM
    for largest in range(1, MAX_HEAD_DIM + 1):
        config = float32.forward.flash_row(75, 1, largest)
        assert config.reason.strip()
        shared = float32.forward._flash_shared_bytes(config, largest)
        assert shared * config.ctas_per_sm <= TURING.shared_bytes_per_cta


@pytest.mark.parametrize("table", ["DKDV", "DQ"])
def test_float_backward_rows_and_the_options_that_take_registers(table):
    rows = getattr(float32.backward, table)[75]
    config = getattr(float32.backward, f"{table.lower()}_row")
    limits = (64, 128, 256, 512)
    for largest, row in (
        (1, 64),
        *zip(limits, limits, strict=True),
        (65, 128),
        (129, 256),
        (257, 512),
    ):
        for dims in ((largest, 1), (1, largest)):
            for options in (PLAIN, FlashOptions(bias="float32"), FlashOptions(mask=True)):
                assert config(75, *dims, options) is rows[row]
            for options in (FlashOptions(softcap=True), FlashOptions(dropout=True)):
                assert config(75, *dims, options) is rows[max(row, 128)]


def test_the_ahead_of_time_list_has_every_float32_flash_row_and_option():
    found = of_kernel("attention_forward_f32")
    table, dtypes = float32.forward.FLASH[75], float32.forward.DTYPES
    assert met(found, "HEAD_DIM", "COLUMN_LANES", "PAIRS") == {
        (limit, row.column_lanes, row.pairs) for limit, row in table.items()
    }
    assert met(found, "DTYPE", "HEAD_DIM") == set(itertools.product(dtypes, table))
    assert met(found, "DTYPE", "VEC") == set(itertools.product(dtypes, (4, 1)))
    for name in ("BIAS", "SLOPES", "SINKS"):
        assert met(found, name) > {("void",)}
    for name in ("MASK", "SOFTCAP", "DROPOUT"):
        assert met(found, name) == {("true",), ("false",)}


def test_specialisations_say_what_their_kernel_needs():
    for specialisation in catalogue():
        spec = specialisation.spec
        assert (source_root() / spec.source).is_file()
        assert specialisation.threads % WARP_SIZE == 0
        assert specialisation.threads <= 1024
        first = [f"{name}=" for name, _ in specialisation.macros[:1]]
        assert specialisation.label.startswith(f"{spec.entry}[{''.join(first)}")
        for struct in spec.parameters:
            if isinstance(struct, StructParameter):
                assert struct.size_macros.items() <= specialisation.defines.items()
        assert specialisation.defines["THREADS"] == specialisation.threads


def test_structs_are_laid_out_as_c_does():
    """Every field aligned to its size, and the whole to the largest."""
    for dtype in (
        APPEND_PARAMS,
        ATTENTION_PARAMS,
        BACKWARD_PARAMS,
        COPY_BLOCKS_PARAMS,
        DBIAS_PARAMS,
        DECODE_PARAMS,
        DEQUANTIZE_PARAMS,
        GATHER_PARAMS,
        MERGE_PARAMS,
        PAGED_PARAMS,
        QUANTIZE_PARAMS,
        TEACHING_BACKWARD_PARAMS,
        TEACHING_PARAMS,
        SKINNY_PARAMS,
        VARLEN_BACKWARD_PARAMS,
        VARLEN_PARAMS,
        rows_params(2),
        rows_params(3),
    ):
        assert dtype.isalignedstruct
        assert dtype.itemsize % dtype.alignment == 0
        for field, offset in dtype.fields.values():
            assert offset % field.alignment == 0
    assert rows_params(3).itemsize - rows_params(2).itemsize == 4 * np.dtype(np.int64).itemsize


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rows", "vec", "chosen"),
    [
        # On tensor cores (no lanes): float16 of whole vectors, of three head dims.
        ("float16", 64, 8, 8, (0, 8)),
        ("float16", 64, 9, 8, (0, 16)),
        ("float16", 128, 256, 8, (0, 16)),
        ("float16", 256, 16, 8, (0, 8)),
        ("float16", 64, 8, 1, (32, 8)),
        ("float16", 80, 4, 8, (16, 4)),
        ("bfloat16", 64, 4, 8, (8, 4)),
        ("float32", 128, 4, 4, (32, 4)),
        ("float32", 128, 5, 4, (32, 8)),
        ("float32", 1, 1, 1, (4, 4)),
        ("float32", 256, 8, 4, (32, 4)),
        ("float16", 512, 4, 8, (0, 8)),
        ("float16", 384, 16, 8, (0, 8)),
        ("float16", 264, 4, 8, (32, 4)),
        ("float32", 512, 16, 4, (32, 4)),
    ],
)
def test_decoding_chooses_by_head_dim_rows_and_loads(dtype, head_dim, rows, vec, chosen):
    launch = decode.decode_launch(75, dtype, head_dim, rows, vec)
    assert (launch.lanes, launch.config.rows) == chosen


@pytest.mark.parametrize("dtype", STORAGE)
def test_every_decode_launch_fits_an_sm_as_often_as_its_row_says(dtype):
    for head_dim in range(1, MAX_HEAD_DIM + 1):
        for rows in (1, 256):
            for vec in {1, vector_items(dtype)}:
                if head_dim % vec:
                    continue
                launch = decode.decode_launch(75, dtype, head_dim, rows, vec)
                found = decode.forward(launch, FlashOptions())
                assert found.defines["SHARED_BYTES"] * launch.config.ctas_per_sm <= 65_536
                assert launch.lanes == 0 or launch.lanes * vec * 16 >= head_dim


def test_the_kind_of_options_decides_the_row_of_the_forward():
    expression = Modifier("score", None, ())
    options_of = {
        "dropout": FlashOptions(dropout=True, slopes="float32"),
        "block mask": FlashOptions(modified=Modifiers(None, expression, BLOCK_LISTS), softcap=True),
        "float32 bias by 4": FlashOptions(bias="float32", bias_vec=4),
        "bias or mask one by one": FlashOptions(bias="float16", bias_vec=4, mask=True, mask_vec=1),
        "score_mod": FlashOptions(modified=Modifiers(expression, expression)),
        "mask_mod": FlashOptions(modified=Modifiers(None, expression)),
        "softcap": FlashOptions(softcap=True, bias="float16", bias_vec=2),
        "slopes": FlashOptions(slopes="float16"),
    }
    assert set(options_of) == set(forward_rows.FLASH_WITH)
    for kind, options in options_of.items():
        for head_dim in forward_rows.FLASH[75]:
            usual = forward_rows.FLASH[75][head_dim]
            expected = forward_rows.FLASH_WITH[kind][75].get(head_dim, usual)
            assert forward_rows.flash_row(75, head_dim, 1, options) is expected, kind
    for options in (PLAIN, FlashOptions(sinks="float32"), FlashOptions(mask=True, mask_vec=2)):
        assert forward_rows.flash_row(75, 64, 64, options) is forward_rows.FLASH[75][64]
