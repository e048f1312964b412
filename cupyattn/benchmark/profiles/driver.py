"""What Nsight Compute is started around: every call, once, the profiler on for single launches.

``python -m cupyattn.benchmark.profiles.driver FILE [KERNEL ...]`` writes to FILE what was launched
and where. With ``--warm I N`` it makes every N-th call from the I-th on, so that all is compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cupyattn.benchmark.frame.machine import measured_on
from cupyattn.benchmark.profiles.calls import ProfiledCall, profiled_calls
from cupyattn.cli.table_rows import row_name
from cupyattn.cupy_library import load_cupy
from cupyattn.kernels.device import Device
from cupyattn.kernels.device.cuda import cuda_device
from cupyattn.kernels.registry import KERNELS
from cupyattn.kernels.spec import Specialisation
from cupyattn.ops import plan

Profiled = Callable[[], AbstractContextManager[Any]]


class FirstLaunches:
    """Has the profiler on for the first launch of each wanted kernel, within a ``with`` block.

    `launches` says of each what it was, in their order; `wanted` are those that had none yet.
    """

    def __init__(self, profiled: Profiled, wanted: Collection[str]) -> None:
        self.launches: list[dict[str, Any]] = []
        self.wanted = {*wanted}
        self._profiled = profiled
        self._start = plan.start
        self._call: str | None = None

    def __enter__(self) -> FirstLaunches:
        plan.start = self._watched
        return self

    def __exit__(self, *_: object) -> None:
        plan.start = self._start

    def watch(self, call: ProfiledCall, xp: Any) -> None:
        """Make a call, once for itself and once watched."""
        run = call.prepare(xp)
        run()
        self._call = call.name
        run()
        self._call = None

    def _watched(
        self,
        device: Device,
        specialisation: Specialisation,
        ctas: int,
        arguments: Sequence[Any],
        values: tuple[Any, ...],
    ) -> None:
        entry, start = specialisation.spec.entry, self._start
        if self._call is None or entry not in self.wanted:
            start(device, specialisation, ctas, arguments, values)
            return
        self.wanted.remove(entry)
        with self._profiled():
            start(device, specialisation, ctas, arguments, values)
        self.launches.append(
            {
                "kernel": entry,
                "row": row_name(specialisation),
                "call": self._call,
                "ctas": ctas,
                "threads": specialisation.threads,
            }
        )


def main(arguments: Sequence[str]) -> None:
    """Make the calls on the first GPU."""
    cupy = load_cupy()
    device = cuda_device(0)
    with cupy.cuda.Device(device.ordinal):
        if arguments[0] == "--warm":
            first, every = map(int, arguments[1:])
            for call in list(profiled_calls())[first::every]:
                call.prepare(cupy)()
            cupy.cuda.get_current_stream().synchronize()
            return
        file, *wanted = arguments
        launches = _launches(cupy, wanted or KERNELS)
    machine = {**measured_on(device), "multiprocessors": device.multiprocessors}
    result = {**machine, "launches": launches}
    Path(file).write_text(json.dumps(result) + "\n", encoding="utf-8")


def _launches(cupy: Any, wanted: Iterable[str]) -> list[dict[str, Any]]:
    pool = cupy.get_default_memory_pool()
    with FirstLaunches(partial(_profiled, cupy), {*wanted}) as first:
        for call in profiled_calls():
            if not first.wanted:
                break
            first.watch(call, cupy)
            pool.free_all_blocks()
    return first.launches


@contextmanager
def _profiled(cupy: Any) -> Iterator[None]:
    cupy.cuda.runtime.profilerStart()
    try:
        yield
        cupy.cuda.get_current_stream().synchronize()
    finally:
        cupy.cuda.runtime.profilerStop()


if __name__ == "__main__":
    main(sys.argv[1:])
