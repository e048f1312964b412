"""The target of compiled code: as environment variables set it, and as the code states it."""

from __future__ import annotations

import os
import re
import struct

from cupyattn.runtime.arch import ARCHS, Arch
from cupyattn.runtime.errors import error, shown

ARCH_VARIABLE = "CUPYATTN_ARCH"
TENSOR_CORES_VARIABLE = "CUPYATTN_TENSOR_CORES"

_PTX_TARGET = re.compile(rb"^\.target\s+sm_(\d+)", re.MULTILINE)
_ELF = b"\x7fELF"
_ABI_VERSION, _FLAGS = 8, 48  # offsets in the header of a 64-bit ELF file
_NEWER_ABI = 8  # from here on the architecture is the second byte of the flags, not the first


def arch_override() -> Arch | None:
    """Return the architecture that CUPYATTN_ARCH names; None if it is not set.

    Raises
    ------
    ValueError
        If the library does not know the architecture.
    """
    text = os.environ.get(ARCH_VARIABLE, "").strip()
    if not text:
        return None
    known = {str(number): arch for number, arch in ARCHS.items()}
    if text not in known:
        raise error(
            ValueError,
            f"{ARCH_VARIABLE}={shown(text)}",
            f"it is a compute capability without its dot; known are {', '.join(known)}",
            f"set {ARCH_VARIABLE}=75 to run the Turing code, or unset it",
        )
    return known[text]


def tensor_cores_override() -> bool | None:
    """Return CUPYATTN_TENSOR_CORES as a bool; None if it is not set.

    Raises
    ------
    ValueError
        If it is neither 0 nor 1.
    """
    off = "compute float16 in float32 arithmetic"
    return flag(TENSOR_CORES_VARIABLE, on="use tensor cores", off=off)


def flag(variable: str, *, on: str, off: str) -> bool | None:
    """Return an environment variable of 0 or 1 as a bool; None if it is not set.

    Raises
    ------
    ValueError
        If it is neither. The message explains 1 by `on` and 0 by `off`.
    """
    text = os.environ.get(variable, "").strip()
    if text not in ("", "0", "1"):
        raise error(
            ValueError,
            f"{variable}={shown(text)}",
            f"it is 1 to {on}, 0 to {off}",
            f"set {variable}=0 or 1, or unset it",
        )
    return text == "1" if text else None


def target_of(code: bytes) -> str:
    """Return "sm_90" for machine code of compute capability 9.0, "compute_90" for its PTX.

    Raises
    ------
    ValueError
        If it is neither.
    """
    if code.startswith(_ELF):
        (flags,) = struct.unpack_from("<I", code, _FLAGS)
        return f"sm_{flags >> (8 if code[_ABI_VERSION] >= _NEWER_ABI else 0) & 0xFF}"
    target = _PTX_TARGET.search(code)
    if target is None:
        raise ValueError(f"neither a cubin nor PTX: it begins with {code[:16]!r}")
    return f"compute_{target[1].decode()}"
