"""The tape of `vjp`: traced arrays, the operations recorded on them, and the backward pass.

A function is called with traced arrays in place of its float arrays. Each operation on a traced
array computes its result and appends a node to the tape: the nodes that its arguments come from,
and a function from the gradient of the result to those of the arguments. The backward pass calls
these functions from the last node to the first.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cupyattn.runtime.annotations import Undescribed
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.differentiable import names
from cupyattn.runtime.errors import RefusalError, error

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")
_FAMILIES = "cupyattn.ops."
_CONSTANT = -1

Pull = Callable[..., Iterable[Undescribed]]
"""From the gradients of a node's results, None for those that are not used, to the gradients of
its differentiable arguments."""


class Spec(NamedTuple):
    """The shape and dtype that a gradient has, and the array library that it belongs to."""

    shape: tuple[int, ...]
    dtype: np.dtype
    library: ModuleType | None


class TapeNode:
    """A recorded operation, or an argument of the function.

    Attributes
    ----------
    name : str
        The operation.
    parents : tuple of (int, int)
        For each differentiable argument the number of its node, and which of the node's results.
    specs : tuple of Spec or None
        The results; None for one that the operation did not return.
    pull : callable or None
        None for an argument of the function.
    """

    __slots__ = ("name", "parents", "pull", "specs")

    def __init__(
        self,
        name: str,
        parents: tuple[tuple[int, int], ...],
        specs: tuple[Spec | None, ...],
        pull: Pull | None,
    ) -> None:
        self.name = name
        self.parents = parents
        self.specs = specs
        self.pull = pull


class Tape:
    """The operations of one call of a function."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.nodes: list[TapeNode] = []
        self.closed: str | None = None
        """Why traced arrays cannot be used now, if so."""
        self.refused: RefusalError | None = None
        """The error of an operation that has no derivative. vjp raises it even if the function
        caught it: the result would not depend on the argument as the tape says."""
        self.constant_inputs: dict[int, str] = {}
        """Arguments that were passed where the library has no gradient: how each was used."""

    def input(self, value: Undescribed) -> Traced:
        """Return a traced array for an argument of the function."""
        self.nodes.append(TapeNode("argument", (), (spec_of(value),), None))
        return Traced(value, self, len(self.nodes) - 1, 0)

    def record(
        self,
        name: str,
        operands: Sequence[Traced],
        values: Sequence[Undescribed],
        pull: Pull,
    ) -> list[Traced | None]:
        """Append an operation; return its traced results.

        `operands` are its differentiable arguments, in the order of the gradients of `pull`.
        """
        parents = tuple([(operand._node, operand._output) for operand in operands])
        specs = tuple([None if value is None else spec_of(value) for value in values])
        self.nodes.append(TapeNode(name, parents, specs, pull))
        number = len(self.nodes) - 1
        return [
            None if value is None else Traced(value, self, number, output)
            for output, value in enumerate(values)
        ]

    def refuse(self, did: str, fix: str) -> RefusalError:
        """Return the error for what cannot be differentiated, with the line of the caller."""
        self.refused = error(
            RefusalError,
            f"vjp of {self.title}, which {did}{_location()}",
            "a function is made of the library's differentiable functions and of the array "
            "operations of cupyattn.autodiff",
            fix,
        )
        return self.refused

    def require_open(self) -> None:
        """Raise an error if the function has returned, or calls a function that is not traced."""
        if self.closed is not None:
            raise self.refuse(
                f"uses a traced array {self.closed}",
                "return the array from the function, or pass it as an argument",
            )


