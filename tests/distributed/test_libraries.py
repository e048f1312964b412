"""What NCCL is asked for through each library that has it, without a GPU and without NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from cupyattn.distributed.communicators import adapters, nccl
from cupyattn.distributed.communicators.adapters import communicator_of


class Bindings:
    """What `cupy.cuda.nccl` offers, and a record of what is asked of it."""

    NCCL_INT8 = 0
    available = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.asked.append((name, *given, *named.values()))


class NCCLEnd:
    """A NcclCommunicator: rank 1 of 3 on device 2."""

    def __init__(self, bindings: Bindings) -> None:
        for name in ("send", "recv", "allGather", "abort", "destroy"):
            setattr(self, name, getattr(bindings, name))

    def rank_id(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def device_id(self) -> int:
        return 2


class Backend:
    """A NCCLBackend of cupyx.distributed: rank 1 of 3."""

    rank, _n_devices = 1, 3

    def __init__(self, bindings: Bindings) -> None:
        self._comm = NCCLEnd(bindings)
        for name in ("send", "recv", "send_recv", "all_gather"):
            setattr(self, name, getattr(bindings, name))


class NCCL4Py:
    """A Communicator of nccl4py 0.6, whose buffers are positional and streams are not."""

    rank, nranks = 1, 3
    device = SimpleNamespace(device_id=2)

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings

    def send(self, sendbuf: Any, peer: int, *, stream: int | None = None) -> None:
        self._bindings.send(sendbuf, peer, stream)

    def recv(self, recvbuf: Any, peer: int, *, stream: int | None = None) -> None:
        self._bindings.recv(recvbuf, peer, stream)

    def allgather(
        self, sendbuf: Any, recvbuf: Any, *, stream: int | None = None, config: Any = None
    ) -> None:
        assert config is None
        self._bindings.allgather(sendbuf, recvbuf, stream)

    def abort(self) -> None:
        self._bindings.abort()


class OnGPU:
    """Stands in for an array of a GPU: its place, its bytes."""

    def __init__(self, place: int, nbytes: int) -> None:
        self.data, self.nbytes, self.place = SimpleNamespace(ptr=place), nbytes, place

    def reshape(self, *_: int) -> OnGPU:
        return self

    view = reshape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnGPU) and other.place == self.place

    __hash__ = None  # type: ignore[assignment]


STREAM = SimpleNamespace(ptr=77)
HERE, THERE = OnGPU(1000, 12), OnGPU(2000, 12)


@pytest.mark.parametrize(("set_before", "found"), [(None, "0"), ("1", "1")])
def test_multicast_is_off_before_nccl_is_loaded(set_before, found, monkeypatch):
    """Unless the user has set it."""
    seen = []

    def import_module(name: str) -> Bindings:
        seen.append((name, os.environ.get("NCCL_NVLS_ENABLE")))
        return Bindings()

    monkeypatch.setenv("NCCL_NVLS_ENABLE", set_before or "")
    if set_before is None:
        monkeypatch.delenv("NCCL_NVLS_ENABLE")
    monkeypatch.setattr(nccl, "load_cupy", lambda: None)
    monkeypatch.setattr(nccl, "import_module", import_module)
    nccl.load_nccl()
    assert seen == [("cupy.cuda.nccl", found)]


def test_nccl_is_given_bytes_in_one_group(monkeypatch):
    bindings = Bindings()
    monkeypatch.setattr(nccl, "load_nccl", lambda: bindings)
    end = communicator_of(NCCLEnd(bindings))
    assert (end.rank, end.size, end.device) == (1, 3, 2)
    with end.together():
        end.send(HERE, 2, STREAM)
        end.receive(THERE, 0, STREAM)
    end.all_gather(HERE, THERE, STREAM)
    end.abort()
    assert bindings.asked == [
        ("groupStart",), ("send", 1000, 12, 0, 2, 77), ("recv", 2000, 12, 0, 0, 77),
        ("groupEnd",), ("allGather", 1000, 2000, 12, 0, 77), ("abort",),
    ]  # fmt: skip


def test_cupyx_has_two_peers_in_one_group(monkeypatch):
    """Its own send_recv has one for both."""
    bindings = Bindings()
    monkeypatch.setattr(adapters, "load_nccl", lambda: bindings)
    end = communicator_of(Backend(bindings))
    assert (end.rank, end.size, end.device) == (1, 3, 2)
    with end.together():
        end.send(HERE, 2, STREAM)
        end.receive(THERE, 0, STREAM)
    end.all_gather(HERE, THERE, STREAM)
    end.abort()
    assert bindings.asked == [
        ("groupStart",), ("send", HERE, 2, STREAM), ("recv", THERE, 0, STREAM), ("groupEnd",),
        ("all_gather", HERE, THERE, 12, STREAM), ("abort",),
    ]  # fmt: skip


def test_nccl4py_is_given_streams_by_their_address(monkeypatch):
    bindings = Bindings()

    @contextmanager
    def group() -> Iterator[None]:
        bindings.group_start()
        yield
        bindings.group_end()

    modules = {"nccl.core": SimpleNamespace(group=group)}
    monkeypatch.setattr(adapters, "import_module", modules.__getitem__)
    end = communicator_of(NCCL4Py(bindings))
    assert (end.rank, end.size, end.device) == (1, 3, 2)
    with end.together():
        end.send(HERE, 2, STREAM)
        end.receive(THERE, 0, STREAM)
    end.all_gather(HERE, THERE, STREAM)
    end.abort()
    assert bindings.asked == [
        ("group_start",), ("send", HERE, 2, 77), ("recv", THERE, 0, 77), ("group_end",),
        ("allgather", HERE, THERE, 77), ("abort",),
    ]  # fmt: skip
