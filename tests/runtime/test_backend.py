"""backend: what a block selects, how blocks nest, and choices of threads, tasks and processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import devices
from support.processes import environment
from support.search import deep

import cupyattn
from cupyattn import backend, emulator, softmax
from cupyattn.emulator import Checks, Report
from cupyattn.emulator.ptx.architecture import SHARED_BYTES
from cupyattn.runtime.arch import ARCH_VARIABLE, TURING, arch_of
from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.backend import BACKEND_VARIABLE, device_of, running_on
from cupyattn.runtime.device import Device
from cupyattn.runtime.device import emulated as emulated_device
from cupyattn.runtime.device.emulated import EmulatedDevice
from cupyattn.runtime.device.recorder import LaunchRecorder
from cupyattn.runtime.records import record_of
from cupyattn.runtime.value_checks import checks_values

NUMPY = adopt(record_of("x")(np.zeros((2, 3), np.float32)))


def chosen() -> Device | None:
    return device_of(NUMPY)


def on_emulator() -> bool:
    return isinstance(chosen(), EmulatedDevice)


def checks() -> Checks:
    device = chosen()
    assert isinstance(device, EmulatedDevice)
    return device.checks


def report() -> Report | None:
    device = chosen()
    assert isinstance(device, EmulatedDevice)
    return device.report


X = np.random.default_rng(0).standard_normal((2, 3), dtype=np.float32)
CUPY = replace(NUMPY, device_id=0)


@pytest.fixture(autouse=True)
def _outside_of_every_block(monkeypatch):
    """Ignore the environment variable of the test run."""
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    with backend("reference"):
        yield


@pytest.mark.nvrtc
@pytest.mark.parametrize("number", [75, 80, *deep(86, 89, 90)])
def test_the_emulator_has_the_architecture_that_the_environment_names(number, monkeypatch):
    """Each block reads it; kernels are compiled for it, and meet its limit of shared memory."""
    targets = []
    load = emulated_device.emulator.load
    monkeypatch.setattr(emulated_device.emulator, "load", lambda ptx, *texts, **options:
                        targets.append(ptx) or load(ptx, *texts, **options))  # fmt: skip
    emulated_device._module.cache_clear()
    monkeypatch.setenv(ARCH_VARIABLE, str(number))
    with backend("emulator"):
        device = chosen()
        found = softmax(X)
    assert (device.arch, device.traits.arch) == (arch_of(number), number)
    assert f".target sm_{number}" in targets[-1]
    assert SHARED_BYTES[number] == device.arch.shared_bytes_per_cta
    np.testing.assert_allclose(found, softmax(X), rtol=1e-6)
    monkeypatch.delenv(ARCH_VARIABLE)
    with backend("emulator"):
        assert chosen().arch is TURING
        softmax(X)
    assert ".target sm_75" in targets[-1]
    with devices.emulated(number, checks=False), backend("emulator"):  # which may be nested
        assert chosen().arch.number == number
        np.testing.assert_array_equal(softmax(X), found)
    with backend("emulator"):
        assert chosen().arch is TURING


def test_names():
    for name, emulated in (("reference", False), ("emulator", True)):
        for block in (backend(name), backend(name=name)):
            with block as bound:
                assert bound is None
                assert on_emulator() == emulated
            assert chosen() is None


@pytest.mark.parametrize("name", ["nonsense", "", "Emulator", 3, ["emulator"], np.zeros(2), b"emu"])
def test_a_name_is_checked_at_once(name):
    with pytest.raises(ValueError, match=r"^backend is .*; allowed are 'reference', 'emulator'; "):
        backend(name)
    assert chosen() is None


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"checks": 1}, TypeError, "checks has type int; it must be True, False or an emulat"),
        ({"checks": "all"}, TypeError, "checks has type str; "),
        ({"checks": Checks}, TypeError, "checks has type type; "),
        ({"report": True}, TypeError, "report has type bool; it must be an emulator.Report; "),
        ({"report": Report}, TypeError, "report has type type; "),
    ],
)
def test_options_are_checked_at_once(given, kind, message):
    for name in (None, "reference", "emulator"):
        with pytest.raises(kind, match=f"^{message}"):
            backend(name, **given)


@pytest.mark.parametrize(
    "given", [{"checks": Checks.fast()}, {"report": Report()}], ids=["checks", "report"]
)
def test_emulator_options_without_the_emulator_are_refused(given):
    (option,) = given
    message = rf"^{option} with backend 'reference'; .* the emulator's; leave them out"
    with pytest.raises(ValueError, match=message):
        backend("reference", **given)
    block = backend(**given)  # what holds where it is entered is not known yet
    with pytest.raises(ValueError, match=message), block:
        pytest.fail("entered")
    assert chosen() is None
    with backend("emulator"), block:
        assert on_emulator()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, Checks.all()), (True, Checks.all()), (False, Checks.none()),
        (np.True_, Checks.all()), (np.False_, Checks.none()), (Checks.fast(), Checks.fast()),
        (Checks(races=False), Checks(races=False)), (Checks.none(), Checks.none()),
    ],
    ids=str,
)  # fmt: skip
def test_checks_of_the_emulator(given, wanted):
    with backend("emulator", checks=given):
        assert checks() == wanted
    with backend("emulator"):
        with backend(checks=given):
            assert checks() == wanted
        assert checks() == Checks.all()


@pytest.mark.parametrize("given", [False, True])
def test_bool_checks_are_allowed_on_the_reference(given):
    with backend("reference", checks=given):
        assert chosen() is None
        np.testing.assert_array_equal(cupyattn.softmax(X), cupyattn.softmax(X))


def test_values_on_a_gpu_are_checked_only_on_request():
    """On a GPU the check waits; for NumPy arrays it is always made."""
    assert not checks_values(CUPY)
    for given, wanted in ((None, False), (False, False), (True, True)):
        for block in (backend(checks=given), backend("reference", checks=given)):
            with block:
                assert checks_values(CUPY) is wanted
                assert checks_values(NUMPY) is True
        with backend("emulator", checks=given):
            assert checks_values(CUPY) is wanted
            assert checks_values(NUMPY) is True
    with backend("emulator", checks=Checks.all()):
        assert not checks_values(CUPY), "which faults of the emulator, says nothing of a GPU"
    assert not checks_values(CUPY)


def test_without_a_name_the_backend_stays():
    mine = Report()
    with backend("emulator", checks=Checks.fast(), report=mine):
        with backend():
            assert (checks(), report()) == (Checks.fast(), mine)
        with backend(checks=False):
            assert (checks(), report()) == (Checks.none(), mine)
            other = Report()
            with backend(report=other):
                assert (checks(), report()) == (Checks.none(), other)
            assert report() is mine
        assert (checks(), report()) == (Checks.fast(), mine)
    with backend(checks=True):
        assert chosen() is None
        with backend():
            assert chosen() is None and checks_values(CUPY)


def test_name_resets_checks_and_report():
    with backend("emulator", checks=True, report=Report()):
        with backend("emulator"):
            assert (checks(), report()) == (Checks.all(), None)
            assert not checks_values(CUPY)
        assert report() is not None and checks_values(CUPY)


def test_blocks_nest():
    with backend("emulator", checks=False):
        with backend("reference"):
            assert chosen() is None
            with backend("emulator"):
                assert checks() == Checks.all()
            assert chosen() is None
        assert checks() == Checks.none()
    assert chosen() is None


def test_one_object_is_entered_again_and_again():
    block = backend("emulator", checks=False)
    for _ in range(3):
        with block:
            assert checks() == Checks.none()
        assert chosen() is None


def test_one_object_is_entered_inside_of_itself():
    block, inner = backend("emulator"), backend(checks=False)
    with block:
        with block, inner, inner:
            assert checks() == Checks.none()
            with block:
                assert checks() == Checks.all()
            with backend("reference"), block:
                assert on_emulator()
            assert checks() == Checks.none()
        assert checks() == Checks.all()
    assert chosen() is None


def test_an_exception_leaves_the_block():
    block = backend("emulator")
    for _ in range(2):
        with pytest.raises(KeyError), block, backend(checks=False):
            raise KeyError
        assert chosen() is None
    with block:
        with pytest.raises(ValueError, match="x has no axes"), backend(checks=False):
            cupyattn.softmax(np.zeros((), np.float32))
        assert checks() == Checks.all()


def test_as_a_decorator():
    @backend("emulator", checks=False)
    def inside(depth: int, *, fail: bool = False) -> Checks:
        """Said."""
        assert not fail
        return inside(depth - 1) if depth else checks()

    assert inside.__name__ == "inside" and inside.__doc__ == "Said."
    assert inside(0) == Checks.none()
    assert inside(3) == Checks.none()
    with pytest.raises(AssertionError):
        inside(0, fail=True)
    assert chosen() is None


def test_decorator_refuses_generators_and_coroutines():
    async def coroutine() -> None: ...

    def generator():
        yield

    async def asynchronous_generator():
        yield

    for function in (coroutine, generator, asynchronous_generator):
        with pytest.raises(TypeError, match=r"which runs after it has returned; .*; write 'with b"):
            backend("emulator")(function)


@pytest.mark.nvrtc
def test_kernels_run_without_checks_too():
    """The report of the outer block still counts them."""
    mine = Report()
    with backend("emulator", report=mine):
        checked = cupyattn.softmax(X)
        assert mine.instruction_mix
        before = dict(mine.instruction_mix)
        with backend(checks=False):
            np.testing.assert_array_equal(cupyattn.softmax(X), checked)
        assert mine.instruction_mix != before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["seqused_k", "q_offset"])
def test_value_checks_on_a_gpu_raise(name):
    import cupy

    q, k, v = cupy.zeros((3, 1, 4, 2, 8), np.float16)
    wrong = {name: cupy.array([2**61])}
    cupyattn.attention(q, k, v, **wrong)
    with backend(checks=True), pytest.raises(ValueError, match=rf"{name} has values from 2305"):
        cupyattn.attention(q, k, v, **wrong)


def test_arrays_run_on_a_device_that_is_given():
    """The device is used until the end of the block, even after an exception."""
    recorder = LaunchRecorder(TURING)
    x = np.ones((2, 8), np.float32)
    with suppress(ZeroDivisionError), running_on(recorder):
        cupyattn.softmax(x)
        assert len(recorder.launches) == 1
        raise ZeroDivisionError
    cupyattn.softmax(x)
    assert len(recorder.launches) == 1


def test_one_object_in_several_threads_at_once():
    """All threads are in the block at once and leave it in the order in which they entered."""
    block, together = backend("emulator", checks=False), threading.Barrier(4, timeout=60)
    order = [threading.Event() for _ in range(5)]
    order[0].set()

    def work(place: int) -> bool:
        before = chosen()
        with block:
            together.wait()
            assert checks() == Checks.none()
            with backend(checks=True), block:
                together.wait()
                assert checks() == Checks.none()
            order[place].wait(60)
        order[place + 1].set()
        return before is None and chosen() is None

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert chosen() is None


def test_other_threads_keep_theirs():
    with backend("emulator"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(chosen).result() is None
        assert pool.submit(copy_context().run, on_emulator).result()


@pytest.mark.nvrtc
def test_kernels_of_several_threads_run_one_after_the_other(monkeypatch):
    launch, together, most = emulator.launch, [], []

    def noted(*arguments, **options):
        together.append(threading.get_ident())
        most.append(len(together))
        time.sleep(0.01)
        launch(*arguments, **options)
        together.pop()

    def work(rows: int) -> bool:
        with backend("emulator"):
            return np.allclose(softmax(np.zeros((rows, 40), np.float32)), 1 / 40)

    monkeypatch.setattr(emulator, "launch", noted)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 9)))
    assert most == [1] * 8


@pytest.mark.nvrtc
def test_a_kernel_may_run_within_the_launch_of_another(monkeypatch):
    """A signal handler may launch a kernel while its thread already holds the lock."""
    launch, results = emulator.launch, []

    def nested(*arguments, **options):
        monkeypatch.setattr(emulator, "launch", launch)
        results.append(softmax(np.zeros((2, 40), np.float32)))
        launch(*arguments, **options)

    monkeypatch.setattr(emulator, "launch", nested)
    with backend("emulator"), ThreadPoolExecutor(1) as pool:
        outer = pool.submit(copy_context().run, softmax, np.zeros((3, 40), np.float32))
        results.append(outer.result(60))
    assert [x.shape for x in results] == [(2, 40), (3, 40)]
    assert all(np.allclose(x, 1 / 40) for x in results)


def test_tasks_keep_theirs():
    block = backend("emulator")

    async def inside(seconds: float) -> None:
        assert chosen() is None
        with block:
            await asyncio.sleep(seconds)
            assert checks() == Checks.all()
            with backend(checks=False):
                await asyncio.sleep(seconds)
                assert checks() == Checks.none()
                await asyncio.create_task(child())
            assert checks() == Checks.all()
        assert chosen() is None

    async def child() -> None:
        """A task that is made in a block is in it; what it does there is its own."""
        assert checks() == Checks.none()
        with backend("reference"):
            await asyncio.sleep(0)
            assert chosen() is None

    async def outside() -> None:
        for _ in range(20):
            assert chosen() is None
            await asyncio.sleep(0.001)

    async def main() -> None:
        await asyncio.gather(inside(0.01), inside(0.002), outside(), inside(0.005))

    asyncio.run(main())
    assert chosen() is None


def in_new_context(function: Callable[[], Any]) -> Any:
    """The environment variable is read once in each context, outside of every block."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_environment_variable_sets_the_default(monkeypatch):
    for name, wanted in (("emulator", True), ("reference", False), ("", False)):
        monkeypatch.setenv(BACKEND_VARIABLE, name)
        assert in_new_context(on_emulator) == wanted

    def inside() -> bool:
        monkeypatch.setenv(BACKEND_VARIABLE, "emulator")
        with backend("reference"):
            assert chosen() is None
        with backend(checks=False):
            assert checks() == Checks.none()
        return checks() == Checks.all()

    assert in_new_context(inside)


def test_wrong_environment_variable_is_refused(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "nonsense")
    for call in (chosen, lambda: backend(checks=True).__enter__()):
        with pytest.raises(ValueError, match=rf"^{BACKEND_VARIABLE} is 'nonsense'; allowed are"):
            in_new_context(call)

    def named() -> bool:
        with backend("emulator"):
            return on_emulator()

    assert in_new_context(named)


def test_the_emulator_is_imported_where_it_is_chosen():
    script = (
        "import sys, cupyattn\n"
        "def loaded(): return 'cupyattn.emulator.launch' in sys.modules\n"
        "cupyattn.backend('reference'), cupyattn.backend(checks=True), cupyattn.backend()\n"
        "with cupyattn.backend(checks=True): assert not loaded()\n"
        "with cupyattn.backend('emulator'): assert loaded()\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=300)
