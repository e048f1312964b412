"""Names in annotations for values whose types are not described."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
"""A JSON object: parsed, or a result to be written."""
Keywords = dict[str, Any]
"""Keyword arguments for a call with ``**``."""
Undescribed = Any
"""A type that differs between NumPy and CuPy, or depends on the arguments."""
Stream = Any
"""A stream of CuPy; None for NumPy arrays."""
