"""The functions that `vjp` differentiates, each with its backward: one entry a function."""

from cupyattn.ops.activations.api import gelu as _gelu
from cupyattn.ops.activations.api import gelu_backward, silu_backward
from cupyattn.ops.activations.api import silu as _silu
from cupyattn.ops.activations.dropout import DropoutGrads, dropout_backward
from cupyattn.ops.activations.dropout import dropout as _dropout
from cupyattn.ops.activations.gated import GatedGrads, geglu_backward, swiglu_backward
from cupyattn.ops.activations.gated import geglu as _geglu
from cupyattn.ops.activations.gated import swiglu as _swiglu
from cupyattn.ops.embedding.api import embedding as _embedding
from cupyattn.ops.embedding.api import embedding_backward
from cupyattn.ops.linear.api import linear as _linear
from cupyattn.ops.linear.api_backward import linear_backward
from cupyattn.ops.linear.api_gelu import linear_gelu as _linear_gelu
from cupyattn.ops.linear.api_gelu import linear_gelu_backward
from cupyattn.ops.linear.differentiated import differentiated
from cupyattn.ops.linear.reference import LinearGrads
from cupyattn.ops.losses.api import cross_entropy as _cross_entropy
from cupyattn.ops.losses.api import cross_entropy_backward
from cupyattn.ops.losses.linear_cross_entropy import linear_cross_entropy as _linear_cross_entropy
from cupyattn.ops.losses.linear_cross_entropy import linear_cross_entropy_backward
from cupyattn.ops.losses.reference import LinearCrossEntropyGrads
from cupyattn.ops.norms.api import (
    LayerNormGrads,
    RMSNormGrads,
    layer_norm_backward,
    rms_norm_backward,
)
from cupyattn.ops.norms.api import layer_norm as _layer_norm
from cupyattn.ops.norms.api import rms_norm as _rms_norm
from cupyattn.ops.rope.api import rope as _rope
from cupyattn.ops.rope.api import rope_backward
from cupyattn.ops.softmax.api import softmax as _softmax
from cupyattn.ops.softmax.api import softmax_backward
from cupyattn.ops.softmax.api_log import log_softmax as _log_softmax
from cupyattn.ops.softmax.api_log import log_softmax_backward
from cupyattn.ops.softmax.bias_gradient import require_bias_gradient
from cupyattn.ops.softmax.logsumexp import logsumexp as _logsumexp
from cupyattn.ops.softmax.logsumexp import logsumexp_backward
from cupyattn.ops.softmax.scores import SoftmaxGrads
from cupyattn.runtime.differentiable import differentiable

softmax = differentiable(
    lambda: softmax_backward,
    gradients=SoftmaxGrads._fields,
    on_demand={"bias": require_bias_gradient},
)(_softmax)
gelu = differentiable(lambda: gelu_backward, gradients=("dx",))(_gelu)
silu = differentiable(lambda: silu_backward, gradients=("dx",))(_silu)
swiglu = differentiable(lambda: swiglu_backward, gradients=GatedGrads._fields)(_swiglu)
geglu = differentiable(lambda: geglu_backward, gradients=GatedGrads._fields)(_geglu)
dropout = differentiable(lambda: dropout_backward, gradients=DropoutGrads._fields)(_dropout)
rope = differentiable(lambda: rope_backward, gradients=("dx",))(_rope)
embedding = differentiable(lambda: embedding_backward, gradients=("dtable",))(_embedding)
log_softmax = differentiable(
    lambda: log_softmax_backward,
    gradients=SoftmaxGrads._fields,
    on_demand={"bias": require_bias_gradient},
)(_log_softmax)
logsumexp = differentiable(lambda: logsumexp_backward, gradients=("dx",))(_logsumexp)
cross_entropy = differentiable(
    lambda: cross_entropy_backward,
    results=("loss",),
    saved=("lse",),
    saved_by="return_lse",
    gradients=("dlogits",),
)(_cross_entropy)

# With a residual the second result, x + residual, is what the backward takes as x, and dx is the
# gradient of both terms.
layer_norm = differentiable(
    lambda: layer_norm_backward,
    results=("out", "total"),
    saved=("mean", "rstd"),
    saved_by="return_stats",
    gradients=LayerNormGrads._fields,
    taken_from={"x": "total"},
    same={"dresidual": "dx"},
)(_layer_norm)
rms_norm = differentiable(
    lambda: rms_norm_backward,
    results=("out", "total"),
    saved=("rstd",),
    saved_by="return_stats",
    gradients=RMSNormGrads._fields,
    taken_from={"x": "total"},
    same={"dresidual": "dx"},
)(_rms_norm)
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
linear_cross_entropy = differentiable(
    lambda: linear_cross_entropy_backward,
    results=("loss",),
    saved=("lse",),
    saved_by="return_lse",
    gradients=LinearCrossEntropyGrads._fields,
)(_linear_cross_entropy)
