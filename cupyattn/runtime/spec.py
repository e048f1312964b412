"""What a kernel is, before anything is compiled: its source, entry, parameters; and its macros."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Pointer:
    """An array parameter: `const` if only read, `optional` if it may be None (null)."""

    name: str
    const: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Scalar:
    """A number passed by value."""

    name: str
    dtype: np.dtype


@dataclass(frozen=True)
class Struct:
    """A C struct passed by value.

    Attributes
    ----------
    name : str
        Of the parameter.
    dtype : numpy.dtype
        The aligned structured dtype that is laid out as the struct is.
    c_name : str
        The name of the type in C, from which that of the macro with its size follows.
    includes : tuple of Struct
        Further structs whose definitions the kernel's source includes: their sizes are asserted
        there too.
    """

    name: str
    dtype: np.dtype
    c_name: str
    includes: tuple[Struct, ...] = ()

    @property
    def size_macros(self) -> dict[str, int]:
        """The macros that sources assert the sizes with.

        Examples
        --------
        >>> Struct("params", np.dtype(np.int64), "RowsParams").size_macros
        {'ROWS_PARAMS_BYTES': 8}
        """
        words = re.findall("[A-Z][a-z]*", self.c_name)
        sizes = {"_".join([*words, "bytes"]).upper(): self.dtype.itemsize}
        for other in self.includes:
            sizes |= other.size_macros
        return sizes


Parameter = Pointer | Scalar | Struct


def inputs(*names: str, optional: bool = False) -> tuple[Pointer, ...]:
    """Return parameters for arrays that a kernel only reads."""
    return tuple(Pointer(name, const=True, optional=optional) for name in names)


class Gates(NamedTuple):
    """Limits of a configuration on sm_75, compiled by the release `GATES_NVRTC` of NVRTC.

    Tests hold every specialisation to them; nothing else reads them. CTAs per SM are not repeated
    here: they are the macro MIN_CTAS, or follow from `registers`. A specialisation that belongs to
    several of the groups below may have the lowest of their utilisations.
    """

    models: float = 0.0
    """Least utilisation of the tensor cores (or float32 units) in the main loop on a T4, by the
    model of `python -m cupyattn turing`; 0 where no product binds."""
    spills: int = 0
    """Most bytes that a thread stores because registers are short: what was found and at least 8
    more, rounded up to 16, as ptxas moves some when statements change places."""
    scalar: float | None = None
    """Utilisation with scalar loads; None is that of `models`, here and below."""
    items: float | None = None
    """With a bias or a mask."""
    options: float | None = None
    """With any other option."""
    kernels: float | None = None
    """In kernels of the same configuration: paged, packed, rotary, split."""
    most_spills: int = 0
    """Most spilled bytes of all these, where they are more than `spills`."""
    registers: int = 64
    """Most registers of a thread without the macro MIN_CTAS; 64 leave room for 1,024 threads."""


GATES_NVRTC = (12, 9)
"""The release that the gates hold for: the one that CI installs (.ci/constraints.txt)."""


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One ``extern "C" __global__`` entry and what it must be told; each is one object.

    Attributes
    ----------
    entry : str
        Name of the entry function.
    source : str
        The ``.cu`` file, relative to the folder of CUDA sources, or an absolute path.
    parameters : tuple of Parameter
        In the order of the C declaration.
    headers : tuple of (str, str)
        What the source includes in angle brackets that is no file: names, and texts.
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
        """Give every macro its value: one specialisation is one compiled module.

        THREADS, SHARED_BYTES and the sizes of the structs follow from the other arguments and are
        not among the macros.
        """
        return Specialisation(
            self, tuple(macros.items()), threads, shared_bytes, static_shared_bytes, gates, reason
        )


@dataclass(frozen=True, eq=False)
class Specialisation:
    """A kernel with its macros, CTA size and shared memory fixed.

    The tables make each one once, so identity is equality and costs a launch no hashing.
    """

    spec: KernelSpec
    macros: tuple[tuple[str, int | str], ...]
    """What the table decides; the source gets `defines`."""
    threads: int
    shared_bytes: int
    """Dynamic shared memory, in bytes."""
    static_shared_bytes: int = 0
    """Shared memory that the source declares itself, in bytes, as far as the table knows it."""
    gates: Gates = Gates()
    reason: str = ""
    """Why the table has this configuration, for `cupyattn.explain`."""

    @cached_property
    def defines(self) -> dict[str, int | str]:
        """Every macro that the source is compiled with, the derived ones among them."""
        defines: dict[str, int | str] = dict(self.macros)
        defines["THREADS"] = self.threads
        defines["SHARED_BYTES"] = self.shared_bytes + self.static_shared_bytes
        for parameter in self.spec.parameters:
            if isinstance(parameter, Struct):
                defines |= parameter.size_macros
        named = [*map(str, defines.values()), *(text for _, text in self.spec.headers)]
        users_own = Path(self.spec.source).is_absolute()  # may name any dtype itself
        if users_own or any("bfloat16" in text for text in named):
            defines["BFLOAT16"] = 1
        return defines

    @property
    def label(self) -> str:
        """A short name for tables and messages: the entry and its macros."""
        return f"{self.spec.entry}[{', '.join(f'{name}={value}' for name, value in self.macros)}]"