class Traced:
    """An array within a function that is differentiated.

    It has the shape, the dtype and the operations of an array, not its values.
    """

    __slots__ = ("_node", "_output", "_tape", "_value")
    __array_priority__ = 1e6  # CuPy then leaves its operators to this class

    def __init__(self, value: Undescribed, tape: Tape, node: int, output: int) -> None:
        self._value = value
        self._tape = tape
        self._node = node
        self._output = output

    def __repr__(self) -> str:
        kind = "constant" if self._node == _CONSTANT else "traced array"
        return f"<{kind} {self.shape} {self.dtype} of {self._tape.title}>"

    def __getattr__(self, name: str) -> Any:
        if name in _PROTOCOLS or hasattr(type(self._value), name):
            raise refusal_of_values(self, name)
        raise AttributeError(f"a traced array has no attribute {name!r}")

    @property  # type: ignore[misc]  # isinstance(x, numpy.ndarray) holds; CuPy's operators would
    def __class__(self) -> type:  # take the like for one of its arrays
        return type(self._value) if library_of(self._value) is np else Traced

    __hash__ = object.__hash__


_PROTOCOLS = frozenset(
    (
        *("__array__", "__array_interface__", "__array_struct__", "__buffer__", "__dlpack__"),
        *("__dlpack_device__", "__cuda_array_interface__", "data", "strides", "flags", "device"),
        *("item", "tolist", "get"),
    )
)
for _name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize"):
    setattr(Traced, _name, property(attrgetter(f"_value.{_name}")))


def is_traced(value: object) -> bool:
    """Tell whether a value is a traced array, also one that is constant."""
    return type(value) is Traced


def is_differentiable(value: object) -> bool:
    """Tell whether a value is a traced array that depends on the function's arguments."""
    return type(value) is Traced and value._node != _CONSTANT


def raw(value: Undescribed) -> Undescribed:
    """Return the array of a traced array; other values are unchanged."""
    return value._value if type(value) is Traced else value


def constant(value: Undescribed, tape: Tape) -> Traced:
    """Return a traced array without a gradient."""
    return Traced(value, tape, _CONSTANT, 0)


def tape_of(values: Iterable[object]) -> Tape | None:
    """Return the tape of the traced arrays among values; None without any.

    Raises
    ------
    RefusalError
        If it is closed, or the arrays are of two tapes.
    """
    found: Tape | None = None
    for value in values:
        if type(value) is Traced:
            tape = value._tape
            if tape is found:
                continue
            tape.require_open()
            if found is not None:
                raise tape.refuse(
                    f"mixes traced arrays of two vjp ({found.title} and {tape.title})",
                    "pass the array of the outer function to the inner one as an argument",
                )
            found = tape
    return found


_libraries: dict[type, ModuleType | None] = {np.ndarray: np}
"""The array library of each type that was met."""


def library_of(value: Undescribed) -> ModuleType | None:
    """Return the array library of a value: NumPy, CuPy, or None for another."""
    kind = type(value)
    try:
        return _libraries[kind]
    except KeyError:
        found: ModuleType | None = None
        if issubclass(kind, np.ndarray | np.generic):
            found = np
        elif kind.__module__.partition(".")[0] == "cupy":
            found = load_cupy()
        _libraries[kind] = found
        return found


def is_float(dtype: Undescribed) -> bool:
    """Tell whether arrays of a dtype have gradients."""
    kind = getattr(dtype, "kind", "")
    return kind == "f" or (kind == "V" and dtype.name == "bfloat16")


def spec_of(value: Undescribed) -> Spec:
    """Describe an array."""
    return Spec(value.shape, value.dtype, library_of(value))


def zeros(spec: Spec, like: Undescribed = None) -> Undescribed:
    """Return zeros of a description."""
    library = spec.library or library_of(like) or np
    return library.zeros(spec.shape, spec.dtype)


def narrow(dtype: np.dtype) -> bool:
    """Tell whether sums of a dtype are formed in float32."""
    return dtype.itemsize == 2


def summed(gradient: Undescribed, shape: tuple[int, ...]) -> Undescribed:
    """Sum a gradient over broadcast axes, in float32 if its dtype has 16 bits."""
    if gradient.shape != shape:
        extra = gradient.ndim - len(shape)
        axes = tuple(range(extra)) + tuple(
            extra + axis
            for axis, (had, got) in enumerate(zip(shape, gradient.shape[extra:], strict=True))
            if had == 1 != got
        )
        wide = np.float32 if narrow(gradient.dtype) else gradient.dtype
        gradient = gradient.sum(axis=axes, dtype=wide).reshape(shape)
    return gradient


