"""How rows are measured: who is timed, what is compared before, what is left out and why."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
from support.fake_gpu import CEILINGS, SCRATCH, harness

from cupyattn.benchmark import cases as subjects
from cupyattn.benchmark.cases import (
    BFLOAT16,
    COPY,
    FIGURES,
    FLOAT32,
    PRODUCTS,
    Case,
    NotAskedError,
    TimedImplementation,
    measured,
    products_of,
    row_of,
    rows_of,
    times_of,
)

ONES = np.ones(4, np.float32)


def calling(result):
    return lambda: [lambda: result]


def subject(*implementations, **more):
    return Case(
        {"M": 8}, [TimedImplementation("cupyattn", calling(ONES)), *implementations], **more
    )


def peer(result, name="eager", **more):
    return TimedImplementation(name, calling(result), **more)


def test_times():
    times = times_of([0.1 * n for n in range(1, 101)])
    assert times["mean_s"] == pytest.approx(5.05)
    assert times["std_s"] == pytest.approx(0.1 * np.std(np.arange(1, 101), ddof=1))
    assert (times["min_s"], times["max_s"], times["samples"]) == (0.1, 10.0, 100)
    for share in (50, 95, 99):
        expected = 0.1 * np.percentile(np.arange(1, 101), share)
        assert times[f"p{share}_s"] == pytest.approx(expected)
    assert times["calls_per_sample"] == 1
    assert times_of([2.0])["std_s"] == 0


@pytest.mark.parametrize(
    ("ceiling", "rate"), [(PRODUCTS, "tflops"), (FLOAT32, "tflops"), (COPY, "gb_per_s")]
)
def test_a_row_is_held_against_the_ceiling_that_binds(ceiling, rate):
    row = row_of({}, "a", [0.5], flops=1e12, bytes=1e9, ceiling=ceiling, ceilings=CEILINGS)
    assert (row["tflops"], row["gb_per_s"]) == (2.0, 2.0)
    assert row["of_ceiling"] == pytest.approx(row[rate] / CEILINGS[ceiling])
    assert row_of({}, "a", [0.5], bytes=1e9, ceiling=PRODUCTS, ceilings={})["of_ceiling"] is None


def test_without_tensor_cores_float16_is_held_against_float32():
    none = {PRODUCTS: None, FLOAT32: 4.0}
    row = row_of({}, "a", [0.5], flops=1e12, ceiling=products_of("float16"), ceilings=none)
    assert row["of_ceiling"] == pytest.approx(2.0 / 4.0)


@pytest.mark.parametrize(("rate", "limit"), [(None, 4.0), (8.0, 8.0)])
def test_bfloat16_is_held_against_mma_where_the_code_has_it(rate, limit):
    ceilings = {PRODUCTS: 8.0, BFLOAT16: rate, FLOAT32: 4.0}
    row = row_of({}, "a", [0.5], flops=1e12, ceiling=products_of("bfloat16"), ceilings=ceilings)
    assert row["of_ceiling"] == pytest.approx(2.0 / limit)


def test_rows_have_labels_figures_and_nothing_else():
    made = subject(peer(ONES), flops=4.0, bytes=8, ceiling=COPY, tolerance=0.1)
    first, second = rows_of(made, harness(0.5, 0.25, baselines=("eager",)))
    assert set(first) - FIGURES == {"M", "implementation"}
    assert [row["implementation"] for row in (first, second)] == ["cupyattn", "torch eager"]
    assert [row["times"]["p50_s"] for row in (first, second)] == [0.5, 0.25]
    assert first["times"]["samples"] == 3
    assert first["peak_bytes"] == SCRATCH
    assert second["tflops"] == pytest.approx(16e-12)


@pytest.mark.parametrize(("off", "agrees"), [(0.01, True), (0.1, False), (math.nan, False)])
def test_what_differs_is_not_timed(off, agrees):
    found = harness()
    rows = list(rows_of(subject(peer(ONES + np.float32(off)), tolerance=0.02), found))
    assert ("times" in rows[1]) is agrees
    if not agrees:
        assert "result 0 differs from cupyattn's by" in rows[1]["unavailable"]
    assert "times" in list(rows_of(subject(peer(ONES + np.float32(off))), found))[1]


def test_what_has_another_form_is_made_comparable():
    turned = peer(np.zeros((2, 4), np.float32), comparable=lambda result: result[0] + 1)
    assert "times" in list(rows_of(subject(turned, tolerance=0.02), harness()))[1]
    silent = peer(ONES, comparable=lambda result: None)
    assert "times" in list(rows_of(subject(silent, tolerance=0.02), harness()))[1]
    other = peer(np.ones(3, np.float32))
    row = list(rows_of(subject(other, tolerance=0.02), harness()))[1]
    assert row["unavailable"] == "ArithmeticError: result 0 has shape (3,), not (4,)"


def refusing(failure):
    def prepare():
        raise failure

    return prepare


def test_what_a_peer_cannot_do_is_a_row():
    broken = TimedImplementation("math", refusing(KeyError("no kernel\nand much more")))
    row = list(rows_of(subject(broken), harness()))[1]
    assert row == {
        "M": 8,
        "implementation": "torch math",
        "unavailable": "KeyError: 'no kernel\\nand much more'",
    }


def test_who_was_not_asked_has_refused_nothing():
    missing = harness(torch=NotAskedError("a peer of PyTorch without it; pip install torch"))
    _, row = rows_of(subject(peer(ONES)), missing)
    assert row["left_out"] and row["unavailable"].startswith("a peer of PyTorch")
    (own,) = rows_of(
        Case({}, [TimedImplementation("cupyattn", refusing(NotAskedError("for hours")))]), harness()
    )
    assert own["left_out"]
    refused = list(
        rows_of(subject(TimedImplementation("math", refusing(KeyError("none")))), harness())
    )
    assert "left_out" not in refused[1]


@pytest.mark.parametrize("failure", [NotImplementedError("no softcap"), MemoryError("64 GB")])
def test_what_a_kernel_refuses_is_a_row(failure):
    (row,) = rows_of(Case({}, [TimedImplementation("cupyattn", refusing(failure))]), harness())
    assert row["unavailable"] == f"{type(failure).__name__}: {failure}"


def test_a_fault_in_a_kernel_is_no_row():
    fault = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(rows_of(Case({}, [TimedImplementation("cupyattn", refusing(fault))]), harness()))


@pytest.mark.parametrize(
    ("seconds", "left_out"), [(4, []), (6, ["torch compile"]), (11, ["torch compile", "cupy"])]
)
def test_peers_are_left_out_when_time_is_over(seconds, left_out, monkeypatch):
    monkeypatch.setattr(subjects.time, "monotonic", lambda: 100.0 + seconds)
    late = harness(limit_s=10.0, began=100.0)
    rows = list(rows_of(subject(peer(ONES, "compile"), peer(ONES, "cupy")), late))
    assert [row["implementation"] for row in rows if "unavailable" in row] == left_out
    assert all("--limit" in row["unavailable"] for row in rows if row.get("left_out"))
    assert all(row["left_out"] for row in rows if "unavailable" in row)


def test_work_of_one_implementation():
    made = subject(peer(ONES), flops=1e12, own={"torch eager": {"flops": 2e12}})
    first, second = rows_of(made, harness(1.0, 1.0))
    assert (first["tflops"], second["tflops"]) == (1.0, 2.0)


def test_arrays_of_a_case_are_freed_before_the_next_is_prepared():
    made = []

    def one(number):
        held = []

        def prepare():
            assert all(each() is None for each in made)
            held.append(np.zeros(1))
            made.append(weakref.ref(held[0]))
            return [lambda: None]

        return Case({"M": number}, [TimedImplementation("cupyattn", prepare)])

    assert len(list(measured(map(one, range(3)), harness()))) == len(made) == 3
