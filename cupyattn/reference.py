"""The whole library in NumPy float64, and bounds of how far a float32 kernel may be from it.

It is the oracle of every kernel's tests, and what the public functions run on NumPy arrays. It
imports NumPy alone. Arguments are taken as validated; results are float64, rounded by the caller if
need be.
"""

from cupyattn.ops.activations.bounds import (
    activation_backward_bound,
    activation_bound,
    activation_error,
    add_to_bound,
    derivative_error,
    dropout_bound,
    gated_backward_bound,
    gated_bound,
)
from cupyattn.ops.activations.reference import (
    activation,
    activation_backward,
    activation_derivative,
    add_to,
    dropout,
    element_keep,
    gated,
    gated_backward,
)
from cupyattn.ops.attention.bounds import attention_backward_bound, attention_bound
from cupyattn.ops.attention.reference.block_mask import block_mask
from cupyattn.ops.attention.reference.cache_formats import dequantise, quantisation_bound, quantise
from cupyattn.ops.attention.reference.dense import attention, attention_backward
from cupyattn.ops.attention.reference.paged import (
    merge_attention,
    merge_attention_bound,
    paged_attention,
)
from cupyattn.ops.attention.reference.scores import attention_keep
from cupyattn.ops.attention.reference.varlen import attention_varlen, attention_varlen_backward
from cupyattn.ops.cache.bounds import append_kv_bound, gather_bound
from cupyattn.ops.cache.reference import append_kv, copy_blocks, gather, rotated
from cupyattn.ops.embedding.bounds import embedding_backward_bound
from cupyattn.ops.embedding.reference import embedding, embedding_backward
from cupyattn.ops.linear.bounds import linear_backward_bound, linear_bound
from cupyattn.ops.linear.reference import (
    dequantised_rows,
    dequantize,
    expand_scales,
    linear,
    linear_backward,
    nest_scales,
    quantize,
    with_expanded_scales,
)
from cupyattn.ops.losses.bounds import (
    cross_entropy_backward_bound,
    cross_entropy_bound,
    linear_cross_entropy_backward_bound,
    linear_cross_entropy_bound,
)
from cupyattn.ops.losses.reference import (
    cross_entropy,
    cross_entropy_backward,
    linear_cross_entropy,
    linear_cross_entropy_backward,
    reduced,
    spread,
)
from cupyattn.ops.norms.bounds import norm_backward_bound, norm_bound
from cupyattn.ops.norms.reference import norm, norm_backward
from cupyattn.ops.optimizer.bounds import adamw_step_bound, global_norm_bound
from cupyattn.ops.optimizer.reference import adamw_step, adamw_step_8bit, global_norm
from cupyattn.ops.rope.bounds import rope_bound
from cupyattn.ops.rope.reference import rope, rope_backward, rope_frequencies, rope_tables
from cupyattn.ops.sampling.reference import sample, sampling_probabilities
from cupyattn.ops.softmax.bounds import (
    broadcast_sums_bound,
    log_softmax_backward_bound,
    log_softmax_bound,
    logsumexp_backward_bound,
    logsumexp_bound,
    softmax_backward_bound,
    softmax_bound,
)
from cupyattn.ops.softmax.reference import (
    broadcast_sums,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    logsumexp_backward,
    softmax,
    softmax_backward,
)
from cupyattn.runtime.philox import philox4x32_10
from cupyattn.runtime.precision import error_ratio

__all__ = [
    "activation",
    "activation_backward",
    "activation_backward_bound",
    "activation_bound",
    "activation_derivative",
    "activation_error",
    "adamw_step",
    "adamw_step_8bit",
    "adamw_step_bound",
    "add_to",
    "add_to_bound",
    "append_kv",
    "append_kv_bound",
    "attention",
    "attention_backward",
    "attention_backward_bound",
    "attention_bound",
    "attention_keep",
    "attention_varlen",
    "attention_varlen_backward",
    "block_mask",
    "broadcast_sums",
    "broadcast_sums_bound",
    "copy_blocks",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_bound",
    "cross_entropy_bound",
    "dequantise",
    "dequantised_rows",
    "dequantize",
    "derivative_error",
    "dropout",
    "dropout_bound",
    "element_keep",
    "embedding",
    "embedding_backward",
    "embedding_backward_bound",
    "error_ratio",
    "expand_scales",
    "gated",
    "gated_backward",
    "gated_backward_bound",
    "gated_bound",
    "gather",
    "gather_bound",
    "global_norm",
    "global_norm_bound",
    "linear",
    "linear_backward",
    "linear_backward_bound",
    "linear_bound",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_cross_entropy_backward_bound",
    "linear_cross_entropy_bound",
    "log_softmax",
    "log_softmax_backward",
    "log_softmax_backward_bound",
    "log_softmax_bound",
    "logsumexp",
    "logsumexp_backward",
    "logsumexp_backward_bound",
    "logsumexp_bound",
    "merge_attention",
    "merge_attention_bound",
    "nest_scales",
    "norm",
    "norm_backward",
    "norm_backward_bound",
    "norm_bound",
    "paged_attention",
    "philox4x32_10",
    "quantisation_bound",
    "quantise",
    "quantize",
    "reduced",
    "rope",
    "rope_backward",
    "rope_bound",
    "rope_frequencies",
    "rope_tables",
    "rotated",
    "sample",
    "sampling_probabilities",
    "softmax",
    "softmax_backward",
    "softmax_backward_bound",
    "softmax_bound",
    "spread",
    "with_expanded_scales",
]
