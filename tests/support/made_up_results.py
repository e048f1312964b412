"""What the benchmarks could write: made-up results, for tests of what is drawn of them."""

from __future__ import annotations

from typing import Any

from support.fake_gpu import HEADER

CEILINGS = {
    **{"copy_gb_per_s": 4000.0, "read_gb_per_s": 4500.0},
    **{"mma_tflops": 600.0, "fma_tflops": 60.0},
}
SPEED = {
    "cupyattn naive": 9, "cupyattn tiled": 60, "cupyattn flash": 290, "torch eager": 70,
    "torch cudnn": 480, "torch flash": 289, "torch efficient": 200, "torch math": 65,
    "torch compile": 110, "triton": 150, "cupy": 40, "transformers": 62,
}  # fmt: skip
"""TFLOP/s of long sequences, by implementation."""
FEW = ("cupyattn flash", "torch eager")
Result = dict[str, Any]


def result(command: str, rows: list[dict[str, Any]], **more: Any) -> Result:
    """Return a result of a GPU."""
    return {"command": command, **HEADER, "ceilings": CEILINGS, "rows": rows, **more}


def times(median: float) -> dict[str, float]:
    """Return times that spread the more, the longer they are."""
    return {
        "mean_s": 1.02 * median, "std_s": 0.03 * median, "min_s": 0.97 * median,
        "p50_s": median, "p95_s": 1.05 * median, "p99_s": 1.2 * median, "max_s": 3 * median,
    }  # fmt: skip


def attention(
    lengths: tuple[int, ...] = (4096,),
    head_dims: tuple[int, ...] = (64, 80, 128),
    dtypes: tuple[str, ...] = ("float16",),
    implementations: tuple[str, ...] = tuple(SPEED),
    *,
    command: str = "attention",
    **more: Any,
) -> Result:
    """Return attention's rows; "torch math" has no room for 4,096, "torch cudnn" no D of 80."""
    rows = []
    for head_dim in head_dims:
        for dtype in dtypes:
            for option in ("plain", "causal"):
                for length in lengths:
                    for implementation in implementations:
                        case = {
                            "batch": 4, "heads": 2048 // head_dim, "seqlen": length,
                            "head_dim": head_dim, "head_dim_v": head_dim, "dtype": dtype,
                            "causal": False, "window": 512, "option": option,
                        }  # fmt: skip
                        rows.append(
                            {
                                **case,
                                "implementation": implementation,
                                **_figures(implementation, case),
                            }
                        )
    return result(command, rows, **more)


def _figures(implementation: str, case: dict[str, Any]) -> dict[str, Any]:
    length, heads = case["seqlen"], 4 * case["heads"]
    if implementation == "torch math" and length > 2048:
        return {"unavailable": "MemoryError: no room"}
    if implementation == "torch cudnn" and case["head_dim"] == 80:
        return {"unavailable": "RuntimeError: no kernel"}
    flops = 4 * heads * length**2 * case["head_dim"] / (1 + (case["option"] == "causal"))
    least = 8 * heads * length * case["head_dim"] * (1 + (case["dtype"] == "float32"))
    speed = SPEED[implementation] * (0.1 if case["dtype"] == "float32" else 1)
    median = flops / speed / 1e12 + 5e-6
    return {
        "times": times(median), "flops": flops, "bytes": least, "tflops": flops / median / 1e12,
        "gb_per_s": least / median / 1e9, "of_ceiling": flops / median / 600e12,
        "ceiling": "mma_tflops",
        "peak_bytes": 0 if implementation.endswith("flash") else heads * length**2,
    }  # fmt: skip


def layers(**more: Any) -> Result:
    """Return rows of layers: three widths of each, but for the one that has a shape of its own."""
    rows = []
    sizes = [(8192, width) for width in (768, 2048, 4096)]
    for operation in ("layer_norm", "rms_norm", "add + rms_norm", "cross_entropy", "swiglu"):
        for count, width in [(2048, 128256)] if operation == "cross_entropy" else sizes:
            for direction in ("forward", "backward"):
                for implementation, share in {"cupyattn": 0.9, "torch compile": 0.8}.items():
                    least = 4 * count * width
                    median = least / share / 4e12 + 2e-6
                    rows.append({
                        "operation": operation, "rows": count, "width": width, "dtype": "float16",
                        "direction": direction, "implementation": implementation,
                        "times": times(median), "ceiling": "copy_gb_per_s",
                        "flops": None, "bytes": least, "tflops": None,
                        "gb_per_s": least / median / 1e9, "of_ceiling": share, "peak_bytes": None,
                    })  # fmt: skip
    return result("layers", rows, **more)
