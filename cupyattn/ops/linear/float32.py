"""Products in float32 arithmetic, of every storage dtype."""

from __future__ import annotations

from cupyattn.ops.linear.implementations import LinearPlan

PLANS: tuple[LinearPlan, ...] = ()
