"""Descriptions of kernels before compilation: source, entry, parameters and macros."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Pointer:
    """An array parameter: `const` if it is only read, `optional` if it may be None (null)."""

    name: str
    const: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Scalar:
    """A number passed by value; `fix` is the advice for one that does not fit its dtype."""

    name: str
    dtype: np.dtype
    fix: str = "split the problem over several calls"


@dataclass(frozen=True)
class StructParameter:
    """A C struct passed by value.

    Attributes
    ----------
    name : str
        The name of the parameter.
    dtype : numpy.dtype
        The aligned structured dtype with the layout of the struct.
    c_name : str
        The name of the type in C, which also gives the name of the macro for its size.
    includes : tuple of StructParameter
        Further structs that the kernel's source includes, which asserts their sizes too.
    """

    name: str
    dtype: np.dtype
    c_name: str
    includes: tuple[StructParameter, ...] = ()

    @property
    def size_macros(self) -> dict[str, int]:
        """The macros with which sources assert the sizes.

        Examples
        --------
        >>> StructParameter("params", np.dtype(np.int64), "RowsParams").size_macros
        {'ROWS_PARAMS_BYTES': 8}
        """
        words = re.findall("[A-Z][a-z]*", self.c_name)
        sizes = {"_".join([*words, "bytes"]).upper(): self.dtype.itemsize}
        for other in self.includes:
            sizes |= other.size_macros
        return sizes


Parameter = Pointer | Scalar | StructParameter

Value = np.generic | np.ndarray
"""An argument that is passed by value: a number or a struct."""


def inputs(*names: str, optional: bool = False) -> tuple[Pointer, ...]:
    """Return array parameters that a kernel only reads."""
    return tuple(Pointer(name, const=True, optional=optional) for name in names)


class Gates(NamedTuple):
    """Limits of a configuration on sm_75, compiled by the release `GATES_NVRTC` of NVRTC.

    Tests check every specialisation against them; nothing else reads them. CTAs per SM are not
    among them: they are the macro MIN_CTAS, or follow from `registers`. For a specialisation that
    belongs to several of the groups below, the lowest of their utilisations applies.
    """

    models: float = 0.0
    """Lowest utilisation of the tensor cores (or float32 units) in the main loop on a T4, by the
    model of `python -m cupyattn turing`; 0 if products are not the limit."""
    spills: int = 0
    """Most bytes that a thread spills: the compiled value plus at least 8, rounded up to a multiple
    of 16, because reordering statements changes ptxas's result."""
    scalar: float | None = None
    """Utilisation with scalar loads; None means the value of `models`, here and below."""
    items: float | None = None
    """Utilisation with a bias or a mask."""
    options: float | None = None
    """Utilisation with any other option."""
    kernels: float | None = None
    """Utilisation of other kernels with this configuration: paged, packed, rotary, split."""
    most_spills: int = 0
    """Most spilled bytes of all these, if they are more than `spills`."""
    registers: int = 64
    """Most registers of a thread without the macro MIN_CTAS; with 64 an SM holds 1,024 threads."""


GATES_NVRTC = (12, 9)
"""The release of NVRTC for the gates: the one that CI installs (.ci/constraints.txt)."""


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One ``extern "C" __global__`` entry with its parameters. Equality is identity.

    Attributes
    ----------
    entry : str
        Name of the entry function.
    source : str
        The ``.cu`` file, relative to the folder of CUDA sources, or an absolute path.
    parameters : tuple of Parameter
        In the order of the C declaration.
    headers : tuple of (str, str)
        Names and texts of generated headers, which the source includes in angle brackets.
    """

    entry: str
    source: str
    parameters: tuple[Parameter, ...]
    headers: tuple[tuple[str, str], ...] = ()

    @cached_property
    def pointers(self) -> tuple[Pointer, ...]:
        """The array parameters, which come first."""
        return tuple(each for each in self.parameters if isinstance(each, Pointer))

    def specialise(
        self,
        *,
        threads: int,
        shared_bytes: int = 0,
        static_shared_bytes: int = 0,
        gates: Gates = Gates(),
        reason: str = "",
        **macros: int | str,
    ) -> Specialisation:
        """Set the values of all macros. One specialisation is one compiled module.

        `macros` excludes THREADS, SHARED_BYTES and the sizes of structs, which follow from the
        other arguments.
        """
        return Specialisation(
            self, tuple(macros.items()), threads, shared_bytes, static_shared_bytes, gates, reason
        )


@dataclass(frozen=True, eq=False)
class Specialisation:
    """A kernel with its macros, CTA size and shared memory fixed.

    Equality is identity, which needs no hashing of fields in a launch: callers make each one once.
    """

    spec: KernelSpec
    macros: tuple[tuple[str, int | str], ...]
    """The macros of the configuration. The compiler gets `defines`."""
    threads: int
    shared_bytes: int
    """Dynamic shared memory, in bytes."""
    static_shared_bytes: int = 0
    """Shared memory that the source declares itself, in bytes, as far as it is known."""
    gates: Gates = Gates()
    reason: str = ""
    """Why this configuration exists, for `cupyattn.explain`."""

    @cached_property
    def defines(self) -> dict[str, int | str]:
        """All macros for the compiler, including the derived ones."""
        defines: dict[str, int | str] = dict(self.macros)
        defines["THREADS"] = self.threads
        defines["SHARED_BYTES"] = self.shared_bytes + self.static_shared_bytes
        for parameter in self.spec.parameters:
            if isinstance(parameter, StructParameter):
                defines |= parameter.size_macros
        named = [*map(str, defines.values()), *(text for _, text in self.spec.headers)]
        users_own = Path(self.spec.source).is_absolute()  # it may name any dtype in its text
        if users_own or any("bfloat16" in text for text in named):
            defines["BFLOAT16"] = 1
        return defines

    @property
    def label(self) -> str:
        """A short name for tables and messages: the entry and its macros."""
        return f"{self.spec.entry}[{', '.join(f'{name}={value}' for name, value in self.macros)}]"
