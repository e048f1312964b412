"""The strides that structs of several families have."""

from __future__ import annotations

import numpy as np

TOKEN_STRIDES = np.dtype([("batch", np.int64), ("seq", np.int64), ("head", np.int64)], align=True)
"""Of an array (B, S, H, D), or the like, whose last axis is contiguous."""
