"""The launch-configuration tables: the right row at every limit, and rows that can run."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from strategies import dtype_of

from cupyattn.kernels import configs
from cupyattn.kernels.arch import ARCHS, TURING, WARP_SIZE, arch_of
from cupyattn.kernels.configs import (
    attention,
    attention_backward_f32,
    attention_backward_naive,
    softmax,
)
from cupyattn.kernels.configs import attention_teaching as teaching
from cupyattn.kernels.configs.attention import PLAIN, FlashOptions
from cupyattn.kernels.configs.dtypes import STORAGE, VECTOR_BYTES, vector_items
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.kernels.registry import KERNELS
from cupyattn.kernels.source import source_root
from cupyattn.kernels.spec import Struct
from cupyattn.kernels.structs import ATTENTION_PARAMS, BACKWARD_PARAMS, DBIAS_PARAMS, rows_params


@pytest.mark.parametrize(
    ("largest", "row"), [(1, 64), (63, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)]
)
def test_tiled_rows_start_and_end_where_the_table_says(largest, row):
    """The larger of D and Dv decides, whichever it is."""
    for dims in ((largest, largest), (largest, 1), (1, largest)):
        assert teaching.tiled_config(*dims) is teaching.TILED[row]


@pytest.mark.parametrize(
    ("length", "row"),
    [
        (0, 128),
        (1, 128),
        (128, 128),
        (129, 1024),
        (1024, 1024),
        (1025, 8192),
        (8192, 8192),
        (8193, None),
        (2**31, None),
    ],
)
def test_softmax_rows_start_and_end_where_the_table_says(length, row):
    config = softmax.ROWS[row]
    assert softmax.row_config(length) is config
    for table in (softmax.forward, softmax.backward):
        macros = dict(table("float32", length, 1).macros)
        assert (macros["THREADS"], macros["LANES"]) == (config.threads, config.lanes)
        assert macros["RESIDENT"] == ("false" if row is None else "true")


def test_tables_are_in_order_and_reach_every_size():
    assert list(teaching.TILED) == sorted(teaching.TILED)
    assert max(teaching.TILED) == MAX_HEAD_DIM
    *limits, last = softmax.ROWS
    assert limits == sorted(limits)
    assert last is None
    for config in (
        teaching.NAIVE,
        *teaching.TILED.values(),
        *softmax.ROWS.values(),
    ):
        assert config.reason.strip()


@pytest.mark.parametrize("vec", [1, 4, 8])
def test_shared_memory_of_the_tiled_kernel_fits_for_all_head_dims(vec):
    """As many CTAs as the row promises, on the SM with the least shared memory."""
    for head_dim in range(vec, MAX_HEAD_DIM + 1, vec):
        for head_dim_v in range(vec, MAX_HEAD_DIM + 1, vec):
            config = teaching.tiled_config(head_dim, head_dim_v)
            shared = teaching._tiled_shared_bytes(config, head_dim, head_dim_v, vec)
            assert shared % 16 == 0
            assert shared * config.ctas_per_sm <= TURING.shared_bytes_per_cta


@pytest.mark.parametrize("dtype", STORAGE)
def test_a_resident_row_has_room_in_its_threads(dtype):
    for limit, config in softmax.ROWS.items():
        assert config.lanes in (1, 2, 4, 8, 16, 32, config.threads)
        assert config.threads % WARP_SIZE == 0
        assert config.rows_per_cta * config.lanes == config.threads
        for vec in (1, vector_items(dtype)):
            for table in (softmax.forward, softmax.backward):
                macros = dict(table(dtype, limit or 10**6, vec).macros)
                held = macros["STRIPS"] * macros["LANES"] * macros["VEC"]
                assert macros["VEC"] == vec
                assert held == config.lanes * (config.items or vec)
                if limit is not None:
                    assert held >= limit, "the row's end would be dropped"


def test_vectors_are_16_bytes():
    assert VECTOR_BYTES == 16
    for dtype, itemsize in STORAGE.items():
        assert dtype_of(dtype).itemsize == itemsize
        assert dtype_of(dtype).name == dtype, "the CUDA sources use NumPy's names"
        assert vector_items(dtype) * itemsize == VECTOR_BYTES


def test_the_same_key_is_the_same_object():
    """What is loaded, planned and cached goes by identity."""
    assert teaching.tiled("float16", 64, 32, 8) is teaching.tiled("float16", 64, 32, 8)
    assert teaching.naive("float16", 64, 32) is teaching.naive("float16", 64, 32)
    assert softmax.forward("float32", 10, 4) is softmax.forward("float32", 10, 4)
    different = [
        teaching.tiled(dtype, dim, dim_v, vec)
        for dtype in STORAGE
        for dim, dim_v in ((64, 64), (64, 32), (32, 64))
        for vec in (1, vector_items(dtype))
    ]
    assert len({specialisation.macros for specialisation in different}) == len(different)


def test_the_catalogue_has_every_row_in_every_dtype():
    catalogue = list(configs.catalogue())
    labels = Counter(specialisation.label for specialisation in catalogue)
    assert max(labels.values()) == 1, labels.most_common(1)
    assert {specialisation.spec.entry for specialisation in catalogue} == set(KERNELS)
    for dtype in STORAGE:
        of_dtype = [dict(s.macros) for s in catalogue if dict(s.macros).get("DTYPE") == dtype]
        vectors = {1, vector_items(dtype)}
        tiled = {(m["HEAD_DIM"], m["ROWS"], m["VEC"]) for m in of_dtype if "ROWS" in m}
        assert tiled == {
            (limit, config.rows, vec) for limit, config in teaching.TILED.items() for vec in vectors
        }
        resident = [m for m in of_dtype if "RESIDENT" in m]
        rows = Counter((m["THREADS"], m["LANES"], m["VEC"]) for m in resident)
        assert rows == {
            (config.threads, config.lanes, vec): 2  # forward and backward
            for config in softmax.ROWS.values()
            for vec in vectors
        }


@pytest.mark.parametrize(
    ("terms", "lanes"), [(0, 1), (1, 1), (16, 1), (17, WARP_SIZE), (2**40, WARP_SIZE)]
)
def test_rows_of_dbias_start_and_end_where_the_table_says(terms, lanes):
    assert attention_backward_naive.dbias_config(terms).lanes == lanes


def test_the_catalogue_has_every_naive_backward_kernel():
    macros = [(s.spec.entry, dict(s.macros)) for s in configs.catalogue() if "_naive_d" in s.label]
    for step in ("dq", "dkdv", "dbias"):
        of_step = [m for entry, m in macros if entry == f"attention_backward_naive_{step}"]
        assert {m["DTYPE"] for m in of_step} == set(STORAGE)
        for name in ("MASK", "SOFTCAP", "DROPOUT"):
            assert {m[name] for m in of_step} == (
                {"true"} if step == "dbias" else {"true", "false"}
            )
    assert {m["SINKS"] for entry, m in macros if "SINKS" in m} == set(STORAGE)
    assert {m["LANES"] for _, m in macros if "LANES" in m} == {1, WARP_SIZE}


def test_the_catalogue_has_every_flash_row_and_option():
    macros = [dict(s.macros) for s in configs.catalogue() if s.spec.entry == "attention_forward"]
    rows = {(m["HEAD_DIM"], m["TILE_K"], m["VEC"]) for m in macros}
    expected = {(d, row.tile_k, vec) for d, row in attention.FLASH.items() for vec in (8, 1)}
    for table in (attention.FLASH_DROPOUT, attention.FLASH_FLOAT32_BIAS):
        expected |= {(d, row.tile_k, 8) for d, row in table.items()}
    assert rows == expected
    for name, absent in (("BIAS", "void"), ("SLOPES", "void"), ("SINKS", "void")):
        assert {m[name] for m in macros} > {absent}
    for name in ("MASK", "SOFTCAP", "DROPOUT"):
        assert {m[name] for m in macros} == {"true", "false"}


@pytest.mark.parametrize(
    ("largest", "row"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 160), (161, 256)]
)
def test_float32_flash_rows_start_and_end_where_the_table_says(largest, row):
    for dims in ((largest, largest), (largest, 1), (1, largest)):
        assert attention.flash_f32_config(*dims) is attention.FLASH_F32[row]


def test_float32_flash_fits_for_all_head_dims():
    """As many CTAs as the row promises, on the SM with the least shared memory."""
    assert list(attention.FLASH_F32) == sorted(attention.FLASH_F32)
    assert max(attention.FLASH_F32) == MAX_HEAD_DIM
    for largest in range(1, MAX_HEAD_DIM + 1):
        config = attention.flash_f32_config(1, largest)
        assert config.reason.strip()
        shared = attention._flash_f32_shared_bytes(config, largest)
        assert shared * config.ctas_per_sm <= TURING.shared_bytes_per_cta


@pytest.mark.parametrize("table", ["DKDV", "DQ"])
def test_float_backward_rows_and_the_options_that_take_registers(table):
    rows = getattr(attention_backward_f32, table)
    config = getattr(attention_backward_f32, f"{table.lower()}_config")
    for largest, row in ((1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)):
        for dims in ((largest, 1), (1, largest)):
            for options in (PLAIN, FlashOptions(bias="float32"), FlashOptions(mask=True)):
                assert config(*dims, options) is rows[row]
            for options in (FlashOptions(softcap=True), FlashOptions(dropout=True)):
                assert config(*dims, options) is rows[max(row, 128)]


def test_the_catalogue_has_every_float32_flash_row_and_option():
    macros = [
        dict(s.macros) for s in configs.catalogue() if s.spec.entry == "attention_forward_f32"
    ]
    rows = {(m["DTYPE"], m["HEAD_DIM"], m["COLUMN_LANES"], m["PAIRS"], m["VEC"]) for m in macros}
    assert rows == {
        (dtype, d, row.column_lanes, row.pairs, vec)
        for dtype in ("float32", "bfloat16")
        for d, row in attention.FLASH_F32.items()
        for vec in (4, 1)
    }
    for name, absent in (("BIAS", "void"), ("SLOPES", "void"), ("SINKS", "void")):
        assert {m[name] for m in macros} > {absent}
    for name in ("MASK", "SOFTCAP", "DROPOUT"):
        assert {m[name] for m in macros} == {"true", "false"}


def test_specialisations_say_what_their_kernel_needs():
    for specialisation in configs.catalogue():
        spec = specialisation.spec
        assert (source_root() / spec.source).is_file()
        assert tuple(name for name, _ in specialisation.macros) == spec.macros
        assert specialisation.threads % WARP_SIZE == 0
        assert specialisation.threads <= 1024
        assert specialisation.label.startswith(f"{spec.entry}[{spec.macros[0]}=")
        struct = spec.parameters[-1]
        assert isinstance(struct, Struct)
        sizes = {m: size for m, size in specialisation.macros if m.endswith("PARAMS_BYTES")}
        assert struct.dtype.itemsize in sizes.values()


def test_structs_are_laid_out_as_c_does():
    """Every field aligned to its size, and the whole to the largest."""
    for dtype in (ATTENTION_PARAMS, BACKWARD_PARAMS, DBIAS_PARAMS, rows_params(2), rows_params(3)):
        assert dtype.isalignedstruct
        assert dtype.itemsize % dtype.alignment == 0
        for field, offset in dtype.fields.values():
            assert offset % field.alignment == 0
    assert rows_params(3).itemsize - rows_params(2).itemsize == 4 * np.dtype(np.int64).itemsize


def test_specialise_names_missing_and_unknown_macros():
    spec = KERNELS["softmax_forward"]
    macros = dict(softmax.forward("float32", 10, 1).macros)
    del macros["LANES"]
    with pytest.raises(ValueError, match=r"missing \['LANES'\], unknown \['LANE'\]"):
        spec.specialise(threads=128, shared_bytes=0, LANE=8, **macros)


# CUDA C++ Programming Guide, technical specifications per compute capability: threads, CTAs,
# registers and KiB of shared memory of an SM, KiB of a CTA.
LIMITS = {
    75: (1024, 16, 65_536, 64, 64),
    80: (2048, 32, 65_536, 164, 163),
    86: (1536, 16, 65_536, 100, 99),
    89: (1536, 24, 65_536, 100, 99),
    90: (2048, 32, 65_536, 228, 227),
    100: (2048, 32, 65_536, 228, 227),
    120: (1536, 24, 65_536, 100, 99),
}


@pytest.mark.parametrize("number", LIMITS)
def test_limits_of_architectures(number):
    arch = arch_of(number)
    shared, shared_cta = arch.shared_bytes_per_sm // 1024, arch.shared_bytes_per_cta // 1024
    actual = (arch.threads_per_sm, arch.ctas_per_sm, arch.registers_per_sm, shared, shared_cta)
    assert actual == LIMITS[number]
    assert (arch.real, arch.virtual) == (f"sm_{number}", f"compute_{number}")


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "ctas"),
    [
        (128, 32, 0, 8),  # 1,024 threads
        (32, 32, 0, 16),  # 16 CTAs
        (256, 128, 0, 2),  # registers: 65,536 exactly
        (256, 129, 0, 1),  # 129 is 136 of them
        (1024, 64, 0, 1),
        (1024, 65, 0, 0),  # not one
        (128, 256, 0, 0),  # more than a thread can have
        (128, 32, 65_536, 1),
        (128, 32, 65_537, 0),
        (128, 32, 21_760, 3),
        (128, 32, 21_761, 2),  # 3 times 22,016 are 66,048
        (64, 200, 0, 4),  # a quarter of the registers is two warps' and a rest: not 10 but 8 warps
        (33, 168, 0, 6),  # 33 threads are two warps, of 5,376 registers each
    ],
)
def test_ctas_that_a_turing_sm_holds(threads, registers, shared, ctas):
    assert TURING.resident_ctas(threads, registers, shared) == ctas


def test_newer_sms_keep_a_kilobyte_of_every_cta():
    a100 = arch_of(80)
    assert a100.resident_ctas(128, 32, 163 * 1024) == 1
    assert a100.resident_ctas(128, 32, 163 * 1024 + 1) == 0
    assert a100.resident_ctas(128, 32, 81 * 1024) == 2
    assert a100.resident_ctas(128, 32, 81 * 1024 + 128) == 1


def test_an_unknown_architecture_is_named():
    with pytest.raises(ValueError, match=r"13\.0 \(sm_130\); known are 75, 80.*; .*CUPYATTN_ARCH"):
        arch_of(130)
    assert all(arch_of(number) is arch for number, arch in ARCHS.items())
