"""Positions of lanes that stand at no basic block; above every block number."""

__all__ = ["EXITED", "WAITING"]

EXITED = 1 << 30
WAITING = 1 << 29  # at a barrier
