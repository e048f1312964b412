"""What stands in for a GPU, its clock and PyTorch in the tests of the benchmarks."""

from __future__ import annotations

import copy
import types

import numpy as np

import cupyattn

HEADER = {
    "version": cupyattn.__version__,
    "date": "2026-11-20",
    "device": "A GPU",
    "compute_capability": "9.0",
    "code": ["compute_75"],
    "arch_override": "75",
    "tensor_cores": True,
    "cuda_driver": "13.0",
    "cupy": "14.2.0",
    "nvrtc": "12.9",
    "numpy": np.__version__,
}


class FakeTimer:
    """Makes each call once, for real, and gives the times that it was told to."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.results = []

    def __call__(self, call):
        result = call()
        self.results.append(copy.deepcopy(result))  # later calls write into the same arrays
        second = self.seconds.pop(0)
        return [second / 2, second, second * 3]  # a median is not thrown off by a slow call


class FakeTorch:
    """What of PyTorch is used, on NumPy."""

    bfloat16 = "bfloat16"

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.differentiated: list[tuple] = []
        functional = types.SimpleNamespace(scaled_dot_product_attention=self.attend)
        self.autograd = types.SimpleNamespace(grad=self.grad)
        self.nn = types.SimpleNamespace(functional=functional)
        self.bool = np.bool_

    def attend(self, q, k, v, *, is_causal, dropout_p, attn_mask=None):
        self.asked.append((q.shape, v.shape, is_causal, dropout_p, attn_mask))
        if attn_mask is not None:
            raise RuntimeError("no kernel")
        return q

    def grad(self, out, of, dout, *, retain_graph):
        assert retain_graph, "the call is made again"
        assert all(tensor.wanted for tensor in of)
        self.differentiated.append((len(of), out.shape, dout.shape))
        return of

    @staticmethod
    def from_dlpack(array):
        class Tensor(np.ndarray):
            def requires_grad_(self):
                self.wanted = True

            def transpose(self, a, b):
                return self.swapaxes(a, b)

        return array.view(Tensor)

    class no_grad:  # noqa: N801
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None
