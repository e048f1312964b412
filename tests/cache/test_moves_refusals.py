"""Calls that append_kv, gather and copy_blocks refuse: the message, and that nothing is written."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.devices import everywhere
from support.paged import AppendProblem

import cupyattn
from cupyattn.ops.cache.kernels import AppendArrays, CopyArrays, GatherArrays
from cupyattn.ops.cache.plan import append_plan, copy_launches, gather_plan
from cupyattn.ops.cache.problems import checked_append, checked_copies, checked_gather
from cupyattn.runtime.arrays import contiguous
from cupyattn.runtime.records import fields_of

PROBLEM = AppendProblem((6,), H=4, G=2, D=8, dtype="float32", half=4)
STORED = replace(PROBLEM, bits=8)
APPENDED = ("k_cache", "v_cache", "k", "v", "slot_mapping")
F32 = np.float32
WEIGHT = np.ones(8, F32)


def call(problem: AppendProblem = PROBLEM, **changed: Any) -> None:
    """Append with arguments or options changed; what the call would write stays as it is."""
    memory = problem.memory()
    arguments, options = problem.views(memory)
    named = dict(zip(APPENDED, arguments, strict=True)) | options
    for name, change in changed.items():
        named[name] = change(named.get(name)) if callable(change) else change
    before = {name: array.copy() for name, array in memory.items()}
    arguments = [named.pop(name) for name in APPENDED]
    try:
        cupyattn.append_kv(*arguments, **named)
    except (TypeError, ValueError):
        for name, array in memory.items():
            assert_array_equal(array, before[name])
        raise


def with_item(index: Any, value: Any) -> Any:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return change


def test_the_calls_themselves_are_right():
    call()
    call(STORED)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"k_cache": None}, TypeError, "k_cache is None"),
        ({"k": None}, TypeError, "k is None"),
        ({"v": None}, TypeError, "v is None"),
        ({"slot_mapping": None}, TypeError, "slot_mapping is None"),
        ({"k_cache": lambda x: x[0]}, ValueError, "k_cache has shape (4, 2, 8)"),
        ({"k_cache": lambda x: x.astype("int16")}, TypeError, "k_cache has dtype int16"),
        ({"k_cache": lambda x: x.astype("float16")}, TypeError, "k_cache has float16"),
        ({"v_cache": lambda x: x[1:]}, ValueError, "v_cache has shape"),
        ({"v_cache": lambda x: np.swapaxes(x, 2, 3).copy().swapaxes(2, 3)}, ValueError,
         "v_cache has strides"),
        ({"k_cache": lambda x: x[:, :0], "v_cache": lambda x: x[:, :0]}, ValueError,
         "blocks of no token"),
        ({"k_cache": lambda x: np.zeros((1, 1, 2, 513), F32)}, ValueError, "v_cache has shape"),
        ({"k": lambda x: x[:, :1]}, ValueError, "k has shape (6, 1, 8)"),
        ({"k": lambda x: x[..., :6]}, ValueError, "k has shape (6, 2, 6)"),
        ({"k": lambda x: x[0]}, ValueError, "k is (total, G, D), 3 axes"),
        ({"k": lambda x: x.astype("float16")}, TypeError, "q has float32, k has float16"),
        ({"k": lambda x: x.astype("float16"), "v": lambda x: x.astype("float16"), "q": None},
         TypeError, "k_cache has float32"),
        ({"k": lambda x: x.astype(int)}, TypeError, "k has dtype int64"),
        ({"k": lambda x: np.repeat(x, 2, axis=2)[..., ::2]}, ValueError, "k has strides"),
        ({"v": lambda x: x[:5]}, ValueError, "v has shape (5, 2, 8)"),
        ({"slot_mapping": lambda x: x[:5]}, ValueError, "slot_mapping has shape (5,)"),
        ({"slot_mapping": lambda x: x[None]}, ValueError, "slot_mapping has shape (1, 6)"),
        ({"slot_mapping": lambda x: x.astype(F32)}, TypeError, "slot_mapping has dtype float32"),
        ({"slot_mapping": with_item(slice(2, 4), (16, 99))}, ValueError,
         "slot_mapping[2] is 16; the caches have slots 0 to 15 (4 blocks of 4)"),
        ({"slot_mapping": with_item(5, -2)}, ValueError, "slot_mapping[5] is -2"),
        ({"q": lambda x: x[:5]}, ValueError, "q has shape (5, 4, 8)"),
        ({"q": lambda x: x[..., :4]}, ValueError, "q has shape (6, 4, 4)"),
        ({"q": lambda x: x[:, 0]}, ValueError, "q is (total, H, D), 3 axes"),
        ({"q": lambda x: np.broadcast_to(x[:1], x.shape)}, ValueError, "q has strides"),
        ({"rotary": None, "positions": None}, ValueError, "q was given without rotary"),
        ({"rotary": None}, TypeError, "positions was given without rotary"),
        ({"positions": None}, TypeError, "rotary was given without positions"),
        ({"rotary": lambda x: list(x)}, TypeError, "rotary has type list"),
        ({"rotary": lambda x: tuple(x)}, TypeError, "rotary has type tuple of length 3"),
        ({"rotary": lambda x: (x.cos, None)}, TypeError, "rotary has type tuple"),
        ({"rotary": lambda x: x._replace(interleaved=1)}, TypeError, "rotary's interleaved = 1"),
        ({"rotary": lambda x: (x.cos, x.sin[1:])}, ValueError, "rotary's sin has shape"),
        ({"rotary": lambda x: (x.cos, x.sin.astype("float16"))}, TypeError, "share one dtype"),
        ({"rotary": lambda x: (x.cos[0], x.sin[0])}, ValueError, "rotary's cos has shape"),
        ({"rotary": lambda x: (np.zeros((9, 5), F32),) * 2}, ValueError, "rotate 10 features"),
        ({"positions": lambda x: x[:5]}, ValueError, "positions has shape (5,)"),
        ({"positions": lambda x: x.astype(F32)}, TypeError, "positions has dtype float32"),
        ({"positions": lambda x: np.full(6, 40), "slot_mapping": lambda x: np.arange(6)},
         ValueError, "positions[0] is 40; the tables of rotary have rows 0 to 39"),
        ({"positions": with_item(slice(None), -3), "slot_mapping": lambda x: np.arange(-1, 5),
          "q": None}, ValueError, "positions[1] is -3"),
        ({"k_scales": np.zeros((4, 4, 2), F32)}, ValueError, "k_scales was given with caches of"),
        ({"q_norm": (WEIGHT, 1e-6, 0.0)}, TypeError, "q_norm has type tuple; it must be RMSNorm("),
        ({"k_norm": WEIGHT}, TypeError, "k_norm has type ndarray; it must be RMSNorm(weight"),
        ({"k_norm": cupyattn.RMSNorm(None)}, TypeError, "k_norm has type RMSNorm and no weight"),
        ({"k_norm": cupyattn.RMSNorm(WEIGHT, -1.0)}, ValueError, "k_norm's eps = -1.0; it is 0 or"),
        ({"q_norm": cupyattn.RMSNorm(WEIGHT, weight_offset=np.inf)}, ValueError,
         "q_norm's weight_offset = inf; it is a finite number"),
        ({"q_norm": cupyattn.RMSNorm(WEIGHT[:4])}, ValueError,
         "q_norm's weight has shape (4,); q_norm's weight is (D,), here (8,)"),
        ({"k_norm": cupyattn.RMSNorm(WEIGHT.astype("float16"))}, TypeError,
         "k_norm's weight has float16"),
        ({"k_norm": cupyattn.RMSNorm(np.repeat(WEIGHT, 2)[::2])}, ValueError,
         "k_norm's weight has strides"),
        ({"q_norm": cupyattn.RMSNorm(WEIGHT), "q": None}, ValueError, "q_norm was given without q"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_append_kv(changed, kind, message, backend):
    with cupyattn.backend(backend), pytest.raises(kind, match=re.escape(message)):
        call(**changed)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"k_scales": None}, TypeError, "k_scales is None, and the caches have dtype int8"),
        ({"v_scales": lambda x: x[1:]}, ValueError, "v_scales has shape"),
        ({"v_scales": lambda x: x.astype("float16")}, TypeError, "v_scales has dtype float16"),
        ({"v_cache": lambda x: x.view(np.uint8)}, TypeError, "k_cache has int8, v_cache has uint8"),
        ({name: lambda x: x.view(np.uint8) for name in ("k_cache", "v_cache")}, ValueError,
         "k has shape (6, 2, 8); k is (total, G, D) with the caches' G, D, here (6, 2, 16)"),
    ],
)  # fmt: skip
def test_append_kv_to_integers(changed, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call(STORED, **changed)


def crooked(array: np.ndarray) -> np.ndarray:
    """Return these items at least five bytes apart."""
    spread = np.zeros(array.shape, [("item", array.dtype), ("between", np.int8)])["item"]
    spread[...] = array
    return spread


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k_cache", np.asfortranarray),
        ("v_cache", crooked),
        ("v_cache", lambda x: x.astype(np.int64)),
        ("k_scales", crooked),
        ("v_scales", lambda x: x.astype(np.float64)),
    ],
)
def test_a_copy_is_no_cache_to_write(name, change):
    """It would be written, and lost: one that is only read may be a copy."""
    caches, scales = np.zeros((2, 5, 4, 2, 8), np.int8), np.zeros((2, 5, 4, 2), F32)
    given = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    given |= dict(zip(("k_scales", "v_scales"), scales, strict=True))
    given[name] = change(given[name])
    arrays = given.pop("k_cache"), given.pop("v_cache")
    table, lengths, tokens = np.zeros((1, 1), np.int32), np.array([3]), np.zeros((1, 2, 8), F32)
    for call, copied in (
        (lambda: cupyattn.append_kv(*arrays, tokens, tokens, np.array([0]), **given), False),
        (lambda: cupyattn.copy_blocks(*arrays, [(0, 1)], **given), False),
        (lambda: cupyattn.gather(*arrays, table, lengths, **given), True),
    ):
        with pytest.raises((TypeError, ValueError)) as refused:
            call()
        *_, fix = str(refused.value).split("; ")
        assert fix.startswith("make a writable, C-contiguous array before the call") != copied, fix
        assert ("ascontiguousarray" in fix or "astype" in fix) == copied, fix


def test_float64_is_not_for_kernels():
    with cupyattn.backend("emulator"), pytest.raises(TypeError, match="k has dtype float64 on a"):
        call(replace(PROBLEM, dtype="float64"))


def test_what_overlaps_or_cannot_be_written():
    k_cache, v_cache, k, v, slots = PROBLEM.views(PROBLEM.memory())[0]
    for caches, message in (
        ((k_cache, k_cache), "k_cache overlaps v_cache in memory; both are written"),
        ((k_cache, np.broadcast_to(v_cache[:, :1], k_cache.shape)), "v_cache has strides"),
        ((k_cache, np.lib.stride_tricks.as_strided(v_cache, writeable=False)),
         "v_cache is read-only"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            cupyattn.append_kv(*caches, k, v, slots)
    caches = np.zeros((2, 4, 4, 2, 8), F32)
    inside = caches[0].reshape(-1)[: k.size].reshape(k.shape)
    with pytest.raises(ValueError, match="k_cache overlaps k in memory"):
        cupyattn.append_kv(*caches, inside, v, slots)
    rotation = {"rotary": cupyattn.rope_tables(40, 8), "positions": np.arange(6)}
    with pytest.raises(ValueError, match="q overlaps k in memory"):
        cupyattn.append_kv(*caches, k, v, slots, q=k, **rotation)


def test_an_array_that_starts_within_an_item():
    k_cache, v_cache, k, v, slots = PROBLEM.views(PROBLEM.memory())[0]
    crooked = np.zeros(v.nbytes + 1, np.uint8)[1:].view(v.dtype).reshape(v.shape)
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match="v starts 1 bytes into"):
        cupyattn.append_kv(k_cache, v_cache, k, crooked, slots)


CACHES = np.zeros((2, 5, 4, 2, 8), F32)
GATHERED = ("k_cache", "v_cache", "block_table", "seqlens_k")


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"k_cache": None}, TypeError, "k_cache is None"),
        ({"block_table": None}, TypeError, "block_table is None"),
        ({"block_table": lambda x: x.astype("int64")}, TypeError, "block_table has dtype int64"),
        ({"block_table": lambda x: x[0]}, ValueError, "block_table has shape (3,)"),
        ({"seqlens_k": lambda x: x[:1]}, ValueError, "seqlens_k has shape (1,)"),
        ({"seqlens_k": lambda x: x.astype(F32)}, TypeError, "seqlens_k has dtype float32"),
        ({"seqlens_k": with_item(1, 13)}, ValueError, "seqlens_k[1] = 13; each is at least 0 and"),
        ({"seqlens_k": with_item(0, -1)}, ValueError, "seqlens_k[0] = -1"),
        ({"max_seqlen_k": 4}, ValueError, "seqlens_k[0] = 5; each is at least 0 and at most 4"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k = -1"),
        ({"max_seqlen_k": 4.0}, TypeError, "max_seqlen_k is 4.0 of type float"),
        ({"block_table": with_item((0, 1), 5)}, ValueError, "block_table[0, 1] = 5"),
        ({"block_table": with_item((0, 0), -2)}, ValueError, "block_table[0, 0] = -2"),
        ({"dtype": "int8"}, TypeError, "dtype = 'int8'"),
        ({"dtype": "float16"}, ValueError, "dtype = float16 with caches of float32"),
        ({"k_scales": np.zeros((5, 4, 2), F32)}, ValueError, "k_scales was given with caches of"),
        ({"k_cache": lambda x: x.astype(np.int8), "v_cache": lambda x: x.astype(np.int8)},
         TypeError, "k_scales is None"),
        ({"out": np.zeros((2, 12, 2, 8), F32)}, TypeError, "out has type ndarray"),
        ({"out": (np.zeros((2, 12, 2, 8), F32), None)}, TypeError, "out is a tuple of 2"),
        ({"out": (np.zeros((2, 11, 2, 8), F32),) * 2}, ValueError, "k is float32 (2, 11, 2, 8)"),
        ({"out": (np.zeros((2, 12, 2, 8), F32),) * 2}, ValueError,
         "out's k overlaps out's v in memory"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_gather(changed, kind, message, backend):
    table = np.array([[0, 4, 9], [1, 9, 9]], np.int32)
    named: dict[str, Any] = dict(
        zip(GATHERED, (CACHES[0], CACHES[1], table, np.array([5, 4])), strict=True)
    )
    for name, change in changed.items():
        named[name] = change(named.get(name)) if callable(change) else change
    arguments = [named.pop(name) for name in GATHERED]
    with cupyattn.backend(backend), pytest.raises(kind, match=re.escape(message)):
        cupyattn.gather(*arguments, **named)


def test_gather_of_int8_keys_names_their_formula():
    keys, values = np.zeros((4, 16, 2, 8), np.int8), np.zeros((4, 16, 2, 8), np.float16)
    table, lengths = np.zeros((1, 1), np.int32), np.array([3])
    scales = np.zeros((4, 16, 2), np.float32)
    with pytest.raises(TypeError, match=r"k_cache \* k_scales\[\.\.\., None\] \+ k_centre"):
        cupyattn.gather(keys, values, table, lengths, k_scales=scales)
    assert cupyattn.gather(values, values, table, lengths)[1].shape == (1, 16, 2, 8)


def test_gather_of_float64_is_not_for_kernels():
    table, lengths = np.zeros((1, 1), np.int32), np.array([3])
    with cupyattn.backend("emulator"), pytest.raises(TypeError, match="k_cache has dtype float64"):
        cupyattn.gather(*CACHES.astype(float), table, lengths)
    stored, scales = CACHES.astype(np.int8), CACHES[..., 0].copy()
    with cupyattn.backend("emulator"), pytest.raises(TypeError, match="k has dtype float64 on a"):
        cupyattn.gather(*stored, table, lengths, k_scales=scales[0], v_scales=scales[1],
                        dtype=np.float64)  # fmt: skip


def test_a_result_within_the_cache():
    table = np.array([[0, 1, 2]], np.int32)
    out = CACHES[1, :3].reshape(1, 12, 2, 8), np.zeros((1, 12, 2, 8), F32)
    with pytest.raises(ValueError, match="out's k overlaps v_cache"):
        cupyattn.gather(*CACHES, table, np.array([5]), out=out)


def described(kind: type[Any], **arrays: tuple[tuple[int, ...], str]) -> tuple[Any, ...]:
    """Arrays of a call as checks see them, of any size, in the order of a record's fields."""
    given = (arrays.get(field) for field in fields_of(kind))
    return tuple(each and (*contiguous(each[0], np.dtype(each[1])), 0) for each in given)


