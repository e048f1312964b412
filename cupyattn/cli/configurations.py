"""Configurations of the kernels: their names, those that a user chooses, and their resources."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from difflib import get_close_matches

from cupyattn.cli.arguments import integer
from cupyattn.ops.attention.checks import checked_problem
from cupyattn.ops.attention.forward import attention_forward
from cupyattn.ops.attention.options import AttentionOptions, DropoutSeed
from cupyattn.ops.attention.problem import AttentionArrays
from cupyattn.registry import KERNELS, catalogue
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arch import TURING, Arch
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.compile import compile_cubin
from cupyattn.runtime.device.recorder import Launch, LaunchRecorder
from cupyattn.runtime.errors import error
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.tables import MAX_HEAD_DIM

Macros = Mapping[str, int | str]


def add_row_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--kernel`` and ``--head-dim``; `default` describes the kernels without them."""
    parser.add_argument(
        "--kernel",
        nargs="+",
        action="extend",
        type=kernel_name,
        default=[],
        metavar="NAME",
        help=f"only these kernels, by the names that `info` lists (default: {default})",
    )
    parser.add_argument(
        "--head-dim",
        nargs="+",
        action="extend",
        type=integer(1, MAX_HEAD_DIM),
        default=[],
        metavar="D",
        help="only the configurations for these head dims (default: all)",
    )


def kernel_name(name: str) -> str:
    """Read the name of a kernel, for argparse's ``type=``."""
    if name not in KERNELS:
        near = get_close_matches(name, KERNELS) or [each for each in KERNELS if name in each]
        raise argparse.ArgumentTypeError(
            f"there is no kernel {name!r}; "
            + (f"near it are {', '.join(near)}" if near else "`python -m cupyattn info` lists them")
        )
    return name


def rows_of(
    kernels: Collection[str], head_dims: Collection[int] | None, arch: Arch = TURING
) -> list[Specialisation]:
    """Return an architecture's rows for these kernels and head dims; without any, for all.

    Raises ValueError if there are none.
    """
    rows = [each for each in catalogue(arch.number) if not kernels or each.spec.entry in kernels]
    chosen = [each for each in rows if not head_dims or head_dim_of(each) in head_dims]
    if not chosen:
        dims = sorted({dim for each in rows if (dim := head_dim_of(each))})
        raise error(
            ValueError,
            f"--head-dim {' '.join(map(str, head_dims or ()))}",
            f"there are configurations of {', '.join(kernels) or 'the kernels'} for "
            + (f"head dims {', '.join(map(str, dims))}" if dims else "every head dim in one"),
            "pass one of them, or leave --head-dim out" if dims else "leave --head-dim out",
        )
    return chosen


def without_rows(
    rows: Collection[Specialisation], kernels: Collection[str], head_dims: Collection[int]
) -> list[str]:
    """Return messages for the requested kernels and head dims without a configuration."""
    entries = {each.spec.entry for each in rows}
    dims = {head_dim_of(each) for each in rows}
    of = f" of head dim {' or '.join(map(str, head_dims))}" if head_dims else ""
    return [f"{name} has no row{of}" for name in dict.fromkeys(kernels) if name not in entries] + [
        f"no row has head dim {dim}: it is compiled at its first call"
        for dim in dict.fromkeys(head_dims)
        if dim not in dims
    ]


def head_dim_of(row: Specialisation) -> int | None:
    """Return a row's head dim, of the values where it has no other, None where it has none."""
    macros = dict(row.macros)
    dim = macros.get("HEAD_DIM", macros.get("HEAD_DIM_V"))
    return None if dim is None else int(dim)


