"""Instructions of the kernels for GPUs newer than Turing, from their PTX on the emulator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS
from support.forward_runs import check, natively, split
from support.modifiers import blocks_of
from support.search import deep, examples, wider
from support.strategies import (
    EITHER_HALF,
    FRUGAL,
    LONGEST,
    RUN_TIME_OPTIONS,
    attention_problems,
    every_option,
)
from support.varlen import varlen_problems

import cupyattn
from cupyattn import emulator, reference
from cupyattn.emulator.machine.global_memory import GlobalMemory
from cupyattn.ops.attention.kernels import native
from cupyattn.ops.attention.kernels.options import FlashOptions
from cupyattn.runtime.arch import ARCH_VARIABLE, TURING, Arch, arch_of
from cupyattn.runtime.backend import running_on
from cupyattn.runtime.compile import compile_cubin, compile_ptx
from cupyattn.runtime.device import emulated as emulated_device
from cupyattn.runtime.device.recorder import LaunchRecorder
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
    forward = "attention_forward_native" if arch.number >= 80 else "attention_forward"
    for kernel in (forward, "attention_backward_dkdv"):
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


def rows_of_views(view: str, aligned: bool) -> list[np.ndarray]:
    """Return q, k, v and dout whose rows lie in that way in memory."""
    rng = np.random.default_rng(0)
    shape = 1, 2 * LENGTH, 1, HEAD_DIM + 8
    wide = [rng.standard_normal(shape).astype(np.float16) for _ in range(4)]
    ways = {"in order": slice(LENGTH), "backwards": slice(LENGTH - 1, None, -1)}
    columns = slice(HEAD_DIM) if aligned else slice(1, HEAD_DIM + 1)
    return [array[:, ways.get(view, slice(None, None, 2)), :, columns] for array in wide]


@pytest.mark.deep
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("view", ["in order", "backwards", "every second"])
def test_tiles_come_to_l2_before_their_turn_from_sm_80_on(
    view, aligned, deterministic, monkeypatch
):
    """Just the lines of their rows, whichever way these run: loads in their place say which.

    Tiles of queries that are copied asynchronously are under way for long enough.
    """
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
    q, k, v, dout = rows_of_views(view, aligned)

    def lines(rows: range, *arrays: np.ndarray) -> set[int]:
        starts = {array[0, row].ctypes.data for array in arrays for row in rows}
        return {start + line for start in starts for line in (0, LINE)}

    with cupyattn.backend("emulator"):
        out, lse = cupyattn.attention(q, k, v, return_lse=True)
        assert not brought  # cp.async has a hint instead
        cupyattn.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic)
    # Tiles of 32: all of the queries after the fourth but the last one.
    expected = set() if aligned else lines(range(128, 192), q, dout)
    if deterministic:
        expected |= lines(range(96, 192), k, v)
    if aligned:
        assert set(brought) == expected
        return
    assert set(brought) > expected
    # Two float32 a row, side by side.
    statistics = sorted(line - begin for line, begin in brought.items() if line not in expected)
    assert statistics == list(range(128 * 8, 192 * 8, LINE))


NATIVE_ARCHS = (80, *(arch for arch in native.NATIVE if arch > 80))
# Both checks of the softmax, Q in registers and in shared memory, one softmax a tile and two; tails
# of a chunk; single items; D != Dv.
NATIVE_DIMS = (
    *((40, 64), (64, 64), (72, 80), (5, 96), (128, 128), (192, 136), (256, 256)),
    *((257, 264), (320, 64), (500, 512)),
)


@pytest.mark.parametrize(
    ("dtype", "head_dims"),
    [
        *(("float16", (64, 64)), ("bfloat16", (128, 128))),
        *deep(*((dtype, dims) for dtype in native.DTYPES for dims in NATIVE_DIMS)),
    ],
    ids=str,
)
@examples(2, deep=8)
@given(data=st.data())
def test_native_forward_within_bounds(dtype: str, head_dims: Any, data: st.DataObject):
    problems = attention_problems(
        head_dims=(head_dims,), dtypes=(dtype,), options=RUN_TIME_OPTIONS, largest=LONGEST,
        **FRUGAL,
    )  # fmt: skip
    with natively(data.draw(st.sampled_from(wider([80], NATIVE_ARCHS)))):
        check(data.draw(problems), "flash", native=True)


@examples(2, deep=24)
@given(
    problem=attention_problems(
        head_dims=wider([(64, 64)], [(128, 96), (256, 40), (80, 80), (264, 384)]),
        dtypes=wider(["bfloat16"], ["float16"]),
        options=RUN_TIME_OPTIONS,
        option_sets=wider(*EITHER_HALF[0]),
        largest=LONGEST,
        **FRUGAL,
    )
)
def test_native_options_within_bounds(problem: AttentionCase):
    with natively():
        check(problem, "flash", native=True)


@pytest.mark.deep
@pytest.mark.parametrize("arch", NATIVE_ARCHS)
@pytest.mark.parametrize("head_dim", native.NATIVE[80])
@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("drawn", [("causal", True), ("dropout_p", 0.5)])
def test_every_native_configuration(dtype: str, head_dim: int, arch: int, drawn: tuple[str, Any]):
    problem = AttentionCase(1, 130, 200, 2, 1, head_dim, head_dim, dtype, options=(drawn,))
    with natively(arch):
        check(problem, "flash", native=True)


RISING_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": np.random.default_rng(1).standard_normal((40, 232)).astype(np.float16)},
    "mask": {"mask": np.random.default_rng(2).random((40, 232)) < 0.7},
    "alibi": {"alibi_slopes": np.float32([-0.25])},
    "softcap": {"softcap": 500.0},
    "dropout": {"dropout_p": 0.25, "seed": 1},
}


@pytest.mark.parametrize(
    ("dtype", "head_dim", "scale", "option"),
    [
        *(("bfloat16", 64, 0.125, option) for option in ("plain", "bias")),
        *(("float16", 64, 0.125, option) for option in ("alibi", "mask")),
        *deep(*((d, n, s, o) for d in native.DTYPES for n in (64, 128, 512)
                for s in (0.125, -0.125, 0.0) for o in RISING_OPTIONS)),
    ],
)  # fmt: skip
def test_scores_that_rise_within_a_tile(dtype: str, head_dim: int, scale: float, option: str):
    """Tiles after the first, which is masked, have scores up to 2^200 times above its maximum.

    What a check misses is infinite in P; what a clamp takes and nothing returns is a wrong weight.
    """
    case = AttentionCase(1, 40, 232, 1, 1, head_dim, head_dim, dtype)
    q, k, v = case.arrays()
    options = RISING_OPTIONS[option]
    for key, rise in ((70, 2.0), (75, 7.0), (90, 30.0), (140, 110.0), (141, 140.0)):
        k[:, key] = (np.abs(k[:, key].astype(np.float32)) * 0.1 + 0.1 * rise).astype(k.dtype)
    q = np.abs(q)
    with natively():
        out, lse = cupyattn.attention(
            *map(KERNELS.put, (q, k, v)), softmax_scale=scale, return_lse=True, **placed(options)
        )
    exact = reference.attention(q, k, v, softmax_scale=scale, **options)
    bounds = reference.attention_bound(
        q, k, v, dtype=dtype, tile_k=32, native=True, softmax_scale=scale, **options
    )
    for found, *wanted in zip(map(KERNELS.get, (out, lse)), exact, bounds, strict=True):
        assert reference.error_ratio(found, *wanted) <= 1


def placed(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


@pytest.mark.deep
@pytest.mark.parametrize("option", RISING_OPTIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_a_query_that_is_not_finite_changes_its_row_alone(dtype, head_dim, value, option):
    case = AttentionCase(1, 40, 232, 1, 1, head_dim, head_dim, dtype)
    q, k, v = case.arrays()
    options = RISING_OPTIONS[option]
    exact, _ = reference.attention(q, k, v, **options)
    bound, _ = reference.attention_bound(q, k, v, dtype=dtype, tile_k=32, native=True, **options)
    q[0, 7, 0, 3] = value
    with natively():
        out = KERNELS.get(cupyattn.attention(*map(KERNELS.put, (q, k, v)), **placed(options)))
    others = np.arange(40) != 7
    finite = option == "softcap" and not np.isnan(value)
    assert np.isnan(out[0, 7].astype(np.float32)).all() != finite
    assert reference.error_ratio(out[:, others], exact[:, others], bound[:, others]) <= 1


@pytest.mark.parametrize("dtype", ["float16", *deep("bfloat16")])
@pytest.mark.parametrize("key", ["finite", "hidden", *deep("NaN")])
def test_four_capped_scores_share_no_key_that_a_mask_hides(dtype: str, key: str):
    q, k, v = AttentionCase(1, 40, 232, 1, 1, 64, 64, dtype).arrays()
    seen = np.full((40, 232), True)
    seen[:, 100] = False
    if key != "finite":
        k[:, 100] = np.nan
    options = {"softcap": 5.0, **({"mask": seen} if key == "hidden" else {})}
    exact, _ = reference.attention(q, k, v, **options)
    bound, _ = reference.attention_bound(q, k, v, dtype=dtype, tile_k=32, native=True, **options)
    with natively():
        out = KERNELS.get(cupyattn.attention(*map(KERNELS.put, (q, k, v)), **placed(options)))
    assert np.isfinite(exact).all() == (key != "NaN")
    assert reference.error_ratio(out, exact, bound) <= 1


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float16", 64), *deep(("bfloat16", 64), ("float16", 128))]
)
@pytest.mark.parametrize("q_offset", [-2, -30, 250, *deep(-300, -50, 0, 100, 2**18 + 1)])
def test_alibi_of_keys_on_either_side_of_the_queries(dtype: str, head_dim: int, q_offset: int):
    """Tiles of keys before all rows of a warp, after them, and around them; slopes of any size."""
    q, k, v = AttentionCase(1, 70, 260, 5, 1, head_dim, head_dim, dtype).arrays()
    slopes = np.float32([0.5, -0.125, 1.0, 3.0, 2.0**-24])
    options: dict[str, Any] = {"alibi_slopes": slopes, "q_offset": q_offset}
    with natively():
        found = cupyattn.attention(*map(KERNELS.put, (q, k, v)), return_lse=True, **placed(options))
    exact = reference.attention(q, k, v, **options)
    bounds = reference.attention_bound(q, k, v, dtype=dtype, tile_k=32, native=True, **options)
    for each, *wanted in zip(map(KERNELS.get, found), exact, bounds, strict=True):
        assert reference.error_ratio(each, *wanted) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", *deep("float16")])
def test_native_split_keys(dtype: str):
    options = (("causal", True), ("sinks", "float32"))
    problem = AttentionCase(1, 70, 300, 2, 1, 64, 64, dtype, options=options)
    with natively(), split(3):
        check(problem, "flash", native=True)


@pytest.mark.deep
@examples(4, deep=12)
@given(
    problem=varlen_problems(
        head_dims=((64, 64), (128, 128), (5, 256), (264, 500)),
        dtypes=native.DTYPES,
        options=RUN_TIME_OPTIONS,
        option_sets=EITHER_HALF[0][1],
        option_views=("strided",),
        largest=LONGEST,
    )
)
def test_native_packed_sequences(problem: Any):
    with natively():
        found = problem.run()
    assert problem.ratio(*found) <= 1


@pytest.mark.deep
@pytest.mark.parametrize("head_dim", [64, 128, 256, 264])
@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_native_block_masks(dtype: str, head_dim: int, causal: bool):
    """Empty, partial and full tiles of kernels, in random order."""
    rng = np.random.default_rng(head_dim)
    tiles = rng.integers(0, 3, (5, 7))
    seen = np.repeat(np.repeat(tiles, 32, 0), 64, 1)[:150, :420]
    seen = np.where(seen == 1, rng.random(seen.shape) < 0.5, seen == 2)
    options = (("causal", True),) if causal else ()
    problem = AttentionCase(1, *seen.shape, 2, 1, head_dim, head_dim, dtype, options=options)
    q, k, v = problem.arrays()
    with natively():
        found = cupyattn.attention(
            *map(KERNELS.put, (q, k, v)),
            mask_mod=blocks_of(seen[None, None]),
            causal=causal,
            return_lse=True,
        )
    alike = {"mask": seen, "causal": causal}
    exact = reference.attention(q, k, v, **alike)
    bounds = reference.attention_bound(q, k, v, dtype=dtype, tile_k=16, native=True, **alike)
    for each, *wanted in zip(map(KERNELS.get, found), exact, bounds, strict=True):
        assert reference.error_ratio(each, *wanted) <= 1


@pytest.mark.deep
@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_native_every_option_with_rows_of_four_keys(dtype: str, head_dim: int):
    """Bias and mask are read four keys at a time: keys lie in another order in the tiles."""
    drawn = every_option(dtype, 2, 140, 264)
    for options in (drawn[:1], drawn[1:2], drawn[:-1]):
        problem = AttentionCase(1, 140, 264, 2, 1, head_dim, head_dim, dtype, options=options)
        with natively():
            check(problem, "flash", native=True)


@pytest.mark.parametrize(
    ("arch", "dtype", "tensor_cores", "entry"),
    [
        (75, "float16", True, "attention_forward"),
        (75, "bfloat16", True, "attention_forward_f32"),
        (80, "float16", True, "attention_forward_native"),
        (80, "bfloat16", True, "attention_forward_native"),
        (86, "bfloat16", True, "attention_forward_native"),
        (80, "float32", True, "attention_forward_f32"),
        (80, "bfloat16", False, "attention_forward_f32"),
    ],
)
def test_which_kernels_an_architecture_runs(arch, dtype, tensor_cores, entry):
    q, k, v = AttentionCase(1, 40, 40, 1, 1, 64, 64, dtype).arrays()
    assert launched(arch, q, k, v, tensor_cores=tensor_cores) == [entry]


def test_native_kernels_take_rotated_queries_from_a_launch_before():
    q, k, v = AttentionCase(1, 70, 70, 1, 1, 64, 64, "bfloat16").arrays()
    table = np.ones((70, 16), np.float32)
    entries = launched(80, q, k, v, rotary=(table, table))
    assert entries == ["attention_rotary", "attention_forward_native"]


def launched(arch: int, *arrays: Any, tensor_cores: bool = True, **options: Any) -> list[str]:
    """The kernels of a call on a device of that architecture."""
    recorder = LaunchRecorder(arch_of(arch), tensor_cores=tensor_cores)
    with running_on(recorder):
        cupyattn.attention(*arrays, **options)
    return [launch.specialisation.spec.entry for launch in recorder.launches]


def test_explain_names_the_path_of_the_architecture_that_is_set(monkeypatch):
    monkeypatch.setenv(ARCH_VARIABLE, "80")
    explained = cupyattn.explain(cupyattn.attention, *[((1, 40, 1, 64), "bfloat16")] * 3)
    assert "sm_80" in explained.device
    assert explained.reasons == ("bfloat16 runs on tensor cores, with cp.async and mma.m16n8k16",)
    assert [launch.kernel for launch in explained.launches] == ["attention_forward_native"]


@pytest.mark.parametrize(
    ("arch", "head_dim", "dtype"),
    [
        *((80, 64, "float16"), (90, 128, "bfloat16")),
        *deep(*((a, d, t) for a in (80, 86, 89, 90) for d in native.NATIVE[80]
                for t in native.DTYPES)),
    ],
)  # fmt: skip
def test_native_configurations_fit(arch: int, head_dim: int, dtype: str):
    kernel = native.flash(arch, dtype, head_dim, head_dim, 8)
    assert fits(arch, kernel, most_spills=32), kernel.label  # NVRTC 12.9: at most 20


@pytest.mark.deep
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_every_native_kernel_fits(arch: int):
    """With options and in other kernels too, whose most are 184 bytes."""
    kernels = list(native.catalogue(arch))
    assert [each.label for each in kernels if not fits(arch, each, most_spills=208)] == []


def fits(arch: int, kernel: Specialisation, most_spills: int) -> bool:
    """As many CTAs as the table says, and no more bytes spilled than that."""
    resources = compile_cubin(kernel, arch_of(arch)).resources
    assert resources is not None
    ctas = arch_of(arch).resident_ctas(kernel.threads, resources.registers, kernel.shared_bytes)
    return ctas >= dict(kernel.macros)["MIN_CTAS"] and resources.spill_store_bytes <= most_spills


def test_options_choose_the_native_table():
    """Plain calls, with sinks too; options; a softcap alone; and those that take more registers."""
    tables = {
        "plain": (FlashOptions(), FlashOptions(sinks="float32")),
        "with": (
            FlashOptions(bias="float16", bias_vec=4),
            FlashOptions(softcap=True, slopes="float32"),
        ),
        "softcap": (FlashOptions(softcap=True), FlashOptions(softcap=True, sinks="float32")),
        "halves": (FlashOptions(dropout=True), FlashOptions(mask=True)),
    }
    rows = {
        "plain": native.NATIVE,
        "with": native.NATIVE_WITH,
        "softcap": native.NATIVE_SOFTCAP,
        "halves": native.NATIVE_HALVES,
    }
    for arch, newest in ((80, 80), (86, 86), (89, 86), (90, 90), (103, 90), (121, 120)):
        for kind, of_kind in tables.items():
            for options in of_kind:
                assert native.flash_row(arch, 50, 64, options) is rows[kind][newest][64]
