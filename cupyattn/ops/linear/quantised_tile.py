"""Many rows and a quantised weight: the plans."""

from __future__ import annotations

from cupyattn.ops.linear.implementations import LinearPlan

PLANS: tuple[LinearPlan, ...] = ()
