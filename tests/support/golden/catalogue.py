"""Every golden case."""

from __future__ import annotations

from support.golden.atomics import ATOMICS
from support.golden.case import Case
from support.golden.elementwise import Table
from support.golden.floating_tables import CONVERSIONS, FLOATING, NEWER
from support.golden.integer_tables import INTEGERS
from support.golden.warp_level import WARP_LEVEL

TABLES: tuple[Table, ...] = (*CONVERSIONS, *FLOATING, *NEWER, *INTEGERS)

CASES: tuple[Case, ...] = (
    *(table.case for table in TABLES),
    *(table.case for table in ATOMICS),
    *WARP_LEVEL,
)
