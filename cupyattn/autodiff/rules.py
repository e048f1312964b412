"""The functions that `vjp` differentiates, each with its backward: one entry a function."""

from cupyattn.ops.linear.api import linear as _linear
from cupyattn.ops.linear.api_backward import linear_backward
from cupyattn.ops.linear.api_gelu import linear_gelu as _linear_gelu
from cupyattn.ops.linear.api_gelu import linear_gelu_backward
from cupyattn.ops.linear.differentiated import differentiated
from cupyattn.ops.linear.reference import LinearGrads
from cupyattn.runtime.differentiable import differentiable

linear = differentiable(
    lambda: differentiated(linear_backward, residual=True),
    saved=("preactivation",),
    saved_by="return_preactivation",
    gradients=(*LinearGrads._fields, "dresidual"),
)(_linear)
linear_gelu = differentiable(
    lambda: differentiated(linear_gelu_backward, residual=False),
    saved=("preactivation",),
    saved_by="return_preactivation",
    gradients=LinearGrads._fields,
)(_linear_gelu)
