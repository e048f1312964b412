"""`Kernel`: kernels of users, compiled, cached, checked and launched like those of the library."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import (
    Description,
    Layout,
    adopt,
    dtype_of,
    is_contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import (
    fixes_of_results,
    integer,
    require_given,
    require_item_alignment,
    require_writable,
)
from cupyattn.runtime.errors import error, made_beforehand, shown
from cupyattn.runtime.plan import MAX_GRID_X, Plan, Step, run
from cupyattn.runtime.records import record_of, values_of
from cupyattn.runtime.source import bytes_of, path_of_text, read_unit
from cupyattn.runtime.spec import KernelSpec, Parameter, Pointer, Scalar, Specialisation, inputs

_MOST_THREADS = 1024  # of a CTA, on any GPU
_OWN_MACROS = {"THREADS", "SHARED_BYTES", "BFLOAT16"}  # of `Specialisation.defines`


class Kernel:
    """A CUDA kernel of your own, which runs where the library's kernels run.

    With CuPy arrays it runs on their GPU, on the current stream. With NumPy arrays it runs inside
    ``with backend("emulator")``, with every check of `cupyattn.emulator`. It is compiled at its
    first call and cached on disk.

    Parameters
    ----------
    source : str or path-like
        The CUDA source itself, a string with a line break or ``__global__``, or the path of a
        ``.cu`` file. Included files are searched in the folder of the file and in this library's
        CUDA sources (``#include "common/reduce.cuh"``). The kernel is recompiled when any of these
        files changes, so every include has to name its file: ``#include MACRO``, ``#include_next``
        and ``__has_include`` are rejected.
    inputs : iterable of str
        The names of parameters that are arrays to read, ``const T*``. They come first.
    outputs : iterable of str
        The names of parameters that are arrays to write, ``T*``; the kernel may also read them.
        They come next.
    scalars : mapping of str to dtype
        The names of parameters that are numbers, with their dtypes. They come last. All names and
        their order are those of the source.
    threads : int
        Threads of a CTA (cooperative thread array, CUDA's thread block), 1 to 1024: ``blockDim.x``.
    shared_bytes : int
        Dynamic shared memory of a CTA in bytes, up to 65,536.
    entry : str, optional
        The ``extern "C" __global__`` function. The default is the name of the file; of a string,
        its only ``__global__`` function.
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
        If an argument is not as described, or the source declares other parameters: other names,
        another order, a number where an array was named, or another dtype of a number.

    Notes
    -----
    A call, ``kernel(ctas, *arguments)``, takes the size of the one-dimensional grid
    (``blockIdx.x``), then the inputs, outputs and scalars in the order of the C parameters. It
    returns nothing: outputs are written in place. Arrays must be contiguous, because the kernel
    gets no strides. A grid of 0 starts nothing.

    Parameters are compared with the declaration in the source. Pointers to a C type that is not
    known there (``void``, a vector such as ``float4``, a type of another header) are not compared:
    such a kernel takes arrays of any dtype. To pass an array to a pointer of another type, pass
    ``x.view(dtype)``.

    A call raises TypeError for arguments that do not fit, also for an array of another dtype than
    the source declares, ValueError for numbers beyond their dtype, for arrays that are not
    contiguous or writable, and for a source that includes a file without naming it,
    NotImplementedError for NumPy arrays outside the emulator,
    RuntimeError with the compiler's log for a source that does not compile, and on the emulator the
    errors that `cupyattn.emulator.checks` lists.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> scale = cupyattn.Kernel(
    ...     '''
    ...     extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
    ...       const int i = blockIdx.x * THREADS + threadIdx.x;
    ...       if (i < n) y[i] = factor * x[i];
    ...     }
    ...     ''',
    ...     inputs=["x"], outputs=["y"], scalars={"factor": "float32", "n": "int32"}, threads=32,
    ... )
    >>> x = np.arange(5, dtype=np.float32)
    >>> y = np.empty_like(x)
    >>> with cupyattn.backend("emulator"):
    ...     scale(1, x, y, 0.5, 5)
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
        _require_mapping("scalars", scalars, "the names of numbers to dtypes")
        _require_mapping("macros", macros, "names to values")
        path = _path_of(source, None if entry is None else _entry(entry))
        parameters = _parameters(inputs, outputs, scalars)
        spec = KernelSpec(_entry(entry or path.stem), str(path), parameters)
        self._declared = _require_declared(spec, path, macros)
        self._fixes = fixes_of_results(*(each.name for each in spec.pointers if not each.const))
        self._record: Any = record_of(*(each.name for each in spec.pointers))
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
            if not pointer.const:
                require_writable(pointer.name, array)
        operands = adopt(self._record(*arguments[:count]), self._fixes)
        _check_arrays(self, operands.description)
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


def _path_of(source: str | PathLike[str], entry: str | None) -> Path:
    """Return the path of a source: of its file, or one that is used for its text."""
    if isinstance(source, str) and ("\n" in source or "__global__" in source):
        names = dict.fromkeys(each.name for each in _declarations(_plain(source.encode())))
        if entry is None and len(names) != 1:
            raise error(
                ValueError,
                f"the __global__ functions of the source are {', '.join(names) or 'none'}",
                "a Kernel is one of them",
                "pass its name as entry=",
            )
        return path_of_text(entry or next(iter(names)), source)
    named = fspath(source) if isinstance(source, str | PathLike) else source
    if not isinstance(named, str):
        raise error(
            TypeError,
            f"the source has type {type(named).__name__}",
            "it is a path, or a string of CUDA C++",
            "decode it with .decode()" if isinstance(named, bytes) else "pass one of these",
        )
    passed = shown(named)
    with suppress(OSError, ValueError):  # a name that is too long, or has a null character
        path = Path(named).resolve()
        if path.is_file():
            return path
        passed = str(path)
    what = "neither a file nor a source with __global__" if named is source else "no file"
    raise error(
        FileNotFoundError,
        f"{passed} is {what}",
        "the source of a Kernel is a .cu file, or a string of CUDA C++",
        "write it, or correct the path",
    )


def _require_mapping(option: str, value: object, allowed: str) -> None:
    if not isinstance(value, Mapping):
        passed = f"{option} is {shown(value)}"
        raise error(TypeError, passed, f"it maps {allowed}", "pass a dict of them")
    for name in _OWN_MACROS & value.keys():
        allowed = "a Kernel sets THREADS, SHARED_BYTES and BFLOAT16 itself"
        fix = "pass threads= or shared_bytes=, or choose another name"
        raise error(ValueError, f"{option} has {name}", allowed, fix)


def _entry(entry: str) -> str:
    if isinstance(entry, str) and entry.isidentifier():
        return entry
    raise error(
        ValueError if isinstance(entry, str) else TypeError,
        f"the entry is {shown(entry)}",
        "it is the name of a __global__ function, by default the name of the file",
        "pass its name as entry=",
    )


def _parameters(
    read: Iterable[str], written: Iterable[str], scalars: Mapping[str, DTypeLike]
) -> tuple[Parameter, ...]:
    outputs = _names("outputs", written)
    if not outputs:
        raise error(
            ValueError, "outputs is empty", "a kernel writes into an array", "name it in outputs"
        )
    by_value = [_scalar(name, scalars[name]) for name in _names("scalars", scalars)]
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


def _scalar(name: str, dtype: DTypeLike) -> Scalar:
    with suppress(TypeError, ValueError):
        found = np.dtype(dtype_of(dtype) if isinstance(dtype, str) else dtype)
        is_number = found.kind in "biufc" or (found.kind == "V" and found.type is not np.void)
        if dtype is not None and is_number:  # NumPy takes None for float64
            return Scalar(name, found, "pass a number in this range, or declare a wider type")
    raise error(
        TypeError,
        f"the dtype of {name} is {shown(dtype)}",
        "a scalar has the dtype of a number",
        f"pass for example scalars={{{name!r}: 'int32'}}",
    )


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


@lru_cache(maxsize=4096)
def _check_arrays(kernel: Kernel, description: Description) -> None:
    """Raise unless arrays have the declared dtypes, and the kernel needs only their addresses."""
    kind = kernel._record
    names = kind.SHOWN_AS.values()
    layouts, starts = (
        dict(zip(names, values_of(of(kind, description)), strict=True))
        for of in (layouts_of, starts_of)
    )
    for pointer, declared in zip(
        kernel.specialisation.spec.pointers, kernel._declared, strict=False
    ):
        if declared is not None and _differs(declared, layouts[pointer.name].dtype):
            raise _wrong_dtype(pointer, declared, layouts[pointer.name])
    require_item_alignment(layouts, starts)
    for name, layout in layouts.items():
        if not is_contiguous(layout):
            raise error(
                ValueError,
                f"{name} of shape {layout.shape} has strides {layout.strides}",
                "a kernel of your own gets no strides: its arrays are contiguous in C order",
                f"pass ascontiguousarray({name}), for a result a new contiguous array",
            )


def _differs(declared: _Declared, dtype: np.dtype) -> bool:
    return declared.dtype is not None and declared.dtype != dtype  # in NumPy float64 equals None


def _wrong_dtype(pointer: Pointer, declared: _Declared, layout: Layout) -> TypeError:
    name, dtype = pointer.name, declared.dtype
    assert dtype is not None
    return error(
        TypeError,
        f"{name} has dtype {layout.dtype_text}",
        f"the source declares {declared.text}, items of {dtype.name}",
        f"convert it, {name}.astype({dtype.name!r}); to read the same bytes as that dtype, pass "
        f"{name}.view({dtype.name!r})"
        if pointer.const
        else made_beforehand(name),
    )


class _Declared(NamedTuple):
    """A parameter as the source declares it."""

    text: str
    name: str | None
    dtype: np.dtype | None
    """The dtype of the number or of the items; None for a type that is not known here."""
    is_pointer: bool | None
    """None where the type may be another name of a pointer."""
    is_const: bool


_NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'", re.DOTALL
)
_QUALIFIERS = re.compile(
    r"\b(__restrict__|__restrict|restrict|volatile|register|__grid_constant__|struct|std\s*::)"
)
_ATTRIBUTE = re.compile(r"\[\s*\[.*?\]\s*\]", re.DOTALL)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([^\n]*)$", re.MULTILINE)
_ALIAS = re.compile(r"\b(?:using\s+(\w+)\s*=\s*([^;{}]*)|typedef\s+([^;{}]*?)\b(\w+)\s*);|([{}])")
_BRACE = re.compile(r'(extern\s*"C"\s*)?\{|\}')
_BEFORE = re.compile(r"[;{}]|^[ \t]*#[^\n]*\n", re.MULTILINE)
"""The end of another declaration, or a line for the preprocessor."""
_NOT_NAMES = {"__launch_bounds__", "__attribute__", "__declspec", "alignas", "__cluster_dims__"}
_ITEMS = {
    **{name: name for name in ("bool", "float16", "bfloat16", "int64", "uint64")},
    **{f"{kind}{bits}_t": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{"float": "float32", "double": "float64", "__half": "float16", "half": "float16"},
    **{"__nv_bfloat16": "bfloat16", "nv_bfloat16": "bfloat16", "size_t": "uint64"},
    **{"uchar": "uint8", "ushort": "uint16", "uint": "uint32"},
}
"""The dtypes of C types, those of the library's headers among them."""
_CLOSING = {")": "(", ">": "<", "]": "[", "}": "{"}
_NO_NAMES = {"*", "const", "float", "double", "bool", "signed", "unsigned", "char", "int", "long"}
_INTEGER_WORDS = {"signed", "unsigned", "char", "short", "int", "long"}


def _plain(source: bytes) -> str:
    """Return a source without comments, attributes and quotes but "C", and with joined lines."""
    joined = re.sub(r"\\\r?\n", "", source.decode(errors="replace"))
    plain = _NOT_CODE.sub(lambda found: found[0] if found[0] == '"C"' else " ", joined)
    return _ATTRIBUTE.sub(" ", plain)


class _Declaration(NamedTuple):
    """A ``__global__`` function; `text` has its parameters. See `_is_mangled`."""

    name: str
    text: str
    is_mangled: bool


def _is_mangled(plain: str, start: int) -> bool:
    """Tell whether the function with ``__global__`` at `start` is sure not to be extern "C"."""
    if re.search(r"#[^\n]*\bextern\b", plain):  # a macro may have it
        return False
    opened: list[bool] = []
    for brace in _BRACE.finditer(plain, 0, start):
        if brace[0] != "}":
            opened.append(brace[1] is not None)
        elif opened:
            opened.pop()
    head = _BEFORE.split(plain[:start])[-1].split()
    return not any(opened) and {"static", "void"}.issuperset(head)


def _declarations(plain: str) -> Iterator[_Declaration]:
    """Yield each ``__global__`` function."""
    for match in re.finditer(r"\b__global__\b", plain):
        found, start = None, match.end()
        while (opened := re.compile(r"[({;]").search(plain, start)) and opened[0] == "(":
            stop = _closing(plain, opened.end())
            name = re.search(r"(\w+)\s*$", plain[start : opened.start()])
            if name is not None and name[1] not in _NOT_NAMES:
                text = plain[opened.end() : stop]
                found = _Declaration(name[1], text, _is_mangled(plain, match.start()))
            start = stop + 1
        if found is not None:
            yield found


def _closing(plain: str, start: int) -> int:
    """Return where the parenthesis closes that was opened before `start`."""
    depth = 1
    for match in re.compile(r"[()]").finditer(plain, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(plain)


def _require_declared(
    spec: KernelSpec, path: Path, macros: Mapping[str, int | str]
) -> tuple[_Declared | None, ...]:
    """Raise unless the source, or a file that it includes, declares the parameters so.

    Return the declarations; None where there is none to read, for example from a macro.
    """
    plain = _plain(bytes_of(path))
    own = [each for each in _declarations(plain) if each.name == spec.entry]
    if own and all(each.is_mangled for each in own):
        raise error(
            ValueError,
            f'the source declares __global__ void {spec.entry}(...) without extern "C"',
            "a Kernel is found by its name, which C++ changes",
            f'write extern "C" __global__ void {spec.entry}(...)',
        )
    if not own:
        with suppress(OSError, ValueError):  # the first call reports what cannot be read
            plain = "\n".join(map(_plain, read_unit(path).texts.values()))
    texts = sorted({each.text for each in _declarations(plain) if each.name == spec.entry})
    if not texts or any("#" in text for text in texts):
        return (None,) * len(spec.parameters)
    types = _types(plain, macros)
    all_declared = [tuple(_parameter(each, types) for each in _split(text)) for text in texts]
    differences = [_difference(spec, declared) for declared in all_declared]
    fitting = [each for each, found in zip(all_declared, differences, strict=True) if found is None]
    if not fitting:
        assert differences[0] is not None
        raise differences[0]
    # Of several, such as those of #if and #else, dtypes that differ are not compared.
    return tuple(
        each[0] if len({str(one.dtype) for one in each}) == 1 else None
        for each in zip(*fitting, strict=True)
    )


def _types(plain: str, macros: Mapping[str, int | str]) -> dict[str, str]:
    """Return the types that the source or the caller gives another name, each with one meaning."""
    found: dict[str, set[str]] = {}
    aliases, depth = [], 0
    for a, b, c, d, brace in _ALIAS.findall(plain):
        depth = max(depth + (brace == "{") - (brace == "}"), 0)
        # A name within braces belongs to a namespace or class, and is not known here.
        aliases += [] if brace else [(a or d, "?" if depth else b or c)]
    for name, meaning in (*_DEFINE.findall(plain), *aliases):
        found.setdefault(name, set()).add(meaning.strip())
    # A name with several meanings depends on conditions, and is not known here.
    types = {
        name: meanings.pop() if len(meanings) == 1 else "?" for name, meanings in found.items()
    }
    return types | {name: str(value) for name, value in macros.items()}


def _split(text: str) -> list[str]:
    """Return the texts of the parameters, without their default values."""
    parts, opened, is_default = [""], "", False
    for word in re.findall(r"<<|<=|>=|->|.", text, re.DOTALL):
        if word in _CLOSING:
            start = opened.rfind(_CLOSING[word])
            # > is an operator unless it closes <, and < is one if another bracket closes first.
            if start >= 0 and (word != ">" or start == len(opened) - 1):
                opened = opened[:start]
        elif word in "(<[{":
            opened += word
        if word == "," and not opened:
            parts.append("")
            is_default = False
        elif word == "=" and not opened:
            is_default = True
        elif not is_default:
            parts[-1] += word
    found = [" ".join(part.split()) for part in parts]
    return [] if found in ([""], ["void"]) else found


def _parameter(text: str, types: Mapping[str, str]) -> _Declared:
    plain = _QUALIFIERS.sub(" ", text)
    if re.search(r"[^\w\s*\[\]]", plain):  # a template, a reference, a macro with arguments
        name = re.search(r"(\w+)\s*$", plain)
        return _Declared(text, name and name[1], None, None, False)
    words = re.findall(r"\w+|\*", re.sub(r"\[[^\]]*\]\s*$", "", plain))
    # The last word is the name, unless it belongs to the type of a parameter without one.
    named = len([word for word in words if word != "const"]) > 1 and words[-1] not in _NO_NAMES
    name = words[-1] if named else None
    kind = words[: len(words) - named]
    is_pointer = "*" in kind or "[" in plain
    kind = kind[: kind.index("*")] if "*" in kind else kind
    resolved = _resolved(tuple(word for word in kind if word != "const"), types)
    dtype = None if "**" in "".join(words) else _dtype(resolved)
    known = dtype is not None or is_pointer
    return _Declared(text, name, dtype, is_pointer if known else None, "const" in kind)


def _resolved(words: tuple[str, ...], types: Mapping[str, str]) -> tuple[str, ...]:
    for _ in range(8):  # names of names; a circle ends
        if len(words) != 1 or words[0] not in types:
            break
        words = tuple(re.findall(r"\w+|\W", _QUALIFIERS.sub("", types[words[0]]).strip()))
        words = tuple(word for word in words if word.strip() and word != "const")
    return words


def _dtype(words: tuple[str, ...]) -> np.dtype | None:
    """Return the dtype of a C type; None for one that is not known."""
    if len(words) == 1 and words[0] in _ITEMS:
        return dtype_of(_ITEMS[words[0]])
    if not words or not _INTEGER_WORDS.issuperset(words) or words == ("char",):
        return None  # char: bytes of anything
    kind = "u" if "unsigned" in words else ""
    if "char" in words:
        return np.dtype(f"{kind}int8")
    if "short" in words:
        return np.dtype(f"{kind}int16")
    if words.count("long") == 1:  # 4 bytes on Windows
        return np.dtype(f"{kind}int{8 * ctypes.sizeof(ctypes.c_long)}")
    return np.dtype(f"{kind}int{64 if 'long' in words else 32}")


def _difference(spec: KernelSpec, declared: tuple[_Declared, ...]) -> Exception | None:
    """Return what to raise where a declaration has other parameters than the kernel was given."""
    given = spec.parameters
    names = [each.name for each in given]
    if len(given) != len(declared) or any(
        theirs.name not in (None, name) for name, theirs in zip(names, declared, strict=True)
    ):
        return error(
            ValueError,
            f"the parameters of {spec.entry} were given as {', '.join(names)}",
            f"the source declares {', '.join(each.text for each in declared) or 'none'}",
            "name all parameters of the source in its order: inputs, outputs, scalars",
        )
    for ours, theirs in zip(given, declared, strict=True):
        is_array = isinstance(ours, Pointer)
        if theirs.is_pointer is not None and theirs.is_pointer != is_array:
            return error(
                ValueError,
                f"{ours.name} is among the {'arrays' if is_array else 'scalars'}",
                f"the source declares {theirs.text}",
                "name it in scalars, with its dtype"
                if is_array
                else "name it in inputs or outputs",
            )
        if isinstance(ours, Pointer) and theirs.is_const and not ours.const:
            return error(
                ValueError,
                f"{ours.name} is among the outputs",
                f"the source declares {theirs.text}, which is not written",
                "name it in inputs, or declare it without const",
            )
        if isinstance(ours, Scalar) and _differs(theirs, ours.dtype):
            assert theirs.dtype is not None
            return error(
                TypeError,
                f"{ours.name} is a scalar of dtype {ours.dtype.name}",
                f"the source declares {theirs.text}, a number of {theirs.dtype.name}",
                f"give it that dtype, {ours.name!r}: {theirs.dtype.name!r}",
            )
    return None
