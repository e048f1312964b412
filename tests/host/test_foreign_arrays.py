"""Arrays of other libraries, by the CUDA array interface and DLPack, and of other devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.devices import CUPY
from support.dtypes import DTYPES, dtype_of
from support.strategies import AttentionProblem

from cupyattn import attention
from cupyattn import softmax as softmax_forward


class Interface:
    """Another library's array: the CUDA array interface and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__


class Capsule:
    """Another library's array: DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("foreign", [Interface, Capsule])
def test_arrays_of_other_libraries_come_in_without_a_copy(foreign):
    import cupy

    problem = AttentionProblem(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=8, view="transposed")
    arrays = [CUPY.put(array) for array in problem.arrays()]
    used = cupy.array([6, 3], np.int32)
    expected = attention(*arrays, seqused_k=used)
    memory = cupy.empty_like(expected)
    result = attention(
        *map(foreign, arrays),
        seqused_k=foreign(used),
        out=foreign(memory),
    )
    assert isinstance(result, cupy.ndarray)
    assert result.data.ptr == memory.data.ptr
    assert_array_equal(CUPY.get(memory), CUPY.get(expected))
    assert_array_equal(
        CUPY.get(softmax_forward(foreign(memory))), CUPY.get(softmax_forward(memory))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_come_in_without_a_copy(dtype):
    torch = pytest.importorskip("torch")
    import cupy

    rng = np.random.default_rng(0)
    packed = rng.standard_normal((2, 5, 3, 4, 8)).astype(dtype_of(dtype))
    on_torch = torch.from_numpy(packed.astype(np.float32)).cuda().to(getattr(torch, dtype))
    on_cupy = CUPY.put(packed)
    expected = attention(*(on_cupy[:, :, i] for i in range(3)), causal=True, implementation="tiled")
    out = torch.zeros((2, 5, 4, 8), dtype=on_torch.dtype, device="cuda")
    tensors = [on_torch[:, :, i] for i in range(3)]
    result = attention(*tensors, causal=True, implementation="tiled", out=out)
    assert isinstance(result, cupy.ndarray)
    assert result.dtype == dtype_of(dtype)
    cupy.cuda.Device().synchronize()
    assert_array_equal(out.float().cpu().numpy(), CUPY.get(expected).astype(np.float32))


@pytest.mark.gpu
def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    q = torch.zeros((1, 2, 1, 8))
    with pytest.raises(TypeError, match=r"q is a torch\.Tensor; .*numpy\.asarray\(q\)"):
        attention(q, q, q)
