"""Float16 on a device without tensor cores: no kernel of any public function has mma."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.devices import has_mma
from support.search import mostly_deep

import cupyattn
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.recorder import LaunchRecorder

pytestmark = pytest.mark.nvrtc

RNG = np.random.default_rng(0)


def half(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float16)


def single(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def attention(name: str, sq: int = 40, head_dim: int = 64, **options: Any) -> Any:
    """Call attention or its backward with 300 keys."""
    q, out, dout = half(1, sq, 2, head_dim), half(1, sq, 2, head_dim), half(1, sq, 2, head_dim)
    k, v = half(2, 1, 300, 1, head_dim)
    if name == "attention_backward":
        return cupyattn.attention_backward(dout, q, k, v, out, single(1, 2, sq), **options)
    return cupyattn.attention(q, k, v, **options)


def causal_blocks(sq: int) -> cupyattn.BlockMask:
    return cupyattn.block_mask(cupyattn.MaskMod("q_idx >= k_idx"), sq, 300)


def varlen(name: str, **options: Any) -> Any:
    """Call packed attention or its backward with two sequences of 40 rows."""
    q, out, dout, k, v = half(5, 80, 2, 64)
    packed = np.array([0, 40, 80], np.int32), np.array([0, 40, 80], np.int32), 40, 40
    if name == "attention_varlen_backward":
        lse = single(2, 80)
        return cupyattn.attention_varlen_backward(dout, q, k, v, out, lse, *packed, **options)
    return cupyattn.attention_varlen(q, k, v, *packed, **options)


TABLE = np.arange(8, dtype=np.int32).reshape(1, 8)
LENGTHS = np.array([100], np.int32)


def paged(sq: int, integers: bool = False, packed: bool = False) -> Any:
    """Call paged attention with 100 tokens in blocks of 16."""
    q = half(1, sq, 2, 64)
    k, v = half(2, 8, 16, 1, 64)
    scales = {}
    if integers:
        k, v = np.ones((2, 8, 16, 1, 64), np.int8)
        scales = {name: np.ones((8, 16, 1), np.float32) for name in ("k_scales", "v_scales")}
    if packed:
        q, scales = q[0], {"cu_seqlens_q": np.array([0, sq], np.int32), "max_seqlen_q": sq}
    return cupyattn.paged_attention(q, k, v, TABLE, LENGTHS, **scales)


def linear(rows: int, *, backward: bool = False, activation: str | None = "swiglu") -> Any:
    """Call linear or its backward with a width for tensor cores, gated or not."""
    x, w, b = half(rows, 64), half(64, 128), half(128)
    if not backward:
        return cupyattn.linear(x, w, b, activation=activation)
    dout = half(rows, 64 if activation == "swiglu" else 128)
    return cupyattn.linear_backward(dout, x, w, b, activation=activation)


IDS = np.array([1, 3, 2], np.int64)
SLOTS = np.arange(3, dtype=np.int32)
STEP = {"step": 1, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
ROTARY = (single(8, 32), single(8, 32))


def in_int8() -> cupyattn.QuantizedWeight:
    return cupyattn.quantize(half(64, 8), format="int8", rotation=64)


# Calls of every public function that runs kernels; of those with products, of every kind of them.
CALLS: dict[str, list[Callable[[], Any]]] = {
    "attention": [
        lambda: attention("attention"),
        lambda: attention("attention", head_dim=24, causal=True),
        lambda: attention("attention", sq=2),
        lambda: attention("attention", implementation="tiled"),
        lambda: attention("attention", implementation="naive"),
        lambda: attention("attention", mask_mod=causal_blocks(40)),
    ],
    "attention_backward": [
        lambda: attention("attention_backward"),
        lambda: attention("attention_backward", deterministic=True),
        lambda: attention("attention_backward", head_dim=192),
        lambda: attention("attention_backward", bias=half(2, 1, 300), sinks=half(2)),
        lambda: attention("attention_backward", implementation="naive"),
    ],
    "block_mask": [lambda: causal_blocks(40)],
    "attention_varlen": [lambda: varlen("attention_varlen", causal=True)],
    "attention_varlen_backward": [
        lambda: varlen("attention_varlen_backward"),
        lambda: varlen("attention_varlen_backward", deterministic=True, sinks=half(2)),
    ],
    "paged_attention": [
        lambda: paged(1),
        lambda: paged(12),
        lambda: paged(40),
        lambda: paged(40, packed=True),
        lambda: paged(1, integers=True),
        lambda: paged(40, integers=True),
    ],
    "merge_attention": [
        lambda: cupyattn.merge_attention(
            *(half(1, 3, 2, 8), single(1, 2, 3)), *(half(1, 3, 2, 8), single(1, 2, 3))
        )
    ],
    "linear": [
        *(lambda rows=rows: linear(rows) for rows in (1, 3, 12, 40, 200)),
        lambda: linear(200, activation=None),
        lambda: cupyattn.linear(half(112, 64), in_int8(), activations="int8"),
        lambda: cupyattn.linear(cupyattn.quantize_rows(half(3, 64), rotation=64), in_int8()),
    ],
    "linear_gelu": [lambda: cupyattn.linear_gelu(half(100, 64), half(64, 128))],
    "linear_backward": [
        *(lambda rows=rows: linear(rows, backward=True) for rows in (1, 40, 200)),
        lambda: linear(200, backward=True, activation=None),
    ],
    "linear_gelu_backward": [
        lambda: cupyattn.linear_gelu_backward(half(100, 128), half(100, 64), half(64, 128))
    ],
    "linear_cross_entropy": [lambda: cupyattn.linear_cross_entropy(half(3, 64), half(64, 40), IDS)],
    "linear_cross_entropy_backward": [
        lambda: cupyattn.linear_cross_entropy_backward(
            single(3), half(3, 64), half(64, 40), IDS, single(3), reduction="none"
        )
    ],
    "matmul": [
        lambda: cupyattn.matmul(half(2, 40, 64), half(2, 64, 72)),
        lambda: cupyattn.matmul(half(2, 72, 40).swapaxes(1, 2), half(2, 64, 72).swapaxes(1, 2)),
        lambda: cupyattn.matmul(half(200, 64), half(64, 128)),
        lambda: cupyattn.matmul(np.ones((2, 40, 64), np.int8), np.ones((64, 72), np.int8)),
    ],
    "quantize": [lambda: cupyattn.quantize(half(64, 8))],
    "quantize_keys": [lambda: cupyattn.quantize_keys(half(1, 3, 2, 8))],
    "quantize_rows": [lambda: cupyattn.quantize_rows(half(3, 64))],
    "dequantize": [lambda: cupyattn.dequantize(cupyattn.quantize(half(64, 8)))],
    "layer_norm": [lambda: cupyattn.layer_norm(half(3, 8), half(8), half(8))],
    "layer_norm_backward": [
        lambda: cupyattn.layer_norm_backward(*half(2, 3, 8), half(8), *single(2, 3))
    ],
    "rms_norm": [lambda: cupyattn.rms_norm(half(3, 8), half(8))],
    "rms_norm_backward": [lambda: cupyattn.rms_norm_backward(*half(2, 3, 8), half(8), single(3))],
    "softmax": [lambda: cupyattn.softmax(half(3, 8))],
    "softmax_backward": [lambda: cupyattn.softmax_backward(half(3, 8), half(3, 8))],
    "log_softmax": [lambda: cupyattn.log_softmax(half(3, 8))],
    "log_softmax_backward": [lambda: cupyattn.log_softmax_backward(half(3, 8), half(3, 8))],
    "logsumexp": [lambda: cupyattn.logsumexp(half(3, 8))],
    "logsumexp_backward": [lambda: cupyattn.logsumexp_backward(single(3), half(3, 8), single(3))],
    "cross_entropy": [lambda: cupyattn.cross_entropy(half(3, 8), IDS)],
    "cross_entropy_backward": [
        lambda: cupyattn.cross_entropy_backward(
            single(3), half(3, 8), IDS, single(3), reduction="none"
        )
    ],
    "rope": [lambda: cupyattn.rope(half(1, 8, 2, 64), *ROTARY)],
    "rope_backward": [lambda: cupyattn.rope_backward(half(1, 8, 2, 64), *ROTARY)],
    "gelu": [lambda: cupyattn.gelu(half(3, 8))],
    "gelu_backward": [lambda: cupyattn.gelu_backward(half(3, 8), half(3, 8))],
    "silu": [lambda: cupyattn.silu(half(3, 8))],
    "silu_backward": [lambda: cupyattn.silu_backward(half(3, 8), half(3, 8))],
    "swiglu": [lambda: cupyattn.swiglu(half(3, 8), half(3, 8))],
    "swiglu_backward": [lambda: cupyattn.swiglu_backward(half(3, 8), half(3, 8), half(3, 8))],
    "geglu": [lambda: cupyattn.geglu(half(3, 8), half(3, 8))],
    "geglu_backward": [lambda: cupyattn.geglu_backward(half(3, 8), half(3, 8), half(3, 8))],
    "dropout": [lambda: cupyattn.dropout(half(3, 8), 0.5, 1)],
    "dropout_backward": [lambda: cupyattn.dropout_backward(half(3, 8), 0.5, 1)],
    "embedding": [lambda: cupyattn.embedding(half(8, 8), IDS)],
    "embedding_backward": [lambda: cupyattn.embedding_backward(half(3, 8), half(8, 8), IDS)],
    "adamw_step": [lambda: cupyattn.adamw_step(half(8), half(8), single(8), single(8), **STEP)],
    "adamw_step_8bit": [
        lambda: cupyattn.adamw_step_8bit(
            single(8), single(8), np.zeros(8, np.int8), np.zeros(8, np.uint8), *single(2, 1), **STEP
        )
    ],
    "add_to": [lambda: cupyattn.add_to(single(8), half(8))],
    "global_norm": [lambda: cupyattn.global_norm(half(3, 8), half(8))],
    "sample": [lambda: cupyattn.sample(half(3, 8), seed=0, top_k=2)],
    "append_kv": [lambda: cupyattn.append_kv(*half(2, 4, 16, 1, 64), *half(2, 3, 1, 64), SLOTS)],
    "copy_blocks": [
        lambda: cupyattn.copy_blocks(*half(2, 4, 16, 1, 64), np.array([[0, 1]], np.int32))
    ],
    "gather": [lambda: cupyattn.gather(*half(2, 8, 16, 1, 64), TABLE, LENGTHS)],
}
HAVE_PRODUCTS = {
    name for name in CALLS if name.startswith(("attention", "paged_attention", "linear", "matmul"))
}
RUN_NO_KERNEL = {"backend", "device_info", "explain", "rope_tables"}
RUN_NO_KERNEL |= {"vjp", "value_and_grad", "grad", "checkpoint", "stop_gradient", "custom_vjp"}


def test_every_public_function_is_called():
    """A new function with kernels needs a call in the table above."""
    functions = {name for name in cupyattn.__all__ if name.islower() and name[0] != "_"}
    assert set(CALLS) == functions - RUN_NO_KERNEL


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch):
    """Make the calls of a function on a device; return the kernels that they launch."""

    def record(name: str, tensor_cores: bool) -> list[Any]:
        recorder = LaunchRecorder(TURING, tensor_cores=tensor_cores)
        backend_module = sys.modules["cupyattn.runtime.backend"]  # the function has its name
        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "_device", lambda *_: recorder)
            with cupyattn.backend("emulator"):
                for call in CALLS[name]:
                    before = len(recorder.launches)
                    call()
                    assert len(recorder.launches) > before, "nothing was launched"
        return list(dict.fromkeys(launch.specialisation for launch in recorder.launches))

    return record


@pytest.mark.parametrize("name", CALLS)
def test_no_kernel_has_mma(name, recorded):
    assert [each.label for each in recorded(name, tensor_cores=False) if has_mma(each)] == []


@pytest.mark.parametrize("name", mostly_deep(sorted(HAVE_PRODUCTS), ["attention", "linear"]))
def test_the_same_calls_have_it_on_tensor_cores(name, recorded):
    """Otherwise the test above would be vacuous."""
    assert any(map(has_mma, recorded(name, tensor_cores=True)))
