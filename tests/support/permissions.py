"""Folders that can only be read, even by root, and files of another user."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CAP_DAC_OVERRIDE = 1 << 1  # linux/capability.h: writes where permissions forbid it
_VERSION_3 = 0x20080522


@contextmanager
def read_only(warmed: Path) -> Iterator[Path]:
    """A copy of a folder that this thread may not write, whoever it is.

    Root stays root, without the right to pass over permissions: another user could not read
    headers that lie in root's own folders.
    """
    if not hasattr(os, "geteuid"):
        pytest.skip("permissions are POSIX")
    parent = Path(tempfile.mkdtemp())
    folder = shutil.copytree(warmed, parent / "folder")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with _bound_by_permissions():
            yield folder
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(parent)


@contextmanager
def _bound_by_permissions() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "capset"):
        pytest.skip("root can write everywhere; only Linux can take that right away")
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)  # 0: this thread
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low 32 bits, then high

    def call(name: str) -> None:
        if getattr(libc, name)(header, rights):
            raise OSError(ctypes.get_errno(), f"{name} failed")

    call("capget")
    effective = rights[0]
    rights[0] &= ~_CAP_DAC_OVERRIDE
    call("capset")
    try:
        yield
    finally:
        rights[0] = effective
        call("capset")


NOBODY = 65534


def give_away(path: Path) -> None:
    """Let a file, folder or link belong to another user; skip the test if this one cannot."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, NOBODY, -1, follow_symlinks=False)
