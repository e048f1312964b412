"""The whole library in NumPy float64, and bounds of how far a float32 kernel may be from it.

Every kernel is tested against it. The public functions run it on NumPy arrays too, except where a
family has a faster `cpu` module for arrays that are not float64. It imports NumPy alone. Arguments
are taken as validated; results are float64, rounded by the caller if need be.
"""

from cupyattn.ops.activations.bounds import activation_backward_bound as activation_backward_bound
from cupyattn.ops.activations.bounds import activation_bound as activation_bound
from cupyattn.ops.activations.bounds import activation_error as activation_error
from cupyattn.ops.activations.bounds import add_to_bound as add_to_bound
from cupyattn.ops.activations.bounds import derivative_error as derivative_error
from cupyattn.ops.activations.bounds import dropout_bound as dropout_bound
from cupyattn.ops.activations.bounds import gated_backward_bound as gated_backward_bound
from cupyattn.ops.activations.bounds import gated_bound as gated_bound
from cupyattn.ops.activations.reference import activation as activation
from cupyattn.ops.activations.reference import activation_backward as activation_backward
from cupyattn.ops.activations.reference import activation_derivative as activation_derivative
from cupyattn.ops.activations.reference import add_to as add_to
from cupyattn.ops.activations.reference import dropout as dropout
from cupyattn.ops.activations.reference import element_keep as element_keep
from cupyattn.ops.activations.reference import gated as gated
from cupyattn.ops.activations.reference import gated_backward as gated_backward
from cupyattn.ops.attention.bounds import attention_backward_bound as attention_backward_bound
from cupyattn.ops.attention.bounds import attention_bound as attention_bound
from cupyattn.ops.attention.reference.block_mask import block_mask as block_mask
from cupyattn.ops.attention.reference.cache_formats import dequantise as dequantise
from cupyattn.ops.attention.reference.cache_formats import quantisation_bound as quantisation_bound
from cupyattn.ops.attention.reference.cache_formats import quantise as quantise
from cupyattn.ops.attention.reference.dense import attention as attention
from cupyattn.ops.attention.reference.dense import attention_backward as attention_backward
from cupyattn.ops.attention.reference.paged import merge_attention as merge_attention
from cupyattn.ops.attention.reference.paged import merge_attention_bound as merge_attention_bound
from cupyattn.ops.attention.reference.paged import paged_attention as paged_attention
from cupyattn.ops.attention.reference.quantised import (
    int8_attention_estimate as int8_attention_estimate,
)
from cupyattn.ops.attention.reference.quantised import quantised_operands as quantised_operands
from cupyattn.ops.attention.reference.scores import attention_keep as attention_keep
from cupyattn.ops.attention.reference.varlen import attention_varlen as attention_varlen
from cupyattn.ops.attention.reference.varlen import (
    attention_varlen_backward as attention_varlen_backward,
)
from cupyattn.ops.cache.bounds import append_kv_bound as append_kv_bound
from cupyattn.ops.cache.bounds import gather_bound as gather_bound
from cupyattn.ops.cache.reference import append_kv as append_kv
from cupyattn.ops.cache.reference import copy_blocks as copy_blocks
from cupyattn.ops.cache.reference import gather as gather
from cupyattn.ops.cache.reference import rotated as rotated
from cupyattn.ops.embedding.bounds import embedding_backward_bound as embedding_backward_bound
from cupyattn.ops.embedding.reference import embedding as embedding
from cupyattn.ops.embedding.reference import embedding_backward as embedding_backward
from cupyattn.ops.linear.bounds import linear_backward_bound as linear_backward_bound
from cupyattn.ops.linear.bounds import linear_bound as linear_bound
from cupyattn.ops.linear.bounds import matmul_bound as matmul_bound
from cupyattn.ops.linear.reference import dequantised_rows as dequantised_rows
from cupyattn.ops.linear.reference import dequantize as dequantize
from cupyattn.ops.linear.reference import expand_scales as expand_scales
from cupyattn.ops.linear.reference import linear as linear
from cupyattn.ops.linear.reference import linear_backward as linear_backward
from cupyattn.ops.linear.reference import matmul as matmul
from cupyattn.ops.linear.reference import nest_scales as nest_scales
from cupyattn.ops.linear.reference import quantize as quantize
from cupyattn.ops.linear.reference import with_expanded_scales as with_expanded_scales
from cupyattn.ops.losses.bounds import cross_entropy_backward_bound as cross_entropy_backward_bound
from cupyattn.ops.losses.bounds import cross_entropy_bound as cross_entropy_bound
from cupyattn.ops.losses.bounds import (
    linear_cross_entropy_backward_bound as linear_cross_entropy_backward_bound,
)
from cupyattn.ops.losses.bounds import linear_cross_entropy_bound as linear_cross_entropy_bound
from cupyattn.ops.losses.reference import cross_entropy as cross_entropy
from cupyattn.ops.losses.reference import cross_entropy_backward as cross_entropy_backward
from cupyattn.ops.losses.reference import linear_cross_entropy as linear_cross_entropy
from cupyattn.ops.losses.reference import (
    linear_cross_entropy_backward as linear_cross_entropy_backward,
)
from cupyattn.ops.losses.reference import reduced as reduced
from cupyattn.ops.losses.reference import spread as spread
from cupyattn.ops.norms.bounds import norm_backward_bound as norm_backward_bound
from cupyattn.ops.norms.bounds import norm_bound as norm_bound
from cupyattn.ops.norms.bounds import normed_sum_bound as normed_sum_bound
from cupyattn.ops.norms.reference import norm as norm
from cupyattn.ops.norms.reference import norm_backward as norm_backward
from cupyattn.ops.optimizer.bounds import adamw_step_bound as adamw_step_bound
from cupyattn.ops.optimizer.bounds import global_norm_bound as global_norm_bound
from cupyattn.ops.optimizer.reference import adamw_step as adamw_step
from cupyattn.ops.optimizer.reference import adamw_step_8bit as adamw_step_8bit
from cupyattn.ops.optimizer.reference import global_norm as global_norm
from cupyattn.ops.rope.bounds import rope_bound as rope_bound
from cupyattn.ops.rope.reference import rope as rope
from cupyattn.ops.rope.reference import rope_backward as rope_backward
from cupyattn.ops.rope.reference import rope_frequencies as rope_frequencies
from cupyattn.ops.rope.reference import rope_tables as rope_tables
from cupyattn.ops.sampling.reference import sample as sample
from cupyattn.ops.sampling.reference import sampling_probabilities as sampling_probabilities
from cupyattn.ops.softmax.bounds import broadcast_sums_bound as broadcast_sums_bound
from cupyattn.ops.softmax.bounds import log_softmax_backward_bound as log_softmax_backward_bound
from cupyattn.ops.softmax.bounds import log_softmax_bound as log_softmax_bound
from cupyattn.ops.softmax.bounds import logsumexp_backward_bound as logsumexp_backward_bound
from cupyattn.ops.softmax.bounds import logsumexp_bound as logsumexp_bound
from cupyattn.ops.softmax.bounds import softmax_backward_bound as softmax_backward_bound
from cupyattn.ops.softmax.bounds import softmax_bound as softmax_bound
from cupyattn.ops.softmax.reference import broadcast_sums as broadcast_sums
from cupyattn.ops.softmax.reference import log_softmax as log_softmax
from cupyattn.ops.softmax.reference import log_softmax_backward as log_softmax_backward
from cupyattn.ops.softmax.reference import logsumexp as logsumexp
from cupyattn.ops.softmax.reference import logsumexp_backward as logsumexp_backward
from cupyattn.ops.softmax.reference import softmax as softmax
from cupyattn.ops.softmax.reference import softmax_backward as softmax_backward
from cupyattn.runtime.philox import philox4x32_10 as philox4x32_10
from cupyattn.runtime.precision import error_ratio as error_ratio