def row_name(row: Specialisation) -> str:
    """Name a configuration by its caller's choices: dtype, head dims, loads and options.

    Examples
    --------
    >>> from cupyattn.ops.attention.kernels.options import FlashOptions
    >>> from cupyattn.ops.attention.kernels.tensor_core.forward import flash
    >>> row_name(flash(75, 64, 64, 1, FlashOptions(mask=True, bias="float16")))
    'D 64, scalar loads, BIAS=float16, MASK'
    """
    macros = dict(row.macros)
    head_dim, head_dim_v = macros.get("HEAD_DIM"), macros.get("HEAD_DIM_V")
    dtype = macros.get("DTYPE")
    usual = dtype == "float16" and "MMA_K" in macros  # on tensor cores, where others are named
    parts = [] if dtype is None or usual else [str(dtype)]
    dims = {"D": head_dim, "Dv": None if head_dim_v == head_dim else head_dim_v}
    parts += [f"{letter} {dim}" for letter, dim in dims.items() if dim is not None]
    if "QUERY_ROWS" in macros:
        parts.append(f"{macros['QUERY_ROWS']} rows")
    if "CTA_ROWS" in macros:  # of the launch before
        parts.append(f"{macros['CTA_ROWS']} rows")
    if "FORWARD_WARPS" in macros:  # of the sum of a row's parts, chosen by how many there are
        parts.append(f"{macros['WARPS']} warps")
    if macros.get("LANES"):
        parts.append(f"{macros['LANES']} lanes")
    if "CHUNKS" in macros:  # heads that a lane has a chunk of
        parts.append(f"{macros['HEADS']} heads")
        parts += [f"{macros['CHUNKS']} chunks"] if "CENTRED" in macros else []
    if "WORD" in macros:
        parts.append(f"{macros['WORD']} bytes")
    if "STRIPS" in macros:
        parts.append(f"{macros['STRIPS']} strips")
    if "IN_VEC" in macros:  # of a rotation's two arrays
        parts.append(f"{macros['IN_VEC']} to {macros['OUT_VEC']} items")
    if "K_WARPS" in macros:  # of few rows' tiles likewise
        names = ("X_TILES", "W_TILES", "GROUPS", "K_WARPS", "MIN_CTAS")
        parts.append(" x ".join(str(macros[name]) for name in names if name in macros))
    if "BLOCK_SIZE" in macros:  # of a quantised weight; 0 is a row
        parts.append(f"blocks of {macros['BLOCK_SIZE'] or 'a row'}")
        counts = {"ROWS": "rows", "PARTS": "parts", "STEPS": "steps"}
        parts += [f"{macros[name]} {word}" for name, word in counts.items() if name in macros]
    if "TILE_INNER" in macros:  # of a product's tiles its caller chose one by its sizes
        parts.append(f"{macros['TILE_ROWS']} x {macros['TILE_COLUMNS']}")
    if "A_ALONG" in macros:
        parts.append(f"{macros['TILE_M']} x {macros['TILE_N']}")
    if int(macros.get("M_TILES", 0)) > 2:  # of two heights of the forward's tiles
        parts.append("tall tiles")
    if "RESIDENT" in macros and "PIECES" in macros:
        parts.append(f"{macros['PIECES']} pieces")
    if 1 in (macros.get("VEC"), macros.get("IN_VEC")):
        parts.append("scalar loads")
    elif macros.get("OUT_VEC") == 1:
        parts.append("scalar stores")
    parts += [
        (name if value == "true" else f"{name}={value}") + _together(macros.get(f"{name}_VEC", 1))
        for name, value in _options_on(macros).items()
    ]
    if together := _together(macros.get("SCORE_VEC", 1)):
        parts.append(f"scores{together}")
    return ", ".join(parts)


def _options_on(macros: Macros) -> dict[str, str]:
    """Return the options that a kernel was compiled with; sizes are no options."""
    return {
        name: value
        for name, value in macros.items()
        if isinstance(value, str)
        and name != "DTYPE"
        and value not in ("false", "void")
        and (name, value) != ("ACCUMULATOR", "float32")
    }


def _together(items: int | str) -> str:
    return "" if items == 1 else f" by {items}"


def configuration(macros: Macros) -> str:
    """Write a configuration on one line: dtype, sizes, and the options that are on.

    Examples
    --------
    >>> configuration({"TILE_K": 32, "DTYPE": "float32", "BIAS": "void", "BIAS_VEC": 1})
    'float32 TILE_K=32'
    """
    on = _options_on(macros)
    off = {name for name, value in macros.items() if isinstance(value, str)} - {"DTYPE", *on}
    return " ".join(
        str(value) if name == "DTYPE" else f"{name}={value}"
        for name, value in sorted(macros.items(), key=lambda macro: macro[0] != "DTYPE")
        if name.removesuffix("_VEC") not in off
    )


def compiled_kernel(specialisation: Specialisation, arch: Arch) -> Json:
    """Compile to machine code, or find it in the cache, and return its resources.

    ``row`` is the name of the configuration. Registers, spills and stack are those of a thread,
    ``shared_bytes`` (static and dynamic) those of a CTA. Raises RuntimeError if NVRTC or its
    headers are missing, or reject the source.
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


def spill_bytes(kernel: Json) -> int:
    """Return the bytes that a thread stores and loads because registers did not suffice."""
    return int(kernel["spill_store_bytes"] + kernel["spill_load_bytes"])


def attention_launch(
    arch: Arch,
    q: Array,
    k: Array,
    v: Array,
    options: AttentionOptions,
    *,
    tensor_cores: bool = True,
) -> Launch:
    """Return the launch that ``attention(q, k, v, return_lse=True)`` makes on a GPU of `arch`.

    The arrays may be NumPy's: their memory is not read.
    """
    operands = adopt(AttentionArrays(q, k, v))
    problem = checked_problem(operands, options)
    recorder = LaunchRecorder(arch, tensor_cores=tensor_cores)
    attention_forward(recorder, problem, operands, seed=DropoutSeed(0), return_lse=True)
    (launch,) = recorder.launches
    return launch
