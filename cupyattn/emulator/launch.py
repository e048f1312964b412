"""Launching kernels: arguments become the parameter buffer, then batches of blocks run.

Everything is validated first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NoReturn

import numpy as np
from numpy.typing import DTypeLike

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import LaunchError
from cupyattn.emulator.machine.batch import BlockBatch, LaunchState
from cupyattn.emulator.machine.global_memory import Argument, DeviceMemory, check_byte_order
from cupyattn.emulator.machine.races import SharedMemoryTracker
from cupyattn.emulator.module import Module
from cupyattn.emulator.program import Program
from cupyattn.emulator.ptx.architecture import SHARED_BYTES
from cupyattn.emulator.ptx.model import Function, Parameter, readable
from cupyattn.emulator.report import Report


class Struct:
    """A structure passed by value that holds pointers.

    Parameters
    ----------
    dtype : numpy.dtype
        Structured, aligned as the C structure is (``align=True``); pointers are ``uint64`` fields.
    values : mapping
        A value per field: a number, an array or `Argument` (becomes a pointer), None (null), or for
        a nested structure a tuple or ``numpy.void``. Fields left out are zero.

    Examples
    --------
    >>> import numpy as np
    >>> params = np.dtype([("x", "u8"), ("n", "i4")], align=True)
    >>> s = Struct(params, {"x": np.zeros(4, np.float32), "n": 4})
    >>> s.dtype.itemsize
    16
    """

    def __init__(self, dtype: DTypeLike, values: Mapping[str, object]) -> None:
        try:
            self.dtype = np.dtype(dtype)
        except TypeError as error:
            raise LaunchError(f"the dtype of a Struct is {dtype!r}: {error}") from None
        if self.dtype.names is None or not isinstance(values, Mapping):
            raise LaunchError(
                f"Struct got {self.dtype} and values of type {type(values).__name__}; allowed: a "
                "structured dtype and a mapping of its fields to values"
            )
        check_byte_order(self.dtype)
        unknown = set(values) - set(self.dtype.names or ())
        if unknown:
            raise LaunchError(
                f"the structure has no fields {sorted(unknown)}; it has {self.dtype.names}"
            )
        self.values = {name: self._named(name, value) for name, value in values.items()}

    def _named(self, name: str, value: object) -> object:
        """Wrap arrays that become pointers, under the name of their field."""
        is_pointer = self.dtype[name] == np.uint64
        if is_pointer and isinstance(value, np.ndarray) and value.ndim:
            return Argument(value, name)
        if isinstance(value, Argument):
            if not is_pointer:
                raise LaunchError(
                    f"field {name!r} is {self.dtype[name]}; only uint64 fields hold pointers"
                )
            return value if value.name else replace(value, name=name)
        return value

    def arrays(self) -> list[Argument]:
        """Return the arrays that the structure points to."""
        return [value for value in self.values.values() if isinstance(value, Argument)]

    def pack(self, memory: DeviceMemory) -> bytes:
        """Return the bytes of the structure."""
        record = np.zeros((), self.dtype)
        for name, value in self.values.items():
            if isinstance(value, Argument):
                record[name] = memory.address(value.array)
            elif value is not None:
                try:
                    record[name] = value
                except (TypeError, ValueError, OverflowError) as error:
                    raise LaunchError(
                        f"field {name!r} of a Struct is {self.dtype[name]}, got {value!r:.60}: "
                        f"{error}"
                    ) from None
        return record.tobytes()


def collect_arrays(
    function: Function, args: Sequence[object]
) -> tuple[list[object], list[Argument]]:
    """Check number and kind of the arguments; wrap arrays, and list all arrays.

    Raises
    ------
    LaunchError
        Wrong number, kind or size of an argument.
    """
    if len(args) != len(function.parameters):
        names = ", ".join(f"{p.name} ({p.size} bytes)" for p in function.parameters)
        raise LaunchError(
            f"{function.name} takes {len(function.parameters)} arguments, got {len(args)}; "
            f"its parameters: {names or 'none'}"
        )
    wrapped: list[object] = []
    arrays: list[Argument] = []
    for i, (parameter, value) in enumerate(zip(function.parameters, args, strict=True)):
        value = _check_argument(function, i, parameter, value)
        if isinstance(value, Argument):
            arrays.append(value)
        elif isinstance(value, Struct):
            arrays += value.arrays()
        wrapped.append(value)
    return wrapped, arrays


def _check_argument(function: Function, i: int, parameter: Parameter, value: object) -> object:
    where = f"{function.name}, argument {i} ({parameter.name}, .{parameter.type})"
    is_pointer = parameter.type in ("u64", "b64", "s64") and not parameter.is_array
    if isinstance(value, np.ndarray) and value.ndim:
        value = Argument(value, f"argument {i}")
    if value is None or isinstance(value, Argument):
        if not is_pointer:
            raise LaunchError(
                f"{where}: got {'None' if value is None else 'an array'}, but the parameter is "
                f"{parameter.size} bytes by value; pass a NumPy scalar, e.g. np.float32(x)"
            )
        if isinstance(value, Argument) and not value.name:
            value = replace(value, name=f"argument {i}")
        return value
    if isinstance(value, Struct):
        size: int = value.dtype.itemsize
    elif isinstance(value, (np.generic, np.ndarray)):
        size = value.dtype.itemsize
        check_byte_order(value.dtype)
    else:
        raise LaunchError(
            f"{where}: got {type(value).__name__}; allowed are NumPy arrays (pointers), NumPy "
            "scalars (np.int32(3), not 3), structured scalars, Struct, and None (null pointer)"
        )
    if size != parameter.size:
        raise LaunchError(
            f"{where}: got {size} bytes ({getattr(value, 'dtype', '')}), the kernel expects "
            f"{parameter.size}; convert the scalar to the kernel's type"
        )
    if isinstance(value, (np.generic, np.ndarray)) and not parameter.is_array:
        is_float = value.dtype.kind == "f"
        if (
            value.dtype.kind not in "fiub"
            or (parameter.type in ("f32", "f64") and not is_float)
            or (parameter.type[0] in "us" and is_float and parameter.size > 2)
        ):
            raise LaunchError(
                f"{where}: got {value.dtype}; convert the scalar to the kernel's type"
            )
    return value


def pack_parameters(function: Function, values: Sequence[object], memory: DeviceMemory) -> bytes:
    """Return the parameter buffer."""
    buffer = bytearray(function.parameter_bytes)
    for parameter, value in zip(function.parameters, values, strict=True):
        if value is None:
            data = bytes(parameter.size)
        elif isinstance(value, Argument):
            data = memory.address(value.array).to_bytes(8, "little")
        elif isinstance(value, Struct):
            data = value.pack(memory)
        else:
            data = np.asarray(value).tobytes()
        buffer[parameter.offset : parameter.offset + parameter.size] = data
    return bytes(buffer)


_STATIC_SHARED_LIMIT = 48 * 1024

# Lanes of a batch: enough to pay for NumPy's overhead, few enough for the caches.
_BATCH_LANES = 8192
# Bytes of race records per batch.
_TRACKER_BYTES = 32 << 20


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _three(
    value: int | Sequence[int], what: str, limits: tuple[int, int, int]
) -> tuple[int, int, int]:
    sizes = (value,) if _is_integer(value) else value
    if (
        not isinstance(sizes, (tuple, list, np.ndarray))
        or not 1 <= len(sizes) <= 3
        or not all(_is_integer(n) for n in sizes)
    ):
        raise LaunchError(
            f"{what} is {value!r:.60}; allowed: 1 to 3 integers, as 8 or (8, 4) (convert by int())"
        )
    x, y, z = (int(n) for n in (*sizes, 1, 1)[:3])
    if not all(1 <= n <= limit for n, limit in zip((x, y, z), limits, strict=True)):
        raise LaunchError(f"{what} is {(x, y, z)}; each must be at least 1 and at most {limits}")
    return x, y, z


def _check_types(
    module: object,
    entry: object,
    args: object,
    shared_bytes: object,
    checks: object,
    report: object,
) -> None:
    """Refuse arguments of other types than `launch` documents."""

    def refuse(name: str, value: object, allowed: str) -> NoReturn:
        raise LaunchError(f"{name} is {value!r:.60} ({type(value).__name__}); allowed: {allowed}")

    if not isinstance(module, Module):
        refuse("module", module, "what emulator.load(ptx) returns (emulator.run takes PTX text)")
    if not isinstance(entry, str):
        refuse("entry", entry, f"the name of a kernel as str, of {sorted(module.entries)}")
    if not isinstance(args, (tuple, list)):
        refuse("args", args, "a list or tuple with a value per kernel parameter, as [x, n]")
    if not _is_integer(shared_bytes):
        refuse("shared_bytes", shared_bytes, "a number of bytes as int")
    if checks is not None and not isinstance(checks, Checks):
        refuse("checks", checks, "Checks(), Checks.fast(), Checks.none(), or None for all checks")
    if report is not None and not isinstance(report, Report):
        refuse("report", report, "a Report() to be filled, or None")


def _check_threads(function: Function, block: tuple[int, int, int]) -> int:
    threads = block[0] * block[1] * block[2]
    if threads > 1024:
        raise LaunchError(f"a block of {block} has {threads} threads; at most 1024 are allowed")
    required = function.required_threads
    if required and required != block:
        raise LaunchError(f"{function.name} requires blocks of {required} (.reqntid), got {block}")
    most = function.max_threads
    if most and threads > most[0] * most[1] * most[2]:
        raise LaunchError(
            f"{function.name} was compiled for blocks of at most {most[0] * most[1] * most[2]} "
            f"threads (__launch_bounds__), got {threads}"
        )
    return threads


def _shared_size(program: Program, target: int, dynamic: int) -> int:
    layout = program.layout
    if dynamic < 0:
        raise LaunchError(f"shared_bytes is {dynamic}; it must not be negative")
    limit = SHARED_BYTES[target]
    total = (layout.dynamic_shared_offset + dynamic) if dynamic else layout.static_shared_bytes
    if layout.static_shared_bytes > _STATIC_SHARED_LIMIT:
        raise LaunchError(
            f"{program.name} has {layout.static_shared_bytes} bytes of static shared memory; at "
            f"most {_STATIC_SHARED_LIMIT} are allowed (make it dynamic: extern __shared__)"
        )
    if total > limit:
        raise LaunchError(
            f"{program.name} needs {total} bytes of shared memory per block (static "
            f"{layout.static_shared_bytes}, dynamic {dynamic}); sm_{target} has {limit}: use "
            "smaller tiles"
        )
    return total


def _blocks_per_batch(state: LaunchState) -> int:
    padded = -(-state.threads // 32) * 32
    blocks = max(1, _BATCH_LANES // padded)
    if state.checks.races and state.shared_bytes:
        size = SharedMemoryTracker.bytes_per_block(state.program, state.shared_bytes, padded)
        blocks = min(blocks, max(1, _TRACKER_BYTES // size))
    return blocks


def launch(
    module: Module,
    entry: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[object],
    *,
    shared_bytes: int = 0,
    checks: Checks | None = None,
    report: Report | None = None,
) -> None:
    """Run a kernel to its end.

    Blocks run in order of their index, some side by side: a block may wait (by a flag or a counter
    in global memory) for one with a lower index, as it may on a GPU. A wait for a later block may
    never end, there as here; here it is an error after `Checks.max_steps`. Accesses to global
    memory are not checked for races.

    Parameters
    ----------
    module : Module
        From `load`.
    entry : str
        Name of the kernel in the PTX (mangled, unless it is ``extern "C"``).
    grid, block : int or sequence of up to 3 int
        Number of blocks, and of threads in a block.
    args : sequence
        One value per kernel parameter. NumPy arrays (or `Argument`) are passed as pointers and
        written in place, views included; arrays that overlap share their memory. NumPy scalars and
        structured scalars are passed by value, structures that hold pointers as `Struct`, None as a
        null pointer.
    shared_bytes : int
        Dynamic shared memory per block.
    checks : Checks, optional
        What to look for; everything by default.
    report : Report, optional
        Filled with what the kernel did.

    Raises
    ------
    LaunchError
        Something about the launch is wrong; nothing has run.
    UnsupportedPTXError
        The kernel uses PTX that the emulator does not run; nothing has run.
    KernelFault
        A check failed. What the kernel had written by then stays written.
    """
    _check_types(module, entry, args, shared_bytes, checks, report)
    program = module.program(entry)
    checks = Checks() if checks is None else checks
    sizes = _three(grid, "grid", (2**31 - 1, 65535, 65535))
    block_sizes = _three(block, "block", (1024, 1024, 64))
    _check_threads(program.header, block_sizes)
    total_shared = _shared_size(program, module.target, int(shared_bytes))
    values, arrays = collect_arrays(program.header, args)
    symbols = {name: module.symbol(name) for name in program.layout.used_symbols}
    arrays += [
        Argument(memory, readable(name), const=module.is_const(name))
        for name, memory in symbols.items()
    ]
    memory = DeviceMemory(arrays)
    state = LaunchState(
        program,
        sizes,
        block_sizes,
        total_shared,
        int(shared_bytes),
        pack_parameters(program.header, values, memory),
        memory,
        symbols,
        checks,
        report,
        [None] * len(program.instructions),
        module.sources,
    )
    if report is not None:
        report.begin(program)
    blocks = sizes[0] * sizes[1] * sizes[2]
    step = _blocks_per_batch(state)
    with np.errstate(all="ignore"):
        for first in range(0, blocks, step):
            batch = BlockBatch(state, first, min(step, blocks - first))
            program.run(batch)
            batch.scheduler.barriers.check_completed()


@lru_cache(maxsize=64)
def _load_cached(ptx: str) -> Module:
    return Module(ptx)


def run(
    ptx: str,
    entry: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[object],
    *,
    shared_bytes: int = 0,
    checks: Checks | None = None,
    report: Report | None = None,
) -> Report | None:
    """Parse PTX (cached by its text) and run one of its kernels; see `launch`.

    The last 64 texts stay loaded, with their ``__device__`` variables: like a module on a GPU, a
    second `run` of the same text finds the values that the first has left there. `load` makes a
    module whose variables have their initial values.

    Returns
    -------
    Report or None
        `report`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import emulator
    >>> ptx = '''
    ... .version 8.0
    ... .target sm_75
    ... .address_size 64
    ... .visible .entry double_it(.param .u64 x)
    ... {
    ...   .reg .f32 %f<2>;
    ...   .reg .b32 %r<2>;
    ...   .reg .b64 %rd<4>;
    ...   ld.param.u64 %rd1, [x];
    ...   mov.u32 %r1, %tid.x;
    ...   mul.wide.u32 %rd2, %r1, 4;
    ...   add.s64 %rd3, %rd1, %rd2;
    ...   ld.global.f32 %f1, [%rd3];
    ...   add.f32 %f1, %f1, %f1;
    ...   st.global.f32 [%rd3], %f1;
    ...   ret;
    ... }'''
    >>> x = np.arange(4, dtype=np.float32)
    >>> emulator.run(ptx, "double_it", 1, 4, [x])
    >>> x
    array([0., 2., 4., 6.], dtype=float32)
    """
    module = _load_cached(ptx) if isinstance(ptx, str) else Module(ptx)  # which says what is wrong
    launch(
        module, entry, grid, block, args, shared_bytes=shared_bytes, checks=checks, report=report
    )
    return report
