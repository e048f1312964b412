"""Sampling: a token of each row of logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Parameter,
    Pointer,
    Scalar,
    Specialisation,
    Struct,
    inputs,
)
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import cpp_bool, option_macros, pairs

# SampleParams in cuda_src/sampling/logits.cuh
SAMPLE_PARAMS = np.dtype(
    [
        *((field, np.int64) for field in ("logits_stride", "previous_stride", "previous_step")),
        *(
            (f"{option}_stride", np.int64)
            for option in (
                "seed",
                "step",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "repetition_penalty",
            )
        ),
        *((field, np.int32) for field in ("vocabulary", "width", "parts")),
        *((f"{option}_is_int64", np.int32) for option in ("step", "top_k")),
    ],
    align=True,
)


SAMPLE_STRUCT = Struct("params", SAMPLE_PARAMS, "SampleParams")


OPTIONS = {
    "seed": np.uint64,
    "step": np.int64,
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
}
"""What a row may be told, with what is passed where all rows have the same."""

THREADS = 256
PART = 4096
"""Tokens of a CTA: a vocabulary of 128,256 is 32 of them, for the 40 multiprocessors of a T4. A
thread has 16 in registers, all on their way at once."""
CANDIDATES = 4096
"""Tokens in bins that hold a cut, for which there is a list: it takes 64 KB a row."""
BINS, SUMS = 1024, 4
CANDIDATE_WORDS = 4


def _spec(entry: str, told: tuple[str, ...], scratch: tuple[Pointer, ...]) -> KernelSpec:
    """Return a kernel that is told some options: of each an array or a number."""
    numbers: list[Parameter] = [
        Scalar(f"{name}_value", np.dtype(OPTIONS[name])) for name in OPTIONS if name in told
    ]
    return KernelSpec(
        entry,
        f"sampling/{entry.removeprefix('sample_')}.cu",
        (
            *inputs("logits"),
            *inputs("previous", optional=True),
            *inputs(*(name for name in OPTIONS if name in told), optional=True),
            *scratch,
            *numbers,
            SAMPLE_STRUCT,
        ),
    )


MAXIMA = _spec(
    "sample_maxima",
    ("repetition_penalty",),
    (Pointer("maxima"), Pointer("bins", optional=True), Pointer("counters", optional=True)),
)
COUNTS = _spec(
    "sample_bins",
    ("temperature", "top_k", "top_p", "repetition_penalty"),
    (*inputs("maxima"), Pointer("bins")),
)
DRAW = _spec(
    "sample",
    tuple(OPTIONS),
    (
        *inputs("maxima", "bins", optional=True),
        *(Pointer(name, optional=True) for name in ("counters", "best", "candidates")),
        Pointer("out"),
    ),
)
KERNELS = (MAXIMA, COUNTS, DRAW)


class SampleConfig(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    aligned: bool
    """Whether each row starts where a vector may."""
    penalised: bool
    """Whether there are previous tokens."""


@cache
def specialise(spec: KernelSpec, config: SampleConfig) -> Specialisation:
    """Specialise MAXIMA or COUNTS."""
    return spec.specialise(threads=THREADS, PART=PART, **option_macros(config))


@cache
def specialise_draw(config: SampleConfig, filtered: bool) -> Specialisation:
    """Specialise the draw; `filtered` says that rows may ask for top-k, top-p or min-p."""
    return DRAW.specialise(
        threads=THREADS,
        gates=Gates(registers=120),
        PART=PART,
        CANDIDATES=CANDIDATES,
        FILTERED=cpp_bool(filtered),
        **option_macros(config),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield each dtype with loads of both kinds, with previous tokens and without."""
    del arch  # one row serves all
    for dtype, aligned, penalised, filtered in pairs(STORAGE, *[(True, False)] * 3):
        config = SampleConfig(dtype, aligned, penalised)
        for spec in (MAXIMA, COUNTS):
            yield specialise(spec, config)
        yield specialise_draw(config, filtered)
