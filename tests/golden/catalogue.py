"""Every golden case."""

from __future__ import annotations

from golden.atomics import ATOMICS
from golden.case import Case
from golden.conversion_tables import CONVERSIONS
from golden.elementwise import Table
from golden.floating_tables import FLOATING
from golden.integer_tables import INTEGERS
from golden.warp_level import WARP_LEVEL

TABLES: tuple[Table, ...] = (*CONVERSIONS, *FLOATING, *INTEGERS)

CASES: tuple[Case, ...] = (
    *(table.case for table in TABLES),
    *(table.case for table in ATOMICS),
    *WARP_LEVEL,
)
