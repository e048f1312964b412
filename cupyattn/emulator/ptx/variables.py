"""Variable declarations in the shared, local, global and const state spaces."""

import re
import struct

from cupyattn.emulator.errors import PTXSyntaxError
from cupyattn.emulator.ptx.data_types import size_of
from cupyattn.emulator.ptx.model import Variable

__all__ = ["parse_variable"]

_VARIABLE = re.compile(
    r"\.(shared|local|global|const|param)\s+(?:\.align\s+(\d+)\s+)?(?:\.v(\d)\s+)?\.(\w+)\s+"
    r"([\w$%]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)


def parse_variable(text: str) -> Variable | None:
    """Parse a variable declaration, or return None if `text` is none."""
    match = _VARIABLE.search(text)
    if not match:
        return None
    space, alignment, vector, ptx_type, name, dimensions, initial = match.groups()
    size = size_of(ptx_type) * int(vector or 1)
    for extent in re.findall(r"\[(\d*)\]", dimensions):
        size *= int(extent or 0)
    variable = Variable(name, space, int(alignment or size_of(ptx_type)), size)
    if initial:
        try:
            data = b"".join(_initial_bytes(v, size_of(ptx_type)) for v in _initial_values(initial))
            variable.initial = data.ljust(size, b"\0")
        except PTXSyntaxError as error:
            variable.fault = str(error)
    return variable


def _initial_values(text: str) -> list[str]:
    values = [v.strip() for v in text.replace("{", " ").replace("}", " ").split(",")]
    return [v for v in values if v]


def _initial_bytes(value: str, size: int) -> bytes:
    try:
        if value[:2] in ("0f", "0F", "0d", "0D"):
            return int(value[2:], 16).to_bytes(size, "little")
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][+-]?\d+)?", value):
            return struct.pack("<f" if size == 4 else "<d", float(value))
        number = int(value.rstrip("U"), 0)
    except (ValueError, OverflowError):
        raise PTXSyntaxError(f"initial value {value!r}: only numbers are understood") from None
    return (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
