"""The header and the parameters that a user's expressions add to the kernels of attention.

`cuda_src/attention/modifiers.cuh` says how kernels take them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cupyattn.runtime.source import NAMED
from cupyattn.runtime.spec import KernelSpec, Parameter, Pointer, StructParameter
from cupyattn.runtime.tables import cpp_bool

SCORE_NAMES = ("score", "b", "h", "q_idx", "k_idx")
"""The names that an expression for a score may use besides its arrays."""
GRADIENT_NAMES = ("score", "grad", "b", "h", "q_idx", "k_idx")
"""The names that an expression for a gradient may use."""
MASK_NAMES = ("b", "h", "q_idx", "k_idx")
"""The names that an expression for a mask may use."""
TAKEN_NAMES = (*GRADIENT_NAMES, "INFINITY", "NAN")
"""Names that no array can have; `modifiers.cuh` defines the last two."""
CPP_WORDS = """
    alignas alignof and_eq asm auto bitand bitor bool case catch char char16_t char32_t compl
    const const_cast constexpr decltype default delete do double dynamic_cast enum explicit
    export extern false float friend goto inline int long mutable namespace new noexcept not_eq
    nullptr operator or_eq private protected public register reinterpret_cast short signed
    sizeof static static_assert static_cast struct switch template this thread_local throw true
    typedef typeid typename union unsigned using virtual void volatile wchar_t xor xor_eq
"""
"""The words of C++ that are not Python's as well: no array can have one as its name."""
TEXT_NAMES = {"score": "score_mod", "gradient": "score_mod's gradient", "mask": "mask_mod"}
"""The name of each expression in compiler messages and errors."""
ARRAYS, RESULT, END = " (arrays)", " (result)", " (end)"
"""The ends of those names for the lines before an expression and after it."""
ITEMS = {
    "float16": "float16",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "bool": "bool",
    "uint8": "unsigned char",
    "int32": "int",
    "int64": "int64",
}
"""The dtypes of arrays that expressions name, as C++ names them."""

_HEADER = "cupyattn/modifiers"  # as modifiers.cuh includes it
_BEFORE = ("alibi_slopes", "tiles")  # the parameters before the arrays
_BLOCK_AXES = 4  # batch elements and heads; queries and keys


class ModifierArray(NamedTuple):
    """An array that an expression names."""

    name: str
    dtype: str
    axes: int


class BlockArray(NamedTuple):
    """The array that a kernel reads of a block mask."""

    name: str
    item: str
    struct: str


BLOCK_LISTS = BlockArray("block_lists", "uint2", "BlockLists")
"""The tiles that each CTA visits, for kernels that loop over tiles."""
BLOCK_STATES = BlockArray("block_mask", "unsigned char", "BlockStates")
"""The state of each tile, for a kernel whose CTAs have one tile."""


class Modifier(NamedTuple):
    """A score_mod or a mask_mod as kernels have it."""

    expression: str
    gradient: str | None
    """The derivative, of a score_mod that is differentiated."""
    arrays: tuple[ModifierArray, ...]


class Modifiers(NamedTuple):
    """The expressions of a call; at least one is there."""

    score: Modifier | None
    mask: Modifier | None
    blocks: BlockArray | None = None
    """The tiles that a mask leaves, for kernels that read them."""

    @property
    def parameters(self) -> tuple[tuple[str, ModifierArray], ...]:
        """The arrays of both, each with the name that its parameter has."""
        return tuple(
            (parameter_name(option, array.name), array)
            for option, modifier in (("score_mod", self.score), ("mask_mod", self.mask))
            for array in (modifier.arrays if modifier else ())
        )


def parameter_name(option: str, array: str) -> str:
    """Name an array of an option's expression among all arrays of a call.

    Examples
    --------
    >>> parameter_name("score_mod", "slopes")
    'score_mod_slopes'
    """
    return f"{option}_{array}"


@lru_cache(maxsize=256)
def modified(spec: KernelSpec, modifiers: Modifiers | None) -> KernelSpec:
    """Return the kernel that takes what these expressions need; the same for the same ones."""
    if modifiers is None:
        return spec
    names = [*dict(modifiers.parameters), *([modifiers.blocks.name] if modifiers.blocks else [])]
    arrays = tuple(Pointer(name, const=True) for name in names)
    at = 1 + next(n for n, each in enumerate(spec.parameters) if each.name in _BEFORE)
    parameters: tuple[Parameter, ...] = (*spec.parameters[:at], *arrays, *spec.parameters[at:])
    strides = modified_strides(modifiers)
    if strides is not None:
        parameters += (strides,)
    return KernelSpec(spec.entry, spec.source, parameters, ((_HEADER, _header(modifiers)),))


