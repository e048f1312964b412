"""Write the files of ``packed``: weights as bitsandbytes saves them, and what it makes of them.

    python tests/models/write_packed.py

needs torch, bitsandbytes and safetensors (these were written by torch 2.13.0 and bitsandbytes
0.50.2 on a CPU, 2026-11-23). A file has one weight "linear.weight" of `weights` in NF4, with absmax
in float32 or quantised themselves, and as "expected" some of its rows, dequantised.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "packed"
SHAPES = {"plain": (24, 128), "nested": (72, 256)}
"""(N, K); of the second there are more than 256 blocks."""
ROWS = (0, 11, -1)


def weights(name: str) -> np.ndarray:
    """What is quantised, in float16."""
    rng = np.random.default_rng(5)
    spread = rng.uniform(0.01, 0.1, (SHAPES[name][0], 1))
    return (spread * rng.standard_normal(SHAPES[name])).astype(np.float16)


def write(name: str) -> None:
    import torch
    from bitsandbytes import functional
    from safetensors.torch import save_file

    codes, state = functional.quantize_4bit(
        torch.from_numpy(weights(name)), blocksize=64, compress_statistics=name == "nested",
        quant_type="nf4",
    )  # fmt: skip
    parts = {f"linear.weight.{part}": array for part, array in state.as_dict(packed=True).items()}
    state.dtype = torch.float32  # which keeps what float16 would round
    expected = functional.dequantize_4bit(codes, state)[list(ROWS)].contiguous()
    tensors = {"linear.weight": codes, **parts, "expected": expected}
    save_file(tensors, FOLDER / f"{name}.safetensors")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in SHAPES:
        write(each)
