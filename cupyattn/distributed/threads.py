"""Several ranks in one process, a thread each: for notebooks with several GPUs, and for tests."""

from __future__ import annotations

import contextvars
import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from cupyattn.distributed.communicators import Communicator
from cupyattn.distributed.failures import PATIENCE, SharedFailures, seconds_of
from cupyattn.distributed.group import TIMEOUT, Group
from cupyattn.distributed.mailbox import PostOffice, ThreadCommunicator
from cupyattn.distributed.nccl import nccl_is_there, of_devices
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown

TRANSPORTS = ("nccl", "peer")
_GRACE = 5.0  # seconds that ranks have to end once one has failed
_SECONDS_BETWEEN_LOOKS = 0.02

_Result = TypeVar("_Result")


def run(
    function: Callable[[Group], _Result],
    /,
    ranks: int | None = None,
    *,
    devices: Sequence[int] | None = None,
    transport: str | None = None,
    timeout: float = TIMEOUT,
) -> list[_Result]:
    """Call a function on several ranks at once, each a thread of this process.

    Parameters
    ----------
    function : callable
        Called with the `Group` of its rank.
    ranks : int, optional
        How many, without devices: their arrays are NumPy's, or CuPy's of any GPU.
    devices : sequence of int, optional
        CUDA ordinals, one a rank, of which none comes twice. A rank's device is the current one of
        its thread.
    transport : {"nccl", "peer"}, optional
        What carries bytes between devices: NCCL, or copies from GPU to GPU. By default NCCL where
        it is installed.
    timeout : float
        Seconds that a rank waits for another, and that all wait for the next to return once one
        has: do work that only one rank has after the call of `run`.

    Returns
    -------
    list
        What the function returned on each rank.

    Raises
    ------
    RankFailedError
        If the function raised on a rank, which it names: its error is the cause. The other ranks
        end at what they do next with the group. Likewise for a rank that does not come in time, or
        has returned while another waits for it.
    TypeError
        For ranks that are no integer, or devices that are no sequence of them.
    ValueError
        For neither or both of ranks and devices, a device twice or one that is not there, a
        transport that is none, or a timeout that is no number above 0.

    Notes
    -----
    Threads see the context variables of the caller: `cupyattn.backend` holds in them.

    Examples
    --------
    >>> import numpy as np
    >>> run(lambda group: float(sum(group.all_gather(np.array(group.rank)))), 4)
    [6.0, 6.0, 6.0, 6.0]
    """
    timeout = seconds_of(timeout)
    failures, ends = _ends(ranks, devices, transport, timeout)
    groups = [Group(end, timeout=timeout) for end in ends]
    results: dict[int, _Result] = {}
    causes: dict[int, BaseException] = {}

    def act(group: Group) -> None:
        try:
            with group.on_device(group.device):
                results[group.rank] = function(group)
                if group.device is not None:
                    load_cupy().cuda.get_current_stream().synchronize()
        except BaseException as raised:  # KeyboardInterrupt too: it is the caller's to see
            causes[group.rank] = raised
            group.fail(raised)
        failures.leave(group.rank)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(act, group),
            name=f"cupyattn-rank-{group.rank}",
            daemon=True,
        )
        for group in groups
    ]
    for thread in threads:
        thread.start()
    try:
        _join(threads, failures, timeout)
        failed: BaseException | None = failures.first()
    except BaseException as raised:
        failed = raised
        raise
    finally:
        for group in groups:
            if failed is not None:
                group.fail(failed)  # who failed first stays; this ends what waits on GPUs
        _close(groups)
    failure = failures.first()
    if failure is not None:
        raise failure from causes.get(failure.rank)
    return [results[rank] for rank in range(len(groups))]


def _close(groups: list[Group]) -> None:
    """Close all at once: the ends of a communicator of NCCL wait for one another."""
    threads = [threading.Thread(target=group.close, daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_GRACE)


def _join(threads: list[threading.Thread], failures: SharedFailures, timeout: float) -> None:
    """Wait for all threads: for a while once a rank has failed, in time once one has returned."""
    before, since = (len(threads), False), time.monotonic()
    while living := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        failed = failures.first() is not None
        if (len(living), failed) != before:
            before, since = (len(living), failed), time.monotonic()
        waited = time.monotonic() - since
        if failed:
            if waited > _GRACE:
                return
        elif len(living) < len(threads) and waited > timeout:
            failures.post(
                living[0],
                f"rank {living[0]} did not return: the others waited {timeout:g} s for it to; "
                f"{PATIENCE}",
            )
            return
        threads[living[0]].join(_SECONDS_BETWEEN_LOOKS)


def _ends(
    ranks: int | None, devices: Sequence[int] | None, transport: str | None, timeout: float
) -> tuple[SharedFailures, Sequence[Communicator]]:
    if (ranks is None) == (devices is None):
        raise error(
            ValueError,
            f"ranks = {shown(ranks)} and devices = {shown(devices)}",
            "one of them sets the number of ranks",
            "pass run(function, 4), or run(function, devices=[0, 1])",
        )
    if transport is not None and (transport not in TRANSPORTS or devices is None):
        raise error(
            ValueError,
            f"transport = {shown(transport)}" + ("" if devices is not None else " without devices"),
            f"allowed are {', '.join(map(repr, TRANSPORTS))}, between devices",
            "leave it out",
        )
    try:
        ordinals = None if devices is None else [operator.index(device) for device in devices]
        size = operator.index(ranks) if ordinals is None else len(ordinals)  # type: ignore[arg-type]
    except TypeError:
        raise error(
            TypeError,
            f"ranks = {shown(ranks)} and devices = {shown(devices)}",
            "ranks is an integer, devices a sequence of CUDA ordinals",
            "pass run(function, 4), or run(function, devices=[0, 1])",
        ) from None
    if size < 1 or (ordinals and (len(set(ordinals)) < size or min(ordinals) < 0)):
        raise error(
            ValueError,
            f"ranks = {shown(ranks)} and devices = {shown(devices)}",
            "there is 1 rank or more, each on a separate device",
            "pass a number of ranks from 1 on, or the ordinals of different devices",
        )
    if ordinals and max(ordinals) >= (count := _device_count()):
        raise error(
            ValueError,
            f"devices = {shown(devices)}, where CUDA has {count}",
            "each is one that is there, numbered from 0",
            "pass others; run(function, 2) has ranks on NumPy arrays, without a GPU",
        )
    if ordinals is not None and (transport or ("nccl" if nccl_is_there() else "peer")) == "nccl":
        failures = SharedFailures()
        return failures, of_devices(ordinals, failures, timeout)
    office = PostOffice(timeout)
    return office.failures, [
        ThreadCommunicator(office, rank, size, None if ordinals is None else ordinals[rank])
        for rank in range(size)
    ]


def _device_count() -> int:
    runtime = load_cupy().cuda.runtime
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:  # there is no driver
        return 0
