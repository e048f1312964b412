"""PTX types: their sizes, and the NumPy dtypes that hold and interpret them.

A register is stored by width (``.s32``, ``.u32`` and ``.b32`` alike as ``u4``); only ``.f32`` and
``.f64`` registers are stored as floats. An instruction then views the operand as its own type.
"""

from cupyattn.emulator.errors import PTXSyntaxError

__all__ = ["SIZE", "operand_dtype", "register_dtype", "size_of", "unsigned"]

SIZE = {
    "pred": 1,
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
}


def unsigned(size: int) -> str:
    """Return the unsigned dtype of `size` bytes."""
    return f"u{size}"


_REGISTER_DTYPES = {ptx_type: unsigned(size) for ptx_type, size in SIZE.items()}
_REGISTER_DTYPES |= {"pred": "b1", "f32": "f4", "f64": "f8"}


def size_of(ptx_type: str) -> int:
    """Return the bytes of a type; `PTXSyntaxError` if there is no such type."""
    if ptx_type not in SIZE:
        raise PTXSyntaxError(f"unknown PTX type .{ptx_type}; known: {', '.join(sorted(SIZE))}")
    return SIZE[ptx_type]


def register_dtype(ptx_type: str) -> str:
    """Return the dtype in which a register of `ptx_type` is stored."""
    return _REGISTER_DTYPES.get(ptx_type) or unsigned(size_of(ptx_type))


def operand_dtype(ptx_type: str) -> str:
    """Return the dtype that an instruction of `ptx_type` computes in.

    16-bit floats and packed pairs are returned as raw bits; the float operations on them convert.
    """
    if ptx_type[0] == "s":
        return f"i{size_of(ptx_type)}"
    return register_dtype(ptx_type)
