"""Many rows in float16: products on tensor cores."""

from __future__ import annotations

from cupyattn.ops.linear.implementations import LinearPlan

PLANS: tuple[LinearPlan, ...] = ()
