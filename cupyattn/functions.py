"""The public functions and classes, imported from their modules.

Each module documents its functions, checks their calls and chooses where they run.
"""

# An alias exports a name to type checkers, which read the star import in cupyattn/__init__.py.
import inspect
import typing

from cupyattn.autodiff.reverse import vjp as vjp
from cupyattn.autodiff.transforms import checkpoint as checkpoint
from cupyattn.autodiff.transforms import custom_vjp as custom_vjp
from cupyattn.autodiff.transforms import grad as grad
from cupyattn.autodiff.transforms import stop_gradient as stop_gradient
from cupyattn.autodiff.transforms import value_and_grad as value_and_grad
from cupyattn.environment import device_info as device_info
from cupyattn.ops.activations.api import GatedGrads as GatedGrads
from cupyattn.ops.activations.api import add_to as add_to
from cupyattn.ops.activations.api import geglu as geglu
from cupyattn.ops.activations.api import geglu_backward as geglu_backward
from cupyattn.ops.activations.api import gelu as gelu
from cupyattn.ops.activations.api import gelu_backward as gelu_backward
from cupyattn.ops.activations.api import silu as silu
from cupyattn.ops.activations.api import silu_backward as silu_backward
from cupyattn.ops.activations.api import swiglu as swiglu
from cupyattn.ops.activations.api import swiglu_backward as swiglu_backward
from cupyattn.ops.activations.dropout import DropoutGrads as DropoutGrads
from cupyattn.ops.activations.dropout import dropout as dropout
from cupyattn.ops.activations.dropout import dropout_backward as dropout_backward
from cupyattn.ops.attention.api import attention as attention
from cupyattn.ops.attention.api import attention_backward as attention_backward
from cupyattn.ops.attention.api_paged import merge_attention as merge_attention
from cupyattn.ops.attention.api_paged import paged_attention as paged_attention
from cupyattn.ops.attention.api_varlen import attention_varlen as attention_varlen
from cupyattn.ops.attention.api_varlen import attention_varlen_backward as attention_varlen_backward
from cupyattn.ops.attention.block_mask import BlockMask as BlockMask
from cupyattn.ops.attention.block_mask import block_mask as block_mask
from cupyattn.ops.attention.modifiers import MaskMod as MaskMod
from cupyattn.ops.attention.modifiers import ScoreMod as ScoreMod
from cupyattn.ops.attention.options import DropoutSeed as DropoutSeed
from cupyattn.ops.attention.quantized_keys import QuantizedKeys as QuantizedKeys
from cupyattn.ops.attention.quantized_keys import quantize_keys as quantize_keys
from cupyattn.ops.attention.reference.dense import AttentionGrads as AttentionGrads
from cupyattn.ops.cache.api import append_kv as append_kv
from cupyattn.ops.cache.api import copy_blocks as copy_blocks
from cupyattn.ops.cache.api import gather as gather
from cupyattn.ops.embedding.api import embedding as embedding
from cupyattn.ops.embedding.api import embedding_backward as embedding_backward
from cupyattn.ops.linear.api import linear as linear
from cupyattn.ops.linear.api import linear_backward as linear_backward
from cupyattn.ops.linear.api import linear_gelu as linear_gelu
from cupyattn.ops.linear.api import linear_gelu_backward as linear_gelu_backward
from cupyattn.ops.linear.api_matmul import matmul as matmul
from cupyattn.ops.linear.api_quantised import dequantize as dequantize
from cupyattn.ops.linear.api_quantised import quantize as quantize
from cupyattn.ops.linear.api_quantised import quantize_rows as quantize_rows
from cupyattn.ops.linear.reference import LinearGrads as LinearGrads
from cupyattn.ops.linear.row_formats import QuantizedRows as QuantizedRows
from cupyattn.ops.linear.weight_formats import QuantizedWeight as QuantizedWeight
from cupyattn.ops.losses.api import cross_entropy as cross_entropy
from cupyattn.ops.losses.api import cross_entropy_backward as cross_entropy_backward
from cupyattn.ops.losses.api_linear import linear_cross_entropy as linear_cross_entropy
from cupyattn.ops.losses.api_linear import (
    linear_cross_entropy_backward as linear_cross_entropy_backward,
)
from cupyattn.ops.losses.reference import LinearCrossEntropyGrads as LinearCrossEntropyGrads
from cupyattn.ops.norms.api import RMSNorm as RMSNorm
from cupyattn.ops.norms.api import layer_norm as layer_norm
from cupyattn.ops.norms.api import rms_norm as rms_norm
from cupyattn.ops.norms.api_backward import LayerNormGrads as LayerNormGrads
from cupyattn.ops.norms.api_backward import RMSNormGrads as RMSNormGrads
from cupyattn.ops.norms.api_backward import layer_norm_backward as layer_norm_backward
from cupyattn.ops.norms.api_backward import rms_norm_backward as rms_norm_backward
from cupyattn.ops.optimizer.api import adamw_step as adamw_step
from cupyattn.ops.optimizer.api import adamw_step_8bit as adamw_step_8bit
from cupyattn.ops.optimizer.api import global_norm as global_norm
from cupyattn.ops.rope.api import Rotary as Rotary
from cupyattn.ops.rope.api import rope as rope
from cupyattn.ops.rope.api import rope_backward as rope_backward
from cupyattn.ops.rope.api import rope_tables as rope_tables
from cupyattn.ops.rope.reference import LinearScaling as LinearScaling
from cupyattn.ops.rope.reference import Llama3Scaling as Llama3Scaling
from cupyattn.ops.rope.reference import LongRopeScaling as LongRopeScaling
from cupyattn.ops.rope.reference import NTKScaling as NTKScaling
from cupyattn.ops.rope.reference import YarnScaling as YarnScaling
from cupyattn.ops.sampling.api import sample as sample
from cupyattn.ops.softmax.api import log_softmax as log_softmax
from cupyattn.ops.softmax.api import log_softmax_backward as log_softmax_backward
from cupyattn.ops.softmax.api import logsumexp as logsumexp
from cupyattn.ops.softmax.api import logsumexp_backward as logsumexp_backward
from cupyattn.ops.softmax.api import softmax as softmax
from cupyattn.ops.softmax.api import softmax_backward as softmax_backward
from cupyattn.ops.softmax.kernels import SoftmaxGrads as SoftmaxGrads
from cupyattn.runtime import ranges
from cupyattn.runtime.backend import backend as backend
from cupyattn.runtime.kernel import Kernel as Kernel

for _name, _value in list(globals().items()):  # public ones alone: all else is a module
    if inspect.isfunction(_value):
        globals()[_name] = ranges.ranged(_value)
    elif inspect.isclass(_value):  # its public name is the one in messages and for pickle
        _value.__annotations__ = typing.get_type_hints(_value)
        _value.__module__ = "cupyattn"
