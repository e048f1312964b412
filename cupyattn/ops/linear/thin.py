"""Few rows (M up to 64) in float16: kernels that stream the weight once."""

from __future__ import annotations

from cupyattn.ops.linear.implementations import LinearPlan

PLANS: tuple[LinearPlan, ...] = ()
