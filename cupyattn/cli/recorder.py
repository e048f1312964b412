"""The launch of a call of attention."""

from __future__ import annotations

from cupyattn.ops.attention.checks import checked_problem
from cupyattn.ops.attention.forward import attention_forward
from cupyattn.ops.attention.options import AttentionOptions, DropoutSeed
from cupyattn.ops.attention.problem import AttentionArrays
from cupyattn.runtime.arch import Arch
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.device.recorder import Launch, LaunchRecorder


def attention_launch(
    arch: Arch,
    q: Array,
    k: Array,
    v: Array,
    options: AttentionOptions,
    *,
    tensor_cores: bool = True,
) -> Launch:
    """Return the launch that ``attention(q, k, v, return_lse=True)`` makes on a GPU of `arch`.

    The arrays may be NumPy's: their memory is not read.
    """
    operands = adopt(AttentionArrays(q, k, v))
    problem = checked_problem(operands, options)
    recorder = LaunchRecorder(arch, tensor_cores=tensor_cores)
    attention_forward(recorder, problem, operands, seed=DropoutSeed(0), return_lse=True)
    (launch,) = recorder.launches
    return launch
