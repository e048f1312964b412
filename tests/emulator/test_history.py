"""The tracker of races beside a model that compares every access with every earlier one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.emulator import Checks, SharedMemoryRaceError
from cupyattn.emulator.machine import history
from cupyattn.emulator.machine.lanes import Lanes
from cupyattn.emulator.machine.races import SharedMemoryTracker
from cupyattn.emulator.machine.storage import Storage

BLOCKS, THREADS, WORDS = 3, 64, 64
LANES = np.arange(BLOCKS * THREADS).reshape(BLOCKS, THREADS)


class Model:
    """All accesses by word; what a lane knows of the others, by lane."""

    def __init__(self) -> None:
        self.now = np.ones(LANES.size, int)
        self.knows = np.zeros((LANES.size, LANES.size), int)
        self.accesses: list[tuple[int, int, int, str]] = []

    def meet(self, lanes: np.ndarray) -> None:
        known = self.knows[lanes].max(0)
        known[lanes] = self.now[lanes]
        self.knows[lanes] = known
        self.now[lanes] += 1

    def races(self, kind: str, lanes: np.ndarray, words: np.ndarray) -> bool:
        for lane, word in zip(lanes, words, strict=True):
            for other, when, place, did in self.accesses:
                harmless = kind == did == "read" or kind == did == "atomic"
                apart = other == lane or place != word or other // THREADS != lane // THREADS
                if not harmless and not apart and when > self.knows[lane, other]:
                    return True
        new = zip(lanes, words, strict=True)
        self.accesses += [(lane, self.now[lane], word, kind) for lane, word in new]
        return False


def tracker(half_warps: bool) -> tuple[SharedMemoryTracker, Storage]:
    program: Any = SimpleNamespace(
        shared_granule=4, partial_warp_barriers=half_warps, name="random",
        instructions=[SimpleNamespace(location=("", 0))],
    )  # fmt: skip
    lanes = Lanes(program, {}, (BLOCKS, 1, 1), (THREADS, 1, 1), 0, BLOCKS)
    storage = Storage(4 * WORDS, (BLOCKS, 1))
    checks = Checks(uninitialized=False)
    return SharedMemoryTracker(lanes, checks, storage), storage


@pytest.mark.parametrize("half_warps", [False, True])
@given(seed=st.integers(0, 2**32), most_logged=st.sampled_from([1, 4, 512]))
def test_the_first_race_is_found(half_warps, seed, most_logged):
    rng = np.random.default_rng(seed)
    found, storage = tracker(half_warps)
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "_MOST_LOGGED", most_logged)
        for _ in range(60):
            if not step(rng, found, storage, model):
                return


def step(rng: Any, found: SharedMemoryTracker, storage: Storage, model: Model) -> bool:
    """Let one random instruction run; False if it races."""
    kind = rng.choice(["read", "read", "write", "atomic", "blocks", "all", "warps"])
    chosen = np.zeros(LANES.shape, bool)
    chosen.flat[rng.choice(LANES.size, rng.integers(1, 5), replace=False)] = True
    if kind == "all" or kind == "blocks":
        blocks = rng.random(BLOCKS) < 0.5 if kind == "blocks" else np.ones(BLOCKS, bool)
        found.history.sync_blocks(None if kind == "all" else blocks)
        for block in np.flatnonzero(blocks):
            model.meet(LANES[block])
    elif kind == "warps":
        warps = np.repeat(rng.random((BLOCKS, THREADS // 32)) < 0.5, 32, 1)
        found.clocks.sync_warps(warps, np.uint32(0xFFFFFFFF))
        for warp in LANES[warps].reshape(-1, 32):
            model.meet(warp)
    else:
        lanes = np.flatnonzero(chosen)
        words = rng.permutation(8)[: lanes.size]  # few: they meet
        index = words + lanes // THREADS * WORDS
        racing = model.races(kind, lanes, words)
        try:
            if kind == "read":
                found.read(index, 4, chosen, 0)
            elif kind == "atomic":
                found.atomic(index, 4, chosen, 0)
            else:
                values = rng.integers(1, 2**31, lanes.size).astype(np.uint32)
                found.write(index, values, chosen, 0)
                storage.views[4][index] = values
        except SharedMemoryRaceError:
            assert racing, f"{kind} of {words} by {lanes} races with nothing"
            return False
        assert not racing, f"{kind} of {words} by {lanes} races, and nobody said so"
    return True
