"""The kernels for few rows: results within bounds, memory accesses and launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, SENTINEL, choose
from support.linear_problems import forward_steps
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Report
from cupyattn.ops.linear import kernels_skinny as skinny
from cupyattn.ops.linear.kernels_skinny import configurations
from cupyattn.runtime.arch import TURING

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

ROWS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 64)
GATED = ("swiglu", "geglu")
# One activation for each kernel: every other one would be a kernel to compile.
ACTIVATIONS = {1: "gelu", 8: "geglu", 16: "silu", 32: None, 64: "gelu_tanh"}


class Case(NamedTuple):
    """Arrays and activation of a call."""

    x: np.ndarray
    w: np.ndarray
    b: np.ndarray | None
    residual: np.ndarray | None
    activation: str | None

    def run(self, **options: Any) -> Any:
        """Call the public function on the device."""
        x, w, b, residual = (None if a is None else KERNELS.put(a) for a in self[:4])
        options = {"activation": self.activation, "residual": residual, **options}
        return cupyattn.linear(x, w, b, **options)

    def require_right(self) -> None:
        """Require out and preactivation within their bounds."""
        out, preactivation = self.run(return_preactivation=True)
        exact, z = reference.linear(*self[:4], activation=self.activation)
        bounds = reference.linear_bound(*self[:4], activation=self.activation, dtype="float16")
        assert reference.error_ratio(KERNELS.get(out), exact, bounds[0]) <= 1
        if self.activation is not None:
            assert reference.error_ratio(KERNELS.get(preactivation), z, bounds[1]) <= 1


def normal(rng: np.random.Generator, *shape: int, start: int = 0, padding: int = 0) -> np.ndarray:
    """A matrix within a wider one of NaN: rows `padding` items apart, from item `start` on."""
    rows, columns = shape
    memory = np.full((rows, start + columns + padding), np.nan, np.float16)
    view = memory[:, start : start + columns]
    view[...] = rng.standard_normal(shape, np.float32)
    return view


def case(
    rows: int,
    inner: int,
    outer: int,
    *,
    along_k: bool,
    activation: str | None,
    biased: bool = True,
    added: bool = True,
    start: int = 0,
    padding: int = 0,
    seed: int = 0,
) -> Case:
    """x, w and residual lie within wider arrays."""
    rng = np.random.default_rng(seed)
    columns = outer * (2 if activation in GATED else 1)
    apart = {"start": start, "padding": padding}
    w = normal(rng, columns, inner, **apart).T if along_k else normal(rng, inner, columns, **apart)
    return Case(
        normal(rng, rows, inner, **apart),
        w,
        rng.standard_normal(columns).astype(np.float16) if biased else None,
        normal(rng, rows, outer, **apart) if added else None,
        activation,
    )


def steps_of(problem: Case) -> tuple[str, ...]:
    """Return the kernels of a call."""
    given = (problem.x, problem.w, problem.b, problem.activation)
    steps = forward_steps(*given, KERNELS.device.traits)
    return tuple(step.specialisation.spec.entry for step in steps)


@pytest.mark.parametrize("along_k", [True, False])
@pytest.mark.parametrize("rows", mostly_deep(ROWS, (1, 5, 8, 9, 16, 17, 64)))
def test_every_number_of_rows(rows, along_k):
    """K and N have tails, and all options are on."""
    limit = next(limit for limit in ACTIVATIONS if rows <= limit)
    problem = case(rows, 328, 72, along_k=along_k, activation=ACTIVATIONS[limit])
    kernels = ("linear_thin_row",) if rows == 1 else ("linear_thin",)
    assert steps_of(problem) == kernels
    problem.require_right()


@pytest.mark.parametrize("along_k", [True, *deep(False)])
@pytest.mark.parametrize(("rows", "activation"), [(20, "swiglu"), *deep((3, "geglu"), (40, None))])
def test_wide_results_use_groups_of_warps(rows, activation, along_k):
    """Results have more columns than the limit of the narrow configurations."""
    case(rows, 40, 4100, along_k=along_k, activation=activation).require_right()


ADMISSIBLE = [
    (rows, along_k, name)
    for along_k in (True, False)
    for rows in ACTIVATIONS
    for name in configurations(75, along_k=along_k, rows=rows)[1]
]
CHOSEN = [(1, True, "None"), (16, False, "None")]


@pytest.mark.parametrize(
    ("rows", "along_k", "name"),
    [*CHOSEN, *deep(*(each for each in ADMISSIBLE if each not in CHOSEN))],
)
def test_every_admissible_configuration(monkeypatch, rows, along_k, name):
    """`cupyattn tune` may choose any of them for any number of columns."""
    problem = case(rows, 328, 200, along_k=along_k, activation=None)
    layout = "nk" if along_k else "kn"
    choose(monkeypatch, f"linear_thin {rows} 200 328 plain {layout} 8", name)
    (step, *_) = forward_steps(problem.x, problem.w, problem.b, None, KERNELS.device.traits)
    macros, config = (
        dict(step.specialisation.macros),
        configurations(75, along_k=along_k, rows=rows)[1][name],
    )
    assert (macros["GROUPS"], macros["K_WARPS"]) == (config.groups, config.k_warps)
    problem.require_right()


SIZES = (1, 2, 7, 8, 15, 31, 32, 33, 40, 127, 128, 257, 264)


@examples(6)
@given(
    rows=st.sampled_from(wider((1, 7), ROWS)),
    inner=st.sampled_from((0, *SIZES)),
    outer=st.sampled_from(SIZES),
    along_k=st.booleans(),
    apart=st.sampled_from([(0, 0), (8, 16), (0, 8), (1, 2), (3, 0)]),
    biased=st.booleans(),
    added=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_sizes_and_strides(rows, inner, outer, along_k, apart, biased, added, seed):
    """Vector and scalar loads; what lies around the views is NaN."""
    options = {"biased": biased, "added": added, "seed": seed}
    options |= dict(zip(("start", "padding"), apart, strict=True))
    case(rows, inner, outer, along_k=along_k, activation=None, **options).require_right()


@pytest.mark.parametrize(
    ("rows", "along_k", "activation"),
    [(7, False, "relu"), *deep((3, True, None), (1, True, "swiglu"), (64, False, "silu"))],
)
def test_long_k_is_split_and_repeats_its_bits(rows, along_k, activation):
    """There are two multiprocessors without a GPU: few columns leave one of them idle.

    7 x 24 results are more than a CTA adds, 3 x 24 fewer.
    """
    inner, outer = (10_248, 24) if rows > 1 else (20_600, 2)
    problem = case(rows, inner, outer, along_k=along_k, activation=activation)
    assert steps_of(problem)[1:] == ("linear_thin_merge",)
    problem.require_right()
    first, second = (KERNELS.get(problem.run()) for _ in range(2))
    assert_array_equal(first, second)


@pytest.mark.parametrize("along_k", [False, *deep(True)])
def test_results_are_written_through_views(along_k):
    problem = case(7, 40, 33, along_k=along_k, activation="geglu")
    rooms = [KERNELS.put(np.full((7, width), SENTINEL, np.float16)) for width in (50, 80)]
    out = rooms[0][:, 8:41], rooms[1][:, 1:67]
    returned = problem.run(return_preactivation=True, out=out)
    assert all(found is given for found, given in zip(returned, out, strict=True))
    exact = reference.linear(*problem[:4], activation="geglu")
    for found, expected in zip(out, exact, strict=True):
        np.testing.assert_allclose(KERNELS.get(found), expected, rtol=2e-3, atol=0.05)
        found[...] = SENTINEL
    for room in rooms:
        assert (KERNELS.get(room) == SENTINEL).all(), "written outside the view"


@pytest.mark.parametrize(("rows", "along_k"), [(1, True), (7, False), *deep((1, False), (7, True))])
def test_non_finite_items_affect_only_their_row_and_column(rows, along_k):
    problem = case(rows, 264, 40, along_k=along_k, activation=None)
    problem.w[200, 33] = np.nan
    problem.w[100, 34] = np.inf
    problem.x[-1, 7] = np.nan
    out = KERNELS.get(problem.run())
    assert np.isnan(out[-1]).all()
    assert np.isnan(out[:, 33]).all()
    rest = out[:-1]
    assert not np.isfinite(rest[:, 34]).any()
    assert np.isfinite(np.delete(rest, (33, 34), axis=1)).all()


def test_broadcast_row_gives_equal_results():
    """Rows of a broadcast x have the stride 0."""
    problem = case(1, 72, 40, along_k=True, activation=None, added=False)
    repeated = problem._replace(x=np.broadcast_to(problem.x, (6, 72)))
    repeated.require_right()
    out = KERNELS.get(repeated.run())
    assert_array_equal(out, np.broadcast_to(out[:1], out.shape))


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("rows", "along_k", "activation"),
    [
        (1, True, "gelu"),
        (1, False, "gelu"),
        (8, True, "geglu"),
        (8, False, "geglu"),
        (64, True, "gelu_tanh"),
        (64, False, "gelu_tanh"),
        *deep(
            (1, True, "swiglu"),
            (1, False, "swiglu"),
            (16, True, None),
            (16, False, None),
            (32, True, "swiglu"),
            (64, False, "swiglu"),
        ),
    ],
)
def test_accesses_use_whole_sectors_without_bank_conflicts(rows, along_k, activation):
    problem = case(rows, 320, 256, along_k=along_k, activation=activation)
    x, w, b, residual = (array.copy(order="K") for array in problem[:4])
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(x, w, b, residual=residual, activation=activation)
    assert report.bank_conflict_ways == 1.0
    assert report.sector_efficiency >= 0.98
    loads = {a.instruction.opcode for a in report.accesses if "no_allocate" in a.instruction.opcode}
    assert len(loads) == 1
    items = 8 if along_k or rows == 1 else 4
    assert loads.pop().endswith({8: "v4.u32", 4: "v2.u32"}[items])


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("rows", "along_k", "activation"),
    [(20, True, "swiglu"), *deep((3, False, None), (20, False, "swiglu"), (3, False, "swiglu"))],
)
def test_accesses_of_wide_weights_use_whole_sectors(rows, along_k, activation):
    problem = case(rows, 64, 4160, along_k=along_k, activation=activation)
    x, w, b = (array.copy(order="K") for array in problem[:3])
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(x, w, b, activation=activation)
    assert report.bank_conflict_ways == 1.0
    assert report.sector_efficiency >= 0.98


def launch(**problem: Any) -> skinny.SkinnyLaunch:
    """Choose for a T4 and vector loads."""
    usual = {"along_k": True, "rows": 8, "outer": 10_000, "gated": False}
    return skinny.skinny_launch(75, 40, 8, **{**usual, **problem})


CONFIGURATIONS = [
    (along_k, limit, columns, config)
    for along_k, by_rows in skinny.CONFIGURATIONS[75].items()
    for limit, by_columns in by_rows.items()
    for columns, config in by_columns.items()
]


def test_tables_are_sorted_and_cover_every_size():
    for by_rows in skinny.CONFIGURATIONS[75].values():
        assert list(by_rows) == sorted(by_rows)
        assert max(by_rows) == skinny.MAX_ROWS
        for by_columns in by_rows.values():
            *limits, last = by_columns
            assert limits == sorted(limits)
            assert last is None


@pytest.mark.parametrize(("along_k", "limit", "columns", "config"), CONFIGURATIONS)
def test_configuration_fits_turing(along_k, limit, columns, config):
    """Its CTAs per SM fit in shared memory and threads."""
    assert config.reason.strip()
    assert config.threads * config.ctas_per_sm <= TURING.threads_per_sm
    for gated in (False, True):
        sizes = {"rows": limit, "inner": 4096, "outer": columns or 2**20}
        found = launch(along_k=along_k, gated=gated, **sizes)
        assert found.kernel.config is config
        shared = skinny.skinny(found.kernel, ("silu", gated, "float16")).static_shared_bytes
        assert shared <= skinny.SHARED_BYTES
        assert shared * config.ctas_per_sm <= TURING.shared_bytes_per_sm


@pytest.mark.parametrize(
    ("inner", "steps"), [(2560, 5), (4096, 4), (2048, 4), (10240, 5), (8192, 4), (1, 4)]
)
def test_burst_covers_k_with_the_fewest_zeros(inner, steps):
    """A burst has 4 or 5 steps of 32 for eight warps, the longer one if both waste as much."""
    assert launch(inner=inner).kernel.steps == steps


@pytest.mark.parametrize(
    ("outer", "inner", "splits"),
    [
        (16384, 4096, 1),
        (2560, 10240, 1),
        (2048, 2**20, 1),  # 128 CTAs fill a T4
        (256, 2048, 1),  # two rounds of the warps: nothing to save
        (256, 8192, 4),
        (16, 2**20, 80),
    ],
)
def test_k_is_split_for_few_ctas_and_long_k(outer, inner, splits):
    assert launch(inner=inner, outer=outer).splits == splits


def test_a_gated_product_has_a_cta_for_half_as_many_results():
    for along_k in (True, False):
        for rows in (1, 8, 64):
            plain, gated = (
                launch(along_k=along_k, rows=rows, inner=64, outer=1000, gated=gated)
                for gated in (False, True)
            )
            assert plain.kernel.config is gated.kernel.config
            assert gated.tiles in (2 * plain.tiles, 2 * plain.tiles - 1)
