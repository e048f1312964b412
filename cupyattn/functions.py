"""The public functions: documentation, defaults, and the choice of where a call runs.

CuPy arrays go to `cupyattn.ops` and its kernels, NumPy arrays to `cupyattn.reference` or, where
`backend` says so, to the same kernels on the emulator; the checks of a call are the same for all.
"""

from inspect import isfunction

from cupyattn.autodiff.vjp import vjp
from cupyattn.environment import device_info
from cupyattn.ops.activations.api import (
    GatedGrads,
    add_to,
    geglu,
    geglu_backward,
    gelu,
    gelu_backward,
    silu,
    silu_backward,
    swiglu,
    swiglu_backward,
)
from cupyattn.ops.activations.dropout import DropoutGrads, dropout, dropout_backward
from cupyattn.ops.attention.api import attention, attention_backward
from cupyattn.ops.attention.api_paged import merge_attention, paged_attention
from cupyattn.ops.attention.api_varlen import attention_varlen, attention_varlen_backward
from cupyattn.ops.attention.block_mask import BlockMask, block_mask
from cupyattn.ops.attention.modifiers import MaskMod, ScoreMod
from cupyattn.ops.attention.options import DropoutSeed
from cupyattn.ops.attention.reference.dense import AttentionGrads
from cupyattn.ops.cache.api import append_kv, copy_blocks, gather
from cupyattn.ops.embedding.api import embedding, embedding_backward
from cupyattn.ops.linear.api import (
    linear,
    linear_backward,
    linear_gelu,
    linear_gelu_backward,
)
from cupyattn.ops.linear.api_quantised import dequantize, quantize
from cupyattn.ops.linear.quantized_weight import QuantizedWeight
from cupyattn.ops.linear.reference import LinearGrads
from cupyattn.ops.losses.api import cross_entropy, cross_entropy_backward
from cupyattn.ops.losses.api_linear import linear_cross_entropy, linear_cross_entropy_backward
from cupyattn.ops.losses.reference import LinearCrossEntropyGrads
from cupyattn.ops.norms.api import (
    LayerNormGrads,
    RMSNormGrads,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from cupyattn.ops.optimizer.api import adamw_step, adamw_step_8bit, global_norm
from cupyattn.ops.rope.api import Rotary, rope, rope_backward, rope_tables
from cupyattn.ops.rope.reference import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling
from cupyattn.ops.sampling.api import sample
from cupyattn.ops.softmax.api import (
    log_softmax,
    log_softmax_backward,
    logsumexp,
    logsumexp_backward,
    softmax,
    softmax_backward,
)
from cupyattn.ops.softmax.bias_gradient import SoftmaxGrads
from cupyattn.runtime.backend import backend
from cupyattn.runtime.kernel import Kernel
from cupyattn.runtime.ranges import ranged

__all__ = [
    "AttentionGrads",
    "BlockMask",
    "DropoutGrads",
    "DropoutSeed",
    "GatedGrads",
    "Kernel",
    "LayerNormGrads",
    "LinearCrossEntropyGrads",
    "LinearGrads",
    "LinearScaling",
    "Llama3Scaling",
    "MaskMod",
    "NTKScaling",
    "QuantizedWeight",
    "RMSNormGrads",
    "Rotary",
    "ScoreMod",
    "SoftmaxGrads",
    "YarnScaling",
    "adamw_step",
    "adamw_step_8bit",
    "add_to",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "backend",
    "block_mask",
    "copy_blocks",
    "cross_entropy",
    "cross_entropy_backward",
    "dequantize",
    "device_info",
    "dropout",
    "dropout_backward",
    "embedding",
    "embedding_backward",
    "gather",
    "geglu",
    "geglu_backward",
    "gelu",
    "gelu_backward",
    "global_norm",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_gelu",
    "linear_gelu_backward",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "logsumexp_backward",
    "merge_attention",
    "paged_attention",
    "quantize",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_backward",
    "rope_tables",
    "sample",
    "silu",
    "silu_backward",
    "softmax",
    "softmax_backward",
    "swiglu",
    "swiglu_backward",
    "vjp",
]

for _name in __all__:
    if isfunction(globals()[_name]):
        globals()[_name] = ranged(globals()[_name])