def fitted(gradient: Undescribed, spec: Spec) -> Undescribed:
    """Sum a gradient over broadcast axes; give it the dtype of the array that it belongs to."""
    gradient = summed(gradient, spec.shape)
    return gradient if gradient.dtype == spec.dtype else gradient.astype(spec.dtype)


class PartialGradient(NamedTuple):
    """A gradient of the elements that a key selects, each once; it is 0 elsewhere."""

    key: Undescribed
    gradient: Undescribed


def _assembled(parts: Sequence[PartialGradient], spec: Spec | None) -> Undescribed:
    """Return the sum of parts."""
    assert spec is not None
    assert spec.library is not None
    if _cover(parts, spec.shape):
        whole = spec.library.empty(spec.shape, spec.dtype)
        for key, gradient in parts:
            whole[key] = gradient
        return whole
    wide = np.float32 if narrow(spec.dtype) and len(parts) > 1 else spec.dtype
    whole = spec.library.zeros(spec.shape, wide)
    for number, (key, gradient) in enumerate(parts):
        if number:
            whole[key] += gradient
        else:
            whole[key] = gradient
    return whole


def _cover(parts: Sequence[PartialGradient], shape: tuple[int, ...]) -> bool:
    """Tell whether parts are slices along one axis that fill an array without overlaps."""
    found: list[tuple[int, int]] = []
    axes = set()
    for key, _ in parts:
        keys = key if isinstance(key, tuple) else (key,)
        cut = [n for n, each in enumerate(keys) if each != slice(None)] if _plain(keys) else []
        if len(cut) != 1:
            return False
        start, stop, step = keys[cut[0]].indices(shape[cut[0]])
        if step != 1:
            return False
        axes.add(cut[0])
        found.append((start, stop))
    if len(axes) != 1:
        return False
    found.sort()
    ends = [0, *(stop for _, stop in found)]
    return [start for start, _ in found] == ends[:-1] and ends[-1] == shape[axes.pop()]


def _plain(keys: tuple[object, ...]) -> bool:
    return all(type(each) is slice for each in keys)


def pull_back(
    nodes: Sequence[TapeNode],
    seeds: Iterable[tuple[int, int, Undescribed]],
    inputs: int,
    options: Mapping[str, object] | None = None,
) -> list[Undescribed]:
    """Return the gradients of the first nodes, the arguments; None for those that are not used.

    Contributions to one array are added in the order of the tape, from its end. Those of 16-bit
    arrays are added in float32 and rounded once.

    Parameters
    ----------
    nodes
        The tape.
    seeds
        Gradients of results: the node, which of its results, and the gradient.
    inputs
        The number of arguments.
    options
        Options of the backward, where the tape is one call of the library.
    """
    waiting: list[dict[int, Undescribed] | None] = [None] * len(nodes)

    def add(number: int, output: int, gradient: Undescribed) -> None:
        slots = waiting[number]
        if slots is None:
            slots = waiting[number] = {}
        before = slots.get(output)
        if type(gradient) is PartialGradient and type(before) in (list, type(None)):
            slots[output] = [*(before or ()), gradient]
            return
        spec = nodes[number].specs[output]
        if type(gradient) is PartialGradient:
            gradient = _assembled([gradient], spec)
        if type(before) is list:
            before = _assembled(before, spec)
        if before is None or gradient is None:
            slots[output] = gradient if before is None else before
            return
        assert spec is not None
        if before.shape != gradient.shape:
            before, gradient = summed(before, spec.shape), summed(gradient, spec.shape)
        if narrow(before.dtype):
            before = before.astype(np.float32)
        slots[output] = before + gradient

    def taken(number: int) -> list[Undescribed] | None:
        slots, waiting[number] = waiting[number], None
        if slots is None:
            return None
        specs = nodes[number].specs
        found: list[Undescribed] = []
        for output, spec in enumerate(specs):
            gradient = slots.get(output)
            if type(gradient) is list:
                gradient = _assembled(gradient, spec)
            found.append(None if gradient is None or spec is None else fitted(gradient, spec))
        return found

    for seed in seeds:
        add(*seed)
    for number in range(len(nodes) - 1, inputs - 1, -1):
        gradients = taken(number)
        if gradients is None:
            continue
        node = nodes[number]
        assert node.pull is not None
        parts = node.pull(gradients, options) if options else node.pull(gradients)
        for parent, gradient in zip(node.parents, parts, strict=True):
            if gradient is not None:
                add(*parent, gradient)
    found = [taken(number) for number in range(inputs)]
    return [None if gradients is None else gradients[0] for gradients in found]