@lru_cache(maxsize=256)
def modified_strides(modifiers: Modifiers) -> StructParameter | None:
    """Return the struct of the strides of the arrays that have axes; None without such."""
    fields = [(name, np.int64, (axes,)) for name, axes in _axes(modifiers)]
    dtype = np.dtype(fields, align=True)
    return StructParameter("modifier_strides", dtype, "ModifierStrides") if fields else None


def _axes(modifiers: Modifiers) -> list[tuple[str, int]]:
    """Return how many axes each array has, of those that have any."""
    blocks = [(modifiers.blocks.name, _BLOCK_AXES)] if modifiers.blocks else []
    return [(name, array.axes) for name, array in modifiers.parameters if array.axes] + blocks


def _header(modifiers: Modifiers) -> str:
    parameters = modifiers.parameters
    strides = _axes(modifiers)
    items = [(name, ITEMS[array.dtype]) for name, array in parameters]
    items += [modifiers.blocks[:2]] if modifiers.blocks else []
    pointers = "".join(f", const {item}* __restrict__ {name}_g" for name, item in items)
    arguments = ", ".join(
        f"{{{name}_g, modifier_strides.{name}}}"
        if name in dict(strides)
        else f"{{{name}_g, nullptr}}"
        for name, _ in items
    )
    lines = [
        f'#line 2 "{NAMED}modifiers"',
        f"#define MODIFIER_ARRAYS {pointers}",
        f"#define MODIFIER_STRIDES {', const ModifierStrides modifier_strides' if strides else ''}",
        f"#define MODIFIERS Modifiers{{{arguments}}}",
    ]
    if strides:
        lines += [
            "struct ModifierStrides {",
            *(f"  int64 {name}[{axes}];" for name, axes in strides),
            "};",
            'static_assert(sizeof(ModifierStrides) == MODIFIER_STRIDES_BYTES, "another struct");',
        ]
    score, mask = modifiers.score, modifiers.mask
    lines += [
        "struct Modifiers {",
        f"  static constexpr bool kScore = {cpp_bool(score is not None)};",
        f"  static constexpr bool kMask = {cpp_bool(mask is not None)};",
        f"  static constexpr bool kBlocks = {cpp_bool(modifiers.blocks is not None)};",
        *(f"  Indexed<{ITEMS[array.dtype]}, {array.axes}> {name};" for name, array in parameters),
        f"  {modifiers.blocks.struct if modifiers.blocks else 'NoBlocks'} blocks;",
        *_function("score", "score_mod", score and score.expression, score),
        *_function("gradient", "score_mod", score and score.gradient, score),
        *_function("mask", "mask_mod", mask and mask.expression, mask),
    ]
    return "\n".join([*lines, "};", ""])


_RESULTS = {"score": "float", "gradient": "float", "mask": "bool"}
_NAMES = {"score": SCORE_NAMES, "gradient": GRADIENT_NAMES, "mask": MASK_NAMES}
_ABSENT = {"score": "score", "gradient": "grad", "mask": "true"}
_FLOATS = ("score", "grad")


def _function(
    name: str, option: str, expression: str | None, modifier: Modifier | None
) -> list[str]:
    """Return a function around an expression, whose lines the compiler counts on their own."""
    # const: an = in the place of == is no expression then.
    declared = ", ".join(f"const {'float' if n in _FLOATS else 'int'} {n}" for n in _NAMES[name])
    head = f"  __device__ __forceinline__ {_RESULTS[name]} {name}({declared}) const {{"
    if expression is None or modifier is None:
        return [head, f"    return {_ABSENT[name]};", "  }"]
    return [
        head,
        f'#line 1 "{NAMED}{TEXT_NAMES[name]}{ARRAYS}"',
        *(
            f"    const auto {array.name} = this->{parameter_name(option, array.name)}"
            f"{'' if array.axes else '.item()'};"
            for array in modifier.arrays
        ),
        f'#line 1 "{NAMED}{TEXT_NAMES[name]}{RESULT}"',
        f"    return static_cast<{_RESULTS[name]}>(",
        f'#line 1 "{NAMED}{TEXT_NAMES[name]}"',
        expression,
        f'#line 1 "{NAMED}{TEXT_NAMES[name]}{END}"',
        "    );",
        "  }",
    ]
