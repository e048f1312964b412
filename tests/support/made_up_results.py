"""What the benchmarks could write: made-up results, for tests of what is drawn of them."""

from __future__ import annotations

from itertools import product
from typing import Any

from support.fake_gpu import HEADER

CEILINGS = {
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
    return {"command": command, **HEADER, "ceilings": CEILINGS, "rows": rows, **more}


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