def refusal_of_values(traced: Traced, did: str) -> RefusalError:
    """Return the error for what needs the values of a traced array."""
    name = _function_without_backward()
    if name is not None:
        return traced._tape.refuse(
            f"calls {name}, which has no backward,",
            "call it outside of the function",
        )
    return traced._tape.refuse(
        f"needs the values of a traced array ({did})",
        "compute it outside of the function; for CuPy arrays use the functions of "
        "cupyattn.autodiff",
    )


def refuses_values(did: str) -> Callable[..., NoReturn]:
    """Make a method that raises `refusal_of_values`."""

    def method(self: Traced, *_: object, **__: object) -> NoReturn:
        raise refusal_of_values(self, did)

    return method


def _function_without_backward() -> str | None:
    """Return the outermost library function on the stack, if it has no backward."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__", "").startswith(_FAMILIES) and name in frame.f_globals:
            found = name
        frame = frame.f_back  # type: ignore[assignment]
    return None if found in names else found


def _is_library(file: str) -> bool:
    """Tell whether a file belongs to this package or to the standard library."""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return file.startswith((_PACKAGE, "<frozen")) or standard


def _location() -> str:
    """Return the line of the caller: the first one outside of this package and array libraries."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        library = frame.f_globals.get("__name__", "").partition(".")[0]
        if not _is_library(file) and library not in ("numpy", "cupy"):
            return f" ({Path(file).name}, line {frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each leaf of tuples, lists, dictionaries and NamedTuples."""
    if isinstance(tree, dict):
        return {name: tree_map(function, item) for name, item in tree.items()}
    if isinstance(tree, tuple) and not is_traced(tree):
        items = [tree_map(function, item) for item in tree]
        return tree._make(items) if hasattr(tree, "_make") else tuple(items)
    if isinstance(tree, list):
        return [tree_map(function, item) for item in tree]
    return function(tree)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a structure, in its order."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def rebuilt(tree: Any, values: Iterable[Any]) -> Any:
    """Return a structure with other leaves."""
    waiting = iter(values)
    return tree_map(lambda _: next(waiting), tree)


def leaves_like(tree: Any, other: Any) -> list[Any]:
    """Return what another structure has at each leaf of a structure; None where it has None."""
    if other is None:
        return [None for _ in leaves(tree)]
    if isinstance(tree, dict):
        return [leaf for name, item in tree.items() for leaf in leaves_like(item, other[name])]
    if isinstance(tree, tuple | list):
        pairs = zip(tree, other, strict=True)
        return [leaf for item, same in pairs for leaf in leaves_like(item, same)]
    return [other]


def dense(gradient: Undescribed, axis: int = -1) -> Undescribed:
    """Copy a gradient that is broadcast, or not contiguous along an axis: kernels refuse it."""
    if gradient is None or not gradient.ndim:
        return gradient
    pairs = zip(gradient.shape, gradient.strides, strict=True)
    repeats = any(extent > 1 and not stride for extent, stride in pairs)
    jumps = gradient.shape[axis] > 1 and gradient.strides[axis] != gradient.itemsize
    if not (repeats or jumps):
        return gradient
    return gradient.swapaxes(axis, -1).copy(order="C").swapaxes(axis, -1)


def contiguous_axis(array: Undescribed) -> int:
    """Return the axis along which the items of an array are adjacent, by default the last."""
    if array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize:
        for axis, stride in enumerate(array.strides):
            if stride == array.dtype.itemsize and array.shape[axis] > 1:
                return axis
    return -1
