"""The functions that `vjp` differentiates, each with its backward: one entry a function."""

from cupyattn.functional.attention.backward import attention_backward
from cupyattn.functional.attention.forward import attention as _attention
from cupyattn.functional.differentiable import differentiable
from cupyattn.functional.layers.softmax import softmax as _softmax
from cupyattn.functional.layers.softmax import softmax_backward
from cupyattn.gradients import AttentionGrads

attention = differentiable(
    _attention,
    attention_backward,
    saved=("lse",),
    saved_by="return_lse",
    gradients=AttentionGrads._fields,
)
softmax = differentiable(_softmax, softmax_backward, gradients=("dx",))
