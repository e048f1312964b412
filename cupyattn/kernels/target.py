"""The architecture that compiled code is for, as the code itself says."""

from __future__ import annotations

import re
import struct

_PTX_TARGET = re.compile(rb"^\.target\s+sm_(\d+)", re.MULTILINE)
_ELF = b"\x7fELF"
_ABI_VERSION, _FLAGS = 8, 48  # offsets in the header of a 64-bit ELF file
_NEWER_ABI = 8  # from here on the architecture is the second byte of the flags, not the first


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
