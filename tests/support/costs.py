"""What a row of the configuration tables costs a multiprocessor, as ptxas says it."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cupyattn.kernels import compile
from cupyattn.kernels.arch import Arch
from cupyattn.kernels.compile import compile_cubin
from cupyattn.kernels.configs.attention.decode import INTEGER_BITS
from cupyattn.kernels.registry import catalogue
from cupyattn.kernels.source import include_closure, source_root
from cupyattn.kernels.spec import Specialisation


class Cost(NamedTuple):
    """Of one specialisation; a row's are the worst of its dtypes and loads."""

    registers: int
    shared_bytes: int
    ctas_per_sm: int
    spill_bytes: int = 0


# The flash kernels fill the register file: some rows of the tensor-core kernels spill, the
# forward's mostly in the loop over masked tiles, and the float32 kernel spills around the options
# of the scores. What they spill is pinned and must not grow. Decoding and the norms' backward spill
# nothing on Turing, and on sm_90 a few bytes: of single items of head dim 256, of bfloat16. So do
# the products of linear, of which newer GPUs have rows of their own.
MAY_SPILL = (
    "attention_forward",
    "attention_forward_f32",
    "attention_forward_split",
    "attention_forward_split_f32",
    "attention_forward_paged",
    "attention_forward_paged_f32",
    "attention_forward_rotary",
    "attention_forward_rotary_varlen",
    "attention_forward_varlen",
    "attention_forward_varlen_f32",
    "attention_decode",
    "norm_backward",
    "linear_forward",
    "linear_product",
    "attention_backward_dkdv",
    "attention_backward_dkdv_varlen",
    "attention_backward_dkdv_paired_varlen",
    "attention_backward_dq_varlen",
    "attention_backward_f32_dkdv_varlen",
    "attention_backward_f32_dq_varlen",
    "attention_backward_dkdv_paired",
    "attention_backward_dq",
    "attention_backward_summed_dbias",
    "attention_backward_summed_dbias_varlen",
    "attention_backward_f32_dkdv",
    "attention_backward_f32_dq",
)


def cost(specialisation: Specialisation, arch: Arch) -> Cost:
    """Compile, and let nothing else pass that spills or uses the stack."""
    resources = compile_cubin(specialisation, arch).resources
    assert resources is not None
    if specialisation.spec.entry not in MAY_SPILL:
        assert resources.spill_store_bytes == 0, specialisation.label
        assert resources.spill_load_bytes == 0, specialisation.label
        assert resources.stack_bytes == 0, specialisation.label
    shared = specialisation.shared_bytes + resources.static_shared_bytes
    ctas = arch.resident_ctas(specialisation.threads, resources.registers, shared)
    return Cost(resources.registers, shared, ctas, resources.spill_store_bytes)


def row_of(specialisation: Specialisation) -> str:
    """The kernel and its table row."""
    macros = dict(specialisation.macros)
    sizes = [str(macros[name]) for name in ("HEAD_DIM", "HEAD_DIM_V") if name in macros][:1]
    if macros.get("LANES"):
        sizes.append(f"{macros['LANES']} lanes")
    if "QUERY_ROWS" in macros:
        sizes.append(f"{macros['QUERY_ROWS']} rows")
    if macros.get("CACHE") in INTEGER_BITS:
        sizes.append(f"of {macros['CACHE']}")
    if "W_ALONG_K" in macros:  # products with few rows
        sizes.append(f"{8 * int(macros.get('X_TILES', 0)) or 1} rows")
        sizes.append("along K" if macros["W_ALONG_K"] == "true" else "along N")
        sizes.append(f"{macros['GROUPS']} x {macros['K_WARPS']} warps")
    if "TILE_INNER" in macros:  # products with many rows
        lines = [
            str(macros[name])[1:] for name in ("A_LINES", "B_LINES", "W_LINES") if name in macros
        ]
        sizes += [f"{macros['TILE_ROWS']} x {macros['TILE_COLUMNS']}", *lines]
    if "ONE_PASS" in macros:
        sizes += ["one pass" if macros["ONE_PASS"] == "true" else "deterministic"]
    if specialisation.spec.entry.startswith("linear_"):  # what their shared memory follows from
        names = ("TILE_M", "TILE_N", "ROWS", "W_ALONG", "DTYPE")
        sizes += [str(macros[name]) for name in names if name in macros]
    if "PAIRED" in macros and "TILE_INNER" not in macros:  # whose shared memory follows from both
        sizes += [f"{macros['VEC']} items", *(["paired"] if macros["PAIRED"] == "true" else [])]
    options = [name for name, absent in NO_OPTIONS.items() if macros.get(name, absent) != absent]
    return " ".join([specialisation.spec.entry, *sizes, *options])


NO_OPTIONS = {
    **dict.fromkeys(("BIAS", "SLOPES", "SINKS"), "void"),
    **dict.fromkeys(("MASK", "SOFTCAP", "DROPOUT"), "false"),
    "SCORE_VEC": 1,
}


def rows() -> dict[str, list[Specialisation]]:
    """The catalogue by row: each in every dtype, with vector and with scalar loads."""
    found: dict[str, list[Specialisation]] = {}
    for specialisation in catalogue():
        found.setdefault(row_of(specialisation), []).append(specialisation)
    return found


def first_of_each_kernel(catalogued: Iterable[Specialisation]) -> list[Specialisation]:
    """One row of each kernel: what a plain run compiles, where ``--deep`` compiles all."""
    return first_of_each(catalogued, lambda row: row.spec.entry)


_Row = TypeVar("_Row")


def first_of_each(rows: Iterable[_Row], kind: Callable[[_Row], Any]) -> list[_Row]:
    """One row of each kind."""
    found: dict[Any, _Row] = {}
    for row in rows:
        found.setdefault(kind(row), row)
    return [*found.values()]


def worst(members: Iterable[Specialisation], arch: Arch) -> Cost:
    """Of the dtypes and loads of a row: most registers, bytes and spills, fewest CTAs."""
    costs = [cost(specialisation, arch) for specialisation in members]
    registers, shared, ctas, spills = zip(*costs, strict=True)
    return Cost(max(registers), max(shared), min(ctas), max(spills))


def made_of(members: Iterable[Specialisation]) -> str:
    """A digest of what a row's cost follows from.

    That is what the compiler is given (options, sources, headers and macros), the shared memory
    that is asked for at a launch, and what an architecture has.
    """
    digest = hashlib.sha256(" ".join(compile._OPTIONS).encode())
    digest.update(Path(inspect.getfile(Arch)).read_bytes())
    for member in members:
        code, macros = code_of(source_root() / member.spec.source), sorted(member.defines.items())
        digest.update(f"{code} {member.spec.headers} {macros} {member.shared_bytes}\n".encode())
    return digest.hexdigest()[:16]


@cache
def code_of(source: Path) -> str:
    """A digest of a source and of all it includes, without comments, which make no code."""
    texts = (path.read_text(encoding="utf-8") for path in include_closure(source))
    words = (re.sub(r"//[^\n]*|/\*.*?\*/", "", text).split() for text in texts)
    return hashlib.sha256("\n".join(" ".join(each) for each in words).encode()).hexdigest()
