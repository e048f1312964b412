"""What a kernel is, before anything is compiled: its source, entry, parameters and macros."""

from __future__ import annotations

from dataclasses import dataclass

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
    """A C struct passed by value: `dtype` is its aligned structured dtype."""

    name: str
    dtype: np.dtype


Parameter = Pointer | Scalar | Struct


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
    macros : tuple of str
        The macros that the source requires, all of them: the source has no defaults.
    """

    entry: str
    source: str
    parameters: tuple[Parameter, ...]
    macros: tuple[str, ...]

    def specialise(self, *, threads: int, shared_bytes: int, **macros: int | str) -> Specialisation:
        """Give every macro its value: one specialisation is one compiled module."""
        if set(macros) != set(self.macros):
            missing, unknown = set(self.macros) - set(macros), set(macros) - set(self.macros)
            raise ValueError(
                f"{self.entry} takes the macros {sorted(self.macros)}: "
                f"missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        values = tuple((name, macros[name]) for name in self.macros)
        return Specialisation(self, values, threads, shared_bytes)


@dataclass(frozen=True, eq=False)
class Specialisation:
    """A kernel with its macros, CTA size and dynamic shared memory fixed.

    The tables make each one once, so identity is equality and costs a launch no hashing.
    """

    spec: KernelSpec
    macros: tuple[tuple[str, int | str], ...]
    threads: int
    shared_bytes: int
    """Dynamic shared memory, in bytes; what the source declares statically is not counted here."""

    @property
    def label(self) -> str:
        """A short name for tables and messages: the entry and its macros."""
        return f"{self.spec.entry}[{', '.join(f'{name}={value}' for name, value in self.macros)}]"
