"""From arrays to a launched kernel; no module here names an operation."""