def test_launches_that_are_too_large():
    """Rows of lanes, and a block's words, are numbered with 32 bits."""
    cache = (8, 16, 2, 8), "float16"
    caches = {"k_cache": cache, "v_cache": cache}
    tokens = (2**31, 2, 8), "float16"
    slots = (2**31,), "int32"
    description = described(AppendArrays, **caches, k=tokens, v=tokens, slot_mapping=slots)
    with pytest.raises(ValueError, match=f"{2**31} tokens, and caches of 128 slots; a launch"):
        append_plan(checked_append(description, False, None, None), 75)
    table, lengths = ((2**16, 2**12), "int32"), ((2**16,), "int32")
    description = described(GatherArrays, **caches, block_table=table, seqlens_k=lengths)
    with pytest.raises(ValueError, match=r"results of 65536 \* 65536 tokens; a launch"):
        gather_plan(checked_gather(description, None, None))
    pool = (2**20, 2, 2**12, 64, 128), "float16"
    description = described(CopyArrays, k_cache=pool, v_cache=pool)
    with pytest.raises(ValueError, match="a block of all layers has more than"):
        copy_launches(checked_copies(description))


@everywhere
@pytest.mark.parametrize(
    ("copies", "kind", "message"),
    [
        (None, TypeError, "copies is None"),
        (3, TypeError, "copies has type int; it must be a sequence of Copy(src, dst)"),
        ([3], TypeError, "copies[0] is 3; each copy is a pair"),
        ([(0, 1), (0, 1, 2)], TypeError, "copies[1] is (0, 1, 2)"),
        ([(0, 1.0)], TypeError, "copies[0]'s dst is 1.0 of type float"),
        ([(0, 1), (True, 1)], TypeError, "copies[1]'s src is True"),
        (
            [(0, 1), (4, 5), (9, 9)],
            ValueError,
            "copies[1] is (4, 5); the caches have blocks 0 to 4",
        ),
        ([(-1, -1)], ValueError, "copies[0] is (-1, -1)"),
        (np.array([0, 1]), ValueError, "copies has shape (2,); it is (n, 2)"),
        (np.zeros((2, 3), int), ValueError, "copies has shape (2, 3)"),
        (np.zeros((2, 2)), TypeError, "copies has dtype float64"),
    ],
)
def test_copy_blocks(side, copies, kind, message):
    caches = side.put(CACHES)
    given = side.put(copies) if isinstance(copies, np.ndarray) else copies
    with side.running(), pytest.raises(kind, match=re.escape(message)):
        cupyattn.copy_blocks(caches[0], caches[1], given)


