"""Every row that a dense call may take in place of its usual one computes the same."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import KERNELS, choose
from support.search import deep

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.kernels.tensor_core.forward import (
    FLASH,
    TALL,
    admissible_rows,
    flash_longest_tile,
    flash_row,
)
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.backend import running_on
from cupyattn.runtime.device.recorder import LaunchRecorder

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


def others(head_dim: int) -> list[tuple[int, str]]:
    return [(head_dim, name) for name in list(admissible_rows(75, head_dim, head_dim))[1:]]


EVERY = [pair for head_dim in FLASH[75] for pair in others(head_dim)]
PLAIN = [(40, TALL)]


def test_the_first_row_is_the_usual_one_and_no_tile_is_longer():
    for head_dim in (1, 33, 64, 72, 96, 128, 200, 256, 257):
        rows = admissible_rows(75, head_dim, head_dim)
        assert next(iter(rows.values())) is flash_row(75, head_dim, head_dim)
        assert all(r.tile_k <= flash_longest_tile(75, head_dim, head_dim) for r in rows.values())
    assert set(PLAIN) <= set(EVERY)


@pytest.mark.parametrize(
    ("head_dim", "name"), [*PLAIN, *deep(*(pair for pair in EVERY if pair not in PLAIN))]
)
@pytest.mark.parametrize("causal", [True, *deep(False)])
def test_every_admissible_row_is_within_bounds(monkeypatch, head_dim, name, causal):
    rng = np.random.default_rng(head_dim)
    q, k, v = (
        rng.standard_normal((1, length, heads, head_dim)).astype(np.float16)
        for length, heads in ((150, 2), (203, 1), (203, 1))
    )
    row = admissible_rows(75, head_dim, head_dim)[name]
    choose(monkeypatch, f"attention_forward {head_dim} {head_dim}", name)
    found = cupyattn.attention(*map(KERNELS.put, (q, k, v)), causal=causal, return_lse=True)
    exact = reference.attention(q, k, v, causal=causal)
    bounds = reference.attention_bound(
        q, k, v, dtype="float16", tile_k=row.tile_k, float32_weights=False, causal=causal
    )
    for each, right, bound in zip(map(KERNELS.get, found), exact, bounds, strict=True):
        assert 0 < reference.error_ratio(each, right, bound) <= 1


def test_the_row_is_taken(monkeypatch):
    """Its tiles add the keys up in another order, which bits tell."""
    entry = "attention_forward_native" if KERNELS.device.traits.native else "attention_forward"
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 128, 2, 64)).astype(np.float16) for _ in range(3))

    def bits():
        _, lse = cupyattn.attention(*map(KERNELS.put, (q, k, v)), return_lse=True)
        return KERNELS.get(lse).tobytes()

    usual = bits()
    choose(monkeypatch, f"{entry} 64 64", "256")
    assert bits() != usual


@pytest.mark.parametrize(
    ("length", "head_dim", "options", "tall"),
    [
        (4096, 40, {}, True),
        (4096, 33, {"causal": True}, False),  # rows that are no whole vectors
        (4096, 32, {}, False),
        (4096, 48, {}, False),
        (192, 40, {"causal": True}, True),
        (128, 40, {}, False),
        (300, 40, {}, True),
        (500, 40, {}, False),
        (4096, 40, {"softcap": 30.0}, False),
        (4096, 40, {"mask": np.ones((1, 1, 4096, 4096), bool)}, False),
        (4096, 40, {"dropout_p": 0.1, "seed": 1}, False),
    ],
)
def test_tall_tiles_are_of_long_sequences(length, head_dim, options, tall):
    """Where few of their rows do not exist, and no option takes their registers."""
    q, k, v = np.empty((3, 1, length, 64, head_dim), np.float16)
    recorder = LaunchRecorder(TURING)
    with running_on(recorder):
        cupyattn.attention(q, k, v, **options)
    (launch,) = recorder.launches
    assert (dict(launch.specialisation.macros)["M_TILES"] == 3) == tall
