"""A compiled kernel and its resources, as commands report them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from cupyattn.kernels.arch import Arch
from cupyattn.kernels.compile import compile_cubin
from cupyattn.kernels.spec import Specialisation

# Beside the threads and shared memory of the same table these say nothing new.
_TOLD_ELSEWHERE = {"THREADS", "SHARED_BYTES", "PARAMS_BYTES"}


def compiled_kernel(specialisation: Specialisation, arch: Arch) -> dict[str, Any]:
    """Compile to machine code, or find it in the cache, and tell what it takes of an SM.

    Returns
    -------
    dict
        ``kernel``, ``macros``, ``arch``, ``threads``; of each thread ``registers``,
        ``spill_store_bytes``, ``spill_load_bytes`` and ``stack_bytes``; of each CTA
        ``shared_bytes``, static and dynamic; ``ctas_per_sm``, how many fit; ``cached`` and
        ``seconds``.

    Raises
    ------
    RuntimeError
        If NVRTC or its headers are missing, or reject the source.
    """
    began = time.perf_counter()
    artifact = compile_cubin(specialisation, arch)
    seconds = time.perf_counter() - began
    assert artifact.resources is not None  # machine code always has them
    resources = asdict(artifact.resources)
    shared_bytes = resources.pop("static_shared_bytes") + specialisation.shared_bytes
    return {
        "kernel": specialisation.spec.entry,
        "macros": dict(specialisation.macros),
        "arch": arch.real,
        "threads": specialisation.threads,
        **resources,
        "shared_bytes": shared_bytes,
        "ctas_per_sm": arch.resident_ctas(
            specialisation.threads, resources["registers"], shared_bytes
        ),
        "cached": artifact.was_cached,
        "seconds": seconds,
    }


def spill_bytes(kernel: dict[str, Any]) -> int:
    """Return the bytes that a thread stores and loads because registers did not suffice."""
    return int(kernel["spill_store_bytes"] + kernel["spill_load_bytes"])


def macros_text(macros: dict[str, int | str]) -> str:
    """Write the macros of a kernel on one line, the dtype first and without its name."""
    named = {name: value for name, value in macros.items() if name not in _TOLD_ELSEWHERE}
    dtype = named.pop("DTYPE", "")
    return " ".join([str(dtype), *(f"{name}={value}" for name, value in named.items())]).strip()
