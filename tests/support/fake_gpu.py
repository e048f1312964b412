"""A fake GPU, clock and PyTorch for tests of the benchmarks, and made-up results to draw."""

from __future__ import annotations

import copy
import types
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np

import cupyattn
from cupyattn.benchmark.cases import Harness
from cupyattn.benchmark.timer import Samples

HEADER = {
    "version": cupyattn.__version__,
    "date": "2026-11-20",
    "cpu": "A CPU",
    "os": "Linux",
    "python": "3.12.1",
    "device": "A GPU",
    "compute_capability": "9.0",
    "code": ["compute_75"],
    "arch_override": "75",
    "tensor_cores": True,
    "driver_version": "580.95.05",
    "cuda_driver": "13.0",
    "cupy": "14.2.0",
    "nvrtc": "12.9",
    "numpy": np.__version__,
    "torch": None,
}


CEILINGS = {"copy_gb_per_s": 4.0, "read_gb_per_s": 5.0, "mma_tflops": 0.5, "fma_tflops": 0.25}
SCRATCH = 5_000_000


class FakeTimer:
    """Makes the first call of a round, for real, and returns the given times."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.results = []

    def __call__(self, calls, torch=None):
        self.results.append(copy.deepcopy(calls[0]()))  # later calls write into the same arrays
        # A median is not thrown off by a slow call.
        second = self.seconds.pop(0) if self.seconds else 2e-6
        return Samples([second / 2, second, second * 3])


def harness(*seconds: float, **more) -> Harness:
    """A harness for rows of NumPy arrays; a row takes 2 us by default."""
    given = {"xp": np, "times": FakeTimer(*seconds), "memory": lambda call, torch: SCRATCH}
    return Harness(**{**given, "ceilings": CEILINGS, **more})


class FakeTorch:
    """The parts of PyTorch that are used, on NumPy."""

    bfloat16 = "bfloat16"

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.differentiated: list[tuple] = []
        functional = types.SimpleNamespace(scaled_dot_product_attention=self.attend)
        backend = types.SimpleNamespace(MATH="math", FLASH_ATTENTION="flash")
        attention = types.SimpleNamespace(SDPBackend=backend, sdpa_kernel=self.within)
        self.autograd = types.SimpleNamespace(grad=self.grad)
        self.nn = types.SimpleNamespace(functional=functional, attention=attention)
        self.cuda = types.SimpleNamespace(
            Stream=object, stream=nullcontext, synchronize=lambda: None
        )
        self.bool = np.bool_
        self.backends: list[str] = []
        self.compiled: list[str] = []

    def compile(self, function, *, dynamic, mode):
        assert not dynamic
        self.compiled.append(mode)
        return function

    def within(self, backend):
        self.backends.append(backend)
        return nullcontext()

    def attend(self, q, k, v, attn_mask=None, *, is_causal=False, dropout_p=0.0, enable_gqa=False):
        """Exact, by this library, but for what it says that it has not."""
        assert enable_gqa == (q.shape[1] != k.shape[1])
        self.asked.append((q.shape, v.shape, is_causal, dropout_p, attn_mask))
        if attn_mask is not None:
            raise RuntimeError("no kernel")
        turned = [np.asarray(x).swapaxes(1, 2) for x in (q, k, v)]
        out = cupyattn.attention(*turned, causal=is_causal)
        return self.from_dlpack(out.swapaxes(1, 2))

    def grad(self, out, of, dout, *, retain_graph):
        """Gradients as tensors of the right shapes, of zeros."""
        assert retain_graph, "the call is made again"
        assert all(tensor.wanted for tensor in of)
        self.differentiated.append((len(of), out.shape, dout.shape))
        return tuple(self.from_dlpack(np.zeros_like(np.asarray(tensor))) for tensor in of)

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


MADE_UP_CEILINGS = {
    **{"copy_gb_per_s": 4000.0, "read_gb_per_s": 4500.0},
    **{"mma_tflops": 600.0, "fma_tflops": 60.0},
}
SPEED = {
    "cupyattn naive": 9, "cupyattn tiled": 60, "cupyattn flash": 290, "torch eager": 70,
    "torch cudnn": 480, "torch math": 65, "torch compile": 110, "triton": 150, "cupy": 40,
}  # fmt: skip
"""TFLOP/s, by implementation."""
FEW = ("cupyattn flash", "torch eager")
Result = dict[str, Any]


def result(command: str, rows: list[dict[str, Any]], **more: Any) -> Result:
    """Return a result of a GPU."""
    return {"command": command, **HEADER, "ceilings": MADE_UP_CEILINGS, "rows": rows, **more}


def attention(
    lengths: tuple[int, ...] = (4096,),
    head_dims: tuple[int, ...] = (64, 80, 128),
    dtypes: tuple[str, ...] = ("float16",),
    implementations: tuple[str, ...] = tuple(SPEED),
    *,
    command: str = "attention",
    **more: Any,
) -> Result:
    """Return attention's rows; "torch cudnn" has no kernel for D = 80."""
    rows = []
    every = product(head_dims, dtypes, ("plain", "causal"), lengths, implementations)
    for head_dim, dtype, option, length, implementation in every:
        heads = 2048 // head_dim
        row = {"batch": 4, "heads": heads, "seqlen": length, "head_dim": head_dim, "dtype": dtype,
               "option": option, "implementation": implementation}  # fmt: skip
        if implementation == "torch cudnn" and head_dim == 80:
            rows.append({**row, "unavailable": "RuntimeError: no kernel"})
            continue
        flops = 4 * 4 * heads * length**2 * head_dim / (1 + (option == "causal"))
        seconds, least = flops / SPEED[implementation] / 1e12 + 5e-6, 8 * 4 * heads * length
        rows.append({
            **row, "times": {"p50_s": seconds}, "flops": flops, "bytes": least * head_dim,
            "tflops": flops / seconds / 1e12, "gb_per_s": least * head_dim / seconds / 1e9,
            "ceiling": "mma_tflops", "peak_bytes": least,
        })  # fmt: skip
    return result(command, rows, **more)


def layers(**more: Any) -> Result:
    """Return rows of layers, bound by bytes."""
    rows = []
    for operation, width in product(("layer_norm", "swiglu"), (768, 2048, 4096)):
        for implementation, share in {"cupyattn": 0.9, "torch compile": 0.8}.items():
            least = 4 * 8192 * width
            seconds = least / share / 4e12 + 2e-6
            rows.append({
                "operation": operation, "rows": 8192, "width": width, "dtype": "float16",
                "implementation": implementation, "times": {"p50_s": seconds}, "bytes": least,
                "ceiling": "copy_gb_per_s", "gb_per_s": least / seconds / 1e9,
            })  # fmt: skip
    return result("layers", rows, **more)
