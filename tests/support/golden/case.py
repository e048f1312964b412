"""A golden case: a kernel, what it is given, and what comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.runtime.arch import TURING, Arch
from cupyattn.runtime.spec import KernelSpec, Parameter, Pointer, Scalar, Specialisation

FOLDER = Path(__file__).resolve().parent

# Starts a kernel: the specialisation, what its PTX is for, the number of CTAs, and the arguments,
# of which the arrays are NumPy's and are written in place.
Execute = Callable[[Specialisation, Arch, int, Sequence[Any]], None]


@dataclass(frozen=True)
class Case:
    """A launch whose outputs are golden vectors.

    Attributes
    ----------
    name : str
        Of the case; its vectors are called ``name/output``.
    specialisation : Specialisation
        The kernel, whose parameters are the inputs, the outputs, then the scalars.
    ctas : int
        The grid.
    inputs : dict of str to array or None
        Read only. None is a null pointer.
    outputs : dict of str to array
        What they hold before the launch.
    scalars : dict of str to NumPy scalar
        Numbers passed by value.
    scratch : frozenset of str
        Outputs that are not kept.
    arch : Arch
        What the kernel is compiled to PTX for.
    """

    name: str
    specialisation: Specialisation
    ctas: int
    inputs: dict[str, np.ndarray | None]
    outputs: dict[str, np.ndarray]
    scalars: dict[str, np.generic] = field(default_factory=dict)
    scratch: frozenset[str] = frozenset()
    arch: Arch = TURING

    def run(self, execute: Execute) -> dict[str, np.ndarray]:
        """Launch it and return the outputs by their full names."""
        outputs = {name: array.copy() for name, array in self.outputs.items()}
        execute(
            self.specialisation,
            self.arch,
            self.ctas,
            [*self.inputs.values(), *outputs.values(), *self.scalars.values()],
        )
        kept = {name: array for name, array in outputs.items() if name not in self.scratch}
        return {f"{self.name}/{name}": array for name, array in kept.items()}

    @property
    def digest(self) -> str:
        """Hash everything that decides the result but the text of the kernel."""
        made = self.specialisation
        macros = (("THREADS", made.threads), *made.macros)
        parts = [made.spec.entry, str(macros), str(made.threads), str(self.ctas)]
        given = [*self.inputs.items(), *self.outputs.items(), *self.scalars.items()]
        for name, value in given:
            data = None if value is None else np.ascontiguousarray(value)
            parts.append(f"{name} {'null' if data is None else (data.dtype.str, data.shape)}")
            parts.append("" if data is None else hashlib.sha256(data.tobytes()).hexdigest())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def make_case(
    name: str,
    kernel: str,
    ctas: int,
    inputs: dict[str, np.ndarray | None],
    outputs: dict[str, np.ndarray],
    *,
    macros: dict[str, int | str] | None = None,
    threads: int = 32,
    source: Path | None = None,
    entry: str | None = None,
    scalars: dict[str, np.generic] | None = None,
    scratch: frozenset[str] = frozenset(),
    arch: Arch = TURING,
) -> Case:
    """Return the case of ``golden/<kernel>.cu`` (or `source`), whose parameters it derives."""
    scalars, macros = scalars or {}, macros or {}
    parameters: list[Parameter] = [
        Pointer(key, const=True, optional=value is None) for key, value in inputs.items()
    ]
    parameters += [Pointer(key) for key in outputs]
    parameters += [Scalar(key, value.dtype) for key, value in scalars.items()]
    spec = KernelSpec(
        entry=entry or f"golden_{kernel}",
        source=str(source or FOLDER / f"{kernel}.cu"),
        parameters=tuple(parameters),
    )
    specialisation = spec.specialise(threads=threads, **macros)
    return Case(name, specialisation, ctas, inputs, outputs, scalars, scratch, arch)
