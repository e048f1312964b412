"""backend: each thread, task and process has its own; the environment says the default."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
from support.chosen_backend import checks, chosen, on_emulator
from support.processes import environment

from cupyattn import backend, emulator, softmax
from cupyattn.emulator import Checks
from cupyattn.functional.backend import BACKEND_VARIABLE


@pytest.fixture(autouse=True)
def _outside_of_every_block(monkeypatch):
    """Whatever the environment of the test run says."""
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    with backend("reference"):
        yield


def test_one_object_in_several_threads_at_once():
    """All are in the block together and leave it in the order in which they came."""
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
    """As where a signal's handler launches one: the thread has the turn already."""
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
    """The environment is asked once a context, outside of every block."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_the_environment_says_the_default(monkeypatch):
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


def test_a_wrong_environment_is_told(monkeypatch):
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