@everywhere
@pytest.mark.parametrize(
    ("pair", "shown"), [((0, 5), "(0, 5)"), ((-1, 0), "(-1, 0)"), ((2, -1), "(2, -1)")]
)
def test_blocks_that_do_not_exist_are_named(side, pair, shown):
    caches = side.put(CACHES)
    copies = side.put(np.array([(0, 1), (-1, -1), pair, (7, 7)]))
    with (
        side.running(),
        cupyattn.backend(checks=True),
        pytest.raises(ValueError, match=re.escape(f"copies[2] is {shown}")),
    ):
        cupyattn.copy_blocks(caches[0], caches[1], copies)


def test_copy_blocks_of_other_caches():
    pool = np.zeros((3, 2, 5, 4, 2, 8), F32)
    for caches, kind, message in (
        ((pool[:, 0], pool[0, 1]), ValueError, "v_cache has shape"),
        ((pool, pool), ValueError, "k_cache has shape (3, 2, 5, 4, 2, 8)"),
        ((CACHES[0], CACHES[0]), ValueError, "overlaps"),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            cupyattn.copy_blocks(*caches, [(0, 1)])
    stored = pool.astype(np.int8)
    scales = np.zeros(stored.shape[:-1], F32)
    with pytest.raises(TypeError, match="quantised caches have a float32 scale for each token"):
        cupyattn.copy_blocks(stored[:, 0], stored[:, 1], [(0, 1)])
    with pytest.raises(ValueError, match=re.escape("k_scales has shape (5, 4, 2)")):
        cupyattn.copy_blocks(stored[:, 0], stored[:, 1], [(0, 1)],
                             k_scales=scales[0, 0], v_scales=scales[0, 1])  # fmt: skip
