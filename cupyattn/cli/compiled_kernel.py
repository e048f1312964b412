"""A compiled kernel and its resources, as commands report them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from cupyattn.cli.table_rows import row_name
from cupyattn.runtime.arch import Arch
from cupyattn.runtime.compile import compile_cubin
from cupyattn.runtime.spec import Specialisation


def compiled_kernel(specialisation: Specialisation, arch: Arch) -> dict[str, Any]:
    """Compile to machine code, or find it in the cache, and tell what it takes of an SM.

    Returns
    -------
    dict
        ``kernel``, ``row`` (its name), ``macros``, ``arch``, ``threads``; of each thread
        ``registers``, ``spill_store_bytes``, ``spill_load_bytes`` and ``stack_bytes``; of each CTA
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
        "row": row_name(specialisation),
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
