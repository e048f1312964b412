"""The list of all kernels, which the families declare."""

from __future__ import annotations

from collections.abc import Iterator

from cupyattn.ops.activations import kernels as activations
from cupyattn.ops.attention.kernels import (
    block_mask,
    combine,
    decode,
    float32,
    merge,
    native,
    prepare,
    teaching,
    tensor_core,
)
from cupyattn.ops.attention.kernels import (
    int8 as attention_int8,
)
from cupyattn.ops.cache import kernels as kv_cache
from cupyattn.ops.embedding import kernels as embedding
from cupyattn.ops.linear import kernels_float32 as linear_float32
from cupyattn.ops.linear import kernels_int8 as int8
from cupyattn.ops.linear import kernels_matmul as matmul
from cupyattn.ops.linear import kernels_quantised as quantised
from cupyattn.ops.linear import kernels_quantised_skinny as quantised_skinny
from cupyattn.ops.linear import kernels_quantised_tile as quantised_tile
from cupyattn.ops.linear import kernels_rows as quantised_rows
from cupyattn.ops.linear import kernels_skinny as skinny
from cupyattn.ops.linear import kernels_tensor_core as linear_tensor_core
from cupyattn.ops.losses import kernels as cross_entropy
from cupyattn.ops.norms import kernels as norms
from cupyattn.ops.optimizer import kernels as optimizer
from cupyattn.ops.rope import kernels as rope
from cupyattn.ops.sampling import kernels as sampling
from cupyattn.ops.softmax import kernels as softmax
from cupyattn.runtime import row_kernel
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device import tensor_cores
from cupyattn.runtime.spec import KernelSpec, Specialisation

_MODULES = (
    teaching.forward,
    tensor_core.forward,
    native,
    attention_int8,
    float32.forward,
    tensor_core.backward_dkdv,
    tensor_core.backward_dq,
    tensor_core.backward_summed_dbias,
    tensor_core.passes,
    float32.backward,
    teaching.backward,
    combine,
    decode,
    merge,
    prepare,
    block_mask,
    kv_cache,
    softmax,
    activations,
    optimizer,
    embedding,
    rope,
    sampling,
    cross_entropy,
    norms,
    row_kernel,
    linear_float32,
    tensor_cores,
    skinny,
    quantised_skinny,
    linear_tensor_core,
    matmul,
    quantised,
    quantised_tile,
    quantised_rows,
    int8,
)

KERNELS: dict[str, KernelSpec] = {
    kernel.entry: kernel for module in _MODULES for kernel in module.KERNELS
}


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the ahead-of-time list: every configuration. Tests check the gates of all of them."""
    for module in _MODULES:
        yield from module.catalogue(arch)
