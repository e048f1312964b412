"""`Kernel`: kernels of users, compiled, cached, checked and launched like those of the library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import Operands, adopt, is_contiguous, layouts_of, starts_of
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import fixes_of_results, integer, require_given, require_item_alignment
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.plan import MAX_GRID_X, Plan, Step, run
from cupyattn.runtime.records import Record, record_of, values_of
from cupyattn.runtime.spec import KernelSpec, Parameter, Pointer, Scalar, Specialisation, inputs

_MOST_THREADS = 1024  # of a CTA, on any GPU


class Kernel:
    """A CUDA kernel of your own, which runs where the library's kernels run.

    With CuPy arrays it runs on their GPU, on the current stream. With NumPy arrays it runs inside
    ``with backend("emulator")``, with every check of `cupyattn.emulator`. It is compiled at its
    first call and cached on disk.

    Parameters
    ----------
    source : str or path-like
        The ``.cu`` file. Included files are searched in its folder and in this library's CUDA
        sources (``#include "common/reduce.cuh"``). The kernel is recompiled when any of these files
        changes, so every include has to name its file: ``#include MACRO``, ``#include_next`` and
        ``__has_include`` are rejected.
    inputs : iterable of str
        The names of parameters that are arrays to read, ``const T*``. They come first.
    outputs : iterable of str
        The names of parameters that are arrays to write, ``T*``; the kernel may also read them.
        They come next.
    scalars : mapping of str to dtype
        The names of parameters that are numbers, with their dtypes. They come last.
    threads : int
        Threads of a CTA (cooperative thread array, CUDA's thread block), 1 to 1024: ``blockDim.x``.
    shared_bytes : int
        Dynamic shared memory of a CTA in bytes, up to 65,536.
    entry : str, optional
        The ``extern "C" __global__`` function. The default is the name of the file.
    macros : mapping of str to int or str
        Macros for the compiler, in addition to THREADS and SHARED_BYTES.

    Attributes
    ----------
    specialisation : Specialisation
        The kernel as it is compiled, for example for `cupyattn.turing.analyse`.

    Raises
    ------
    FileNotFoundError
        If the source does not exist.
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    A call, ``kernel(ctas, *arguments)``, takes the size of the one-dimensional grid
    (``blockIdx.x``), then the inputs, outputs and scalars in the order of the C parameters. It
    returns nothing: outputs are written in place. Arrays must be contiguous, because the kernel
    gets no strides. A grid of 0 starts nothing.

    A call raises TypeError for arguments that do not fit, ValueError for arrays that are not
    contiguous and for a source that includes a file without naming it, NotImplementedError for
    NumPy arrays outside the emulator, RuntimeError with the compiler's log for a source that does
    not compile, and on the emulator the errors that `cupyattn.emulator.checks` lists.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import cupyattn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     source = Path(folder) / "scale.cu"
    ...     _ = source.write_text('''
    ...         extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
    ...           const int i = blockIdx.x * THREADS + threadIdx.x;
    ...           if (i < n) y[i] = factor * x[i];
    ...         }''')
    ...     scale = cupyattn.Kernel(
    ...         source, inputs=["x"], outputs=["y"], threads=32,
    ...         scalars={"factor": "float32", "n": "int32"},
    ...     )
    ...     x = np.arange(5, dtype=np.float32)
    ...     y = np.empty_like(x)
    ...     with cupyattn.backend("emulator"):
    ...         scale(1, x, y, 0.5, 5)
    >>> y
    array([0. , 0.5, 1. , 1.5, 2. ], dtype=float32)
    """

    def __init__(
        self,
        source: str | PathLike[str],
        /,
        *,
        inputs: Iterable[str] = (),
        outputs: Iterable[str],
        scalars: Mapping[str, DTypeLike] = MappingProxyType({}),
        threads: int,
        shared_bytes: int = 0,
        entry: str | None = None,
        macros: Mapping[str, int | str] = MappingProxyType({}),
    ) -> None:
        path = Path(fspath(source)).resolve()
        if not path.is_file():
            raise error(
                FileNotFoundError,
                f"{path} is no file",
                "the source of a Kernel is a .cu file",
                "write it, or correct the path",
            )
        spec = KernelSpec(
            path.stem if entry is None else entry, str(path), _parameters(inputs, outputs, scalars)
        )
        self._fixes = fixes_of_results(*(each.name for each in spec.pointers if not each.const))
        self._record = record_of(*(each.name for each in spec.pointers))
        self.specialisation = Specialisation(
            spec,
            tuple(macros.items()),
            threads=_within("threads", threads, 1, _MOST_THREADS),
            shared_bytes=_within("shared_bytes", shared_bytes, 0, TURING.shared_bytes_per_cta),
        )

    def __call__(self, ctas: int, /, *arguments: Any) -> None:
        """Launch the kernel with a grid of `ctas` CTAs. The class documents the arguments."""
        spec = self.specialisation.spec
        if len(arguments) != len(spec.parameters):
            raise error(
                TypeError,
                f"{spec.entry} got {len(arguments)} arguments",
                f"it takes {', '.join(each.name for each in spec.parameters)}",
                "pass each of them, after the size of the grid",
            )
        count = len(spec.pointers)
        for pointer, array in zip(spec.pointers, arguments, strict=False):
            require_given(pointer.name, array)
        operands = adopt(self._record(*arguments[:count]), self._fixes)
        _require_addresses_to_be_enough(operands)
        device = device_of(operands)
        if device is None:
            raise error(
                NotImplementedError,
                f"{spec.entry} got NumPy arrays",
                "a kernel of your own runs on CuPy arrays, and on NumPy arrays on the emulator",
                "call it inside 'with cupyattn.backend(\"emulator\"):'",
            )
        grid = _within("ctas", ctas, 0, MAX_GRID_X)
        step = Step.of(self.specialisation, grid, range(count), *arguments[count:])
        run(device, Plan((step,), results=()), operands)

    def __repr__(self) -> str:
        return f"<Kernel {self.specialisation.label} of {self.specialisation.threads} threads>"


def _parameters(
    read: Iterable[str], written: Iterable[str], scalars: Mapping[str, DTypeLike]
) -> tuple[Parameter, ...]:
    outputs = _names("outputs", written)
    if not outputs:
        raise error(
            ValueError, "outputs is empty", "a kernel writes into an array", "name it in outputs"
        )
    by_value = [Scalar(name, np.dtype(scalars[name])) for name in _names("scalars", scalars)]
    parameters: tuple[Parameter, ...] = (
        *inputs(*_names("inputs", read)),
        *map(Pointer, outputs),
        *by_value,
    )
    names = [each.name for each in parameters]
    if len({*names}) < len(names):
        raise error(
            ValueError,
            f"the parameters are {', '.join(names)}",
            "each has a name of its own",
            "name each of them once, an array that is read and written in outputs",
        )
    return parameters


def _names(option: str, names: Iterable[str]) -> tuple[str, ...]:
    found = () if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in found):
        raise error(
            TypeError,
            f"{option} is {shown(names)}",
            "it has the names of parameters",
            f"pass for example {option}=['x']",
        )
    return found


def _within(name: str, value: object, least: int, most: int) -> int:
    allowed = f"it is {least} to {most}"
    number = integer(name, value, f"{allowed}, an integer")
    if not least <= number <= most:
        raise error(ValueError, f"{name} = {number}", allowed, "choose a number in this range")
    return number


def _require_addresses_to_be_enough(operands: Operands[Record]) -> None:
    """Raise ValueError unless the kernel can read each array from its address alone."""
    kind, names = type(operands.arrays), operands.arrays.SHOWN_AS.values()
    layouts, starts = (
        dict(zip(names, values_of(of(kind, operands.description)), strict=True))
        for of in (layouts_of, starts_of)
    )
    require_item_alignment(layouts, starts)
    for name, layout in layouts.items():
        if not is_contiguous(layout):
            raise error(
                ValueError,
                f"{name} of shape {layout.shape} has strides {layout.strides}",
                "a kernel of your own gets no strides: its arrays are contiguous in C order",
                f"pass ascontiguousarray({name}), for a result a new contiguous array",
            )
